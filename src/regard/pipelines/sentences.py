"""Pairs of sentences with the same meaning, for sentence embeddings (contrastive learning)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import or_
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.config import Choice, RunConfig, kind_of, make
from regard.data.batch import Batch
from regard.data.columns import Roles
from regard.data.loader import RowLoader
from regard.data.sentences import Sentences, from_lines, from_table
from regard.data.table_files import is_table
from regard.data.tables import Table
from regard.errors import ConfigError, DataError
from regard.models.build import resolve
from regard.models.presets import ModelConfig
from regard.pipelines.base import (
    EvalData,
    Pipeline,
    Progress,
    TrainingData,
)
from regard.pipelines.batching import describe_data, rows_per_micro_batch
from regard.pipelines.encoded_texts import room_for_text, special_ids_around
from regard.pipelines.tokenizer_cache import train_cached_tokenizer
from regard.seeds import batch_generator
from regard.tasks import TASKS, Contrastive
from regard.tasks.metrics import evaluation_mode
from regard.text import Tokenizer

DEFAULT_ROWS = 64  # pairs of a step, where train.batch is not set
Texts = list[NDArray[np.int64]]


class SentencesPipeline(Pipeline):
    """Two columns of texts, or lines, with task=contrastive."""

    name: ClassVar[str] = "sentences"
    data_description: ClassVar[str] = "two columns of texts with the same meaning, or lines of text"
    tokenizer_type: ClassVar[type | None] = Tokenizer

    def reads_on_request(self, path: Path) -> bool:
        """Any file."""
        return path.is_file()

    def reads_as_table(self, path: Path, columns: Mapping[str, Any], kind: str | None) -> bool:
        """Any table."""
        return is_table(path)

    def open(self, path: Path) -> Sentences:
        """The lines of a text file."""
        return from_lines(path)

    def from_table(self, table: Table, roles: Roles) -> Sentences:
        """Two columns of a table."""
        return from_table(table, roles)

    def lowercase(self, data: Sentences) -> Sentences:
        """The sentences in lower case."""
        rows = [(a.lower(), b.lower()) for a, b in data.rows]
        return replace(data, rows=rows, description=f"{data.description}, in lower case")

    def defaults(self, data: Sentences, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A small encoder; usually training starts from a pretrained one (`train.start`)."""
        size = sum(len(a) + len(b) for a, b in data.rows)
        vocab_size = min(32_000, max(500, size // 200 // 100 * 100))
        sizes = (
            {"dim": 384, "layers": 6, "heads": 6} if gpu else {"dim": 128, "layers": 2, "heads": 4}
        )
        return {
            "task": "contrastive",
            "data": {"tokenizer": {"kind": "bpe", "vocab_size": vocab_size}},
            "model": {
                "preset": "tiny-encoder",
                "context": 64,
                "dropout": 0.1,
                "head": "none",
                **sizes,
            },
            "train": {
                "steps": 1000,
                "batch": DEFAULT_ROWS,
                "lr": 1e-3,
                "schedule": {"kind": "linear", "warmup": 50},
            },
        }

    def train_tokenizers(
        self, config: RunConfig, train: Sentences, validation: Sentences, progress: Progress | None
    ) -> Tokenizer:
        """Train on the training sentences."""

        def texts() -> list[str]:
            return [text for row in train.rows for text in row]

        return train_cached_tokenizer(config.data.tokenizer, train, texts)

    def training_data(
        self,
        config: RunConfig,
        train: Sentences,
        validation: Sentences,
        tokenizers: Tokenizer,
        progress: Progress | None,
    ) -> TrainingData:
        """Batches of pairs in random order."""
        data = self.evaluation_data(config, validation, tokenizers, progress)
        task, model = cast(Contrastive, data.task), data.model
        _check_dropout(config, train, model)
        sides, truncated = _sides(train, tokenizers, model)
        rows = rows_per_micro_batch(config.train, DEFAULT_ROWS, "pairs of sentences")
        rows = min(len(train), max(2, rows))
        if rows < 2:
            raise DataError(
                f"{train.name} has one training pair; the texts of other pairs are the negatives, "
                "so at least two are needed"
            )
        loader = RowLoader(len(train), rows, config.train.seed)

        def batch(index: int) -> Batch:
            generator = batch_generator(config.train.seed, index)
            return _batch(task, sides, loader.examples(index), model.context, generator)

        description = [
            *describe_data(train, validation, tokenizers),
            f"negatives  the {rows - 1} other texts of a batch",
        ]
        if truncated or data.too_long:
            description.append(
                f"truncated  {truncated:,} training pairs and {data.too_long:,} for validation, "
                f"to {model.context} tokens"
            )
        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=loader.example_ids,
            all_batches=lambda: _batches(task, sides, rows, model.context, None),
            description=description,
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Sentences,
        tokenizers: Tokenizer,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation pairs in order."""
        task = contrastive_task(config.task)
        model = resolve(config.model, vocab_size=tokenizers.vocab_size)
        sides, truncated = _sides(data, tokenizers, model)
        rows = max(2, config.train.batch or DEFAULT_ROWS)
        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=lambda limit: _batches(task, sides, rows, model.context, limit),
            validation_data=data,
            validation_size=len(data),
            validation_targets=len(data),
            too_long=truncated,
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The nearest second sentences of the first validation sentences."""
        task, tokenizer = cast(Contrastive, data.task), cast(Tokenizer, data.tokenizers)
        rows = data.validation_data.rows[:DEFAULT_ROWS]
        first = embed_texts(model, task, tokenizer, [a for a, _ in rows[:3]])
        second = embed_texts(model, task, tokenizer, [b for _, b in rows])
        best = (first @ second.T).argmax(1).tolist()
        return "\n".join(
            f"{a}\n→ {rows[n][1]}\n= {b}" for (a, b), n in zip(rows, best, strict=False)
        )


def contrastive_task(choice: Choice) -> Contrastive:
    """The task of a run on pairs of sentences."""
    return cast(Contrastive, make(choice, TASKS, "task"))


def embed_texts(
    model: nn.Module, task: Contrastive, tokenizer: Tokenizer, texts: Sequence[str]
) -> Float[Tensor, "batch dim"]:
    """The L2-normalized embeddings of texts, computed in batches of similar length."""
    device = next(model.parameters()).device
    ids, _ = _encode(texts, tokenizer, cast(Any, model).config)
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    vectors: dict[int, Tensor] = {}
    for start in range(0, len(order), DEFAULT_ROWS):
        indices = order[start : start + DEFAULT_ROWS]
        batch_ids = [ids[index] for index in indices]
        batch = task.collate((batch_ids, batch_ids, max(map(len, batch_ids))), torch.Generator())
        with evaluation_mode(model):
            embedded = task.embed(model, batch.first.to(device)).cpu()
        vectors |= dict(zip(indices, embedded, strict=True))
    return torch.stack([vectors[index] for index in range(len(ids))])


def nearest_texts(
    queries: Sequence[str],
    query_vectors: Float[Tensor, "queries dim"],
    texts: Sequence[str],
    vectors: Float[Tensor, "texts dim"],
    top: int,
) -> dict[str, list[tuple[str, float]]]:
    """For each query the texts with the largest cosines of the embeddings, best first."""
    best = (query_vectors @ vectors.T).topk(min(top, len(texts)))
    rows = zip(queries, best.indices.tolist(), best.values.tolist(), strict=True)
    return {
        query: [(texts[n], cosine) for n, cosine in zip(indices, cosines, strict=True)]
        for query, indices, cosines in rows
    }


def _check_dropout(config: RunConfig, data: Sentences, model: ModelConfig) -> None:
    """Raise if both texts of every pair would have the same embedding: nothing can be learned."""
    names = ("dropout", "attention_dropout", "ffn_dropout")
    rates = [getattr(model, name, 0.0) for name in names]
    rates.append(kind_of(config.train.tune)[1].get("dropout", 0.0))
    if not any(rates) and all(a == b for a, b in data.rows):
        raise ConfigError(
            f"{data.name}: each text is a pair with itself, and with model.dropout=0 both sides "
            "are equal, so there is nothing to learn;\nset model.dropout=0.1, or give two columns"
        )


def _encode(
    texts: Sequence[str], tokenizer: Tokenizer, model: ModelConfig
) -> tuple[Texts, list[bool]]:
    """The ids of each text, and whether it is truncated."""
    before, after = special_ids_around(model, tokenizer)
    max_tokens = room_for_text(model, tokenizer)
    encoded = tokenizer.encode_batch(list(texts))
    rows = [np.asarray([*before, *ids[:max_tokens], *after], dtype=np.int64) for ids in encoded]
    return rows, [len(ids) > max_tokens for ids in encoded]


def _sides(
    data: Sentences, tokenizer: Tokenizer, model: ModelConfig
) -> tuple[tuple[Texts, Texts], int]:
    """Both sides of the pairs, and how many pairs are truncated."""
    first, second = (_encode(side, tokenizer, model) for side in zip(*data.rows, strict=True))
    return (first[0], second[0]), sum(map(or_, first[1], second[1]))


def _batch(
    task: Contrastive,
    sides: tuple[Texts, Texts],
    rows: Any,
    context: int,
    generator: torch.Generator,
) -> Batch:
    """A batch of these rows, padded to a multiple of 8 tokens or to the context."""
    first, second = ([side[row] for row in rows] for side in sides)
    width = max(len(ids) for ids in (*first, *second))
    return task.collate((first, second, min(-(-width // 8) * 8, context)), generator)


def _batches(
    task: Contrastive, sides: tuple[Texts, Texts], rows: int, context: int, limit: int | None
) -> Iterator[Batch]:
    count = len(sides[0]) if limit is None else min(limit, len(sides[0]))
    for start in range(0, count, rows):
        indices = range(start, min(start + rows, count))
        # `collate` draws no random numbers
        yield _batch(task, sides, indices, context, torch.Generator())
