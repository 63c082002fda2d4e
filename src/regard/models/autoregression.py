"""Linear autoregression AR(p) of time series, fitted by least squares."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.config import Settings
from regard.errors import ConfigError, DataError, ShapeError


@runtime_checkable
class SeriesBatch(Protocol):
    """A batch of time series."""

    @property
    def series(self) -> Float[Tensor, "batch time"]:
        """One series per row."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class AutoregressionConfig(Settings):
    """AR(p), where p is `order`."""

    architecture: ClassVar[str] = "linear"
    input_kind: ClassVar[str] = "series"  # instead of text
    order: int = 24  # number of lags, p

    @property
    def context(self) -> int:
        """The number of lags."""
        return self.order

    def __post_init__(self) -> None:
        if self.order < 1:
            raise ConfigError(f"order={self.order} must be at least 1")


class Autoregression(nn.Module):
    r"""AR(p): the next value is a linear function of the last p values.

        x_t = bias + sum_i weight_i x_{t-i} + noise,      i = 1 … p

    The weights are the least-squares solution for one-step-ahead prediction. Yule 1927.
    """

    weight: Float64[Tensor, " order"]  # that of the most recent value first
    bias: Float64[Tensor, ""]

    def __init__(self, config: AutoregressionConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.order
        self.register_buffer("weight", torch.zeros(config.order, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros((), dtype=torch.float64))

    def fit(self, batches: Iterable[SeriesBatch]) -> None:
        """Solve the least-squares problem in one pass over the series.

        Only R of the QR decomposition is stored: it determines the least-squares solution.
        """
        size = self.config.order + 2
        r = self.weight.new_zeros(size, size)
        for batch in batches:
            series = batch.series
            if series.shape[1] <= self.config.order:
                continue  # too short for one prediction
            rows = series.to(self.weight).unfold(1, self.config.order + 1, 1).flatten(0, 1)
            rows = torch.cat([torch.ones_like(rows[:, :1]), rows], 1)  # 1, oldest … newest, next
            r = torch.linalg.qr(torch.cat([r, rows]), mode="r").R
        if not r.any():
            raise DataError(
                f"order={self.config.order} needs series of at least {self.config.order + 1} "
                "values; set a smaller model.order, or add data"
            )
        solution = torch.linalg.pinv(r[:, :-1]) @ r[:, -1]  # the minimum-norm solution
        self.bias, self.weight = solution[0], solution[1:].flip(0)

    def forward(self, series: Float[Tensor, "batch time"]) -> Float64[Tensor, "batch predictions"]:
        """One-step-ahead predictions after each value of a row, from the `order`-th on."""
        order = self.config.order
        if series.shape[1] < order:
            raise ShapeError(
                f"a series of {series.shape[1]} values is shorter than order={order}; "
                f"give at least {order} values"
            )
        return series.to(self.weight).unfold(1, order, 1) @ self.weight.flip(0) + self.bias

    def forecast(
        self, series: Float[Tensor, "batch time"], steps: int
    ) -> Float64[Tensor, "batch predictions"]:
        """The next `steps` values, recursively: predictions are read as inputs."""
        values = series.to(self.weight)
        for _ in range(steps):
            values = torch.cat([values, self(values[:, -self.config.order :])], 1)
        return values[:, series.shape[1] :]

    if TYPE_CHECKING:
        __call__ = forward
