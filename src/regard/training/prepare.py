"""From the user's data to batches: open, split, tokenize, store, shuffle, collate."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from regard.config import RunConfig, TrainConfig, kind_of, make
from regard.data.batch import Batch
from regard.data.loader import PairLoader, Rows, TextLoader, blocks_in_order
from regard.data.sources import Pairs, Text, open_data
from regard.data.store import PairStore, TokenStore, pair_store, text_store
from regard.errors import ConfigError, DataError, unknown
from regard.models.build import resolve
from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.tasks import TASKS, Task
from regard.text import PairTokenizers, Tokenizer, train_pair, train_tokenizer

Tokenizers = Tokenizer | PairTokenizers
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


@dataclass(frozen=True)
class Material:
    """Everything a run is trained and judged on, ready to be used."""

    task: Task
    tokenizers: Tokenizers
    model: ModelConfig
    batch: Callable[[int], Batch]  # the micro-batch of this number, a pure function of the seed
    train_in_order: Callable[[], Iterator[Batch]]  # all of it once, for models that count
    held_out: Callable[[int | None], Iterator[Batch]]  # at most so many targets; None: all
    held_out_data: Text | Pairs
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
    fingerprint = hashlib.sha256(f"{train.fingerprint()} {held.fingerprint()}".encode()).hexdigest()
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
    if settings.patience is not None and settings.best == "last":
        raise ConfigError(
            "train.patience waits for a better model, and by train.best='last' every one is;\n"
            "give train.best=loss, or train.patience=none"
        )


def _must_fit(config: RunConfig, data: Text | Pairs, tokenizers: Tokenizers | None) -> None:
    """Refuse data, a task, a model and given tokenizers that are not for each other."""
    kind = kind_of(config.task)[0]
    if kind not in TASKS:
        raise ConfigError(unknown("task", kind, TASKS))
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


def _prepare_text(
    config: RunConfig,
    train: Text,
    held: Text,
    tokenizer: Tokenizer | None,
    fingerprint: str,
    progress: Progress | None,
) -> Material:
    if tokenizer is None:
        pieces = (piece for text in (train, held) for piece, _ in text.pieces())
        tokenizer = train_tokenizer(config.data.tokenizer, pieces, total=train.size + held.size)

    def watch(name: str) -> Callable[[int, int], None] | None:
        return None if progress is None else (lambda done, of: progress(name, done, of))

    store = text_store(train, tokenizer, progress=watch("tokenizing"))
    held_store = text_store(held, tokenizer, progress=watch("tokenizing held-out text"))
    model = resolve(config.model, vocab_size=tokenizer.size)
    if len(held_store) < 2:
        raise DataError(
            f"the held-out text has {len(held_store)} token, so there is nothing to predict in it;"
            "\ngive more text, a larger data.held_out, or a data.validation of its own"
        )
    first = len(tokenizer.decode([int(held_store.tokens[0])]).encode())
    per_token = (held_store.bytes - first) / (len(held_store) - 1)
    task: Task = make(config.task, TASKS, "task", bytes_per_token=per_token)
    rows = config.train.batch or max(1, (config.train.tokens or 4096) // model.context)
    loader = TextLoader(store, model.context, rows, config.train.seed)

    def batch(number: int) -> Batch:
        block = loader.examples(number)
        return task.collate((block[:, :-1], block[:, 1:]), _generator(config, number))

    def in_order(store: TokenStore, limit: int | None = None) -> Iterator[Batch]:
        for examples in blocks_in_order(store.tokens, model.context, max(rows, 16), limit):
            yield task.collate(examples, _generator(config, 0))

    return Material(
        task,
        tokenizer,
        model,
        batch,
        lambda: in_order(store),
        lambda limit: in_order(held_store, limit),
        held,
        [
            f"data       {train.description}",
            f"held out   {held.description}",
            f"tokenizer  {tokenizer.kind}, {tokenizer.size:,} tokens; "
            f"{len(store):,} to learn from, {len(held_store):,} held out",
        ],
        fingerprint,
    )


def _prepare_pairs(
    config: RunConfig,
    train: Pairs,
    held: Pairs,
    tokenizers: PairTokenizers | None,
    fingerprint: str,
) -> Material:
    if tokenizers is None:
        tokenizers = train_pair(config.data.tokenizer, train.rows)
    source, target = tokenizers.source, tokenizers.target
    facts = {"vocab_size": target.size}
    if not tokenizers.joint:
        facts["source_vocab_size"] = source.size
    model = resolve(config.model, **facts)
    task: Task = make(
        config.task,
        TASKS,
        "task",
        start_id=target.start_id,
        stop_id=target.stop_id,
        source_stop_id=source.stop_id,
    )
    tokens = None if config.train.batch else config.train.tokens or 4096
    store, held_store = pair_store(train, source, target), pair_store(held, source, target)

    def load(store: PairStore) -> PairLoader:
        return PairLoader(
            store,
            tokens,
            config.train.seed,
            longest=model.context,
            batch=config.train.batch,
        )

    loader, held_loader = load(store), load(held_store)

    def collate(store: PairStore, rows: Rows, number: int) -> Batch:
        sources = [store.source(row) for row in rows.indices]
        targets = [store.target(row) for row in rows.indices]
        return task.collate((sources, targets, rows.width), _generator(config, number))

    def held_out(limit: int | None) -> Iterator[Batch]:
        rows = (
            None if limit is None else max(1, limit * len(held_store) // len(held_store.target_ids))
        )
        return (collate(held_store, each, 0) for each in held_loader.in_order(rows))

    description = [
        f"data       {train.description}",
        f"held out   {held.description}",
        f"tokenizer  {target.kind}, "
        + (
            f"{target.size:,} tokens, joint"
            if tokenizers.joint
            else f"{source.size:,} and {target.size:,} tokens"
        ),
    ]
    if loader.dropped or held_loader.dropped:
        description.append(
            f"left out   {loader.dropped:,} pairs to learn from and {held_loader.dropped:,} "
            f"held out, longer than {model.context - 1} tokens"
        )
    return Material(
        task,
        tokenizers,
        model,
        lambda number: collate(store, loader.examples(number), number),
        lambda: (collate(store, rows, 0) for rows in loader.in_order()),
        held_out,
        held,
        description,
        fingerprint,
    )


def _generator(config: RunConfig, number: int) -> torch.Generator:
    # hashed, because the CPU's generator looks at the lower half of its seed only
    digest = hashlib.sha256(f"{config.train.seed} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def load_tokenizers(folder: Path, config: RunConfig) -> Tokenizers:
    """The tokenizer of a run folder, or those of its two sides."""
    if TASKS[kind_of(config.task)[0]].pairs:
        return PairTokenizers.load(folder)
    return Tokenizer.load(folder / "tokenizer.json")
