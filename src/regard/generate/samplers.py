"""Samplers that look at nothing but the logits, and the table of all samplers.

A truncation takes softmax over what is still alive and keeps at least one token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.context import Context, Sampler

COLDEST = 1e-6  # below, l / T leaves float32; what is left of chance there is rounding


@dataclass(frozen=True, slots=True)
class Temperature:
    r"""Sharpen (T < 1) or flatten (T > 1) the distribution.

        l_v <- l_v / T

    T = 1 changes nothing. T = 0 is greedy: only the first of the largest logits is left.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ConfigError(f"temperature={self.value} must be 0 (greedy) or larger")

    @property
    def greedy(self) -> bool:
        """Whether it leaves a single token."""
        return self.value < COLDEST

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], context: Context | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """Divide by T."""
        if self.value == 1:
            return logits
        if not self.greedy:
            return logits / self.value
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter(-1, best, logits.gather(-1, best))


@dataclass(frozen=True, slots=True)
class TopK:
    r"""Keep the k largest logits (Fan et al. 2018).

        keep v  iff  l_v >= the k-th largest logit

    so tokens tied with the k-th all stay. k = 0 changes nothing.
    """

    k: int = 40

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ConfigError(f"top_k={self.k} must be 1 or more tokens, or 0 for all")

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], context: Context | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """Remove what ranks below the k-th."""
        if self.k == 0 or self.k >= logits.shape[-1]:
            return logits
        least = logits.topk(self.k).values[..., -1:]
        return logits.masked_fill(logits < least, -torch.inf)


@dataclass(frozen=True, slots=True)
class TopP:
    r"""Nucleus sampling (Holtzman et al. 2020): keep the fewest tokens whose mass reaches p.

        keep v  iff  sum of P(u) over all u ranked above v  <  p

    Tokens of equal probability rank by their id. p = 0 keeps one token, p = 1 changes nothing.
    """

    p: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ConfigError(f"top_p={self.p} must lie in [0, 1]")

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], context: Context | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """Remove the tail."""
        if self.p == 1:
            return logits
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = ranked.softmax(-1)
        above = mass.cumsum(-1) - mass
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, above < self.p)
        keep.scatter_(-1, order[..., :1], True)  # p = 0 keeps one
        return logits.masked_fill(~keep, -torch.inf)


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "temperature": Temperature,
    "top_k": TopK,
    "top_p": TopP,
}
