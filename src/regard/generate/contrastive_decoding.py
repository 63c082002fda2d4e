"""Contrastive decoding: a model made of two, one of which shows what not to say."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ConfigError
from regard.models.base import Language, State
from regard.nn.state import Source

RAREST = -70.0  # log Q of a token that the amateur rules out: nothing is infinitely surprising


@dataclass(frozen=True, slots=True)
class ContrastiveDecoding:
    r"""Say what an expert finds likelier than an amateur does.

        l_v = (1 + beta) log P(v) - beta log Q(v)   where  P(v) >= alpha max_u P(u)

    and -inf elsewhere; P is the expert's distribution, Q the amateur's. beta = 0 and alpha = 0
    leave the expert as it is. It is a language like any other, so every sampler and every
    search works with it. (Contrastive search is another idea: it asks one model only.)
    Li et al. 2022; with beta O'Brien & Lewis 2023.
    """

    expert: Language
    amateur: Language
    alpha: float = 0.1
    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} of contrastive decoding must lie in [0, 1]")
        if not 0 <= self.beta <= 100:
            raise ConfigError(f"beta={self.beta} of contrastive decoding must lie in [0, 100]")

    @property
    def vocab_size(self) -> int:
        """That of both models."""
        return self.expert.vocab_size

    @property
    def device(self) -> torch.device:
        """That of both models."""
        return self.expert.device

    @property
    def context(self) -> int | None:
        """That of the model with the shorter one."""
        contexts = [each.context for each in (self.expert, self.amateur) if each.context]
        return min(contexts, default=None)

    def start(self, rows: int, capacity: int, source: Source | None = None) -> "BothStates":
        """The states of both, which must know the same ids."""
        expert, amateur = self.expert.vocab_size, self.amateur.vocab_size
        if expert != amateur:
            raise ConfigError(
                f"the amateur knows {amateur} ids and the expert {expert}; "
                "both must have the same vocabulary"
            )
        return BothStates(
            self.expert.start(rows, capacity, source), self.amateur.start(rows, capacity, source)
        )

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        every: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], "BothStates"]:
        """Ask both; see `Language.step`."""
        assert isinstance(state, BothStates)
        p, expert = self.expert.step(ids, state.expert, counts=counts, every=every)
        q, amateur = self.amateur.step(ids, state.amateur, counts=counts, every=every)
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1).clamp_min(RAREST)
        logits = (1 + self.beta) * log_p - self.beta * log_q
        unlikely = log_p.exp() < self.alpha * log_p.exp().amax(-1, keepdim=True)
        return logits.masked_fill(unlikely, -torch.inf), BothStates(expert, amateur)


@dataclass(frozen=True, slots=True)
class BothStates:
    """What both models remember of the same rows."""

    expert: State
    amateur: State

    @property
    def lengths(self) -> Int[Tensor, " rows"]:
        """How many ids each row has taken in."""
        return self.expert.lengths

    def select(self, rows: Int[Tensor, " chosen"]) -> "BothStates":
        """The states of these rows, in this order."""
        return BothStates(self.expert.select(rows), self.amateur.select(rows))

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "BothStates":
        """Forget all but the first `lengths` ids of each row."""
        return BothStates(self.expert.rewind(lengths), self.amateur.rewind(lengths))
