"""Forecasts of a trained model: after a series, and of its last values."""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from regard.data.series import Series
from regard.errors import ConfigError, DataError
from regard.pipelines.batching import evenly_spaced_indices
from regard.pipelines.series_windows import SeriesWindows
from regard.tasks import Forecast
from regard.tasks.forecast import has_fit

RECURSIVE_WINDOWS = 256  # windows on which a direct model is fed its own forecasts, for a figure


def forecast(
    model: nn.Module,
    task: Forecast,
    series: Series,
    steps: int | None = None,
    *,
    rows_per_pass: int | None = None,
) -> NDArray[np.float64]:
    """The values after the end of a series, (steps, columns), by default up to the horizon.

    `rows_per_pass` as in `Forecast.rollout`.
    """
    steps = task.horizon if steps is None else steps
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"steps={steps} must be an integer of at least 1")
    context = task.context or cast(int, model.context)
    if len(series) < context:
        raise DataError(
            f"{series.name} has {len(series)} rows, but the model needs at least {context}"
        )
    model.eval()
    rows = task.standardize(series.values[-context:, series.indices(task.read_columns)])
    dtype = torch.float64 if has_fit(model) else torch.float32
    window = torch.from_numpy(rows).to(_device(model), dtype)
    with torch.no_grad():
        next_rows = task.rollout(model, window.unsqueeze(0), steps, rows_per_pass=rows_per_pass)
        return task.unstandardize(next_rows[0])


def values_by_column(task: Forecast, values: NDArray[np.float64]) -> Any:
    """Forecast values as a list; of several columns, as a dict of lists."""
    if len(task.columns) == 1:
        return values[:, 0].tolist()
    return dict(zip(task.columns, values.T.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class ColumnForecast:
    """Forecasts of one column, in its unit: of the last values of a series, or of the next ones."""

    column: str
    history: list[float]  # values before the forecast
    truth: list[float]  # values that are forecast; empty after the end of the series
    forecast: list[float]  # multi-step: from `history` only
    one_step: list[float]  # one step ahead: each from the true values before it
    # of a direct model: row by row, each from the forecasts before it; empty for other models
    recursive: list[float]
    first_row: int  # the row of the first value of `history`, from 1
    dates: NDArray[np.datetime64] | None = None  # of all rows, those that are forecast included
    date_columns: tuple[str, ...] = ()


def backtest(
    model: nn.Module, task: Forecast, series: Series, column: str | None = None
) -> ColumnForecast:
    """Multi-step and one-step-ahead forecasts of the last `horizon` values of a series."""
    rows = series.values
    if series.history is not None:
        rows = np.concatenate([series.history, rows])
    steps = min(task.horizon, len(rows) - (task.context or cast(int, model.context)))
    if steps < 1:
        raise DataError(
            f"{series.name} has {len(rows)} rows, and the model reads {len(rows) - steps}; a "
            "forecast of the last values needs more rows"
        )
    forecasts = _forecasts(model, task, replace(series, values=rows[:-steps]), steps)
    return _column_forecast(model, task, replace(series, values=rows), column, steps, forecasts)


def forecast_future(
    model: nn.Module, task: Forecast, series: Series, steps: int | None, column: str | None = None
) -> ColumnForecast:
    """A multi-step forecast after a series, and one-step-ahead forecasts of its last values."""
    steps = task.horizon if steps is None else steps
    forecasts = _forecasts(model, task, series, steps)
    count = min(steps, len(series) - (task.context or cast(int, model.context)))
    result = _column_forecast(model, task, series, column, count, forecasts)
    dates = None if series.dates is None else series.dates.next_values(steps)
    if dates is not None and result.dates is not None:  # empty if the step is not known
        dates = np.concatenate([result.dates, dates]) if len(dates) else None
    return replace(result, history=[*result.history, *result.truth], truth=[], dates=dates)


Forecasts = tuple[NDArray[np.float64], NDArray[np.float64]]  # (steps, columns) each


def _forecasts(model: nn.Module, task: Forecast, series: Series, steps: int) -> Forecasts:
    """The forecast of a model and, of a direct one, its recursive forecast row by row."""
    multi_step = forecast(model, task, series, steps)
    if not task.can_forecast_recursively(model, steps):
        return multi_step, multi_step[:0]
    return multi_step, forecast(model, task, series, steps, rows_per_pass=1)


def recursive_errors(model: nn.Module, task: Forecast, series: Series) -> list[float]:
    """The mean squared error of each step of a direct model, fed its own forecasts row by row.

    They are computed on at most `RECURSIVE_WINDOWS` windows, since each row takes a forward pass.
    Empty for other models.
    """
    if not task.can_forecast_recursively(model, task.horizon):
        return []
    task = replace(task, context=task.context or cast(int, model.context))
    windows = SeriesWindows.from_series(series, task, double=has_fit(model))
    rows = windows.read(evenly_spaced_indices(len(windows), RECURSIVE_WINDOWS)).to(_device(model))
    batch = task.collate((rows, windows.context), torch.Generator())
    with torch.no_grad():
        error = task.rollout(model, batch.series, task.horizon, rows_per_pass=1) - batch.targets
    errors: list[float] = error.double().square().mean((0, 2)).tolist()
    return errors


def _column_forecast(
    model: nn.Module,
    task: Forecast,
    series: Series,
    column: str | None,
    count: int,
    forecasts: Forecasts,
) -> ColumnForecast:
    """The last `count` values with one-step-ahead forecasts, and these multi-step forecasts."""
    output, context = task.column_index(column), task.context or cast(int, model.context)
    name = task.columns[output]
    values = series.column(name).tolist()
    last = replace(series, values=series.values[-(context + count) :], history=None)
    one_step_task = replace(task, horizon=1, context=context)
    one_step: list[float] = []
    if count:
        windows = SeriesWindows.from_series(last, one_step_task, double=has_fit(model))
        inputs = windows.read(np.arange(len(windows)))[:, :-1].to(_device(model))
        with torch.no_grad():
            one_step = task.unstandardize(task.rollout(model, inputs, 1)[:, 0])[:, output].tolist()
    multi_step, recursive = (rows[:, output].tolist() for rows in forecasts)
    history = values[: len(values) - count][-2 * len(multi_step) :]
    truth = values[len(values) - count :]
    first_row = len(values) - count - len(history) + 1
    result = ColumnForecast(name, history, truth, multi_step, one_step, recursive, first_row)
    if series.dates is None:
        return result
    dates = series.dates.values[first_row - 1 : len(values)]
    return replace(result, dates=dates, date_columns=series.dates.columns)


def _device(model: nn.Module) -> torch.device:
    weights = [*model.parameters(), *model.buffers()]
    return weights[0].device
