"""From the user's data to batches: open, split, tokenize, store, shuffle, collate."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from regard.config import Choice, RunConfig, TrainConfig, kind_of, make, to_table
from regard.data.batch import Batch
from regard.data.loader import PairLoader, Rows, TextLoader, blocks_in_order
from regard.data.sources import Pairs, Text, open_data
from regard.data.store import PairStore, TokenStore, cache_folder, pair_store, text_store
from regard.errors import ConfigError, DataError, unknown
from regard.models.build import resolve
from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.tasks import TASKS, Task
from regard.text import PairTokenizers, Tokenizer, train_pair, train_tokenizer
from regard.text.pairs import JOINT
from regard.training.optim import optimizers
from regard.training.schedule import schedule

Tokenizers = Tokenizer | PairTokenizers
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all
TOKENS = 4096  # of a step, where neither train.batch nor train.tokens is given


@dataclass(frozen=True, kw_only=True)
class Exam:
    """What a model is judged by, ready to be used."""

    task: Task
    tokenizers: Tokenizers
    model: ModelConfig
    held_out: Callable[[int | None], Iterator[Batch]]  # at most so many targets; None: all
    held_out_data: Text | Pairs
    held_out_size: int  # tokens of text, or pairs
    left_out: int = 0  # pairs too long for the model


@dataclass(frozen=True, kw_only=True)
class Material(Exam):
    """Everything a run is trained and judged on."""

    batch: Callable[[int], Batch]  # the micro-batch of this number, a pure function of the seed
    train_in_order: Callable[[], Iterator[Batch]]  # all of it once, for models that count
    description: list[str]
    fingerprint: str  # of the data, whatever its tokenizer


def open_split(config: RunConfig) -> tuple[Text | Pairs, Text | Pairs]:
    """The data to learn from and the data to judge by."""
    data = config.data
    whole = open_data(data.path, data.source, data.target, lower=data.lower)
    if not data.validation:
        if isinstance(whole, Text):
            return whole.split(data.held_out)
        return whole.split(data.held_out, config.train.seed)
    return whole, open_held_out(data.validation, isinstance(whole, Pairs), lower=data.lower)


def data_fingerprint(train: Text | Pairs, held: Text | Pairs) -> str:
    """A hash of all that a run learns from and is judged by."""
    return hashlib.sha256(f"{train.fingerprint()} {held.fingerprint()}".encode()).hexdigest()


def tokenizer_fingerprint(tokenizers: Tokenizers) -> str:
    """A hash of all that the ids of a run depend on."""
    if isinstance(tokenizers, PairTokenizers):
        return f"{tokenizers.source.fingerprint()} {tokenizers.target.fingerprint()}"
    return tokenizers.fingerprint()


def open_held_out(paths: list[str], pairs: bool, *, lower: bool) -> Text | Pairs:
    """Data to judge by, of the same kind as that which was learned from."""
    if len(paths) > 2:
        raise ConfigError(f"validation takes one path, or a source and a target, not {len(paths)}")
    if len(paths) == 2:
        held = open_data(None, *paths, lower=lower)
    else:
        held = open_data(paths[0], lower=lower)
    if isinstance(held, Pairs) != pairs:
        ours, theirs = ("pairs", "text") if pairs else ("text", "pairs")
        raise DataError(f"{', '.join(paths)} holds {theirs}; the run learns from {ours}")
    return held


def prepare(
    config: RunConfig, tokenizers: Tokenizers | None = None, progress: Progress | None = None
) -> Material:
    """Open the data of a run and make its task; tokenizers are trained unless given."""
    _must_make_sense(config.train)
    train, held = open_split(config)
    fingerprint = data_fingerprint(train, held)
    _must_fit(config, train, tokenizers)
    if isinstance(train, Text):
        assert isinstance(held, Text)
        assert not isinstance(tokenizers, PairTokenizers)
        return _prepare_text(config, train, held, tokenizers, fingerprint, progress)
    assert isinstance(held, Pairs)
    assert not isinstance(tokenizers, Tokenizer)
    return _prepare_pairs(config, train, held, tokenizers, fingerprint)


def _must_make_sense(settings: TrainConfig) -> None:
    """Refuse numbers with which nothing could be learned."""
    for name in (
        *("steps", "batch", "tokens", "accumulate", "keep", "patience"),
        *("evaluate_every", "evaluate_tokens", "save_every"),
    ):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"train.{name}={value} must be at least 1")
    for name, below in (("rate", math.inf), ("clip", math.inf), ("average", 1)):
        value = getattr(settings, name)
        if not 0 <= value < below:
            raise ConfigError(f"train.{name}={value} must be at least 0 and below {below}")
    if settings.batch is not None and settings.batch % settings.accumulate:
        raise ConfigError(
            f"train.accumulate={settings.accumulate} must divide train.batch={settings.batch}"
        )
    if settings.patience is not None and settings.best == "last":
        raise ConfigError(
            "train.patience waits for a better model, and by train.best='last' every one is;\n"
            "give train.best=loss, or train.patience=none"
        )


class _Smallest(nn.Module):
    """Something to try an optimizer on before there is a model: a matrix between layers, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])


def _must_fit(config: RunConfig, data: Text | Pairs, tokenizers: Tokenizers | None) -> None:
    """Refuse data, a task, a model and given tokenizers that are not for each other."""
    kind = kind_of(config.task)[0]
    if kind not in TASKS:
        raise ConfigError(unknown("task", kind, TASKS))
    if config.train.best not in ("last", *TASKS[kind].measures):
        known = ", ".join(["last", *TASKS[kind].measures])
        raise ConfigError(
            f"train.best={config.train.best!r} is not measured here; choose among {known}"
        )
    schedule(config.train.schedule, config.train.steps)
    optimizers(config.train.optimizer, _Smallest(), config.train.rate)
    pairs = isinstance(data, Pairs)
    wanted, found = ("pairs", "text") if TASKS[kind].pairs else ("text", "pairs")
    if TASKS[kind].pairs != pairs:
        fitting = ", ".join(name for name, task in TASKS.items() if task.pairs == pairs)
        raise ConfigError(
            f"task={kind!r} learns from {wanted}, and {data.name} holds {found}; "
            f"for {found} there is: {fitting}"
        )
    if tokenizers is not None and isinstance(tokenizers, PairTokenizers) != pairs:
        raise ConfigError(
            f"train.start={config.train.start} has learned from {found}; {data.name} holds {wanted}"
        )
    model = resolve(config.model, vocab_size=1)
    shape = model.shape if isinstance(model, TransformerConfig) else "decoder"
    needed = "encoder-decoder" if pairs else "decoder"
    if shape != needed:
        raise ConfigError(
            f"task={kind!r} needs a model of shape {needed!r}, not {shape!r}; "
            "choose another model.preset or model.shape"
        )


def examine(
    config: RunConfig,
    held: Text | Pairs,
    tokenizers: Tokenizers,
    progress: Progress | None = None,
) -> Exam:
    """Make the task of a run, and what its model is judged by, from held-out data alone."""
    if isinstance(held, Text):
        assert isinstance(tokenizers, Tokenizer)
        return _examine_text(config, held, tokenizers, progress)
    assert isinstance(tokenizers, PairTokenizers)
    return _examine_pairs(config, held, tokenizers)


def _examine_text(
    config: RunConfig, held: Text, tokenizer: Tokenizer, progress: Progress | None
) -> Exam:
    store = text_store(held, tokenizer, progress=_named(progress, "tokenizing held-out text"))
    if len(store) < 2:
        raise DataError(
            f"the held-out text has {len(store)} token, so there is nothing to predict in it;"
            "\ngive more text, a larger data.held_out, or a data.validation of its own"
        )
    model = resolve(config.model, vocab_size=tokenizer.size)
    first = len(tokenizer.decode([int(store.tokens[0])]).encode())
    per_token = (store.bytes - first) / (len(store) - 1)
    task: Task = make(config.task, TASKS, "task", bytes_per_token=per_token)
    return Exam(
        task=task,
        tokenizers=tokenizer,
        model=model,
        held_out=lambda limit: _blocks(config, task, model, store, limit),
        held_out_data=held,
        held_out_size=len(store),
    )


def _prepare_text(
    config: RunConfig,
    train: Text,
    held: Text,
    tokenizer: Tokenizer | None,
    fingerprint: str,
    progress: Progress | None,
) -> Material:
    if tokenizer is None:
        tokenizer = _text_tokenizer(config, train, held)
    store = text_store(train, tokenizer, progress=_named(progress, "tokenizing"))
    exam = _examine_text(config, held, tokenizer, progress)
    task, model = exam.task, exam.model
    loader = TextLoader(store, model.context, _rows(config, model), config.train.seed)

    def batch(number: int) -> Batch:
        block = loader.examples(number)
        return task.collate((block[:, :-1], block[:, 1:]), _generator(config, number))

    return Material(
        **vars(exam),
        batch=batch,
        train_in_order=lambda: _blocks(config, task, model, store, None),
        description=[
            f"data       {train.description}",
            f"held out   {held.description}",
            f"tokenizer  {tokenizer.kind}, {tokenizer.size:,} tokens; "
            f"{len(store):,} to learn from, {exam.held_out_size:,} held out",
        ],
        fingerprint=fingerprint,
    )


def _text_tokenizer(config: RunConfig, train: Text, held: Text) -> Tokenizer:
    """Learned from the whole of the user's text, so that no letter of it is unknown.

    From the training part alone where the held-out text is a file of its own.
    """
    texts = [train] if config.data.validation else [train, held]
    choice = config.data.tokenizer
    kept = _kept(choice, *texts)
    if (kept / JOINT).exists():
        return Tokenizer.load(kept / JOINT)
    pieces = (piece for text in texts for piece, _ in text.pieces())
    tokenizer = train_tokenizer(choice, pieces, total=sum(text.size for text in texts))
    _keep(kept, lambda folder: tokenizer.save(folder / JOINT))
    return tokenizer


def _pair_tokenizers(config: RunConfig, train: Pairs) -> PairTokenizers:
    kept = _kept(config.data.tokenizer, train)
    if kept.exists():
        return PairTokenizers.load(kept)
    tokenizers = train_pair(config.data.tokenizer, train.rows)
    _keep(kept, tokenizers.save)
    return tokenizers


def _kept(choice: Choice, *data: Text | Pairs) -> Path:
    """Where the cache has the tokenizer of this kind for this data, if it has it."""
    facts = [1, to_table(choice), [each.fingerprint() for each in data]]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "tokenizers" / key


def _keep(folder: Path, save: Callable[[Path], None]) -> None:
    """Put a tokenizer into the cache, whole or not at all."""
    aside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    aside.mkdir(parents=True, exist_ok=True)
    save(aside)
    with suppress(OSError):  # another run was faster
        aside.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _rows(config: RunConfig, model: ModelConfig) -> int:
    """The rows of a micro-batch."""
    settings = config.train
    rows = settings.batch or (settings.tokens or TOKENS) // model.context
    return max(1, rows // settings.accumulate)


def _blocks(
    config: RunConfig, task: Task, model: ModelConfig, store: TokenStore, limit: int | None
) -> Iterator[Batch]:
    rows = max(_rows(config, model), 16)
    for examples in blocks_in_order(store.tokens, model.context, rows, limit):
        yield task.collate(examples, _generator(config, 0))


def _examine_pairs(config: RunConfig, held: Pairs, tokenizers: PairTokenizers) -> Exam:
    source, target = tokenizers.source, tokenizers.target
    facts = {"vocab_size": target.size}
    if not tokenizers.joint:
        facts["source_vocab_size"] = source.size
    model = resolve(config.model, **facts)
    task = pair_task(config, tokenizers)
    store = pair_store(held, source, target)
    loader = _pair_loader(config, model, store)

    def held_out(limit: int | None) -> Iterator[Batch]:
        rows = None if limit is None else max(1, limit * len(store) // len(store.target_ids))
        return (_collate(config, task, store, each, 0) for each in loader.in_order(rows))

    return Exam(
        task=task,
        tokenizers=tokenizers,
        model=model,
        held_out=held_out,
        held_out_data=held,
        held_out_size=len(loader),
        left_out=loader.dropped,
    )


def pair_task(config: RunConfig, tokenizers: PairTokenizers) -> Task:
    """The task of a run on pairs, with the ids that begin and end its sentences."""
    return make(
        config.task,
        TASKS,
        "task",
        start_id=tokenizers.target.start_id,
        stop_id=tokenizers.target.stop_id,
        source_stop_id=tokenizers.source.stop_id,
    )


def _prepare_pairs(
    config: RunConfig,
    train: Pairs,
    held: Pairs,
    tokenizers: PairTokenizers | None,
    fingerprint: str,
) -> Material:
    if tokenizers is None:
        tokenizers = _pair_tokenizers(config, train)
    source, target = tokenizers.source, tokenizers.target
    exam = _examine_pairs(config, held, tokenizers)
    task = exam.task
    store = pair_store(train, source, target)
    loader = _pair_loader(config, exam.model, store)
    sizes = f"{target.size:,} tokens, joint"
    if not tokenizers.joint:
        sizes = f"{source.size:,} and {target.size:,} tokens"
    description = [
        f"data       {train.description}",
        f"held out   {held.description}",
        f"tokenizer  {target.kind}, {sizes}",
    ]
    if loader.dropped or exam.left_out:
        description.append(
            f"left out   {loader.dropped:,} pairs to learn from and {exam.left_out:,} "
            f"held out, longer than {exam.model.context - 1} tokens"
        )
    return Material(
        **vars(exam),
        batch=lambda number: _collate(config, task, store, loader.examples(number), number),
        train_in_order=lambda: (
            _collate(config, task, store, rows, 0) for rows in loader.in_order()
        ),
        description=description,
        fingerprint=fingerprint,
    )


def _pair_loader(config: RunConfig, model: ModelConfig, store: PairStore) -> PairLoader:
    settings = config.train
    batch = None if settings.batch is None else settings.batch // settings.accumulate
    tokens = None if batch else (settings.tokens or TOKENS) // settings.accumulate
    return PairLoader(store, tokens, settings.seed, longest=model.context, batch=batch)


def _collate(config: RunConfig, task: Task, store: PairStore, rows: Rows, number: int) -> Batch:
    sources = [store.source(row) for row in rows.indices]
    targets = [store.target(row) for row in rows.indices]
    return task.collate((sources, targets, rows.width), _generator(config, number))


def _named(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else (lambda done, of: progress(name, done, of))


def _generator(config: RunConfig, number: int) -> torch.Generator:
    # hashed, because the CPU's generator looks at the lower half of its seed only
    digest = hashlib.sha256(f"{config.train.seed} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def load_tokenizers(folder: Path, config: RunConfig) -> Tokenizers:
    """The tokenizer of a run folder, or those of its two sides."""
    if TASKS[kind_of(config.task)[0]].pairs:
        return PairTokenizers.load(folder)
    return Tokenizer.load(folder / "tokenizer.json")
