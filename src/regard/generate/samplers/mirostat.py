"""Stateful samplers: mirostat and adaptive-p, which adjust to the tokens sampled so far.

They must be the last of a chain, since they observe the probability of the sampled token.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.samplers.logits_processor import (
    LogitsProcessor,
    SortedLogitsProcessor,
    keep_where,
    require_state,
    setting,
)
from regard.generate.sampling_state import SamplingState

SurprisalKind = Literal["truncated", "full"]
LN2 = math.log(2)


class Mirostat(LogitsProcessor):
    """Base class of both versions: a bound mu, adapted to the surprisal of the sampled tokens.

    `target` is tau and `lr` is eta in the paper (`mirostat_tau`, `mirostat_eta` of llama.cpp).
    """

    __slots__ = ()

    stateful: ClassVar[bool] = True

    target: float
    lr: float
    surprisal: SurprisalKind

    def __post_init__(self) -> None:
        """Check the settings."""
        if not 0 <= self.target < math.inf:
            raise ConfigError(f"mirostat: target={self.target} must be 0 (off) or more bits")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"mirostat: lr={self.lr} must be above 0")

    def mu(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """The bound mu of each row, in bits: twice the target at first."""
        offset = torch.zeros_like(logits[:, :1])
        if sampling is not None:
            offset = state_offset(self, logits, sampling)
        return 2 * self.target + offset

    def update_state(
        self, before: Tensor, after: Tensor, ids: Tensor, sampling: SamplingState
    ) -> None:
        """mu <- mu - lr (surprisal of the sampled token - target)."""
        logits = after if self.surprisal == "truncated" else before
        bits = -logits.log_softmax(-1).gather(-1, ids.unsqueeze(1)) / LN2
        mu_offset = state_offset(self, after, sampling)
        mu_offset -= self.lr * (bits - self.target) * (self.target > 0)


def state_offset(sampler: LogitsProcessor, logits: Tensor, sampling: SamplingState) -> Tensor:
    """The change of mu or e of each row since the first token: (rows, 1), updated in place."""
    return sampling.row_state(type(sampler).__name__, lambda: torch.zeros_like(logits[:, :1]))


@dataclass(frozen=True, slots=True)
class Mirostat2(Mirostat):
    r"""Mirostat 2: keep the surprisal of the text near a target (Basu et al. 2021).

        keep v  iff  -log2 P(v) <= mu,      mu <- mu - lr (surprisal - target)

    mu starts at twice the target; the most probable token is always kept. The surprisal of the
    sampled token is measured after truncation, as in llama.cpp, or with `surprisal="full"`
    before it, as in the paper. target = 0 switches it off.
    """

    target: float = setting(5.0, off=0.0)
    lr: float = 0.1
    surprisal: SurprisalKind = setting("truncated", per_row=False, kw_only=True)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens with a surprisal above mu."""
        bits = -logits.log_softmax(-1) / LN2
        smallest = bits.amin(-1, keepdim=True)
        return keep_where(logits, bits <= torch.maximum(self.mu(logits, sampling), smallest))


@dataclass(frozen=True, slots=True)
class Mirostat1(Mirostat, SortedLogitsProcessor):
    r"""Mirostat 1: keep the surprisal of the text near a target (Basu et al. 2021).

    From the 100 most probable tokens it estimates how fast probabilities fall (Zipf's exponent s),
    and from that how many tokens k have an expected surprisal of mu:

        s = sum t_i b_i / sum t_i^2,      t_i = ln((i + 1) / i),   b_i = ln(P_i / P_{i+1})
        k = ((s - 1) 2^mu / (1 - vocab^(1 - s)))^(1 / s),      mu <- mu - lr (surprisal - target)

    The k most probable tokens are kept, at least one; all of them where s is not above 0. As in
    llama.cpp, k is rounded down and the surprisal is measured after truncation (before it with
    `surprisal="full"`). target = 0 switches it off.
    """

    target: float = setting(5.0, off=0.0)
    lr: float = 0.1
    surprisal: SurprisalKind = setting("truncated", per_row=False, kw_only=True)

    needs_full_vocab = True

    def process_sorted(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens ranked below k."""
        vocab = logits.shape[-1]
        top = logits[:, :100]
        rank = torch.arange(1, top.shape[1], dtype=logits.dtype, device=logits.device)
        t = ((rank + 1) / rank).log().expand(len(top), -1)
        b = top[:, :-1] - top[:, 1:]  # ln of a ratio of probabilities
        remaining = top[:, 1:] > -torch.inf
        t, b = t.masked_fill(~remaining, 0.0), b.masked_fill(~remaining, 0.0)
        s = (t * b).sum(-1, keepdim=True) / (t * t).sum(-1, keepdim=True)
        # (s - 1) / (1 - vocab^(1 - s)) tends to 1 / ln vocab as s tends to 1
        log_vocab = math.log(max(vocab, 2))
        x = (s - 1) * log_vocab
        ratio = torch.where(x == 0, 1.0, x / -torch.expm1(-x)) / log_vocab
        k = (ratio * 2 ** self.mu(logits, sampling)) ** (1 / s)
        ranks = torch.arange(vocab, device=logits.device)
        return keep_where(logits, (ranks < k.floor().clamp_min(1)) | ~(s > 0))


@dataclass(frozen=True, slots=True)
class AdaptiveP(LogitsProcessor):
    r"""Adaptive-p: prefer tokens with a probability near a target, and correct for past samples.

        a = clip(2 target - e, 0, 1),   x = |P(v) - a| / 0.3,   l_v <- 5 - 10 x^2 / (1 + x)
        e <- decay e + (1 - decay) P(sampled)

    e starts at the target; P is the distribution after the earlier samplers. target = 0 switches
    it off.
    """

    target: float = setting(0.0, off=0.0)
    decay: float = 0.9

    needs_ids = True  # its result is not sorted
    stateful = True

    def __post_init__(self) -> None:
        if not 0 <= self.target <= 1:
            raise ConfigError(f"adaptive_p={self.target} must lie in [0, 1]; 0 is off")
        if not 0 <= self.decay <= 0.99:
            raise ConfigError(f"adaptive_p: decay={self.decay} must lie in [0, 0.99]")

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Raise the logits of tokens with a probability near the target."""
        e = self.target + state_offset(self, logits, require_state(sampling, "adaptive_p"))
        a = (2 * self.target - e).clamp(0, 1)
        x = (logits.softmax(-1) - a).abs() / 0.3
        return (5 - 10 * x**2 / (1 + x)).masked_fill(logits == -torch.inf, -torch.inf)

    def update_state(
        self, before: Tensor, after: Tensor, ids: Tensor, sampling: SamplingState
    ) -> None:
        """e <- decay e + (1 - decay) P(sampled)."""
        p = before.softmax(-1).gather(-1, ids.unsqueeze(1))
        e_offset = state_offset(self, before, sampling)
        e_offset += (1 - self.decay) * (p - self.target - e_offset) * (self.target > 0)
