"""Samplers that reshape the distribution and remove nothing."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.sampler_context import SamplerContext
from regard.generate.samplers.logits_processor import LogitsProcessor, by_row, entropy

COLDEST = 1e-6  # below, l / T leaves float32; what is left of chance there is rounding


@dataclass(frozen=True, slots=True)
class Temperature(LogitsProcessor):
    r"""Sharpen (T < 1) or flatten (T > 1) the distribution.

        l_v <- l_v / T

    T = 1 changes nothing. T = 0 is greedy: only the first of the largest logits is left.
    """

    value: float = 1.0

    off: ClassVar = {"value": 1.0}

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ConfigError(f"temperature={self.value} must be finite, and 0 (greedy) or larger")

    @property
    def greedy(self) -> bool:
        """Whether it leaves a single token."""
        return self.value < COLDEST

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Divide by T."""
        if by_row(self.value):
            return divided(logits, self.value)
        return coldest(logits) if self.greedy else logits / self.value


def coldest(logits: Tensor) -> Tensor:
    """Leave the first of the largest logits."""
    best = logits.argmax(-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter(-1, best, logits.gather(-1, best))


def divided(logits: Tensor, temperature: Tensor) -> Tensor:
    """l / T, where T = 0 leaves the largest logit."""
    warm = logits / temperature.clamp_min(COLDEST)
    return torch.where(temperature < COLDEST, coldest(logits), warm)


@dataclass(frozen=True, slots=True)
class DynamicTemperature(LogitsProcessor):
    r"""Warm where the model is unsure, cool where it is sure.

        T = low + (high - low) (H / ln n)^exponent,      l_v <- l_v / T

    H is the entropy in nats and n counts the tokens that are left, so H / ln n lies in [0, 1].
    low = high = 1 changes nothing; T = 0 is greedy; a single token stays as it is.
    """

    low: float = 1.0
    high: float = 1.0
    exponent: float = 1.0

    off: ClassVar = {"low": 1.0, "high": 1.0}

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise ConfigError(
                f"dynamic_temperature: low={self.low} and high={self.high} must be 0 or larger, "
                "low first"
            )
        if not 0 < self.exponent < math.inf:
            raise ConfigError(f"dynamic_temperature: exponent={self.exponent} must be above 0")

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Divide by T."""
        count = (logits > -torch.inf).sum(-1, keepdim=True)
        unsure = entropy(logits) / count.clamp_min(2).to(logits.dtype).log()
        temperature = self.low + (self.high - self.low) * unsure.clamp(0, 1) ** self.exponent
        return torch.where(count > 1, divided(logits, temperature), logits)


@dataclass(frozen=True, slots=True)
class Quadratic(LogitsProcessor):
    r"""Bend the logits: the likeliest come closer together, the tail falls away.

        d_v = l_v - max l,      l_v <- max l - (3 - c)/2 f d_v^2 + (c - 1)/2 f d_v^3

    f is the factor and c the curve: 1 is purely quadratic, 3 purely cubic. f = 0 changes nothing.
    """

    factor: float = 0.0
    curve: float = 1.0

    off: ClassVar = {"factor": 0.0}

    def __post_init__(self) -> None:
        if not 0 <= self.factor < math.inf:
            raise ConfigError(f"quadratic={self.factor} must be 0 (off) or larger")
        if not 1 <= self.curve <= 3:
            raise ConfigError(
                f"quadratic: curve={self.curve} must lie in [1, 3]; beyond, unlikely tokens win"
            )

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Bend."""
        best = logits.amax(-1, keepdim=True)
        d = logits - best
        square, cube = (3 - self.curve) / 2 * self.factor, (self.curve - 1) / 2 * self.factor
        return (best - square * d**2 + cube * d**3).masked_fill(d == -torch.inf, -torch.inf)
