"""Batches of examples: what the pipelines of labels, pairs, spans, images, … have in common."""

from collections.abc import Callable, Iterator, Sequence
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
from regard.pipelines.base import DEFAULT_TOKENS, first_rows
from regard.seeds import batch_generator
from regard.text import Tokenizer


def pair_loader(config: RunConfig, store: PairStore, *, longest: int) -> PairLoader:
    """Micro-batches of pairs of similar length: `train.batch` rows or `train.tokens` a step."""
    settings = config.train
    batch = None if settings.batch is None else settings.batch // settings.accumulate
    tokens = None if batch else (settings.tokens or DEFAULT_TOKENS) // settings.accumulate
    return PairLoader(store, tokens, settings.seed, longest=longest, batch=batch)


def text_loader(config: RunConfig, model: ModelConfig, store: PairStore) -> PairLoader:
    """The loader of texts and their classes: up to `model.context` tokens."""
    return pair_loader(config, store, longest=model.context + 1)  # pairs have one for EOS


def seeded_batches(
    seed: int, loader: Any, collate: Callable[[Any, torch.Generator], Batch]
) -> Callable[[int], Batch]:
    """The batches of a loader by their index, with the random numbers of (seed, index)."""
    return lambda index: collate(loader.examples(index), batch_generator(seed, index))


def sequential_batches(
    seed: int,
    loader: PairLoader,
    collate: Callable[[Any, torch.Generator], Batch],
    limit: int | None = None,
) -> Iterator[Batch]:
    """All examples of a loader once, shortest first, or a fixed sample of `limit` of them."""
    return (collate(rows, batch_generator(seed, 0)) for rows in loader.sequential(limit))


def rows_per_micro_batch(settings: TrainConfig, default: int, what: str) -> int:
    """Rows of a micro-batch of data that is not counted in tokens: `train.batch`, or `default`."""
    if settings.tokens is not None:
        raise ConfigError(f"train.tokens counts tokens; for {what}, set train.batch")
    return max(1, (settings.batch or default) // settings.accumulate)


def evenly_spaced(count: int, kept: int | None) -> NDArray[np.int64]:
    """The indices from 0 to count - 1, or `kept` of them, evenly spaced."""
    kept = count if kept is None else min(kept, count)
    return np.arange(kept) * count // kept


def batches_of_similar_length(
    store: PairStore, size: int, rows: NDArray[np.int64] | None = None
) -> Iterator[tuple[list[int], int]]:
    """Rows of a store, by default all, `size` at a time: their indices and the width."""
    lengths = store.source_lengths
    rows = np.arange(len(store)) if rows is None else rows
    order = rows[np.argsort(lengths[rows], kind="stable")].tolist()
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield chosen, int(lengths[chosen].max())


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


def describe_classes(names: Sequence[str]) -> str:
    """The line of a description with the names of the first classes."""
    return f"classes    {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
