"""One linear layer from the last values of a series to the next, fitted by least squares."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from regard.config import Settings
from regard.errors import ConfigError, DataError, ShapeError
from regard.models.autoregression import SeriesBatch
from regard.models.compatibility import check_sizes


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class NLinearConfig(Settings):
    """One linear layer from `context` values to the next `horizon`."""

    architecture: ClassVar[str] = "linear"
    input_kind: ClassVar[str] = "series"  # instead of text
    context: int = 336  # values that are read; task.context sets it
    horizon: int = 96  # values that are forecast at once; task.horizon sets it
    ridge: float = 1.0  # L2 penalty of the weights (ridge regression)

    def __post_init__(self) -> None:
        check_sizes(self, "context", "horizon")
        if not 0 <= self.ridge < float("inf"):
            raise ConfigError(f"ridge={self.ridge} must be at least 0 and finite")


class NLinear(nn.Module):
    r"""The next values are a linear function of the last ones, relative to the last value.

        x_{T+h} = x_T + bias_h + sum_i weight_{h,i} (x_i - x_T),      h = 1 ... horizon

    The weights minimize the squared error of all steps plus ridge |weight|^2, and are shared by all
    series. NLinear of Zeng et al. 2023, solved in closed form (Toner & Darlow 2024).
    """

    weight: Float64[Tensor, "horizon time"]
    bias: Float64[Tensor, " horizon"]

    def __init__(self, config: NLinearConfig) -> None:
        super().__init__()
        self.config = config
        self.context, self.horizon = config.context, config.horizon
        shape = (config.horizon, config.context)
        self.register_buffer("weight", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros(config.horizon, dtype=torch.float64))

    def fit(self, batches: Iterable[SeriesBatch]) -> None:
        """Solve the normal equations, whose terms are summed series by series."""
        size, context = self.context + 1, self.context
        gram = self.weight.new_zeros(size, size)
        moment = self.weight.new_zeros(size, self.horizon)
        for batch in batches:
            for series in batch.series.to(self.weight):
                if len(series) < context + self.horizon:
                    continue
                rows = series.unfold(0, context + self.horizon, 1)
                rows = rows - rows[:, context - 1 : context]
                inputs = torch.cat([rows[:, :context], torch.ones_like(rows[:, :1])], 1)
                gram += inputs.mT @ inputs
                moment += inputs.mT @ rows[:, context:]
        if not gram.any():
            raise DataError(
                f"reading {context} values and forecasting {self.horizon} needs a training series "
                f"of at least {context + self.horizon} values; lower task.context or task.horizon"
            )
        penalty = torch.full_like(gram[0], self.config.ridge)
        penalty[-1] = 0  # the bias is not penalized
        # the last value minus itself is always 0, so the matrix is singular without a penalty
        solution = torch.linalg.pinv(gram + penalty.diag(), hermitian=True) @ moment
        self.weight, self.bias = solution[:-1].mT.contiguous(), solution[-1].clone()

    def forward(self, series: Float[Tensor, "batch time"]) -> Float64[Tensor, "batch horizon"]:
        """The `horizon` values after each row."""
        if series.shape[1] < self.context:
            raise ShapeError(
                f"a series of {series.shape[1]} values is shorter than context={self.context}; "
                f"give at least {self.context} values"
            )
        last_value = series[:, -1:].to(self.weight)
        inputs = series[:, -self.context :].to(self.weight)
        return last_value + (inputs - last_value) @ self.weight.mT + self.bias

    def forecast(
        self, series: Float[Tensor, "batch time"], steps: int
    ) -> Float64[Tensor, "batch predictions"]:
        """The next `steps` values; beyond the horizon recursively: forecasts are read as inputs."""
        values = series.to(self.weight)
        while values.shape[1] < series.shape[1] + steps:
            values = torch.cat([values, self(values)], 1)
        return values[:, series.shape[1] : series.shape[1] + steps]

    if TYPE_CHECKING:
        __call__ = forward
