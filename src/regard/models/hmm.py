"""The hidden Markov model, fitted by the Baum-Welch algorithm without gradients."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.config import Settings
from regard.errors import ConfigError, DataError
from regard.models.base import LanguageModel, State
from regard.models.compatibility import check_sizes
from regard.models.ngram_counts import TokenBatch, flatten_rows
from regard.nn.head import LogProbHead
from regard.nn.state import RecurrentState, Source


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class HMMConfig(Settings):
    """A hidden Markov model with discrete emissions."""

    vocab_size: int  # number of tokens
    states: int = 32  # number of hidden states
    iterations: int = 20  # EM iterations (Baum-Welch), each over the whole text
    context: int = 256  # ids per block of the training text

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "states", "iterations", "context")


class HMM(LanguageModel):
    r"""A hidden Markov model: initial, transition and emission probabilities pi, A and B.

        P(x, z) = pi(z_1) B(z_1, x_1) prod_{t>1} A(z_{t-1}, z_t) B(z_t, x_t)

    The predictive distribution of the state is the belief b_t(j) = P(z_t = j | x_1 … x_{t-1}):

        P(x_t | x_1 … x_{t-1}) = sum_j b_t(j) B(j, x_t)                      the forward algorithm
        b_{t+1}(k) = sum_j b_t(j) B(j, x_t) A(j, k) / P(x_t | x_1 … x_{t-1})

    log pi, log A and log B are stored in float64. Baum et al. 1970; Rabiner 1989.

    `forward` returns log-probabilities, so the head is the identity.
    """

    log_initial: Float64[Tensor, " states"]  # log pi
    log_transition: Float64[Tensor, "states states"]  # log A
    log_emission: Float64[Tensor, "states vocab"]  # log B

    def __init__(self, config: HMMConfig) -> None:
        super().__init__()
        self.config = config
        self.head = LogProbHead()
        states, vocab = config.states, config.vocab_size
        sizes = {"initial": [states], "transition": [states] * 2, "emission": [states, vocab]}
        for name, size in sizes.items():
            # uniform on the simplex; EM would never separate equal states
            sample = nn.init.uniform_(torch.empty(size, dtype=torch.float64), 1e-9, 1.0)
            self.register_buffer(f"log_{name}", _normalize((-sample.log()).log()))

    def fit(self, batches: Iterable[TokenBatch]) -> None:
        """Run `iterations` iterations of EM from the current parameters.

        At the end a pseudo-count of 1 / V is added to every emission count, so that unseen
        emissions are unlikely, not impossible.
        """
        texts = [
            _padded_rows(batch, self.config.vocab_size, self.log_initial.device)
            for batch in batches
        ]
        texts = [(ids, lengths) for ids, lengths in texts if ids.numel()]
        if not texts:
            raise DataError("the training data has no scored target; give fit() at least one batch")
        for _ in range(self.config.iterations):
            emission_counts = self.em_step(texts)
        self.log_emission = _normalize((emission_counts + 1 / self.config.vocab_size).log())

    def em_step(self, texts: Iterable[tuple[Tensor, Tensor]]) -> Float64[Tensor, "states vocab"]:
        """One iteration of Baum-Welch; the likelihood of the texts does not decrease.

            pi(j) ∝ sum P(z_1 = j | x),    A(j, k) ∝ sum_t P(z_t = j, z_{t+1} = k | x)
            B(j, v) ∝ sum over x_t = v of P(z_t = j | x)

        `texts` are right-padded ids, (batch, time), and the length of each row. Returns the
        expected emission counts.
        """
        initial, transition, emission_counts = (
            torch.zeros_like(logs.exp()) for logs in self._log_parameters()
        )
        for ids, lengths in texts:
            valid = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(-1)
            emission = self._emission(ids).where(valid.unsqueeze(-1), 0.0)  # log 1 for padding
            forward = self._beliefs(emission, self._initial_belief(ids))[:, :-1] + emission
            backward = self._backward(emission, valid)
            posterior = (forward + backward).softmax(-1) * valid.unsqueeze(-1)
            initial += posterior[:, 0].sum(0)
            emission_counts.index_add_(1, ids.flatten(), posterior.flatten(0, 1).T)
            emission_backward = emission + backward  # (batch, time, states)
            for t in range(1, ids.shape[1]):
                pair = (
                    forward[:, t - 1].unsqueeze(-1)
                    + self.log_transition
                    + emission_backward[:, t].unsqueeze(-2)
                )
                pair = pair.flatten(1).softmax(-1).view_as(pair)  # (batch, states, states)
                transition += pair[valid[:, t]].sum(0)
        self.log_initial, self.log_transition, self.log_emission = (
            # a state that was never visited keeps its parameters
            _normalize(new.log().where(new.sum(-1, keepdim=True) > 0, old))
            for new, old in zip(
                (initial, transition, emission_counts), self._log_parameters(), strict=True
            )
        )
        return emission_counts

    def log_likelihood(self, ids: Int[Tensor, "batch time"]) -> Float64[Tensor, " batch"]:
        """log P of each row, summed over all state sequences: the forward algorithm."""
        emission = self._emission(ids)
        belief = self._beliefs(emission, self._initial_belief(ids))[:, :-1]
        return (belief + emission).logsumexp(-1).sum(-1)

    def viterbi(self, ids: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
        """The most likely state sequence of each row. Viterbi 1967.

        best_t(k) = max_j best_{t-1}(j) A(j, k) B(k, x_t), with a backpointer to the best j
        """
        emissions = self._emission(ids)
        best, backpointers = self.log_initial + emissions[:, 0], []
        for emission in emissions.unbind(1)[1:]:
            best, previous = (best.unsqueeze(-1) + self.log_transition).max(1)
            best = best + emission
            backpointers.append(previous)
        path = [best.argmax(-1)]
        for previous in reversed(backpointers):
            path.append(previous.gather(1, path[-1].unsqueeze(-1)).squeeze(-1))
        return torch.stack(path[::-1], 1)

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocab"]:
        """log P of every next id, after each id of each row."""
        return self._predict(self._beliefs(self._emission(ids), self._initial_belief(ids))[:, 1:])

    def start(self, rows: int, capacity: int, source: Source | None = None) -> RecurrentState:
        """The state is the belief; its size does not depend on `capacity`."""
        if source is not None:
            raise ConfigError("a hidden Markov model takes no source; an encoder-decoder does")
        return RecurrentState.initial([(self.log_initial.expand(rows, -1),)])

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
        [(belief,)] = state.current()
        beliefs = self._beliefs(self._emission(ids), belief)
        state = state.advance([(beliefs,)], counts)
        if all_logits:
            return self._predict(beliefs[:, 1:]), state
        [(belief,)] = state.current()
        return self._predict(belief.unsqueeze(1)), state

    def _beliefs(self, emissions: Tensor, belief: Tensor) -> Float64[Tensor, "batch time states"]:
        """log P of the next state, before the first id and after each."""
        beliefs = [belief]
        for emission in emissions.unbind(1):
            belief = _log_matmul(_normalize(belief + emission), self.log_transition)
            beliefs.append(belief)
        return torch.stack(beliefs, 1)

    def _backward(self, emissions: Tensor, valid: Tensor) -> Float64[Tensor, "batch time states"]:
        """log P of the ids after each position, given its state: the backward algorithm."""
        backward = [torch.zeros_like(emissions[:, 0])]
        for t in range(emissions.shape[1] - 1, 0, -1):
            previous = _log_matmul(backward[-1] + emissions[:, t], self.log_transition.T)
            backward.append(previous.where(valid[:, t].unsqueeze(-1), 0.0))
        return torch.stack(backward[::-1], 1)

    def _predict(self, beliefs: Tensor) -> Tensor:
        return _log_matmul(beliefs, self.log_emission).float()

    def _emission(self, ids: Tensor) -> Float64[Tensor, "batch time states"]:
        """log P of each id, given each state."""
        return self.log_emission.T[ids]

    def _initial_belief(self, ids: Tensor) -> Tensor:
        return self.log_initial.expand(len(ids), -1)

    def _log_parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.log_initial, self.log_transition, self.log_emission

    if TYPE_CHECKING:
        __call__ = forward


def _normalize(logs: Tensor) -> Tensor:
    return logs - logs.logsumexp(-1, keepdim=True)


def _log_matmul(logs: Tensor, matrix: Tensor) -> Tensor:
    """log(exp(logs) exp(matrix)), shifted by the maximum for numerical stability."""
    maximum = logs.amax(-1, keepdim=True)
    return ((logs - maximum).exp() @ matrix.exp()).log() + maximum


def _padded_rows(batch: TokenBatch, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of a batch with their last targets: right-padded ids, and their lengths."""
    tokens, positions, _ = flatten_rows(batch, vocab_size)
    bounds = [*(positions == 0).nonzero()[0].tolist(), len(tokens)]
    lengths = torch.tensor(bounds, device=device).diff()
    if not len(lengths):
        return lengths, lengths
    rows = torch.from_numpy(tokens).to(device).split(lengths.tolist())
    return pad_sequence(rows, batch_first=True), lengths
