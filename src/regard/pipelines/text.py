"""Text: one stream of tokens, cut into blocks, for language models, masked models and CBOW."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from regard.config import Choice, RunConfig, kind_of, make
from regard.data.batch import Batch, TextBatch
from regard.data.columns import Roles
from regard.data.loader import TextLoader, sequential_blocks, sliding_windows, text_batches
from regard.data.table_files import is_table
from regard.data.tables import Table
from regard.data.text import Text, from_file, from_files, from_table
from regard.data.token_store import TokenStore, text_store
from regard.errors import ConfigError, DataError
from regard.explain.neighbours import WordVectors
from regard.generate import generate, parse_chain
from regard.models.base import Language
from regard.models.build import resolve
from regard.models.presets import ModelConfig
from regard.pipelines.base import (
    EvalData,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
    first_rows,
    with_scheduled_sampling,
)
from regard.pipelines.batching import blocks_per_micro_batch, count_unknown, describe_unknown
from regard.pipelines.tokenizer_cache import cached_tokenizer
from regard.tasks import TASKS, Causal, CBOWTask, Masked, Task
from regard.text import Tokenizer, train_tokenizer
from regard.text.pair_tokenizers import JOINT

# A text of fewer bytes gets a character-level model, because training takes many epochs over it. On
# a CPU, training takes only one or two epochs over a megabyte of characters.
SMALL_TEXT = 10_000_000
SMALL_TEXT_CPU = 500_000
VALIDATION_SEED = 1  # of the random masks in validation: the same for every run
SAMPLE_TOKENS = 160


class TextPipeline(Pipeline):
    """Documents of text, as one stream of tokens that is cut into blocks of `model.context`."""

    name: ClassVar[str] = "text"
    data_description: ClassVar[str] = "text files, or a column of texts"
    tokenizer_type: ClassVar[type | None] = Tokenizer

    def recognizes(self, path: Path) -> bool:
        """Any file or folder that no other pipeline recognizes."""
        return True

    def reads_on_request(self, path: Path) -> bool:
        """False: a path that another pipeline recognizes is not read as text."""
        return False

    def reads_as_table(self, path: Path, columns: Mapping[str, Any], kind: str | None) -> bool:
        """A path with the suffix of a table, or whose columns are named."""
        return bool(columns) or is_table(path)

    def open(self, path: Path) -> Text:
        """A file as one document, or a folder with one document per text file."""
        return _open_folder(path) if path.is_dir() else from_file(path)

    def from_table(self, table: Table, roles: Roles) -> Text:
        """A column of a table, each cell a document."""
        return from_table(table, roles)

    def lowercase(self, data: Text) -> Text:
        """The text in lower case."""
        return data.lowercase()

    def defaults(self, data: Text, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """Settings by task: a decoder, an encoder, or word vectors."""
        kind, options = kind_of(task)
        if kind == "masked":
            return _masked_defaults(data, gpu, pairs=options.get("next_sentence") is True)
        if kind == "cbow":
            return _cbow_defaults(data)
        return {**_causal_defaults(data, gpu), "task": kind}

    def text_bytes(self, data: Text) -> int:
        """The number of bytes; a token has at least one."""
        return data.size

    def train_tokenizers(
        self, config: RunConfig, train: Text, validation: Text, progress: Progress | None
    ) -> Tokenizer:
        """Train on all of the text, so that every character of it is in the vocabulary.

        Separate validation data (`data.validation`, or a split of the dataset) is not read.
        """
        texts = [train, validation] if validation.is_split_off else [train]

        def write(folder: Path) -> None:
            total = sum(text.size for text in texts)
            chunks = _chunks(texts, total, _with_label(progress, "reading"))
            trained = train_tokenizer(
                config.data.tokenizer,
                chunks,
                total_bytes=total,
                progress=_with_label(progress, "training the tokenizer"),
            )
            trained.save(folder / JOINT)

        return Tokenizer.load(cached_tokenizer(config.data.tokenizer, texts, write) / JOINT)

    def training_data(
        self,
        config: RunConfig,
        train: Text,
        validation: Text,
        tokenizers: Tokenizer,
        progress: Progress | None,
    ) -> TrainingData:
        """Blocks of text in random order."""
        data = self.evaluation_data(config, validation, tokenizers, progress)
        task, model = data.task, data.model
        if isinstance(task, Masked):
            task = replace(task, packs_documents=len(train.documents) > 1)
        store = _token_store(task, train, tokenizers, _with_label(progress, "tokenizing"))
        rows = blocks_per_micro_batch(config.train, model.context)
        if isinstance(task, Masked) and task.next_sentence and rows < 2:
            raise ConfigError(
                "task.next_sentence needs at least 2 rows per micro-batch: half of the second "
                "sentences come from other rows;\n"
                "raise train.batch or train.tokens, or lower train.accumulate"
            )
        loader = TextLoader(
            store, model.context, rows, config.train.seed, reserved=_special_token_count(task)
        )

        collate: Callable[..., Batch] = task.collate
        if isinstance(task, Causal) and getattr(model, "prefix", False):
            collate = task.collate_with_prefixes
        unknown = []
        if config.train.start is not None:  # whose tokenizer is used
            unknown = describe_unknown(count_unknown(store.tokens, tokenizers), data.unknown_tokens)
        return TrainingData(
            **vars(data),
            batch=with_scheduled_sampling(config, task, text_batches(loader, collate)),
            example_ids=loader.example_ids,
            all_batches=lambda: _sequential_batches(config, task, model, store, None),
            description=[
                f"data       {train.description}",
                *(first_rows(train) if train.columns else []),
                f"validation {validation.description}",
                f"tokenizer  {tokenizers.kind}, {tokenizers.vocab_size:,} tokens; "
                f"{len(store):,} for training, {data.validation_size:,} for validation",
                *unknown,
            ],
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Text,
        tokenizers: Tokenizer,
        progress: Progress | None = None,
    ) -> EvalData:
        """Sliding windows of the validation text, or blocks; see `_validation_batches`."""
        task = text_task(config, tokenizers)
        report_bytes = _with_label(progress, "tokenizing validation text")
        store = _token_store(task, data, tokenizers, report_bytes)
        if len(store) < 2:
            raise DataError(
                f"the validation text has {len(store)} token, so there is nothing to predict in "
                "it;\ngive more text, a larger data.validation_fraction, or a data.validation file"
            )
        if isinstance(task, Causal):
            first_token_bytes = len(tokenizers.decode([int(store.tokens[0])]).encode())
            scored_bytes = store.bytes - first_token_bytes
            task = replace(task, bytes_per_token=scored_bytes / (len(store) - 1))
        model = resolve(config.model, vocab_size=tokenizers.vocab_size)
        stride = evaluation_stride(config, model) if task.uses_evaluation_stride else None
        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=lambda limit: _validation_batches(config, task, model, store, limit),
            validation_data=data,
            validation_size=len(store),
            validation_targets=len(store) - 1,
            stride=stride,
            unknown_tokens=count_unknown(store.tokens, tokenizers),
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """Generated text, or nearest neighbours of words; other tasks have their own `sample`."""
        tokenizer = cast(Tokenizer, data.tokenizers)
        if isinstance(data.task, CBOWTask):
            batch = cast(TextBatch, next(iter(data.validation_batches(data.model.context))))
            return WordVectors.from_model(model, tokenizer).sample(batch.ids[0].tolist())
        if not isinstance(data.task, Causal):
            return super().sample(data, model, seed)
        batch = cast(TextBatch, next(iter(data.validation_batches(1))))
        prompt = np.asarray(batch.ids)[0, :1].tolist()
        language = cast(Language, model)
        (ids,) = generate(
            language, [prompt], parse_chain(), max_new_tokens=SAMPLE_TOKENS, seed=seed
        )
        return tokenizer.decode(prompt + ids)

    def predict(self, run: TrainedModel, input: str, *, top: int) -> Any:
        """The prediction of the task: for masked models, the most probable tokens for <mask>s."""
        task = text_task(run.config, cast(Tokenizer, run.tokenizers))
        return task.predict(run.model, str(input), top=top)


def text_task(config: RunConfig, tokenizer: Tokenizer) -> Task:
    """The task of a run on text; tasks that need the vocabulary get the tokenizer."""
    known = {"tokenizer": tokenizer, "bytes_per_token": None, "packs_documents": True}
    return make(config.task, TASKS, "task", **known)


def default_stride(context: int) -> int:
    """Three quarters of the context, so that a token is predicted from at least a quarter of it.

    On a novel, that is as good as a stride of half the context, and cheaper (docs/results.md).
    """
    return context - context // 4


def evaluation_stride(config: RunConfig, model: ModelConfig) -> int:
    """Tokens between the starts of two evaluated windows: `train.evaluate_stride`, or a default."""
    stride = config.train.evaluate_stride
    if stride is None:
        return default_stride(model.context)
    if not 1 <= stride <= model.context:
        raise ConfigError(
            f"train.evaluate_stride={stride} must be at least 1 and at most the context, "
            f"{model.context}"
        )
    return stride


def _open_folder(folder: Path) -> Text:
    paths: list[Path] = []
    skipped: dict[str, list[str]] = {}
    for parent, folders, files in os.walk(folder):
        hidden = [name for name in folders + files if name.startswith(".")]
        folders[:] = [name for name in folders if name not in hidden]
        linked = [name for name in folders if (Path(parent) / name).is_symlink()]
        for reason, names in (("hidden", hidden), ("linked folder", linked)):
            if names:
                skipped.setdefault(reason, []).extend(sorted(names))
        paths += [Path(parent) / name for name in files if name not in hidden]
    return from_files(folder.resolve().name, sorted(paths), skipped)


def _token_store(
    task: Task, text: Text, tokenizer: Tokenizer, progress: Callable[[int, int], None] | None
) -> TokenStore:
    separator = task.separator if isinstance(task, Masked) else None
    return text_store(text, tokenizer, separator=separator, progress=progress)


def _special_token_count(task: Task) -> int:
    return task.special_token_count if isinstance(task, Masked) else 0


def _sequential_batches(
    config: RunConfig, task: Task, model: ModelConfig, store: TokenStore, limit: int | None
) -> Iterator[Batch]:
    rows = max(blocks_per_micro_batch(config.train, model.context), 16)
    generator = torch.Generator().manual_seed(VALIDATION_SEED)
    block = model.context - _special_token_count(task)
    for examples in sequential_blocks(store.tokens, block, rows, limit):
        yield task.collate(examples, generator)


def _validation_batches(
    config: RunConfig, task: Task, model: ModelConfig, store: TokenStore, limit: int | None
) -> Iterator[Batch]:
    """Sliding windows for a language model; consecutive blocks for other tasks.

    With a stride of the whole context, sliding windows are consecutive blocks.
    """
    stride = evaluation_stride(config, model) if task.uses_evaluation_stride else model.context
    if stride == model.context:
        yield from _sequential_batches(config, task, model, store, limit)
        return
    rows = max(blocks_per_micro_batch(config.train, model.context), 16)
    for examples in sliding_windows(store.tokens, model.context, stride, rows, limit):
        yield task.collate(examples, torch.Generator())


def _chunks(
    texts: list[Text], total: int, progress: Callable[[int, int], None] | None
) -> Iterator[str]:
    done = 0
    for text in texts:
        for chunk, _ in text.chunks():
            yield chunk
            done += len(chunk.encode())
            if progress is not None:
                progress(min(done, total), total)


def _with_label(progress: Progress | None, label: str) -> Callable[[int, int], None] | None:
    return None if progress is None else (lambda done, total: progress(label, done, total))


def _causal_defaults(data: Text, gpu: bool) -> dict[str, Any]:
    """A decoder: characters for a small text with a small alphabet, subwords otherwise."""
    small = data.size < (SMALL_TEXT if gpu else SMALL_TEXT_CPU)
    by_character = small and len(_alphabet(data)) <= 256
    vocab_size = min(32_000, max(1000, data.size // 500 // 100 * 100))
    sizes = (
        {"dim": 384, "layers": 6, "heads": 6, "context": 256, "dropout": 0.2}
        if gpu
        else {"dim": 128, "layers": 4, "heads": 4, "context": 64 if data.size < SMALL_TEXT else 128}
    )
    return {
        "data": {
            "tokenizer": "char" if by_character else {"kind": "bpe", "vocab_size": vocab_size}
        },
        "model": {"preset": "tiny-decoder", **_limit_context(sizes, data.size // 20)},
        "train": {
            "steps": 3000 if gpu else 2000,
            "batch": 64 if gpu else 12,
            "lr": 3e-3 if gpu else 6e-3,
            "optimizer": "muon",
            "ema": 0.99,
            "schedule": {"kind": "linear", "warmup": 30},
        },
    }


def _masked_defaults(data: Text, gpu: bool, *, pairs: bool) -> dict[str, Any]:
    """An encoder over subwords; with two segments if it reads `pairs` of sentences."""
    vocab_size = min(32_000, max(1000, data.size // 200 // 100 * 100))
    sizes = (
        {"dim": 384, "layers": 6, "heads": 6, "context": 256, "dropout": 0.1}
        if gpu
        else {"dim": 128, "layers": 4, "heads": 4, "context": 64}
    )
    head = {"head": {"kind": "masked", "next_sentence": True}, "segments": 2} if pairs else {}
    return {
        "task": "masked",
        "data": {"tokenizer": {"kind": "bpe", "vocab_size": vocab_size}},
        "model": {
            "preset": "tiny-encoder",
            **_limit_context(sizes, data.size // 20, minimum=8),
            **head,
        },
        "train": {
            "steps": 5000 if gpu else 3500,
            "batch": 64 if gpu else 16,
            "lr": 3e-3 if gpu else 5e-3,
            "optimizer": "muon",
            "ema": 0.99,
            "schedule": {"kind": "linear", "warmup": 50},
        },
    }


def _cbow_defaults(data: Text) -> dict[str, Any]:
    """Vectors of the most frequent words, from about twenty epochs, in at least 500 steps.

    Large batches are faster, since AdamW updates all vectors in every step.
    """
    words = data.size // 5
    rows = min(512, max(128, words // 1600), max(1, words // 64))
    return {
        "task": "cbow",
        "data": {"tokenizer": {"kind": "word", "vocab_size": 20_000, "lower": True}},
        "model": {"preset": "cbow", **_limit_context({"context": 64}, words // 4)},
        "train": {
            "steps": min(20_000, max(500, 20 * words // (64 * rows))),
            "batch": rows,
            "lr": 2e-2,
            "optimizer": {"kind": "adamw", "weight_decay": 0.0},
            "schedule": {"kind": "linear", "warmup": 50},
            "evaluate_targets": 10_000,
        },
    }


def _limit_context(sizes: dict[str, Any], tokens: int, minimum: int = 2) -> dict[str, Any]:
    """The sizes of a model, with a context of at most `tokens` and at least `minimum`."""
    return {**sizes, "context": max(minimum, min(sizes["context"], tokens))}


def _alphabet(data: Text) -> set[str]:
    characters: set[str] = set()
    for chunk, _ in data.chunks():
        characters |= set(chunk)
    return characters
