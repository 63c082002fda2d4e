"""N-gram counts in sorted arrays: counted in one pass, looked up by binary search."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float64, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.errors import DataError
from regard.nn.loss import IGNORE_INDEX

CHUNK_TOKENS = 1 << 22  # tokens that are counted at a time and then merged into the total
# With up to this many possible keys per token, the distinct keys are found with an array that has
# an element for each possible key; with more, by sorting.
MAX_DENSE_KEYS = 8
UNSEEN = -1  # the index of an n-gram that was never seen; also the id before a row begins

Integers = NDArray[np.int64]
Rows = tuple[Integers, Integers, NDArray[np.bool_]]  # tokens, position in the row, whether scored
Counts = list[tuple[Integers, Integers]]  # of each order: sorted keys, counts


@runtime_checkable
class TokenBatch(Protocol):
    """Rows of contiguous text: targets[t] = ids[t + 1], or -1 where it is not scored."""

    @property
    def ids(self) -> Int[Tensor, "batch time"]:
        """The ids of the text."""

    @property
    def targets(self) -> Int[Tensor, "batch time"]:
        """The next id, or -1."""


class NGramTable(nn.Module):
    """All n-grams of one order, sorted, with their counts.

        key of (h, w) = index of h in the table of the lower order * vocab_size + w

    The followers of a history are adjacent, and a lookup is a binary search.
    """

    keys: Int[Tensor, " ngrams"]
    counts: Int[Tensor, " ngrams"]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.empty(0, dtype=torch.long))
        self.register_buffer("counts", torch.empty(0, dtype=torch.long))

    def find(self, keys: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """The indices of these keys in the table; -1 for unseen ones."""
        if not len(self.keys):
            return torch.full_like(keys, UNSEEN)
        index = torch.searchsorted(self.keys, keys).clamp_max(len(self.keys) - 1)
        return index.where(self.keys[index] == keys, UNSEEN)

    def followers(
        self, histories: Int[Tensor, " rows"], vocab_size: int
    ) -> tuple[Int[Tensor, " matches"], Int[Tensor, " matches"], Float64[Tensor, " matches"]]:
        """All ids seen after these histories: row, id and count of each."""
        low = torch.searchsorted(self.keys, histories * vocab_size)
        high = torch.searchsorted(self.keys, (histories + 1) * vocab_size)  # 0 for history -1
        sizes = high - low
        row = torch.arange(len(histories), device=histories.device).repeat_interleave(sizes)
        offset = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row]
        index = low[row] + offset
        word = self.keys[index] - histories[row] * vocab_size
        return row, word, self.counts[index].double()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("keys", "counts"):  # the size of the saved table
            if prefix + name in state_dict:
                size = state_dict[prefix + name].shape
                setattr(self, name, getattr(self, name).new_empty(size))
        super()._load_from_state_dict(state_dict, prefix, *args)


def count_ngrams(batches: Iterable[TokenBatch], order: int, vocab_size: int) -> Counts:
    """The counts of 1-grams to `order`-grams that end in a scored target, in one pass."""
    total: Counts | None = None
    for rows in _chunks(batches, vocab_size):
        counts = _count_chunk(rows, order, vocab_size)
        total = counts if total is None else _merge(total, counts, vocab_size)
    if total is None:
        raise DataError("the training data has no scored target; give fit() at least one batch")
    return total


def _chunks(batches: Iterable[TokenBatch], vocab_size: int) -> Iterator[Rows]:
    """The rows of all batches, concatenated, in chunks of bounded size."""
    rows: list[Rows] = []
    size = 0
    for batch in batches:
        rows.append(flatten_rows(batch, vocab_size))
        size += len(rows[-1][0])
        if size >= CHUNK_TOKENS:
            yield _concatenate(rows)
            rows, size = [], 0
    if size:
        yield _concatenate(rows)


def _concatenate(rows: list[Rows]) -> Rows:
    tokens, positions, scored = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return tokens, positions, scored


def flatten_rows(batch: TokenBatch, vocab_size: int) -> Rows:
    """The rows [ids, last target] of a batch, each up to its last scored target, concatenated."""
    ids, targets = batch.ids.cpu().numpy(), batch.targets.cpu().numpy()
    scored = np.pad(targets != IGNORE_INDEX, ((0, 0), (1, 0)))
    valid = np.logical_or.accumulate(scored[:, ::-1], 1)[:, ::-1]
    tokens = np.pad(ids, ((0, 0), (0, 1))).astype(np.int64)
    tokens[:, 1:][scored[:, 1:]] = targets[scored[:, 1:]]  # the last token is only a target
    if not np.array_equal(tokens[:, :-1][valid[:, 1:]], ids[valid[:, 1:]]):
        raise DataError("n-gram counts need contiguous text: targets[t] must be ids[t + 1]")
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    tokens = tokens[valid]
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        invalid = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise DataError(f"id {invalid} must be at least 0 and below vocab_size={vocab_size}")
    return tokens, positions[valid], scored[valid]


def _count_chunk(rows: Rows, order: int, vocab_size: int) -> Counts:
    """The counts of one chunk, order by order: an n-gram is the index of its history and one id.

    Every n-gram of a row is in the tables, since it may be the history of a longer one; only
    those that end in a scored target are counted.
    """
    tokens, positions, scored = rows
    tables: Counts = []
    num_histories = 1  # n-grams of the lower order
    index = np.zeros_like(tokens)  # of the n-gram of the lower order that ends here
    for length in range(order):
        ends = np.flatnonzero(positions >= length)  # tokens with a history of this length
        key = index[ends - 1] * vocab_size + tokens[ends]
        keys, inverse = _unique(key, num_histories * vocab_size)
        counts = np.bincount(inverse[scored[ends]], minlength=len(keys))
        index[ends] = inverse
        num_histories = len(keys)
        tables.append((keys, counts))
    return tables


def _unique(key: Integers, num_possible: int) -> tuple[Integers, Integers]:
    """The distinct keys, sorted, and the index of each key among them.

    All keys are less than `num_possible`.
    """
    if num_possible > MAX_DENSE_KEYS * len(key):
        keys, inverse = np.unique(key, return_inverse=True)
        return keys, inverse
    seen = np.zeros(num_possible, np.bool_)
    seen[key] = True
    keys = np.flatnonzero(seen)
    index = np.empty(num_possible, np.int32)
    index[keys] = np.arange(len(keys), dtype=np.int32)
    return keys, index[key].astype(np.int64)


def _merge(left: Counts, right: Counts, vocab_size: int) -> Counts:
    """The sum of two sets of counts; merging an order re-indexes the histories of the next."""
    merged: Counts = []
    new_index = [np.zeros(1, np.int64), np.zeros(1, np.int64)]  # by old index, lower order
    for tables in zip(left, right, strict=True):
        new_keys = [
            index[keys // vocab_size] * vocab_size + keys % vocab_size
            for index, (keys, _) in zip(new_index, tables, strict=True)
        ]
        # np.unique sorts with return_counts, and hashes without, ten times slower (numpy 2.3)
        keys, _ = np.unique(np.concatenate(new_keys), return_counts=True)
        new_index = [np.searchsorted(keys, old) for old in new_keys]
        counts = np.zeros_like(keys)
        for index, (_, count) in zip(new_index, tables, strict=True):
            counts[index] += count
        merged.append((keys, counts))
    return merged
