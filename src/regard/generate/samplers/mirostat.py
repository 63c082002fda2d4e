"""Samplers that steer: what was drawn decides how the next token is drawn.

They must be the last of a chain, since they learn from the probability they leave a token.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.sampler_context import SamplerContext
from regard.generate.samplers.logits_processor import STATIC, LogitsProcessor, Ranking, cut, needed

Surprise = Literal["truncated", "full"]
LN2 = math.log(2)


class Mirostat(LogitsProcessor):
    """What both versions share: a bound mu that follows the surprise of what was drawn."""

    __slots__ = ()

    learns: ClassVar[bool] = True

    target: float
    rate: float
    surprise: Surprise

    def __post_init__(self) -> None:
        """Check the settings."""
        if not 0 <= self.target < math.inf:
            raise ConfigError(f"mirostat: target={self.target} must be 0 (off) or more bits")
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"mirostat: rate={self.rate} must be above 0")

    def bound(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """mu of each row, in bits."""
        still = torch.zeros_like(logits[:, :1])
        return 2 * self.target + (still if context is None else drift(self, logits, context))

    def learn(self, before: Tensor, after: Tensor, ids: Tensor, context: SamplerContext) -> None:
        """mu <- mu - rate (surprise of what was drawn - target)."""
        told = after if self.surprise == "truncated" else before
        bits = -told.log_softmax(-1).gather(-1, ids.unsqueeze(1)) / LN2
        moved = drift(self, after, context)
        moved -= self.rate * (bits - self.target) * (self.target > 0)


def drift(stage: LogitsProcessor, logits: Tensor, context: SamplerContext) -> Tensor:
    """How far each row has moved from where it began: (rows, 1), to be changed in place."""
    return context.remembered(type(stage).__name__, lambda: torch.zeros_like(logits[:, :1]))


@dataclass(frozen=True, slots=True)
class Mirostat2(Mirostat):
    r"""Keep the surprise of the text near a target (Basu et al. 2021, version 2).

        keep v  iff  -log2 P(v) <= mu,      mu <- mu - rate (surprise - target)

    mu begins at twice the target; the likeliest token is always kept. The surprise of the token
    drawn is that among the kept, as in llama.cpp, or with `surprise="full"` that before anything
    was removed, as in the paper. target = 0 changes nothing.
    """

    target: float = 5.0
    rate: float = 0.1
    surprise: Surprise = field(default="truncated", kw_only=True, metadata=STATIC)

    off: ClassVar = {"target": 0.0}

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove what would surprise too much."""
        bits = -logits.log_softmax(-1) / LN2
        least = bits.amin(-1, keepdim=True)
        return cut(logits, bits <= torch.maximum(self.bound(logits, context), least))


@dataclass(frozen=True, slots=True)
class Mirostat1(Mirostat, Ranking):
    r"""Keep the surprise of the text near a target (Basu et al. 2021, version 1).

    From the 100 likeliest tokens it estimates how fast probabilities fall (Zipf's exponent s),
    and from that how many tokens k have an expected surprise of mu:

        s = sum t_i b_i / sum t_i^2,      t_i = ln((i + 1) / i),   b_i = ln(P_i / P_{i+1})
        k = ((s - 1) 2^mu / (1 - vocab^(1 - s)))^(1 / s),      mu <- mu - rate (surprise - target)

    The k likeliest are kept, one at least; all of them where s is not above 0. As in llama.cpp
    k is rounded down and the surprise is that among the kept (`surprise="full"`: before).
    target = 0 changes nothing.
    """

    target: float = 5.0
    rate: float = 0.1
    surprise: Surprise = field(default="truncated", kw_only=True, metadata=STATIC)

    off: ClassVar = {"target": 0.0}
    counts_all = True

    def ranked(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove what ranks below k."""
        vocab = logits.shape[-1]
        top = logits[:, :100]
        rank = torch.arange(1, top.shape[1], dtype=logits.dtype, device=logits.device)
        t = ((rank + 1) / rank).log().expand(len(top), -1)
        b = top[:, :-1] - top[:, 1:]  # ln of a ratio of probabilities
        known = top[:, 1:] > -torch.inf
        t, b = t.masked_fill(~known, 0.0), b.masked_fill(~known, 0.0)
        s = (t * b).sum(-1, keepdim=True) / (t * t).sum(-1, keepdim=True)
        # (s - 1) / (1 - vocab^(1 - s)) goes to 1 / ln vocab where s is 1
        above = (s - 1) * math.log(max(vocab, 2))
        share = torch.where(above == 0, 1.0, above / -torch.expm1(-above)) / math.log(max(vocab, 2))
        k = (share * 2 ** self.bound(logits, context)) ** (1 / s)
        at = torch.arange(vocab, device=logits.device)
        return cut(logits, (at < k.floor().clamp_min(1)) | ~(s > 0))


@dataclass(frozen=True, slots=True)
class AdaptiveP(LogitsProcessor):
    r"""Prefer tokens whose probability is near a target, and correct for what was drawn.

        a = clip(2 target - e, 0, 1),   x = |P(v) - a| / 0.3,   l_v <- 5 - 10 x^2 / (1 + x)
        e <- decay e + (1 - decay) P(drawn)

    e begins at the target; P is what the stages before it leave. target = 0 changes nothing.
    """

    target: float = 0.0
    decay: float = 0.9

    off: ClassVar = {"target": 0.0}
    by_id = True  # it leaves no order
    learns = True

    def __post_init__(self) -> None:
        if not 0 <= self.target <= 1:
            raise ConfigError(f"adaptive_p={self.target} must lie in [0, 1]; 0 is off")
        if not 0 <= self.decay <= 0.99:
            raise ConfigError(f"adaptive_p: decay={self.decay} must lie in [0, 0.99]")

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Reshape around the target."""
        mean = self.target + drift(self, logits, needed(context, "adaptive_p"))
        aim = (2 * self.target - mean).clamp(0, 1)
        x = (logits.softmax(-1) - aim).abs() / 0.3
        return (5 - 10 * x**2 / (1 + x)).masked_fill(logits == -torch.inf, -torch.inf)

    def learn(self, before: Tensor, after: Tensor, ids: Tensor, context: SamplerContext) -> None:
        """e <- decay e + (1 - decay) P(drawn)."""
        drawn = before.softmax(-1).gather(-1, ids.unsqueeze(1))
        moved = drift(self, before, context)
        moved += (1 - self.decay) * (drawn - self.target - moved) * (self.target > 0)
