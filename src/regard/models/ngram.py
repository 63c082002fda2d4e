"""Shannon's chain: the next id from counts of the few before it. No gradients, only `fit`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.errors import ConfigError, DataError
from regard.models.base import State
from regard.nn.head import IGNORED, GivenHead
from regard.nn.recurrent import Snapshots
from regard.nn.state import Source

CHUNK_TOKENS = 1 << 22  # counted at a time, then merged into what is already counted
CHUNK_ELEMENTS = 1 << 22  # probabilities in float64 held at a time: 32 MiB
NOWHERE = -1  # the index of a gram that was never seen; also the id before a row begins

Integers = NDArray[np.int64]
Rows = tuple[Integers, Integers, Integers]  # tokens, place in the row, 1 where scored
Counts = list[tuple[Integers, Integers]]  # of each order: sorted keys, counts


@dataclass(frozen=True, kw_only=True, slots=True)
class NGramConfig:
    """Counts of up to `order` ids in a row."""

    vocab_size: int
    order: int = 4  # the next id depends on the order - 1 ids before it
    context: int = 256  # ids per block of the text that is counted

    def __post_init__(self) -> None:
        for name in ("vocab_size", "order", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


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


class NGram(nn.Module):
    r"""What came next after these few ids, in the text that was counted.

        P(w | h) = (c(hw) + t(h) P(w | h')) / (c(h) + t(h)),      P(w | below the unigram) = 1 / V

    c(hw) counts how often w followed h, c(h) = sum_w c(hw), t(h) counts the different ids that
    followed h, and h' is h without its oldest id: the more often h was followed by something
    new, the more the shorter context is trusted. A context that was never seen says what the
    shorter one says. Witten & Bell 1991, interpolated as in Chen & Goodman 1998.

    `forward` gives log-probabilities, so the head has nothing to add.
    """

    context: int | None = None

    def __init__(self, config: NGramConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = nn.ModuleList(Table() for _ in range(config.order))
        self.head = GivenHead()

    def fit(self, batches: Iterable[Blocks]) -> None:
        """Count the grams that end in a scored target, in one pass; older counts are dropped."""
        total: Counts | None = None
        for rows in _chunks(batches, self.config.vocab_size):
            part = _count(rows, self.config)
            total = part if total is None else _merge(total, part, self.config.vocab_size)
        if total is None:
            raise DataError("there is no scored target to count; give fit() at least one batch")
        for table, (keys, counts) in zip(self._tables(), total, strict=True):
            device = table.keys.device
            table.keys = torch.from_numpy(keys).to(device)
            table.counts = torch.from_numpy(counts).to(device)

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocab"]:
        """log P of every id that may come next, after each id of each row."""
        return self._log_probabilities(self._contexts(ids))

    def probabilities(self, ids: Int[Tensor, "batch time"]) -> Float64[Tensor, "batch time vocab"]:
        """P of every id that may come next, after each id of each row, in full precision."""
        contexts = [at.flatten() for at in self._contexts(ids)]
        return self._distribution(contexts).unflatten(0, ids.shape)

    def start(self, rows: int, capacity: int, source: Source | None = None) -> Snapshots:
        """Nothing read. The state is the last order - 1 ids, so any `capacity` fits."""
        if source is not None:
            raise ConfigError("an n-gram model reads no source; it only continues text")
        device = self._tables()[0].keys.device
        kept = max(1, self.config.order - 1)
        return Snapshots.first([(torch.full((rows, kept), NOWHERE, device=device),)])

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        every: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], Snapshots]:
        """Take in one or more ids per row; see `Language.step`."""
        assert isinstance(state, Snapshots)
        [(last,)] = state.now()
        seen = torch.cat([last, ids], 1)
        state = state.advanced([(seen.unfold(1, last.shape[1], 1),)], counts)
        if every:
            contexts = [at[:, last.shape[1] :] for at in self._contexts(seen)]
        else:
            [(last,)] = state.now()
            contexts = [at[:, -1:] for at in self._contexts(last)]
        return self._log_probabilities(contexts), state

    def _contexts(self, ids: Tensor) -> list[Tensor]:
        """The index of the gram of 0, 1, …, order - 1 ids that ends at each id."""
        contexts = [torch.zeros_like(ids)]
        for table in self._tables()[:-1]:
            before = F.pad(contexts[-1], (1, -1), value=NOWHERE if len(contexts) > 1 else 0)
            # where a row has not begun, the key is below zero, and so is not found either
            contexts.append(table.find(before * self.config.vocab_size + ids))
        return contexts

    def _log_probabilities(self, contexts: list[Tensor]) -> Tensor:
        shape, vocab = contexts[0].shape, self.config.vocab_size
        flat = torch.stack([at.flatten() for at in contexts])
        result = torch.empty(flat.shape[1], vocab, dtype=torch.float32, device=flat.device)
        size = max(1, CHUNK_ELEMENTS // vocab)
        for part, out in zip(flat.split(size, 1), result.split(size), strict=True):
            out.copy_(self._distribution(list(part)).log_())
        return result.unflatten(0, shape)

    def _distribution(self, contexts: list[Tensor]) -> Float64[Tensor, "positions vocab"]:
        """P(w | h) from the uniform upward, one order more at a time."""
        vocab, positions = self.config.vocab_size, len(contexts[0])
        p = torch.full((1, vocab), 1 / vocab, dtype=torch.float64, device=contexts[0].device)
        for order, (table, at) in enumerate(zip(self._tables(), contexts, strict=True)):
            at = at if order else at[:1]  # in the empty context all positions are alike
            row, word, count = table.followers(at, vocab)
            c = torch.zeros_like(p[:, 0]).index_add_(0, row, count)
            t = torch.zeros_like(c).index_add_(0, row, count.sign())
            trust = (t / (c + t)).where(t > 0, 1.0)  # in the shorter context
            p *= trust.unsqueeze(-1)
            p[row, word] += count / (c + t).clamp_min(1)[row]
            p = p if order else p.repeat(positions, 1)
        return p

    def _tables(self) -> list[Table]:
        return cast(list[Table], list(self.tables))

    if TYPE_CHECKING:
        __call__ = forward


def _chunks(batches: Iterable[Blocks], vocab_size: int) -> Iterator[Rows]:
    """The rows of all batches, laid end to end, in pieces of bounded size."""
    rows: list[Rows] = []
    size = 0
    for batch in batches:
        rows.append(_rows(batch, vocab_size))
        size += len(rows[-1][0])
        if size >= CHUNK_TOKENS:
            yield _laid(rows)
            rows, size = [], 0
    if size:
        yield _laid(rows)


def _laid(rows: list[Rows]) -> Rows:
    tokens, place, scored = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return tokens, place, scored


def _rows(batch: Blocks, vocab_size: int) -> Rows:
    """A batch's rows [ids, last target], each up to its last scored target, end to end."""
    ids, targets = batch.ids.cpu().numpy(), batch.targets.cpu().numpy()
    scored = np.pad(targets != IGNORED, ((0, 0), (1, 0)))
    real = np.logical_or.accumulate(scored[:, ::-1], 1)[:, ::-1]
    tokens = np.pad(ids, ((0, 0), (0, 1))).astype(np.int64)
    tokens[:, 1:][scored[:, 1:]] = targets[scored[:, 1:]]  # the last one is a target only
    if not np.array_equal(tokens[:, :-1][real[:, 1:]], ids[real[:, 1:]]):
        raise DataError("an n-gram model counts contiguous text: targets[t] must be ids[t + 1]")
    place = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    tokens = tokens[real]
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise DataError(f"id {wrong} must be at least 0 and below vocab_size={vocab_size}")
    return tokens, place[real], scored[real].astype(np.int64)


def _count(rows: Rows, config: NGramConfig) -> Counts:
    """The counts of one chunk, order by order: a gram is its context's index and one more id.

    Every gram of a row is given its place in the tables, for it may be the context of a longer
    one; only those that end in a scored target are counted.
    """
    tokens, place, scored = rows
    tables: Counts = []
    index = np.zeros_like(tokens)  # of the gram that ends here, one order lower
    for order in range(config.order):
        ends = np.flatnonzero(place >= order)  # with so many ids before it in its row
        key = index[ends - 1] * config.vocab_size + tokens[ends]
        keys, where = np.unique(key, return_inverse=True)
        counts = np.bincount(where, weights=scored[ends], minlength=len(keys)).astype(np.int64)
        index[ends] = where
        tables.append((keys, counts))
    return tables


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
