"""Loaders: which examples a step trains on, as a function of (seed, step).

Resuming therefore needs no loader state. Tasks collate the examples into batches. With gradient
accumulation, a step of a loader is one micro-batch.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from regard.data.batch import Batch
from regard.data.token_store import PairStore, TokenStore
from regard.errors import ConfigError, DataError
from regard.seeds import batch_generator, permute, shuffle_key

T = TypeVar("T")


class TextLoader:
    """Blocks of a text in shuffled order.

    In epoch e the text is cut into blocks, beginning at the offset o_e; the permutation p_e of the
    epoch is the order of the blocks:

        example g = tokens[o_e + context p_e(g mod blocks) :][: context + 1],     e = g div blocks

    and step s has the examples s·batch … (s + 1)·batch - 1, so a batch may extend into the next
    epoch. The offsets make the blocks of different epochs differ. `reserved` positions of the
    context are left for special tokens.
    """

    def __init__(
        self, store: TokenStore, context: int, batch: int, seed: int, *, reserved: int = 0
    ) -> None:
        length = len(store.tokens)
        if length < context - reserved + 1:
            raise DataError(
                f"the text has {length} tokens, but one block of model.context={context} needs"
                f" {context - reserved + 1};\n"
                f"give more text, or model.context={max(length - 1, 1) + reserved} or less"
            )
        context -= reserved
        self.tokens, self.context, self.batch, self.seed = store.tokens, context, batch, seed
        self.blocks = max(1, length // context - 1)  # per epoch, for every offset
        self._offset_count = min(context, length - self.blocks * context)

    @property
    def steps_per_epoch(self) -> float:
        """Steps per epoch, as a fraction."""
        return self.blocks / self.batch

    def starts(self, step: int) -> NDArray[np.int64]:
        """The token offsets at which the blocks of a step begin."""
        positions = np.arange(step * self.batch, (step + 1) * self.batch)
        starts = np.empty_like(positions)
        epochs = positions // self.blocks
        for epoch in range(epochs[0], epochs[-1] + 1):
            in_epoch = epochs == epoch
            block = permute(
                positions[in_epoch] % self.blocks, self.blocks, shuffle_key(self.seed, epoch, 0)
            )
            offset = shuffle_key(self.seed, epoch, 1) % self._offset_count
            starts[in_epoch] = offset + self.context * block
        return starts

    def example_ids(self, step: int) -> list[int]:
        """The starts of the blocks of a step, for the log."""
        return self.starts(step).tolist()

    def examples(self, step: int) -> NDArray[np.int64]:
        """The ids of a step, (batch, context + 1): inputs, and the target of the last one."""
        starts = self.starts(step)
        return self.tokens[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)

    def sequential(
        self, max_targets: int | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The text from its beginning, for evaluation; see `sequential_blocks`."""
        return sequential_blocks(self.tokens, self.context, self.batch, max_targets)


def text_batches(loader: TextLoader, collate: Callable[..., Batch]) -> Callable[[int], Batch]:
    """A function that returns the batch of an index; its random numbers depend on (seed, index)."""

    def batch(index: int) -> Batch:
        block = loader.examples(index)
        return collate((block[:, :-1], block[:, 1:]), batch_generator(loader.seed, index))

    return batch


class RowLoader:
    """Single examples, such as images, shuffled in every epoch.

        example g = p_e(g mod count),     e = g div count

    and step s has the examples s·batch … (s + 1)·batch - 1.
    """

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self.count, self.batch, self.seed = count, batch, seed

    def examples(self, step: int) -> NDArray[np.int64]:
        """The indices of the examples of a step."""
        positions = np.arange(step * self.batch, (step + 1) * self.batch)
        rows = np.empty_like(positions)
        epochs = positions // self.count
        for epoch in range(epochs[0], epochs[-1] + 1):
            in_epoch = epochs == epoch
            rows[in_epoch] = permute(
                positions[in_epoch] % self.count, self.count, shuffle_key(self.seed, epoch)
            )
        return rows

    def example_ids(self, step: int) -> list[int]:
        """The indices of the examples of a step, for the log."""
        return self.examples(step).tolist()


def sequential_blocks(
    tokens: NDArray[Any], context: int, batch: int, max_targets: int | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Ids and targets, each (rows, context); every token except the first is a target once.

    At most `max_targets` targets, and at most `batch` rows at a time. The last row is padded with
    id 0 and target -1. The text may be shorter than one block.
    """
    count = len(tokens) - 1  # targets
    if count < 1:
        raise DataError(f"the text has {len(tokens)} tokens; at least 2 are needed for one target")
    count = count if max_targets is None else min(count, max_targets)
    for start in range(0, count, context * batch):
        size = min(count - start, context * batch)
        rows = -(-size // context)
        ids = np.zeros(rows * context, np.int64)
        targets = np.full(rows * context, -1, np.int64)
        ids[:size] = tokens[start : start + size]
        targets[:size] = tokens[start + 1 : start + size + 1]
        yield ids.reshape(rows, context), targets.reshape(rows, context)


def sliding_windows(
    tokens: NDArray[Any], context: int, stride: int, batch: int, max_targets: int | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Overlapping windows: ids (rows, context), and the targets (rows, stride) of their ends.

    Every token except the first is a target once. The window at the start of the text comes last,
    with `context` targets; in all others, a target has at least context - stride + 1 ids before it.
    Limits, padding and the number of rows are those of `sequential_blocks`.
    """
    count = len(tokens) - 1
    count = count if max_targets is None else min(count, max_targets)
    for first in range(context, count, batch * stride):
        scored_starts = np.arange(first, min(first + batch * stride, count), stride)[:, None]
        positions = scored_starts + stride - context + np.arange(context)  # (rows, context)
        scored = scored_starts + np.arange(stride)
        ids = tokens[positions.clip(max=count)].astype(np.int64)
        targets = tokens[(scored + 1).clip(max=count)].astype(np.int64)
        yield np.where(positions < count, ids, 0), np.where(scored < count, targets, -1)
    yield from sequential_blocks(tokens[: context + 1], context, 1, max_targets)


@dataclass(frozen=True, slots=True)
class PairIndices:
    """The pairs of a batch, and the length to which they are padded, including BOS or EOS."""

    indices: NDArray[np.int64]
    length: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    length: int
    rows: int
    begin: int  # its pairs, as a range of the pairs ordered by length
    end: int

    @property
    def batches(self) -> int:
        return -(-(self.end - self.begin) // self.rows)


class PairLoader:
    """Batches of pairs of similar length (bucketing), in a few fixed shapes.

    The lengths of the buckets are fixed. A pair needs max(source, target) + 1 positions and belongs
    to the shortest bucket that fits it. All batches of a bucket have the same number of rows, about
    `tokens` / length (or `batch`). The last batch of a bucket is filled with the longest pairs of
    the next shorter bucket, the last batch of the shortest bucket with its own first pairs. With
    n_b batches in bucket b, an epoch has sum_b n_b steps:

        step s -> epoch e and index k = s mod sum n;  p_e(k) is batch j of bucket b;
        its rows are  p_{e,b}(j·rows … (j + 1)·rows - 1),  modulo the size of the bucket

    Pairs that need more than `max_length` positions are dropped; `dropped` is their number.
    """

    def __init__(
        self,
        store: PairStore,
        tokens: int | None,
        seed: int,
        *,
        max_length: int,
        batch: int | None = None,
    ) -> None:
        if tokens is None and batch is None:
            raise ConfigError("no batch size; set train.tokens or train.batch")
        self.seed = seed
        pair_lengths = np.maximum(store.source_lengths, store.target_lengths) + 1
        order = np.argsort(pair_lengths, kind="stable")
        count = int(np.searchsorted(pair_lengths[order], max_length, side="right"))
        self.dropped = len(order) - count
        if not count:
            raise DataError(
                f"all {len(order)} pairs need more than {max_length} positions; the shortest needs"
                f" {int(pair_lengths.min())}\nraise model.context, or give shorter sentences"
            )
        self.pairs = order[:count]  # indices of the pairs that are not dropped
        self.buckets = _buckets(pair_lengths[self.pairs], max_length, tokens, batch)
        self._first_batch = np.cumsum([0, *(bucket.batches for bucket in self.buckets)])

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch."""
        return int(self._first_batch[-1])

    def __len__(self) -> int:
        return len(self.pairs)

    def examples(self, step: int) -> PairIndices:
        """The pairs of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        batch = int(
            permute(np.array([position]), self.steps_per_epoch, shuffle_key(self.seed, epoch))[0]
        )
        index = int(np.searchsorted(self._first_batch, batch, side="right")) - 1
        bucket = self.buckets[index]
        size = bucket.end - bucket.begin
        start = (batch - int(self._first_batch[index])) * bucket.rows
        positions = np.arange(start, start + bucket.rows) % size
        indices = bucket.begin + permute(positions, size, shuffle_key(self.seed, epoch, index))
        return PairIndices(self.pairs[indices], bucket.length)

    def example_ids(self, step: int) -> list[int]:
        """The indices of the pairs of a step, for the log."""
        return self.examples(step).indices.tolist()

    def sequential(self, limit: int | None = None) -> Iterator[PairIndices]:
        """Every pair once, or a fixed sample of `limit` pairs, shortest first, for evaluation."""
        positions = np.arange(len(self.pairs))
        if limit is not None and limit < len(positions):
            positions = np.sort(permute(positions[:limit], len(positions), shuffle_key(self.seed)))
        for bucket in self.buckets:
            in_bucket = positions[(positions >= bucket.begin) & (positions < bucket.end)]
            for start in range(0, len(in_bucket), bucket.rows):
                yield PairIndices(self.pairs[in_bucket[start : start + bucket.rows]], bucket.length)


def _bucket_lengths(max_length: int) -> list[int]:
    """Multiples of 8, each about a quarter more than the previous one, up to `max_length`."""
    lengths, length = [], 8
    while length < max_length:
        lengths.append(length)
        length += max(8, -(-length // 32) * 8)
    return [*lengths, max_length]


def _buckets(
    pair_lengths: NDArray[np.int64], max_length: int, tokens: int | None, batch: int | None
) -> list[_Bucket]:
    """Divide pairs, whose lengths are sorted, into buckets."""
    buckets: list[_Bucket] = []
    lengths = [0, *_bucket_lengths(max_length)]
    end = len(pair_lengths)
    for shorter, length in reversed(list(pairwise(lengths))):
        count = end - int(np.searchsorted(pair_lengths[:end], shorter, side="right"))
        if count:
            rows = batch if batch is not None else max(1, (tokens or 0) // length)
            begin = max(0, end - -(-count // rows) * rows)
            buckets.insert(0, _Bucket(length, rows, begin, end))
            end = begin
    return buckets


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


def prefetch(make: Callable[[int], T], start: int, stop: int, ahead: int = 2) -> Iterator[T]:
    """Yield make(start), …, make(stop - 1), computed by a thread at most `ahead` items in advance.

    An exception of `make` is raised instead of its item. The thread ends when the iteration ends,
    even if it ends early.
    """
    queue: SimpleQueue[T | _Failure] = SimpleQueue()
    free_slots, stopped = threading.Semaphore(ahead), threading.Event()

    def work() -> None:
        for step in range(start, stop):
            free_slots.acquire()
            if stopped.is_set():
                return
            try:
                queue.put(make(step))
            except BaseException as error:  # raised in the consumer
                queue.put(_Failure(error))
                return

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        for _ in range(start, stop):
            item = queue.get()
            free_slots.release()
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stopped.set()
        free_slots.release()
        thread.join()
