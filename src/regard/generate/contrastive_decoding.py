"""Contrastive decoding: the log probabilities of an expert minus those of an amateur model."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ConfigError
from regard.models.base import Language, State, mark_prompt_as_prefix
from regard.nn.state import Source

MIN_LOG_Q = -70.0  # lower bound of log Q, for tokens with Q = 0


@dataclass(frozen=True, slots=True)
class ContrastiveDecoding:
    r"""Prefer tokens that are likelier under an expert model than under an amateur model.

        l_v = (1 + beta) log P(v) - beta log Q(v)   where  P(v) >= alpha max_u P(u)

    and -inf elsewhere; P is the expert's distribution, Q the amateur's. beta = 0 and alpha = 0
    give the expert alone. It is a `Language`, so that every sampler and every search works with
    it. (Contrastive search is another method, which needs one model only.)
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
        """The vocabulary size of both models."""
        return self.expert.vocab_size

    @property
    def device(self) -> torch.device:
        """The device of both models."""
        return self.expert.device

    @property
    def context(self) -> int | None:
        """The shorter of the two contexts."""
        contexts = [model.context for model in (self.expert, self.amateur) if model.context]
        return min(contexts, default=None)

    def start(self, rows: int, capacity: int, source: Source | None = None) -> "ContrastiveState":
        """The states of both models, which must have the same vocabulary size."""
        expert, amateur = self.expert.vocab_size, self.amateur.vocab_size
        if expert != amateur:
            raise ConfigError(
                f"the amateur has vocab_size={amateur} and the expert vocab_size={expert}; "
                "both must have the same vocabulary"
            )
        return ContrastiveState(
            self.expert.start(rows, capacity, source), self.amateur.start(rows, capacity, source)
        )

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], "ContrastiveState"]:
        """Run both models; see `Language.step`."""
        assert isinstance(state, ContrastiveState)
        expert_state, amateur_state = state.expert, state.amateur
        if state.prefix:
            expert_state = mark_prompt_as_prefix(self.expert, expert_state)
            amateur_state = mark_prompt_as_prefix(self.amateur, amateur_state)
        expert_logits, expert_state = self.expert.step(
            ids, expert_state, counts=counts, all_logits=all_logits
        )
        amateur_logits, amateur_state = self.amateur.step(
            ids, amateur_state, counts=counts, all_logits=all_logits
        )
        log_p = expert_logits.float().log_softmax(-1)
        log_q = amateur_logits.float().log_softmax(-1).clamp_min(MIN_LOG_Q)
        logits = (1 + self.beta) * log_p - self.beta * log_q
        unlikely = log_p.exp() < self.alpha * log_p.exp().amax(-1, keepdim=True)
        new_state = ContrastiveState(expert_state, amateur_state)
        return logits.masked_fill(unlikely, -torch.inf), new_state


@dataclass(frozen=True, slots=True)
class ContrastiveState:
    """The states (KV caches) of both models for the same rows."""

    expert: State
    amateur: State
    prefix: bool = False  # the next ids are a prompt, which a prefix LM reads bidirectionally

    @property
    def lengths(self) -> Int[Tensor, " rows"]:
        """The number of ids in each row's state."""
        return self.expert.lengths

    def select(self, rows: Int[Tensor, " selected"]) -> "ContrastiveState":
        """The states of these rows, in this order."""
        return replace(self, expert=self.expert.select(rows), amateur=self.amateur.select(rows))

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "ContrastiveState":
        """Forget all but the first `lengths` ids of each row."""
        return ContrastiveState(self.expert.rewind(lengths), self.amateur.rewind(lengths))
