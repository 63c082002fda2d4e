"""N-gram language models with smoothing, fitted without gradients by counting in one pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from regard.config import Choice, Settings, make
from regard.errors import ConfigError
from regard.models.base import LanguageModel, State
from regard.models.compatibility import check_sizes
from regard.models.ngram_counts import UNSEEN, NGramTable, TokenBatch, count_ngrams
from regard.models.smoothing import SMOOTHINGS
from regard.nn.head import LogProbHead
from regard.nn.loss import IGNORE_INDEX
from regard.nn.state import RecurrentState, Source

CHUNK_ELEMENTS = 1 << 22  # float64 probabilities in memory at a time: 32 MiB


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class NGramConfig(Settings):
    """An n-gram model, n = `order`."""

    vocab_size: int  # number of tokens
    order: int = 4  # the next id depends on the order - 1 ids before it
    smoothing: Choice = "witten_bell"  # smoothing of the counts (models.smoothing.SMOOTHINGS)
    context: int = 256  # ids per block of the training text

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "order", "context")


class NGram(LanguageModel):
    r"""An interpolated n-gram model.

        P(w | h) = α(w | h) + γ(h) P(w | h'),      and 1 / V for P(w | h') if h is empty

    h' is the history h without its oldest id. The smoothing gives the discounted probability
    α(w | h) and the interpolation weight γ(h) of the lower order; see `models.smoothing`.
    Shannon 1948.

    `forward` returns log-probabilities, so the head is the identity.
    """

    def __init__(self, config: NGramConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = nn.ModuleList(NGramTable() for _ in range(config.order))
        sizes = {"order": config.order, "vocab_size": config.vocab_size}
        self.smoothing = make(config.smoothing, SMOOTHINGS, "smoothing", **sizes)
        self.head = LogProbHead()

    def fit(self, batches: Iterable[TokenBatch]) -> None:
        """Count the n-grams that end in a scored target, in one pass; replaces earlier counts."""
        order, vocab = self.config.order, self.config.vocab_size
        all_counts = count_ngrams(batches, order, vocab)
        for table, (keys, counts) in zip(self._tables(), all_counts, strict=True):
            device = table.keys.device
            table.keys = torch.from_numpy(keys).to(device)
            table.counts = torch.from_numpy(counts).to(device)
        self.smoothing.fit(self._tables(), vocab)

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocab"]:
        """log P(w | h) of every id w, after each id of each row."""
        return self._log_probabilities(self._histories(ids))

    def probabilities(self, ids: Int[Tensor, "batch time"]) -> Float64[Tensor, "batch time vocab"]:
        """P(w | h) of every id w, after each id of each row, in float64."""
        histories = [history.flatten() for history in self._histories(ids)]
        return self._distribution(histories).unflatten(0, ids.shape)

    def target_log_probs(
        self, ids: Int[Tensor, "batch time"], targets: Int[Tensor, "batch time"]
    ) -> Float64[Tensor, " scored"]:
        """log P of each scored target only, at a cost independent of the vocabulary size."""
        return self.contributions(ids, targets).sum(-1).log_()

    def contributions(
        self, ids: Int[Tensor, "batch time"], targets: Int[Tensor, "batch time"]
    ) -> Float64[Tensor, "scored orders"]:
        r"""The contribution of each order to P(target), the uniform distribution first.

            P(w | h) = sum_n α(w | h_n) prod_{m > n} γ(h_m),      h_n the last n ids of h

        There is a row for each scored target; it sums to P(target).
        """
        vocab, scored = self.config.vocab_size, targets != IGNORE_INDEX
        words = targets[scored].long()
        parts = [torch.full(words.shape, 1 / vocab, dtype=torch.float64, device=words.device)]
        for length, histories in enumerate(self._histories(ids)):
            distinct, inverse = histories[scored].unique(return_inverse=True)
            row, word, probability, lower_order_weight, seen = self._smooth(length, distinct)
            if self.smoothing.uniform_backoff:  # below a seen history only the uniform part counts
                uniform = torch.full_like(parts[0], 1 / vocab)
                parts = [
                    part.where(~seen[inverse], torch.zeros_like(part) if index else uniform)
                    for index, part in enumerate(parts)
                ]
            parts = [part * lower_order_weight[inverse] for part in parts]
            keys, target_keys = row * vocab + word, inverse * vocab + words
            index = torch.searchsorted(keys, target_keys).clamp_max(max(0, len(keys) - 1))
            target_probability = torch.zeros_like(parts[0])
            if len(keys):
                target_probability = probability[index].where(keys[index] == target_keys, 0.0)
            parts.append(target_probability)
        return torch.stack(parts, -1)

    def start(self, rows: int, capacity: int, source: Source | None = None) -> RecurrentState:
        """The state is the last order - 1 ids; its size does not depend on `capacity`."""
        if source is not None:
            raise ConfigError("an n-gram model takes no source; an encoder-decoder does")
        history = torch.full((rows, max(1, self.config.order - 1)), UNSEEN, device=self.device)
        return RecurrentState.initial([(history,)])

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], RecurrentState]:
        """Read one or more ids per row; see `Language.step`."""
        assert isinstance(state, RecurrentState)
        [(last_ids,)] = state.current()
        all_ids = torch.cat([last_ids, ids], 1)
        state = state.advance([(all_ids.unfold(1, last_ids.shape[1], 1),)], counts)
        if all_logits:
            histories = [history[:, last_ids.shape[1] :] for history in self._histories(all_ids)]
        else:
            [(last_ids,)] = state.current()
            histories = [history[:, -1:] for history in self._histories(last_ids)]
        return self._log_probabilities(histories), state

    def _histories(self, ids: Tensor) -> list[Tensor]:
        """The indices of the histories of 0, 1, …, order - 1 ids that end at each id."""
        histories = [torch.zeros_like(ids)]
        for table in self._tables()[:-1]:
            previous = F.pad(histories[-1], (1, -1), value=UNSEEN if len(histories) > 1 else 0)
            # before the beginning of a row the key is negative, so it is not in the table
            histories.append(table.find(previous * self.config.vocab_size + ids))
        return histories

    def _log_probabilities(self, histories: list[Tensor]) -> Tensor:
        shape, vocab = histories[0].shape, self.config.vocab_size
        flat = torch.stack([history.flatten() for history in histories])
        result = torch.empty(flat.shape[1], vocab, dtype=torch.float32, device=flat.device)
        size = max(1, CHUNK_ELEMENTS // vocab)
        for chunk, out in zip(flat.split(size, 1), result.split(size), strict=True):
            out.copy_(self._distribution(list(chunk)).log_())
        return result.unflatten(0, shape)

    def _distribution(self, histories: list[Tensor]) -> Float64[Tensor, "positions vocab"]:
        """P(w | h), interpolated from the uniform distribution up to the highest order."""
        vocab, positions = self.config.vocab_size, len(histories[0])
        p = torch.full((1, vocab), 1 / vocab, dtype=torch.float64, device=histories[0].device)
        for length, history in enumerate(histories):
            history = history if length else history[:1]  # the empty history is the same everywhere
            row, word, probability, lower_order_weight, seen = self._smooth(length, history)
            if self.smoothing.uniform_backoff:
                p = p.where(~seen.unsqueeze(-1), 1 / vocab)
            p *= lower_order_weight.unsqueeze(-1)
            p[row, word] += probability
            p = p if length else p.repeat(positions, 1)
        return p

    def _smooth(
        self, length: int, histories: Int[Tensor, " rows"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The smoothed probabilities after these histories of `length` ids.

        For each id w that was seen after a history h: its row, w and α(w | h). For each row: γ(h),
        and whether h was seen. An unseen history backs off entirely to the lower order: γ(h) = 1.
        """
        row, word, count = self._tables()[length].followers(histories, self.config.vocab_size)
        total = torch.zeros(len(histories), dtype=torch.float64, device=row.device)
        total.index_add_(0, row, count)
        probability, lower_order_weight = self.smoothing(length, count, row, total.clamp_min(1))
        seen = total > 0
        return row, word, probability, lower_order_weight.where(seen, 1.0), seen

    def _tables(self) -> list[NGramTable]:
        return cast(list[NGramTable], list(self.tables))

    if TYPE_CHECKING:
        __call__ = forward
