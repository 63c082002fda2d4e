"""A chain that cannot be seen, and what it writes. No gradients, only `fit`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.errors import ConfigError, DataError
from regard.models.base import LanguageModel, State
from regard.models.counts import Blocks, rows_of
from regard.nn.head import GivenHead
from regard.nn.recurrent import Snapshots
from regard.nn.state import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class HMMConfig:
    """A chain of hidden states, each with its own habits of writing."""

    vocab_size: int
    states: int = 32
    rounds: int = 20  # of Baum and Welch's, each over the whole text
    context: int = 256  # ids per block of the text that is read

    def __post_init__(self) -> None:
        for name in ("vocab_size", "states", "rounds", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


class HMM(LanguageModel):
    r"""A hidden state moves on at every id, and writes it.

        P(x, z) = first(z_1) write(z_1, x_1) prod_t move(z_t-1, z_t) write(z_t, x_t)

    What is known of the state before an id is a belief, b_t(j) = P(z_t = j | x_1 … x_t-1):

        P(x_t | x_1 … x_t-1) = sum_j b_t(j) write(j, x_t)                    the forward algorithm
        b_t+1(k) = sum_j b_t(j) write(j, x_t) move(j, k) / P(x_t | x_1 … x_t-1)

    Everything is kept as logarithms, in float64. Baum et al. 1970; Rabiner 1989.

    `forward` gives log-probabilities, so the head has nothing to add.
    """

    log_first: Float64[Tensor, " states"]
    log_move: Float64[Tensor, "states states"]
    log_write: Float64[Tensor, "states vocab"]

    def __init__(self, config: HMMConfig) -> None:
        super().__init__()
        self.config = config
        self.head = GivenHead()
        states, vocab = config.states, config.vocab_size
        for name, size in [("first", [states]), ("move", [states] * 2), ("write", [states, vocab])]:
            # any distribution as likely as any other: states that are alike would stay so
            drawn = nn.init.uniform_(torch.empty(size, dtype=torch.float64), 1e-9, 1.0)
            self.register_buffer(f"log_{name}", _normalised((-drawn.log()).log()))

    def fit(self, batches: Iterable[Blocks]) -> None:
        """Go through the text `rounds` times, from what is believed now.

        At the end each state is taken to have written one id more, a bit of each in the
        vocabulary: what it never wrote is unlikely, not impossible.
        """
        texts = [_text(batch, self.config.vocab_size, self.log_first.device) for batch in batches]
        texts = [(ids, lengths) for ids, lengths in texts if ids.numel()]
        if not texts:
            raise DataError("there is no scored target to learn; give fit() at least one batch")
        for _ in range(self.config.rounds):
            written = self.improve(texts)
        self.log_write = _normalised((written + 1 / self.config.vocab_size).log())

    def improve(self, texts: Iterable[tuple[Tensor, Tensor]]) -> Float64[Tensor, "states vocab"]:
        """One round of Baum and Welch's: no text becomes less likely by it on the whole.

            first(j) ~ sum P(z_1 = j | x),    move(j, k) ~ sum_t P(z_t = j, z_t+1 = k | x)
            write(j, v) ~ sum over x_t = v of P(z_t = j | x)

        `texts` are right-padded ids, (batch, time), and the length of each row. Gives the last sum.
        """
        first, move, write = (torch.zeros_like(each.exp()) for each in self._logs())
        for ids, lengths in texts:
            real = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(-1)
            written = self._written(ids).where(real.unsqueeze(-1), 0.0)  # padding says nothing
            now = self._beliefs(written, self._first(ids))[:, :-1] + written
            later = self._later(written, real)
            at = (now + later).softmax(-1) * real.unsqueeze(-1)  # (batch, time, states)
            first += at[:, 0].sum(0)
            write.index_add_(1, ids.flatten(), at.flatten(0, 1).T)
            after = written + later
            for t in range(1, ids.shape[1]):
                pair = now[:, t - 1].unsqueeze(-1) + self.log_move + after[:, t].unsqueeze(-2)
                pair = pair.flatten(1).softmax(-1).view_as(pair)  # (batch, states, states)
                move += pair[real[:, t]].sum(0)
        self.log_first, self.log_move, self.log_write = (
            # of a state that was never visited nothing is learned
            _normalised(new.log().where(new.sum(-1, keepdim=True) > 0, old))
            for new, old in zip((first, move, write), self._logs(), strict=True)
        )
        return write

    def likelihood(self, ids: Int[Tensor, "batch time"]) -> Float64[Tensor, " batch"]:
        """log P of each row, whatever the states were: the forward algorithm."""
        written = self._written(ids)
        belief = self._beliefs(written, self._first(ids))[:, :-1]
        return (belief + written).logsumexp(-1).sum(-1)

    def viterbi(self, ids: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
        """The likeliest states of each row, all of them taken together. Viterbi 1967.

        best_t(k) = max_j best_t-1(j) move(j, k) write(k, x_t), and which j that was
        """
        written = self._written(ids)
        best, came = self.log_first + written[:, 0], []
        for each in written.unbind(1)[1:]:
            best, previous = (best.unsqueeze(-1) + self.log_move).max(1)
            best = best + each
            came.append(previous)
        path = [best.argmax(-1)]
        for previous in reversed(came):
            path.append(previous.gather(1, path[-1].unsqueeze(-1)).squeeze(-1))
        return torch.stack(path[::-1], 1)

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocab"]:
        """log P of every id that may come next, after each id of each row."""
        return self._next(self._beliefs(self._written(ids), self._first(ids))[:, 1:])

    def start(self, rows: int, capacity: int, source: Source | None = None) -> Snapshots:
        """Nothing read. The state is a belief, so any `capacity` fits."""
        if source is not None:
            raise ConfigError("a hidden Markov model reads no source; it only continues text")
        return Snapshots.initial([(self.log_first.expand(rows, -1),)])

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
        [(belief,)] = state.current()
        beliefs = self._beliefs(self._written(ids), belief)
        state = state.advance([(beliefs,)], counts)
        if every:
            return self._next(beliefs[:, 1:]), state
        [(belief,)] = state.current()
        return self._next(belief.unsqueeze(1)), state

    def _beliefs(self, written: Tensor, belief: Tensor) -> Float64[Tensor, "batch time states"]:
        """log P of the state that writes next, before the first id and after each."""
        beliefs = [belief]
        for each in written.unbind(1):
            belief = _multiplied(_normalised(belief + each), self.log_move)
            beliefs.append(belief)
        return torch.stack(beliefs, 1)

    def _later(self, written: Tensor, real: Tensor) -> Float64[Tensor, "batch time states"]:
        """log P of what comes after each id, given its state: the backward algorithm."""
        later = [torch.zeros_like(written[:, 0])]
        for t in range(written.shape[1] - 1, 0, -1):
            before = _multiplied(later[-1] + written[:, t], self.log_move.T)
            later.append(before.where(real[:, t].unsqueeze(-1), 0.0))
        return torch.stack(later[::-1], 1)

    def _next(self, beliefs: Tensor) -> Tensor:
        return _multiplied(beliefs, self.log_write).float()

    def _written(self, ids: Tensor) -> Float64[Tensor, "batch time states"]:
        """log P of each id, of every state."""
        return self.log_write.T[ids]

    def _first(self, ids: Tensor) -> Tensor:
        return self.log_first.expand(len(ids), -1)

    def _logs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.log_first, self.log_move, self.log_write

    if TYPE_CHECKING:
        __call__ = forward


def _normalised(logs: Tensor) -> Tensor:
    return logs - logs.logsumexp(-1, keepdim=True)


def _multiplied(logs: Tensor, matrix: Tensor) -> Tensor:
    """log of (e^logs e^matrix): what is largest is taken out before, and put back after."""
    most = logs.amax(-1, keepdim=True)
    return ((logs - most).exp() @ matrix.exp()).log() + most


def _text(batch: Blocks, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of a batch, each with its last target: right-padded ids, and how many are real."""
    tokens, place, _ = rows_of(batch, vocab_size)
    ends = [*(place == 0).nonzero()[0].tolist(), len(tokens)]
    lengths = torch.tensor(ends, device=device).diff()
    if not len(lengths):
        return lengths, lengths
    rows = torch.from_numpy(tokens).to(device).split(lengths.tolist())
    return pad_sequence(rows, batch_first=True), lengths
