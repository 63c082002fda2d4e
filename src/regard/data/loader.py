"""Which examples a step sees: a closed form of (seed, step), so that resuming needs no state.

Nothing here knows what a batch looks like; tasks collate what is chosen here.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from regard.data.token_store import PairStore, TokenStore
from regard.errors import ConfigError, DataError
from regard.seeds import shuffle_key

T = TypeVar("T")
_ROUNDS = 6


def permute(index: NDArray[Any], size: int, key: int) -> NDArray[np.int64]:
    r"""Where each index goes in a shuffle of range(size) that is never written down.

    A Feistel network shuffles the numbers of 2 b bits: with halves l and r of b bits,

        (l, r) -> (r, l XOR hash_i(r)),      i = 1 .. rounds

    each round of which can be undone, whatever the hash. b is the smallest for which
    2^(2b) >= size; who lands outside of range(size) walks on until inside.
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    keys = [np.uint64(shuffle_key(key, turn)) for turn in range(_ROUNDS)]

    def shuffled(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> shift, x & mask
        for each in keys:
            left, right = right, left ^ (_mixed(right ^ each) & mask)
        return left << shift | right

    x = shuffled(np.asarray(index).ravel().astype(np.uint64))
    while (outside := x >= size).any():
        x[outside] = shuffled(x[outside])
    return x.astype(np.int64).reshape(np.shape(index))


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Make every bit of the result depend on every bit of x: multiply by odd numbers, fold."""
    for odd in (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)):
        x = x * odd
        x = x ^ (x >> np.uint64(32))
    return x


class TextLoader:
    """Blocks of a text in shuffled order.

    In epoch e the text is cut from an offset o_e on into blocks, which are visited in the order
    of that epoch's permutation p_e:

        example g = tokens[o_e + context p_e(g mod blocks) :][: context + 1],     e = g div blocks

    and step s has the examples s·batch … (s + 1)·batch - 1, so a batch may run on into the next
    epoch. The offsets make the blocks of one epoch differ from those of another. `reserved` places
    of the context are not for text.
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
        self.blocks = max(1, length // context - 1)  # in every epoch, whatever its offset
        self._offsets = min(context, length - self.blocks * context)

    @property
    def per_epoch(self) -> float:
        """How many steps visit every block once."""
        return self.blocks / self.batch

    def starts(self, step: int) -> NDArray[np.int64]:
        """Where in the text the blocks of a step begin, counted in tokens."""
        numbers = np.arange(step * self.batch, (step + 1) * self.batch)
        starts = np.empty_like(numbers)
        epochs = numbers // self.blocks
        for epoch in range(epochs[0], epochs[-1] + 1):
            here = epochs == epoch
            block = permute(
                numbers[here] % self.blocks, self.blocks, shuffle_key(self.seed, epoch, 0)
            )
            offset = shuffle_key(self.seed, epoch, 1) % self._offsets
            starts[here] = offset + self.context * block
        return starts

    def examples(self, step: int) -> NDArray[np.int64]:
        """The ids of a step, (batch, context + 1): what is read, and one further to predict."""
        starts = self.starts(step)
        return self.tokens[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)

    def sequential(
        self, limit_tokens: int | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The text from its beginning, for evaluation; see `sequential_blocks`."""
        return sequential_blocks(self.tokens, self.context, self.batch, limit_tokens)


class RowLoader:
    """Single examples, such as images, in an order that each epoch shuffles anew.

        example g = p_e(g mod count),     e = g div count

    and step s has the examples s·batch … (s + 1)·batch - 1.
    """

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self.count, self.batch, self.seed = count, batch, seed

    def examples(self, step: int) -> NDArray[np.int64]:
        """The rows of a step."""
        numbers = np.arange(step * self.batch, (step + 1) * self.batch)
        rows = np.empty_like(numbers)
        epochs = numbers // self.count
        for epoch in range(epochs[0], epochs[-1] + 1):
            here = epochs == epoch
            rows[here] = permute(
                numbers[here] % self.count, self.count, shuffle_key(self.seed, epoch)
            )
        return rows


def sequential_blocks(
    tokens: NDArray[Any], context: int, batch: int, limit_tokens: int | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Ids and targets, each (rows, context), in which every token but the first is a target once.

    At most `limit_tokens` targets, and at most `batch` rows at a time; what is missing at the
    end of the last row is filled with id 0 and target -1. A text shorter than one block will do.
    """
    count = len(tokens) - 1  # targets
    if count < 1:
        raise DataError(f"the text has {len(tokens)} tokens; there is nothing to predict")
    count = count if limit_tokens is None else min(count, limit_tokens)
    for start in range(0, count, context * batch):
        here = min(count - start, context * batch)
        rows = -(-here // context)
        ids = np.zeros(rows * context, np.int64)
        targets = np.full(rows * context, -1, np.int64)
        ids[:here] = tokens[start : start + here]
        targets[:here] = tokens[start + 1 : start + here + 1]
        yield ids.reshape(rows, context), targets.reshape(rows, context)


@dataclass(frozen=True, slots=True)
class Rows:
    """Which pairs make a batch, and how wide it is with room for start or stop."""

    indices: NDArray[np.int64]
    width: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    width: int
    rows: int
    begin: int  # its pairs, as a stretch of the pairs ordered by length
    end: int

    @property
    def batches(self) -> int:
        return -(-(self.end - self.begin) // self.rows)


class PairLoader:
    """Pairs of about equal length together, in batches of few, fixed shapes.

    A pair needs max(source, target) + 1 places and goes to the smallest width of a fixed ladder
    that holds it; all batches of a bucket have the same rows, about `tokens` / width (or `batch`).
    The last batch of a bucket is filled with the longest pairs of the next narrower one, and of
    the narrowest by beginning again. With n_b batches in bucket b, an epoch has sum_b n_b steps:

        step s -> epoch e and number k = s mod sum n;  p_e(k) names bucket b and its batch j;
        its rows are  p_{e,b}(j·rows … (j + 1)·rows - 1),  modulo the size of the bucket

    Pairs that need more than `longest` places are left out and counted in `dropped`.
    """

    def __init__(
        self,
        store: PairStore,
        tokens: int | None,
        seed: int,
        *,
        longest: int,
        batch: int | None = None,
    ) -> None:
        if tokens is None and batch is None:
            raise ConfigError("give train.tokens or train.batch: how large is a step?")
        self.seed = seed
        needed = np.maximum(store.source_lengths, store.target_lengths) + 1
        order = np.argsort(needed, kind="stable")
        fitting = int(np.searchsorted(needed[order], longest, side="right"))
        self.dropped = len(order) - fitting
        if not fitting:
            raise DataError(
                f"all {len(order)} pairs need more than {longest} places; the shortest needs"
                f" {int(needed.min())}\nraise model.context, or give shorter sentences"
            )
        self._order = order[:fitting]
        self.buckets = _buckets(needed[self._order], longest, tokens, batch)
        self._first = np.cumsum([0, *(bucket.batches for bucket in self.buckets)])

    @property
    def per_epoch(self) -> int:
        """How many steps visit every pair."""
        return int(self._first[-1])

    def __len__(self) -> int:
        return len(self._order)

    def examples(self, step: int) -> Rows:
        """The pairs of a step."""
        epoch, number = divmod(step, self.per_epoch)
        slot = int(permute(np.array([number]), self.per_epoch, shuffle_key(self.seed, epoch))[0])
        which = int(np.searchsorted(self._first, slot, side="right")) - 1
        bucket, size = self.buckets[which], self.buckets[which].end - self.buckets[which].begin
        start = (slot - int(self._first[which])) * bucket.rows
        places = np.arange(start, start + bucket.rows) % size
        chosen = bucket.begin + permute(places, size, shuffle_key(self.seed, epoch, which))
        return Rows(self._order[chosen], bucket.width)

    def sequential(self, limit: int | None = None) -> Iterator[Rows]:
        """Every pair once, shortest first, for evaluation; or a fixed sample of `limit` pairs."""
        places = np.arange(len(self._order))
        if limit is not None and limit < len(places):
            places = np.sort(permute(places[:limit], len(places), shuffle_key(self.seed)))
        for bucket in self.buckets:
            here = places[(places >= bucket.begin) & (places < bucket.end)]
            for start in range(0, len(here), bucket.rows):
                yield Rows(self._order[here[start : start + bucket.rows]], bucket.width)


def _ladder(longest: int) -> list[int]:
    """Widths: multiples of 8, each about a quarter more than the one before, up to `longest`."""
    widths, width = [], 8
    while width < longest:
        widths.append(width)
        width += max(8, -(-width // 32) * 8)
    return [*widths, longest]


def _buckets(
    needed: NDArray[np.int64], longest: int, tokens: int | None, batch: int | None
) -> list[_Bucket]:
    """Cut pairs in order of length into buckets, the widest first; `needed` is sorted."""
    buckets: list[_Bucket] = []
    widths = [0, *_ladder(longest)]
    end = len(needed)
    for narrower, width in reversed(list(pairwise(widths))):
        own = end - int(np.searchsorted(needed[:end], narrower, side="right"))
        if own:
            rows = batch if batch is not None else max(1, (tokens or 0) // width)
            begin = max(0, end - -(-own // rows) * rows)
            buckets.insert(0, _Bucket(width, rows, begin, end))
            end = begin
    return buckets


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


def prefetch(make: Callable[[int], T], start: int, stop: int, ahead: int = 2) -> Iterator[T]:
    """make(start), …, make(stop - 1), made by a thread that stays at most `ahead` in front.

    What `make` raises is raised here, in its turn. The thread ends with the iteration, also
    when that is left early.
    """
    made: SimpleQueue[T | _Failure] = SimpleQueue()
    free, left = threading.Semaphore(ahead), threading.Event()

    def work() -> None:
        for step in range(start, stop):
            free.acquire()
            if left.is_set():
                return
            try:
                made.put(make(step))
            except BaseException as error:  # whatever it is, it belongs to the consumer
                made.put(_Failure(error))
                return

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        for _ in range(start, stop):
            item = made.get()
            free.release()
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        left.set()
        free.release()
        thread.join()
