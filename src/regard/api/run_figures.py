"""Figures of runs: training curves, metrics by length, forecasts, drawings; and their files."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regard.config import kind_of
from regard.errors import ConfigError
from regard.explain.render import strokes
from regard.explain.render.curves import TRUTH, Curve, MetricPanel, Points, draw_curves, printable
from regard.explain.render.figure import encode, page, to_svg
from regard.pipelines.by_length import MetricsByLength
from regard.pipelines.series_forecasts import RECURSIVE_WINDOWS, ColumnForecast
from regard.tasks import TASKS, Forecast, Task
from regard.training.tracking.history import History, downsample
from regard.units import count_noun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 120  # points of a training curve
UNITS = {"bits_per_byte": "bits per byte", "accuracy": "fraction"}
ERROR_CAPTION = f"error: mean over all windows, {Forecast.unit}"
DAY = 86400  # seconds
# parts of the names of metrics that are drawn on a linear axis that starts at 0
SCORES = ("accuracy", "f1", "exact_match", "bleu", "chrf")
DERIVED = ("perplexity",)  # follows from the loss


def history_curves(names: Sequence[str], histories: Sequence[History]) -> "Figure":
    """A panel per metric over the steps, a curve per run.

    The metrics are the training loss, those of the validation data and the logged hook points.
    """
    metrics = dict.fromkeys(
        name for history in histories for name in history.validation if name not in DERIVED
    )
    if any(history.losses for history in histories):
        metrics = {"loss": None, **metrics}
    metrics |= dict.fromkeys(name for history in histories for name in history.activations)
    if not metrics:
        raise ConfigError("nothing to draw: none of these runs has logged a step yet")
    panels = []
    for metric in metrics:
        curves = [
            _curve(run, history, metric)
            for run, history in enumerate(histories)
            if metric == "loss" or metric in history.validation or metric in history.activations
        ]
        title = metric.replace("_", " ")
        unit = _loss_unit(histories) if metric == "loss" else UNITS.get(metric, title)
        is_validation_metric = any(metric in history.validation for history in histories)
        from_zero = is_validation_metric and any(score in metric for score in SCORES)
        panels.append(MetricPanel(title, unit, curves, from_zero=from_zero))
    return draw_curves(names, panels)


def _loss_unit(histories: Sequence[History]) -> str:
    task = TASKS.get(kind_of(histories[0].config.task)[0], Task)
    return task.loss_unit


def _curve(run: int, history: History, metric: str) -> Curve:
    """A metric over the steps; a model fitted without gradients has one value, drawn as a line."""
    points = history.validation.get(metric) or history.activations.get(metric, [])
    if history.is_fitted_without_gradients:
        return Curve(run, [], [], level=points[-1][1] if points else None)
    losses = downsample(history.losses, MAX_POINTS) if metric == "loss" else []
    return Curve(run, losses, points)


def forecast_curves(
    names: Sequence[str], forecasts: Sequence[ColumnForecast], errors: Sequence[Points]
) -> "Figure":
    """The end of each run's validation series with its forecast, and the errors by steps ahead.

    Where a run forecasts several columns, the first is drawn.
    """
    panels = []
    runs_by_series: dict[tuple[float, ...], list[int]] = {}  # a panel for each series
    for run, forecast in enumerate(forecasts):
        runs_by_series.setdefault((*forecast.history[-1:], *forecast.truth), []).append(run)
    for runs in runs_by_series.values():
        forecast = forecasts[runs[0]]
        curves = [
            _true_values(forecast),
            *(_multi_step_values(run, forecasts[run]) for run in runs),
        ]
        title = f"forecast of the last {count_noun(len(forecast.forecast), 'validation value')}"
        panels.append(_values_panel(title, forecast, curves))
    curves = [Curve(run, [], points) for run, points in enumerate(errors)]
    panels.append(_error_panel(curves))
    return draw_curves(names, panels, caption=ERROR_CAPTION, dashes=True)


def forecast_figure(
    forecast: ColumnForecast, errors: Points, method: str, recursive_errors: Points = ()
) -> "Figure":
    """The end of a series with its forecasts of one run, and the errors by steps ahead.

    `method` is direct or recursive; `recursive_errors` are those of a direct model whose forecasts
    are fed back row by row.
    """
    names = [f"{method} forecast"]
    names += ["recursive forecast, row by row"] if forecast.recursive else []
    names.append("one step ahead")
    steps = len(forecast.forecast)
    known = len(forecast.truth)  # no values for a forecast of the future
    curves = [_true_values(forecast), _multi_step_values(0, forecast)]
    if forecast.recursive:
        last = len(forecast.history) - 1
        curves.append(_curve_from(1, forecast, last, [forecast.history[-1], *forecast.recursive]))
    start = len(forecast.history) - (0 if known else len(forecast.one_step))
    curves.append(_curve_from(len(names) - 1, forecast, start, forecast.one_step))
    place = "last" if known else "next"
    title = f"{forecast.column}: forecast of the {place} {count_noun(steps, 'value')}"
    panels = [_values_panel(title, forecast, curves)]
    caption = ""
    if errors:
        caption = ERROR_CAPTION
        error_curves = [Curve(0, [], errors)]
        if recursive_errors:
            error_curves.append(Curve(1, [], recursive_errors))
            caption += f"; row by row: over at most {RECURSIVE_WINDOWS}"
        panels.append(_error_panel(error_curves))
    return draw_curves(names, panels, caption=caption, dashes=True)


def _values_panel(title: str, forecast: ColumnForecast, curves: Sequence[Curve]) -> MetricPanel:
    """Values of a column over the dates of the rows, or over the row numbers."""
    has_dates = forecast.dates is not None
    x_label = ", ".join(forecast.date_columns) if has_dates else "row"
    return MetricPanel(
        printable(title),
        printable(forecast.column),
        curves,
        x_label=printable(x_label),
        linear=True,
        dots=False,
        dates=has_dates,
    )


def _error_panel(curves: Sequence[Curve]) -> MetricPanel:
    """The error of each step; dots where only some steps were measured."""
    every_step = all(len(curve.validation) == curve.validation[-1][0] for curve in curves)
    return MetricPanel(
        "error by forecast step",
        "mean squared error",
        curves,
        x_label="steps ahead",
        dots=not every_step,
    )


def _true_values(forecast: ColumnForecast) -> Curve:
    return _curve_from(TRUTH, forecast, 0, [*forecast.history, *forecast.truth])


def _multi_step_values(run: int, forecast: ColumnForecast) -> Curve:
    return _curve_from(
        run, forecast, len(forecast.history) - 1, [forecast.history[-1], *forecast.forecast]
    )


def _curve_from(run: int, forecast: ColumnForecast, start: int, values: Sequence[float]) -> Curve:
    """Values from the row `start` of the history on, over days since 1970 or row numbers."""
    if forecast.dates is None:
        positions = [float(forecast.first_row + start + index) for index in range(len(values))]
    else:
        seconds = (
            forecast.dates[start : start + len(values)].astype("datetime64[s]").astype(np.int64)
        )
        positions = (seconds / DAY).tolist()
    return Curve(run, [], list(zip(positions, values, strict=True)))


def by_length_curves(names: Sequence[str], results: Sequence[MetricsByLength]) -> "Figure":
    """A panel per metric: the metric over the length of the example, a curve per run."""
    metrics = dict.fromkeys(name for result in results for name in result.metric_names)
    panels = []
    for metric in metrics:
        curves = [
            Curve(
                index,
                [],
                [
                    (span.mean, span.metrics[metric])
                    for span in result.ranges
                    if metric in span.metrics
                ],
            )
            for index, result in enumerate(results)
        ]
        title = metric.replace("_", " ")
        panels.append(MetricPanel(title, title, curves, from_zero=True))
    return draw_curves(names, panels, x_label=f"source length in {results[0].unit}")


def encode_figure(figure: "Figure", suffix: str, tables: Sequence[str] = ()) -> bytes:
    """A figure as the content of a .svg, .png, .pdf or .html file.

    `tables` are HTML tables below the figure of an .html file.
    """
    if suffix != ".html" or not tables:
        return encode(figure, suffix)
    return page(str(figure.get_label()), "\n".join([to_svg(figure), *tables])).encode()


def encode_drawings(drawings: Sequence[NDArray[Any]], suffix: str) -> bytes:
    """Drawings of a handwriting run as the content of an .svg or .png file."""
    if suffix == ".svg":
        return strokes.to_svg(drawings).encode()
    return encode(strokes.figure(drawings), suffix)


def drawings_text(drawings: Sequence[NDArray[Any]]) -> str:
    """Drawings of a handwriting run side by side, as characters of a terminal."""
    return strokes.to_text(drawings)
