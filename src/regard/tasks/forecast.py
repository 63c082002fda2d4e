"""Time series forecasting, one step ahead and several steps ahead."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import SeriesBatch
from regard.errors import ConfigError, DataError
from regard.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Forecast(Task):
    r"""Squared error of the next value of a series, and of free-running forecasts.

        one step ahead   x̂_t+1 = f(x_t, x_t-1, …)
        free-running     x̂_t+h = f(x̂_t+h-1, …, x̂_t+1, x_t, …),     h = 1 … horizon

    `loss` and `mae` are the mean squared and mean absolute error one step ahead, `fed_back` is the
    mean squared error over the horizon if forecasts are fed back as inputs (free-running), and
    `fed_back_h` that of step h: it shows how errors accumulate. All are in units of the standard
    deviation of the training data: a loss of 1 is that of always predicting the mean.
    """

    data_kind: ClassVar[str] = "series"
    target_name: ClassVar[str] = "values"
    shapes: ClassVar[tuple[str, ...]] = ("series",)
    verbs: ClassVar[tuple[str, ...]] = ("predict", "forecast")
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "mae", "fed_back")
    column: str | None = None  # the column to forecast; None: the last
    horizon: int = 96  # steps that are forecast from one place
    mean: float | None = None  # mean of the series; None: that of the training data
    std: float | None = None  # standard deviation of the series; None: that of the training data

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ConfigError(f"task.horizon={self.horizon} must be at least 1")

    def collate(self, examples: NDArray[np.float64], generator: torch.Generator) -> SeriesBatch:
        """The values, centred and scaled."""
        assert self.mean is not None
        assert self.std is not None
        return SeriesBatch(torch.from_numpy((examples - self.mean) / self.std))

    def loss(self, model: nn.Module, batch: SeriesBatch) -> Float[Tensor, ""]:
        """Summed squared error, one step ahead."""
        return _one_step_error(model, batch).square().sum()

    def count(self, batch: SeriesBatch) -> Int[Tensor, ""]:
        """How many values the series have, the first ones included."""
        return torch.tensor(batch.series.numel())

    @torch.no_grad()
    def metrics(self, model: nn.Module, batches: Iterable[SeriesBatch]) -> dict[str, float]:
        """Errors one step ahead, and errors of free-running forecasts by step."""
        one_step, fed_back = [], []
        context: int = model.context  # type: ignore[assignment]
        for batch in batches:
            if batch.series.shape[1] < context + self.horizon:
                raise DataError(
                    f"the validation data has {batch.series.shape[1]:,} values; reading {context} "
                    f"and forecasting {self.horizon} takes {context + self.horizon};\n"
                    "raise data.validation_fraction, or lower task.horizon or model.order"
                )
            one_step.append(_one_step_error(model, batch).flatten())
            # every window of inputs and forecast: (windows, context + horizon)
            windows = batch.series.unfold(1, context + self.horizon, 1).flatten(0, 1)
            forecast = model.forecast(windows[:, :context], self.horizon)  # type: ignore[operator]
            fed_back.append((forecast - windows[:, context:]).square())
        error, steps = torch.cat(one_step), torch.cat(fed_back).mean(0)
        powers = [1 << power for power in range(self.horizon.bit_length())]
        return {
            "loss": float(error.square().mean()),
            "mae": float(error.abs().mean()),
            "fed_back": float(steps.mean()),
            **{f"fed_back_{h}": float(steps[h - 1]) for h in sorted({*powers, self.horizon})},
        }

    def unscale(self, values: Tensor) -> list[float]:
        """Undo the scaling of `collate`."""
        assert self.mean is not None
        assert self.std is not None
        unscaled: list[float] = (values * self.std + self.mean).tolist()
        return unscaled


def _one_step_error(model: Any, batch: SeriesBatch) -> Float[Tensor, "batch windows"]:
    """Forecast minus value, at every position with a full context before it."""
    error: Tensor = model(batch.series[:, :-1]) - batch.series[:, model.context :]
    return error
