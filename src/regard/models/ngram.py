"""Shannon's chain: the next id from counts of the few before it. No gradients, only `fit`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from regard.config import Choice, make
from regard.errors import ConfigError
from regard.models.base import LanguageModel, State
from regard.models.counts import NOWHERE, Blocks, Table, count
from regard.models.smoothing import SMOOTHINGS
from regard.nn.head import IGNORED, GivenHead
from regard.nn.recurrent import Snapshots
from regard.nn.state import Source

CHUNK_ELEMENTS = 1 << 22  # probabilities in float64 held at a time: 32 MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class NGramConfig:
    """Counts of up to `order` ids in a row."""

    vocab_size: int
    order: int = 4  # the next id depends on the order - 1 ids before it
    smoothing: Choice = "interpolated"  # models.smoothing.SMOOTHINGS
    context: int = 256  # ids per block of the text that is counted

    def __post_init__(self) -> None:
        for name in ("vocab_size", "order", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


class NGram(LanguageModel):
    r"""What came next after these few ids, in the text that was counted.

        P(w | h) = share(hw) + rest(h) P(w | h'),      P(w | below the unigram) = 1 / V

    h' is h without its oldest id. The smoothing says what share of a context's followers is
    left to each, and what is set aside for the rest; see `models.smoothing`. Shannon 1948.

    `forward` gives log-probabilities, so the head has nothing to add.
    """

    def __init__(self, config: NGramConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = nn.ModuleList(Table() for _ in range(config.order))
        facts = {"order": config.order, "vocab_size": config.vocab_size}
        self.smoothing = make(config.smoothing, SMOOTHINGS, "smoothing", **facts)
        self.head = GivenHead()

    def fit(self, batches: Iterable[Blocks]) -> None:
        """Count the grams that end in a scored target, in one pass; older counts are dropped."""
        order, vocab = self.config.order, self.config.vocab_size
        for table, (keys, counts) in zip(self._tables(), count(batches, order, vocab), strict=True):
            device = table.keys.device
            table.keys = torch.from_numpy(keys).to(device)
            table.counts = torch.from_numpy(counts).to(device)
        self.smoothing.fit(self._tables(), vocab)

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocab"]:
        """log P of every id that may come next, after each id of each row."""
        return self._log_probabilities(self._contexts(ids))

    def probabilities(self, ids: Int[Tensor, "batch time"]) -> Float64[Tensor, "batch time vocab"]:
        """P of every id that may come next, after each id of each row, in full precision."""
        contexts = [at.flatten() for at in self._contexts(ids)]
        return self._distribution(contexts).unflatten(0, ids.shape)

    def scores(
        self, ids: Int[Tensor, "batch time"], targets: Int[Tensor, "batch time"]
    ) -> Float64[Tensor, " scored"]:
        """log P of each scored target; no other id is looked at, so a large vocabulary is free."""
        vocab = self.config.vocab_size
        scored = targets != IGNORED
        words = targets[scored].long()
        p = torch.full(words.shape, 1 / vocab, dtype=torch.float64, device=words.device)
        for order, at in enumerate(self._contexts(ids)):
            different, which = at[scored].unique(return_inverse=True)
            row, word, share, rest, known = self._seen_after(order, different)
            grams, wanted = row * vocab + word, which * vocab + words
            found = torch.searchsorted(grams, wanted).clamp_max(max(0, len(grams) - 1))
            if self.smoothing.even:
                p = p.where(~known[which], 1 / vocab)
            p *= rest[which]
            if len(grams):
                p += share[found].where(grams[found] == wanted, 0.0)
        return p.log_()

    def start(self, rows: int, capacity: int, source: Source | None = None) -> Snapshots:
        """Nothing read. The state is the last order - 1 ids, so any `capacity` fits."""
        if source is not None:
            raise ConfigError("an n-gram model reads no source; it only continues text")
        device = self._tables()[0].keys.device
        kept = max(1, self.config.order - 1)
        return Snapshots.initial([(torch.full((rows, kept), NOWHERE, device=device),)])

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
        [(last,)] = state.current()
        seen = torch.cat([last, ids], 1)
        state = state.advance([(seen.unfold(1, last.shape[1], 1),)], counts)
        if every:
            contexts = [at[:, last.shape[1] :] for at in self._contexts(seen)]
        else:
            [(last,)] = state.current()
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
        for order, at in enumerate(contexts):
            at = at if order else at[:1]  # in the empty context all positions are alike
            row, word, share, rest, known = self._seen_after(order, at)
            if self.smoothing.even:
                p = p.where(~known.unsqueeze(-1), 1 / vocab)
            p *= rest.unsqueeze(-1)
            p[row, word] += share
            p = p if order else p.repeat(positions, 1)
        return p

    def _seen_after(
        self, order: int, contexts: Int[Tensor, " rows"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of what followed these contexts, its row, id and share; each row's rest, if it is known.

        A context that was never seen leaves all to the shorter one: its rest is 1.
        """
        row, word, seen = self._tables()[order].followers(contexts, self.config.vocab_size)
        total = torch.zeros(len(contexts), dtype=torch.float64, device=row.device)
        total.index_add_(0, row, seen)
        share, rest = self.smoothing(order, seen, row, total.clamp_min(1))
        known = total > 0
        return row, word, share, rest.where(known, 1.0), known

    def _tables(self) -> list[Table]:
        return cast(list[Table], list(self.tables))

    if TYPE_CHECKING:
        __call__ = forward
