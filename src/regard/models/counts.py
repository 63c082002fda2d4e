"""Counts of grams, in arrays: counted in one pass over a text of any length, and looked up."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float64, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.errors import DataError
from regard.nn.head import IGNORED

CHUNK_TOKENS = 1 << 22  # counted at a time, then merged into what is already counted
SPARSE = 8  # where there are more possible keys per key than this, they are sorted
NOWHERE = -1  # the index of a gram that was never seen; also the id before a row begins

Integers = NDArray[np.int64]
Rows = tuple[Integers, Integers, NDArray[np.bool_]]  # tokens, place in the row, whether scored
Counts = list[tuple[Integers, Integers]]  # of each order: sorted keys, counts


@runtime_checkable
class Blocks(Protocol):
    """Rows of contiguous text: targets[t] = ids[t + 1], or -1 where it is not scored."""

    @property
    def ids(self) -> Int[Tensor, "batch time"]:
        """The text."""

    @property
    def targets(self) -> Int[Tensor, "batch time"]:
        """What follows each id."""


class Table(nn.Module):
    """All grams of one length, sorted, with their counts.

        key of the gram (h, w) = index of h in the table of one less * vocab_size + w

    So the followers of a context stand side by side, and finding a gram is a binary search.
    """

    keys: Int[Tensor, " grams"]
    counts: Int[Tensor, " grams"]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.empty(0, dtype=torch.long))
        self.register_buffer("counts", torch.empty(0, dtype=torch.long))

    def find(self, keys: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Where these keys stand in the table; -1 for those that do not."""
        if not len(self.keys):
            return torch.full_like(keys, NOWHERE)
        at = torch.searchsorted(self.keys, keys).clamp_max(len(self.keys) - 1)
        return at.where(self.keys[at] == keys, NOWHERE)

    def followers(
        self, contexts: Int[Tensor, " rows"], vocab_size: int
    ) -> tuple[Int[Tensor, " found"], Int[Tensor, " found"], Float64[Tensor, " found"]]:
        """All ids seen after these contexts: whose row each belongs to, the id, its count."""
        low = torch.searchsorted(self.keys, contexts * vocab_size)
        high = torch.searchsorted(self.keys, (contexts + 1) * vocab_size)  # 0, too, after -1
        many = high - low
        row = torch.arange(len(contexts), device=contexts.device).repeat_interleave(many)
        within = torch.arange(len(row), device=row.device) - (many.cumsum(0) - many)[row]
        gram = low[row] + within
        word = self.keys[gram] - contexts[row] * vocab_size
        return row, word, self.counts[gram].double()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("keys", "counts"):  # as many grams as were saved, not as many as are here
            if prefix + name in state_dict:
                size = state_dict[prefix + name].shape
                setattr(self, name, getattr(self, name).new_empty(size))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def count(batches: Iterable[Blocks], order: int, vocab_size: int) -> Counts:
    """The grams of 1, 2, …, `order` ids that end in a scored target, in one pass."""
    total: Counts | None = None
    for rows in _chunks(batches, vocab_size):
        part = _count(rows, order, vocab_size)
        total = part if total is None else _merge(total, part, vocab_size)
    if total is None:
        raise DataError("there is no scored target to count; give fit() at least one batch")
    return total


def _chunks(batches: Iterable[Blocks], vocab_size: int) -> Iterator[Rows]:
    """The rows of all batches, laid end to end, in pieces of bounded size."""
    rows: list[Rows] = []
    size = 0
    for batch in batches:
        rows.append(rows_of(batch, vocab_size))
        size += len(rows[-1][0])
        if size >= CHUNK_TOKENS:
            yield _laid(rows)
            rows, size = [], 0
    if size:
        yield _laid(rows)


def _laid(rows: list[Rows]) -> Rows:
    tokens, place, scored = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return tokens, place, scored


def rows_of(batch: Blocks, vocab_size: int) -> Rows:
    """A batch's rows [ids, last target], each up to its last scored target, end to end."""
    ids, targets = batch.ids.cpu().numpy(), batch.targets.cpu().numpy()
    scored = np.pad(targets != IGNORED, ((0, 0), (1, 0)))
    real = np.logical_or.accumulate(scored[:, ::-1], 1)[:, ::-1]
    tokens = np.pad(ids, ((0, 0), (0, 1))).astype(np.int64)
    tokens[:, 1:][scored[:, 1:]] = targets[scored[:, 1:]]  # the last one is a target only
    if not np.array_equal(tokens[:, :-1][real[:, 1:]], ids[real[:, 1:]]):
        raise DataError("what is counted is contiguous text: targets[t] must be ids[t + 1]")
    place = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    tokens = tokens[real]
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise DataError(f"id {wrong} must be at least 0 and below vocab_size={vocab_size}")
    return tokens, place[real], scored[real]


def _count(rows: Rows, order: int, vocab_size: int) -> Counts:
    """The counts of one chunk, order by order: a gram is its context's index and one more id.

    Every gram of a row is given its place in the tables, for it may be the context of a longer
    one; only those that end in a scored target are counted.
    """
    tokens, place, scored = rows
    tables: Counts = []
    contexts = 1  # grams of one order lower
    index = np.zeros_like(tokens)  # of the gram that ends here, one order lower
    for before in range(order):
        ends = np.flatnonzero(place >= before)  # with so many ids before it in its row
        key = index[ends - 1] * vocab_size + tokens[ends]
        keys, where = _unique(key, contexts * vocab_size)
        counts = np.bincount(where[scored[ends]], minlength=len(keys))
        index[ends] = where
        contexts = len(keys)
        tables.append((keys, counts))
    return tables


def _unique(key: Integers, possible: int) -> tuple[Integers, Integers]:
    """The different keys, sorted, and where each key stands among them."""
    if possible > SPARSE * len(key):
        keys, where = np.unique(key, return_inverse=True)
        return keys, where
    seen = np.zeros(possible, np.bool_)
    seen[key] = True
    keys = np.flatnonzero(seen)
    number = np.empty(possible, np.int32)
    number[keys] = np.arange(len(keys), dtype=np.int32)
    return keys, number[key].astype(np.int64)


def _merge(left: Counts, right: Counts, vocab_size: int) -> Counts:
    """The counts of both; a context's index is looked up anew before its followers are."""
    merged: Counts = []
    moved = [np.zeros(1, np.int64), np.zeros(1, np.int64)]  # old index -> new, one order lower
    for tables in zip(left, right, strict=True):
        renamed = [
            to[keys // vocab_size] * vocab_size + keys % vocab_size
            for to, (keys, _) in zip(moved, tables, strict=True)
        ]
        # asked for the counts too, unique sorts; alone it hashes, ten times slower (numpy 2.3)
        keys, _ = np.unique(np.concatenate(renamed), return_counts=True)
        moved = [np.searchsorted(keys, each) for each in renamed]
        counts = np.zeros_like(keys)
        for to, (_, count) in zip(moved, tables, strict=True):
            counts[to] += count
        merged.append((keys, counts))
    return merged
