"""Rotary position embedding (RoPE) and its context extensions."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.config import make
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


SCALINGS: dict[str, Callable[..., Frequencies]] = {"linear": linear, "ntk": ntk, "llama3": llama3}


class Rotary(Position):
    r"""Rotate each pair of coordinates of q and k by an angle that grows with the position.

        (a, b) at position t  ->  (a cos tw - b sin tw,  b cos tw + a sin tw),   w = base^(-2i/d)

    so that q_t . k_s depends on t - s only (RoPE, Su et al. 2021). `fraction` rotates only the
    first part of each head (GPT-NeoX, Phi); `scaling` extends a trained model to longer contexts.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10_000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
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
        start = torch.zeros(1, 1, dtype=torch.long, device="cpu")  # also on the meta device
        self.rotation(start)  # checks the options of `scaling`

    def rotation(self, positions: Int[Tensor, "#batch time"]) -> Rotation:
        """The cosines and sines of the angles at `positions`."""
        pairs = torch.arange(0, self.width, 2, device=positions.device)
        frequency = self.base ** (-pairs / self.width)
        if self.scaling is not None:
            frequency = make(self.scaling, SCALINGS, "rotary scaling", frequency=frequency)
        angle = (positions.unsqueeze(-1) * frequency).unsqueeze(1)  # (batch, 1, time, pairs)
        return Rotation(*cos_sin(angle), self.interleaved)


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine and the sine of `angle`."""
    return angle.cos(), angle.sin()
