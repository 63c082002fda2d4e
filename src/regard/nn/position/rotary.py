"""Rotary position embedding (RoPE) and its context extensions."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.config import kind_of, make
from regard.errors import ShapeError
from regard.nn.options import require_positive
from regard.nn.position.base import Position, Rotation

Frequencies = Float[Tensor, " pairs"]


def linear(frequency: Frequencies, factor: float) -> Frequencies:
    """Position interpolation: t becomes t / factor (Chen et al. 2023)."""
    require_positive("rotary scaling 'linear'", factor=factor)
    return frequency / factor


def ntk(frequency: Frequencies, factor: float) -> Frequencies:
    """NTK-aware scaling: divide the lowest frequency by `factor`, keep the highest."""
    require_positive("rotary scaling 'ntk'", factor=factor)
    pairs = len(frequency)
    exponent = torch.arange(pairs, device=frequency.device) / max(pairs - 1, 1)
    return frequency * factor**-exponent


def llama3(
    frequency: Frequencies,
    factor: float,
    original_context: int,
    low: float = 1.0,
    high: float = 4.0,
) -> Frequencies:
    """Divide by `factor` only the frequencies with few periods in the old context (LLaMA 3.1)."""
    require_positive("rotary scaling 'llama3'", factor=factor, original_context=original_context)
    if low >= high:
        raise ShapeError(f"rotary scaling 'llama3': low={low} must be less than high={high}")
    periods = original_context * frequency / (2 * math.pi)  # in the original context
    keep = ((periods - low) / (high - low)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / factor)


def yarn(
    frequency: Frequencies,
    base: float,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
) -> tuple[Frequencies, float]:
    """Interpolate low frequencies and keep high ones (YaRN, Peng et al. 2023).

    Pairs with more than `beta_fast` rotations in the original context keep their frequency, those
    with fewer than `beta_slow` are divided by `factor`, with a linear ramp between. `truncate`
    rounds the ends of the ramp to whole pairs. Queries and keys are multiplied
    by `attention_factor`, by default 0.1 ln(factor) + 1.
    """
    require_positive(
        "rotary scaling 'yarn'",
        factor=factor,
        original_context=original_context,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
    )
    if base == 1:
        raise ShapeError("rotary scaling 'yarn': base=1 gives all pairs the same frequency")
    pairs = len(frequency)

    def pair_with_rotations(rotations: float) -> float:
        return pairs * math.log(original_context / (rotations * 2 * math.pi)) / math.log(base)

    low, high = pair_with_rotations(beta_fast), pair_with_rotations(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    index = torch.arange(pairs, device=frequency.device)
    ramp = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return frequency / factor * ramp + frequency * (1 - ramp), attention_factor


def dynamic(
    frequency: Frequencies, length: Int[Tensor, ""], factor: float, original_context: int
) -> Frequencies:
    """Dynamic NTK scaling: `ntk` with a factor that grows with the length of the text.

    max(1, factor · length / original_context - (factor - 1))
    """
    require_positive("rotary scaling 'dynamic'", factor=factor, original_context=original_context)
    growth = (factor * length / original_context - (factor - 1)).clamp_min(1)
    exponent = torch.arange(len(frequency), device=frequency.device) / max(len(frequency) - 1, 1)
    return frequency * growth**-exponent


def longrope(
    frequency: Frequencies,
    length: Int[Tensor, ""],
    short: list[float],
    long: list[float],
    original_context: int,
    attention_factor: float = 1.0,
) -> tuple[Frequencies, float]:
    """Divide each frequency by its own factor: `long` beyond the original context, else `short`.

    Queries and keys are multiplied by `attention_factor` (LongRoPE, Ding et al. 2024).
    """
    options = {"original_context": original_context, "attention_factor": attention_factor}
    require_positive("rotary scaling 'longrope'", **options)
    for name, factors in (("short", short), ("long", long)):
        if len(factors) != len(frequency) or not all(0 < f < math.inf for f in factors):
            raise ShapeError(
                f"rotary scaling 'longrope': {name} must have {len(frequency)} factors above 0"
            )
    divisors = torch.tensor([short, long], device=frequency.device)
    return frequency / divisors[(length > original_context).long()], attention_factor


# Each returns the frequencies, or the frequencies and a factor for queries and keys.
SCALINGS: dict[str, Callable[..., Frequencies | tuple[Frequencies, float]]] = {
    "linear": linear,
    "ntk": ntk,
    "llama3": llama3,
    "yarn": yarn,
    "dynamic": dynamic,
    "longrope": longrope,
}
BY_LENGTH = ("dynamic", "longrope")  # scalings that depend on the length of the text


class Rotary(Position):
    r"""Rotate each pair of coordinates of q and k by an angle that grows with the position.

        (a, b) at position t  ->  (a cos tw - b sin tw,  b cos tw + a sin tw),   w = base^(-2i/d)

    so that q_t . k_s depends on t - s only (RoPE, Su et al. 2021). `fraction` rotates only the
    first part of each head (GPT-NeoX, Phi); `scaling` extends a trained model to longer contexts.
    `window_base` is the base in layers with a sliding window, which are not scaled (Gemma 3).
    A scaling by length uses the largest position so far; keys in a KV cache keep their rotation.
    """

    by_length = False  # the scaling depends on the length of the text

    def __init__(
        self,
        head_dim: int,
        base: float = 10_000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
        window_base: float | None = None,
    ) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            raise ShapeError(f"rotary: fraction must lie in (0, 1], got {fraction}")
        require_positive("position 'rotary'", base=base)
        width = int(head_dim * fraction)
        if width % 2 or width == 0:
            raise ShapeError(
                f"rotary rotates pairs: head_dim={head_dim} times fraction={fraction} must be even"
            )
        self.width, self.base, self.interleaved, self.scaling = width, base, interleaved, scaling
        if window_base is not None:
            self.window_rotary = Rotary(head_dim, window_base, fraction, interleaved)
        if scaling is not None and kind_of(scaling)[0] in BY_LENGTH:
            self.by_length = True  # packed decoders have fixed tables; they refuse this attribute
        start = torch.zeros(1, 1, dtype=torch.long, device="cpu")  # also on the meta device
        self.rotation(start)  # checks the options of `scaling`

    def in_window(self) -> Position:
        """Rotations by `window_base`, without scaling, if it is set."""
        return getattr(self, "window_rotary", self)

    def rotation(self, positions: Int[Tensor, "#batch time"]) -> Rotation:
        """The cosines and sines of the angles at `positions`."""
        pairs = torch.arange(0, self.width, 2, device=positions.device)
        frequency = self.base ** (-pairs / self.width)
        attention_factor = 1.0
        if self.scaling is not None:
            length = positions.max() + 1 if self.by_length else None
            facts = {"frequency": frequency, "base": self.base, "length": length}
            scaled = make(self.scaling, SCALINGS, "rotary scaling", **facts)
            frequency, attention_factor = scaled if isinstance(scaled, tuple) else (scaled, 1.0)
        angle = (positions.unsqueeze(-1) * frequency).unsqueeze(1)  # (batch, 1, time, pairs)
        cos, sin = cos_sin(angle)
        if attention_factor != 1:
            cos, sin = cos * attention_factor, sin * attention_factor
        return Rotation(cos, sin, self.interleaved)


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine and the sine of `angle`."""
    return angle.cos(), angle.sin()
