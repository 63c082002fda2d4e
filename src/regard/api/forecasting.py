"""Forecasts of a run on a series, their dates and their figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regard.api.run_evaluation import validation_data
from regard.api.run_figures import forecast_figure
from regard.config import Choice
from regard.errors import RegardError
from regard.explain.render.curves import Points
from regard.pipelines import open_data, open_split, prepare_evaluation
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
    column_forecast = forecast_future(run.model, task, _open_series(run, path), steps, column)
    method = task.forecast_method(run.model, len(column_forecast.forecast))
    return forecast_figure(column_forecast, errors_by_step(run), method)


def evaluation_figure(
    run: "Run", data: Sequence[Choice], test: bool, column: str | None
) -> "Figure":
    """The last values of a column of the validation data with its forecasts, and the errors."""
    task = _task(run)
    series = cast(Any, validation_data(run, data, test=test))
    column_forecast = backtest(run.model, task, series, column)
    method = task.forecast_method(run.model, task.horizon)
    recursive = list(enumerate(recursive_errors(run.model, task, series), 1))
    return forecast_figure(column_forecast, _errors_by_step(run, series), method, recursive)


def backtest_validation(run: "Run") -> ColumnForecast:
    """The end of the validation series, in its first column, and its forecasts."""
    return backtest(run.model, _task(run), cast(Any, validation_data(run)))


def errors_by_step(run: "Run") -> Points:
    """The mean squared error of each forecast step on the validation data of a run.

    Where this data cannot be opened, of the steps that the metrics of the run have.
    """
    try:
        return _errors_by_step(run, validation_data(run))
    except RegardError:
        steps = {name.removeprefix("mse_"): value for name, value in run.metrics.items()}
        return sorted((int(step), value) for step, value in steps.items() if step.isdigit())


def _errors_by_step(run: "Run", series: Any) -> Points:
    data = prepare_evaluation(run.config, series, None)
    batches = (cast(Any, batch.to(run.device)) for batch in data.validation_batches(None))
    errors = cast(Forecast, data.task).mse_by_step(run.model, batches)
    return list(enumerate(errors, 1))


def _task(run: "Run") -> Forecast:
    run._require("forecast", "forecast a series")
    return series_task(run.config.task)


def _open_series(run: "Run", path: Path | str | None) -> Any:
    """The series at a path, or else the data of the run up to the end of the validation data."""
    if path is not None:
        return open_data(str(path), kind="series")
    _, validation = open_split(run.config, is_new=False)
    if validation.history is None:  # from a file of its own
        return validation
    return open_data(run.config.data.path, kind="series")  # the rows of all splits
