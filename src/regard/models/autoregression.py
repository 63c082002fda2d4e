"""The next number of a series as a weighted sum of the few before it. No gradients, only `fit`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.errors import ConfigError, DataError, ShapeError


@runtime_checkable
class Numbers(Protocol):
    """Series of numbers."""

    @property
    def series(self) -> Float[Tensor, "batch time"]:
        """One in each row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoregressionConfig:
    """AR(p), where p is `order`."""

    shape: ClassVar[str] = "series"  # it reads numbers, not ids
    order: int = 24  # the next number depends on so many before it

    @property
    def context(self) -> int:
        """How many numbers it looks at."""
        return self.order

    def __post_init__(self) -> None:
        if self.order < 1:
            raise ConfigError(f"order={self.order} must be at least 1")


class Autoregression(nn.Module):
    r"""The next number is a weighted sum of the last ones.

        x_t = bias + sum_i weight_i x_t-i + noise,      i = 1 … order

    The weights are those of the least squared error, one step ahead, over all of the series.
    Yule 1927.
    """

    weight: Float64[Tensor, " order"]  # of the newest number first
    bias: Float64[Tensor, ""]

    def __init__(self, config: AutoregressionConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.order
        self.register_buffer("weight", torch.zeros(config.order, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros((), dtype=torch.float64))

    def fit(self, batches: Iterable[Numbers]) -> None:
        """Find the weights from series in one pass.

        Of what was seen only the R of QR is kept, which has the same squared errors.
        """
        size = self.config.order + 2
        kept = self.weight.new_zeros(size, size)
        for batch in batches:
            series = batch.series
            if series.shape[1] <= self.config.order:
                continue  # too short for one prediction
            rows = series.to(self.weight).unfold(1, self.config.order + 1, 1).flatten(0, 1)
            rows = torch.cat([torch.ones_like(rows[:, :1]), rows], 1)  # 1, oldest … newest, next
            kept = torch.linalg.qr(torch.cat([kept, rows]), mode="r").R
        if not kept.any():
            raise DataError(
                f"order={self.config.order} needs series of {self.config.order + 1} numbers or more"
            )
        # where several weights do equally well, the smallest
        found = torch.linalg.pinv(kept[:, :-1]) @ kept[:, -1]
        self.bias, self.weight = found[0], found[1:].flip(0)

    def forward(self, series: Float[Tensor, "batch time"]) -> Float64[Tensor, "batch places"]:
        """The number after each place that has `order` numbers up to it: one step ahead."""
        order = self.config.order
        if series.shape[1] < order:
            raise ShapeError(f"{series.shape[1]} numbers are fewer than order={order}")
        return series.to(self.weight).unfold(1, order, 1) @ self.weight.flip(0) + self.bias

    def forecast(
        self, series: Float[Tensor, "batch time"], steps: int
    ) -> Float64[Tensor, "batch places"]:
        """The next `steps` numbers: each prediction is fed back as if it had been seen."""
        seen = series.to(self.weight)
        for _ in range(steps):
            seen = torch.cat([seen, self(seen[:, -self.config.order :])], 1)
        return seen[:, series.shape[1] :]

    if TYPE_CHECKING:
        __call__ = forward
