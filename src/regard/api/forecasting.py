"""Forecasts of a run on a series, their dates and their figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regard.api.run_evaluation import validation_data
from regard.api.run_figures import forecast_figure
from regard.config import Choice
from regard.pipelines import open_data
from regard.pipelines.series import series_task
from regard.pipelines.series_forecasts import (
    ColumnForecast,
    backtest,
    forecast,
    forecast_future,
    recursive_errors,
    values_by_column,
)
from regard.tasks import Forecast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.api.run import Run


def next_values(run: "Run", path: Path | str | None, steps: int | None) -> Any:
    """The next values of a series: a list, or for several columns a dict of lists."""
    task = _task(run)
    return values_by_column(task, forecast(run.model, task, _open_series(run, path), steps))


def next_dates(run: "Run", path: Path | str | None, steps: int | None) -> list[str]:
    """The dates of the next rows of a series; empty if its rows have no dates."""
    task = _task(run)
    dates = _open_series(run, path).dates
    return [] if dates is None else dates.next_dates(task.horizon if steps is None else steps)


def future_figure(
    run: "Run", path: Path | str | None, steps: int | None, column: str | None
) -> "Figure":
    """The next values of a column, and one-step-ahead forecasts of its last true values."""
    task = _task(run)
    end = forecast_future(run.model, task, _open_series(run, path), steps, column)
    return forecast_figure(end, run.metrics, task.forecast_method(run.model, len(end.forecast)))


def evaluation_figure(
    run: "Run", data: Sequence[Choice], test: bool, column: str | None
) -> "Figure":
    """The last values of a column of the validation data with its forecasts, and the errors."""
    task = _task(run)
    series = cast(Any, validation_data(run, data, test=test))
    metrics = run.evaluate(*data, test=test)
    end = backtest(run.model, task, series, column)
    method = task.forecast_method(run.model, task.horizon)
    return forecast_figure(end, metrics, method, recursive_errors(run.model, task, series))


def backtest_validation(run: "Run") -> ColumnForecast:
    """The end of the validation series, in its first column, and its forecasts."""
    return backtest(run.model, _task(run), cast(Any, validation_data(run)))


def _task(run: "Run") -> Forecast:
    run._require("forecast", "forecast a series")
    return series_task(run.config.task)


def _open_series(run: "Run", path: Path | str | None) -> Any:
    return open_data(run.config.data.path if path is None else str(path), kind="series")
