"""Pairs of sentences: sources to read, targets to generate."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from regard.config import Choice, RunConfig, make
from regard.data.batch import Batch, PairBatch
from regard.data.columns import Roles
from regard.data.loader import PairIndices
from regard.data.pairs import Pairs, from_table
from regard.data.tables import Table
from regard.data.token_store import PairStore, pair_store
from regard.generate import BeamSearch, Search
from regard.models.base import Language
from regard.models.build import resolve
from regard.models.presets import ModelConfig
from regard.pipelines.base import (
    TRANSLATING,
    EvalData,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
    first_rows,
    require_texts,
    validation_metrics,
    with_scheduled_sampling,
)
from regard.pipelines.batching import pair_loader, seeded_batches, sequential_batches
from regard.pipelines.by_length import MetricsByLength, metrics_by_length
from regard.pipelines.tokenizer_cache import cached_tokenizer
from regard.tasks import TASKS, Seq2Seq
from regard.tasks.metrics import bleu, bleu_is_defined, chrf, exact_match
from regard.tasks.scheduled_sampling import free_running_inputs
from regard.text import PairTokenizers, train_pair

logger = logging.getLogger(__name__)


class PairsPipeline(Pipeline):
    """Pairs of a source and a target text, in batches of similar length."""

    name: ClassVar[str] = "pairs"
    data_description: ClassVar[str] = (
        "a source and a target: two columns of a table (data.source=… data.target=…), or two files"
    )
    tokenizer_type: ClassVar[type | None] = PairTokenizers
    evaluates_with_search: ClassVar[bool] = True

    def reads_on_request(self, path: Path) -> bool:
        """False: tables are opened by their columns, parallel files by two settings."""
        return False

    def from_table(self, table: Table, roles: Roles) -> Pairs:
        """The sources and targets of a table."""
        return from_table(table, roles)

    def lowercase(self, data: Pairs) -> Pairs:
        """Both sides in lower case."""
        return data.lowercase()

    def defaults(self, data: Pairs, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """An encoder-decoder with one BPE vocabulary for both sides."""
        vocab_size = min(16_000, max(300, data.count // 4 // 100 * 100))
        dim, layers = (256, 4) if gpu else (128, 2)
        return {
            "task": "seq2seq",
            "data": {"tokenizer": {"kind": "bpe", "vocab_size": vocab_size}},
            "model": {
                "preset": "tiny-encoder-decoder",
                "dropout": 0.1,
                "dim": dim,
                "layers": layers,
                "heads": 4,
            },
            "train": {
                "steps": 5000 if gpu else 2000,
                "tokens": 8192 if gpu else 2048,
                "lr": 2e-3,
                "optimizer": "muon",
                "ema": 0.995,
                "schedule": {"kind": "cosine", "warmup": 100},
            },
        }

    def smallest_model(self, config: RunConfig) -> ModelConfig:
        """With a joint vocabulary, which has fewer parameters than one per side."""
        return resolve(config.model, vocab_size=1, source_vocab_size=None)

    def train_tokenizers(
        self, config: RunConfig, train: Pairs, validation: Pairs, progress: Progress | None
    ) -> PairTokenizers:
        """One joint vocabulary or one per side, trained on the training pairs."""
        choice = config.data.tokenizer

        def write(folder: Path) -> None:
            train_pair(choice, train.rows).save(folder)

        return PairTokenizers.load(cached_tokenizer(choice, [train], write))

    def load_tokenizers(self, folder: Path) -> PairTokenizers:
        """One joint tokenizer, or one per side."""
        return PairTokenizers.load(folder)

    def training_data(
        self,
        config: RunConfig,
        train: Pairs,
        validation: Pairs,
        tokenizers: PairTokenizers,
        progress: Progress | None,
    ) -> TrainingData:
        """Batches of pairs of similar length, in random order."""
        source, target = tokenizers.source, tokenizers.target
        data = self.evaluation_data(config, validation, tokenizers, progress)
        task = cast(Seq2Seq, data.task)
        store = pair_store(train, source, target)
        loader = pair_loader(config, store, max_length=data.model.context - task.prefix_length)
        sizes = f"{target.vocab_size:,} tokens, joint"
        if not tokenizers.shares_ids:
            sizes = f"{source.vocab_size:,} and {target.vocab_size:,} tokens"
        description = [
            f"data       {train.description}",
            *first_rows(train),
            f"validation {validation.description}",
            f"tokenizer  {target.kind}, {sizes}",
        ]
        if loader.dropped or data.too_long:
            max_tokens = data.model.context - 1 - task.prefix_length
            description.append(
                f"dropped    {loader.dropped:,} training pairs and {data.too_long:,} validation "
                f"pairs, longer than {max_tokens} tokens"
            )

        seed, collate = config.train.seed, partial(_collate, task, store)
        return TrainingData(
            **vars(data),
            batch=with_scheduled_sampling(config, task, seeded_batches(seed, loader, collate)),
            example_ids=loader.example_ids,
            all_batches=lambda: sequential_batches(seed, loader, collate),
            description=description,
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Pairs,
        tokenizers: PairTokenizers,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation pairs, shortest first."""
        source, target = tokenizers.source, tokenizers.target
        source_vocab_size = None if tokenizers.shares_ids else source.vocab_size
        model = resolve(
            config.model, vocab_size=target.vocab_size, source_vocab_size=source_vocab_size
        )
        task = pair_task(config, tokenizers)
        store = pair_store(data, source, target)
        loader = pair_loader(config, store, max_length=model.context - task.prefix_length)
        targets = int(store.target_lengths[loader.pairs].sum()) + len(loader)  # with end of text

        def validation_batches(limit: int | None) -> Iterator[Batch]:
            rows = None if limit is None else max(1, limit * len(loader) // targets)
            collate = partial(_collate, task, store)
            return sequential_batches(config.train.seed, loader, collate, rows)

        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=validation_batches,
            validation_data=data,
            validation_size=len(loader),
            validation_targets=targets,
            too_long=loader.dropped,
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The first validation source, its greedy translation, and its target."""
        source, target = next(data.validation_data.rows())
        (translation,) = _translations(data, model, [source], BeamSearch(1))
        return f"{source}\n→ {translation}\n= {target}"

    def evaluate(
        self,
        data: EvalData,
        model: nn.Module,
        device: torch.device,
        *,
        search: Search,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Loss and perplexity, the free-running loss, and BLEU, chrF and exact match."""
        return {
            **validation_metrics(data, model, device, None, progress),
            "free_running_loss": free_running_loss(data, model, device),
            **translation_metrics(data, model, search=search, progress=progress),
        }

    def input_column(self, config: RunConfig) -> str | int | None:
        """The column of the sources."""
        return config.data.source

    def predict(self, run: TrainedModel, input: str, *, top: int) -> str:
        """The translation of a sentence, by beam search."""
        return self.predict_batch(run, [input], top=top)[0]

    def predict_batch(self, run: TrainedModel, inputs: Sequence[Any], *, top: int) -> list[str]:
        """The translations of several sentences."""
        tokenizers, sentences = cast(PairTokenizers, run.tokenizers), list(map(str, inputs))
        require_texts(sentences)
        task = pair_task(run.config, tokenizers)
        return translate(run.model, task, tokenizers, sentences, search=BeamSearch())

    def evaluate_by_length(
        self, data: EvalData, model: nn.Module, *, search: Search
    ) -> MetricsByLength:
        """Translation metrics by the length of the source."""
        rows = list(data.validation_data.rows())
        translations = _translations(data, model, [source for source, _ in rows], search)

        def evaluate(indices: Sequence[int]) -> dict[str, float]:
            scores = _score([translations[i] for i in indices], [rows[i][1] for i in indices])
            del scores["signatures"]
            return scores

        return metrics_by_length([source for source, _ in rows], evaluate)


def pair_task(config: RunConfig, tokenizers: PairTokenizers) -> Seq2Seq:
    """The task of a run on pairs, with the ids that begin and end its sentences."""
    task = make(
        config.task,
        TASKS,
        "task",
        bos_id=tokenizers.target.bos_id,
        eos_id=tokenizers.target.eos_id,
        source_eos_id=tokenizers.source.eos_id,
        prefix_ids=tuple(tokenizers.target.prefix_ids),
        source_prefix_ids=tuple(tokenizers.source.prefix_ids),
    )
    return cast(Seq2Seq, task)


def translate(
    model: nn.Module,
    task: Seq2Seq,
    tokenizers: PairTokenizers,
    sentences: Sequence[str],
    *,
    search: Search,
    max_new_tokens: int | None = None,
    rows: int = 64,
    progress: Progress | None = None,
) -> list[str]:
    """The translation of each sentence, by a search over batches of similar length.

    A translation has at most `max_new_tokens` ids, by default twice those of the sentence and 20
    more.
    """
    device = next(model.parameters()).device
    language = cast(Language, model)
    max_length = None
    if language.context is not None:
        max_length = language.context - 1 - task.prefix_length  # 1 for EOS
    ids = [np.asarray(row, dtype=np.int64) for row in tokenizers.source.encode_batch(sentences)]
    for index, sentence in enumerate(ids):
        if max_length is not None and len(sentence) > max_length:
            logger.warning(
                "sentence %d has %d tokens and is truncated to %d",
                index + 1,
                len(sentence),
                max_length,
            )
            ids[index] = sentence[:max_length]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    translations = [""] * len(ids)
    model.eval()
    for start in range(0, len(order), rows):
        indices = order[start : start + rows]
        source = task.source([ids[i] for i in indices]).to(device)
        default_limits = [2 * length + 20 for length in source.lengths.tolist()]
        results = search(
            language,
            [task.prompt] * len(indices),
            max_new_tokens=default_limits if max_new_tokens is None else max_new_tokens,
            stop={task.eos_id},
            source=source,
        )
        for i, hypotheses in zip(indices, results, strict=True):
            translations[i] = tokenizers.target.decode(hypotheses[0].ids)
        if progress is not None:
            progress(TRANSLATING, start + len(indices), len(ids))
    return translations


def free_running_loss(data: EvalData, model: nn.Module, device: torch.device) -> float:
    """The loss of a model whose decoder reads its own predictions (no teacher forcing).

    The difference from the loss with teacher forcing measures exposure bias.
    """

    def with_predictions(batch: PairBatch) -> PairBatch:
        all_positions = torch.ones_like(batch.ids, dtype=torch.bool)
        return replace(
            batch, ids=free_running_inputs(model, batch.ids, all_positions, batch.source)
        )

    model.eval()
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(1)
        batches = (
            with_predictions(cast(PairBatch, batch).to(device))
            for batch in data.validation_batches(None)
        )
        return data.task.metrics(model, batches)["loss"]


def translation_metrics(
    data: EvalData,
    model: nn.Module,
    *,
    search: Search,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """BLEU, chrF and exact match of the translations, with the signatures of sacreBLEU."""
    rows = list(data.validation_data.rows())
    translations = _translations(data, model, [source for source, _ in rows], search, progress)
    return _score(translations, [target for _, target in rows])


def _translations(
    data: EvalData,
    model: nn.Module,
    sources: Sequence[str],
    search: Search,
    progress: Progress | None = None,
) -> list[str]:
    task, tokenizers = cast(Seq2Seq, data.task), cast(PairTokenizers, data.tokenizers)
    return translate(model, task, tokenizers, sources, search=search, progress=progress)


def _score(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Exact match, BLEU (where it is defined) and chrF, and the signatures of the last two."""
    scores = {"chrf": chrf(hypotheses, references)}
    if bleu_is_defined(references):
        scores = {
            "bleu": bleu(hypotheses, references),
            "bleu_lower": bleu(hypotheses, references, lower=True),
            **scores,
        }
    return {
        "exact_match": exact_match(hypotheses, references),
        **{name: score for name, (score, _) in scores.items()},
        "signatures": {name: signature for name, (_, signature) in scores.items()},
    }


def _collate(
    task: Seq2Seq, store: PairStore, rows: PairIndices, generator: torch.Generator
) -> Batch:
    sources = [store.source(row) for row in rows.indices]
    targets = [store.target(row) for row in rows.indices]
    return task.collate((sources, targets, rows.length), generator)
