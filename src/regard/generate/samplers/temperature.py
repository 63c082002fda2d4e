"""Temperature samplers: they rescale the logits and remove no token."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.samplers.logits_processor import LogitsProcessor, entropy, is_per_row, setting
from regard.generate.sampling_state import SamplingState

MIN_TEMPERATURE = 1e-6  # below it, l / T overflows float32; treated as greedy


@dataclass(frozen=True, slots=True)
class Temperature(LogitsProcessor):
    r"""Sharpen (T < 1) or flatten (T > 1) the distribution.

        l_v <- l_v / T

    T = 1 switches it off. T = 0 is greedy: it keeps the first of the largest logits only.
    """

    value: float = setting(1.0, off=1.0)

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ConfigError(f"temperature={self.value} must be finite, and 0 (greedy) or larger")

    @property
    def greedy(self) -> bool:
        """Whether it keeps a single token."""
        return self.value < MIN_TEMPERATURE

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Divide by T."""
        if is_per_row(self.value):
            return divide_by_temperature(logits, self.value)
        return keep_argmax(logits) if self.greedy else logits / self.value


def keep_argmax(logits: Tensor) -> Tensor:
    """Keep the first of the largest logits and remove all other tokens."""
    best = logits.argmax(-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter(-1, best, logits.gather(-1, best))


def divide_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """l / T; where T = 0, only the largest logit is kept."""
    scaled = logits / temperature.clamp_min(MIN_TEMPERATURE)
    return torch.where(temperature < MIN_TEMPERATURE, keep_argmax(logits), scaled)


@dataclass(frozen=True, slots=True)
class DynamicTemperature(LogitsProcessor):
    r"""Dynamic temperature: high where the distribution has high entropy, low where it is peaked.

        T = low + (high - low) (H / ln n)^exponent,      l_v <- l_v / T

    H is the entropy in nats and n the number of remaining tokens, so H / ln n lies in [0, 1].
    low = high = 1 switches it off; T = 0 is greedy; a single remaining token is not changed.
    """

    low: float = setting(1.0, off=1.0)
    high: float = setting(1.0, off=1.0)
    exponent: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise ConfigError(
                f"dynamic_temperature: low={self.low} and high={self.high} must be 0 or larger, "
                "and low at most high"
            )
        if not 0 < self.exponent < math.inf:
            raise ConfigError(f"dynamic_temperature: exponent={self.exponent} must be above 0")

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Divide by T."""
        count = (logits > -torch.inf).sum(-1, keepdim=True)
        normalized_entropy = entropy(logits) / count.clamp_min(2).to(logits.dtype).log()
        temperature = (
            self.low + (self.high - self.low) * normalized_entropy.clamp(0, 1) ** self.exponent
        )
        return torch.where(count > 1, divide_by_temperature(logits, temperature), logits)


@dataclass(frozen=True, slots=True)
class Quadratic(LogitsProcessor):
    r"""Quadratic (smooth) sampling: bring the most probable tokens together and lower the tail.

        d_v = l_v - max l,      l_v <- max l - (3 - c)/2 f d_v^2 + (c - 1)/2 f d_v^3

    f is the factor and c the curve (`smoothing_factor` and `smoothing_curve` of
    text-generation-webui): c = 1 is purely quadratic, 3 purely cubic. f = 0 switches it off.
    """

    factor: float = setting(0.0, off=0.0)
    curve: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.factor < math.inf:
            raise ConfigError(f"quadratic={self.factor} must be 0 (off) or larger")
        if not 1 <= self.curve <= 3:
            raise ConfigError(
                f"quadratic: curve={self.curve} must lie in [1, 3]; outside it unlikely tokens "
                "become the most probable"
            )

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Apply the polynomial to the distance from the largest logit."""
        best = logits.amax(-1, keepdim=True)
        d = logits - best
        square, cube = (3 - self.curve) / 2 * self.factor, (self.curve - 1) / 2 * self.factor
        return (best - square * d**2 + cube * d**3).masked_fill(d == -torch.inf, -torch.inf)
