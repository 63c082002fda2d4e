"""Batches of examples, shared by the pipelines of labels, pairs, spans, images, …"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.config import RunConfig, TrainConfig
from regard.data.batch import Batch
from regard.data.loader import PairLoader
from regard.data.token_store import PairStore
from regard.errors import ConfigError
from regard.models.presets import ModelConfig
from regard.pipelines.base import DEFAULT_TOKENS, first_rows, rows_per_step
from regard.seeds import batch_generator
from regard.text import Tokenizer
from regard.units import count_noun


def pair_loader(config: RunConfig, store: PairStore, *, max_length: int) -> PairLoader:
    """Micro-batches of pairs of similar length: `train.batch` rows or `train.tokens` a step."""
    settings = config.train
    batch = None if settings.batch is None else settings.batch // settings.accumulate
    tokens = None if batch else (settings.tokens or DEFAULT_TOKENS) // settings.accumulate
    return PairLoader(store, tokens, settings.seed, max_length=max_length, batch=batch)


def encoded_text_loader(config: RunConfig, model: ModelConfig, store: PairStore) -> PairLoader:
    """A `PairLoader` of encoded texts (sources) and their classes (targets)."""
    # PairLoader counts a position for EOS, which these texts do not have
    return pair_loader(config, store, max_length=model.context + 1)


def seeded_batches(
    seed: int, loader: Any, collate: Callable[[Any, torch.Generator], Batch]
) -> Callable[[int], Batch]:
    """A function that returns the batch of an index; its random numbers depend on (seed, index)."""
    return lambda index: collate(loader.examples(index), batch_generator(seed, index))


def sequential_batches(
    seed: int,
    loader: PairLoader,
    collate: Callable[[Any, torch.Generator], Batch],
    limit: int | None = None,
) -> Iterator[Batch]:
    """All examples of a loader once, shortest first, or a fixed sample of `limit` of them."""
    return (collate(rows, batch_generator(seed, 0)) for rows in loader.sequential(limit))


def rows_per_micro_batch(settings: TrainConfig, default: int, unit: str) -> int:
    """Rows of a micro-batch of images, windows or drawings: rows of a step / `train.accumulate`.

    A step has `train.batch` rows, or `default`.
    """
    if settings.tokens is not None:
        raise ConfigError(f"train.tokens counts tokens; for {unit}, set train.batch")
    return max(1, (settings.batch or default) // settings.accumulate)


def blocks_per_micro_batch(settings: TrainConfig, context: int) -> int:
    """Rows of `context` tokens in a micro-batch: those of a step, divided by `train.accumulate`."""
    return max(1, rows_per_step(settings, context) // settings.accumulate)


def evenly_spaced_indices(count: int, size: int | None) -> NDArray[np.int64]:
    """All indices from 0 to count - 1, or `size` of them, evenly spaced."""
    size = count if size is None else min(size, count)
    return np.arange(size) * count // size


def batches_of_similar_length(
    store: PairStore, size: int, rows: NDArray[np.int64] | None = None
) -> Iterator[tuple[list[int], int]]:
    """Rows of a store in order of length, `size` at a time: indices, and the longest length."""
    lengths = store.source_lengths
    rows = np.arange(len(store)) if rows is None else rows
    order = rows[np.argsort(lengths[rows], kind="stable")].tolist()
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        yield indices, int(lengths[indices].max())


def concatenate(rows: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """One side of a `PairStore`: all rows in one array, and the offset of each."""
    return np.concatenate(rows), np.cumsum([0, *map(len, rows)])


def describe_data(train: Any, validation: Any, tokenizer: Tokenizer) -> list[str]:
    """The lines of a description for data with one tokenizer."""
    return [
        f"data       {train.description}",
        *first_rows(train),
        f"validation {validation.description}",
        f"tokenizer  {tokenizer.kind}, {tokenizer.vocab_size:,} tokens",
    ]


def count_unknown(ids: NDArray[Any], tokenizer: Tokenizer) -> int:
    """The number of `<unk>` tokens; 0 if the vocabulary has no separate token for unknown text."""
    unk = tokenizer.special_id("unk")
    if unk is None or unk in tokenizer.stop_ids:  # GPT-2 has one token for both
        return 0
    return int(np.count_nonzero(ids == unk))


def describe_unknown(training: int, validation: int) -> list[str]:
    """A line for the heading, if text is not in the vocabulary of `train.start`."""
    if not training + validation:
        return []
    return [
        f"unknown    {training:,} tokens for training and {validation:,} for validation are not in "
        "the vocabulary of train.start"
    ]


def describe_truncated(training: int, validation: int, context: int) -> list[str]:
    """The line of a description with the number of truncated texts; none if there are none."""
    if not training and not validation:
        return []
    return [
        f"truncated  {training:,} training texts and {validation:,} validation texts, "
        f"to {context} tokens"
    ]


def class_warnings(
    names: Sequence[str], training: Iterable[int], validation: Iterable[int], unit: str
) -> list[str]:
    """Warnings about classes that a split lacks, and about too many classes.

    `training` and `validation` are the classes of the examples; `unit` is one example: a text, a
    word or an image.
    """
    train_counts, validation_counts = Counter(training), Counter(validation)
    warnings = []
    if 2 * len(train_counts) > train_counts.total():
        warnings.append(
            f"{len(names):,} classes for {count_noun(train_counts.total(), f'training {unit}')}, "
            "too few to learn most of them; check that the labels are classes"
        )
    for split, present, counts, effect in (
        ("validation", train_counts, validation_counts, "the metrics do not cover"),
        ("training", validation_counts, train_counts, "the model does not learn"),
    ):
        absent = [name for id, name in enumerate(names) if id in present and id not in counts]
        if absent:
            listed = ", ".join(absent[:8]) + (", …" if len(absent) > 8 else "")
            which, them = f"the class {listed}", "it"
            if len(absent) > 1:
                which, them = f"{len(absent):,} of {len(names):,} classes ({listed})", "them"
            warnings.append(f"no {split} {unit} has {which}: {effect} {them}; add data")
    return warnings


def describe_classes(names: Sequence[str]) -> str:
    """The line of a description with the names of the first classes."""
    return f"classes    {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
