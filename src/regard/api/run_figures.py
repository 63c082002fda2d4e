"""Figures of runs: training curves, metrics by length, forecasts, drawings; and their files."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from regard.config import kind_of
from regard.errors import ConfigError
from regard.explain.render import strokes
from regard.explain.render.curves import TRUTH, Curve, Panel, draw_curves
from regard.explain.render.figure import encode, page, to_svg
from regard.pipelines.by_length import ByLength
from regard.pipelines.series_forecasts import RECURSIVE_WINDOWS, ColumnForecast
from regard.tasks import TASKS, Task
from regard.training.tracking.history import History, downsample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 120  # points of a training curve
UNITS = {"bits_per_byte": "bits per byte", "accuracy": "fraction"}
ERROR_BY_STEP = "error by forecast step"
ERROR = "squared error of scaled columns"
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
        panels.append(Panel(title, unit, curves, from_zero=from_zero))
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
    names: Sequence[str],
    histories: Sequence[History],
    ends: Sequence[ColumnForecast],
) -> "Figure":
    """The end of each run's validation series with its forecast, and the error by steps ahead.

    Where a run forecasts several columns, the first is drawn.
    """
    panels = []
    curves_by_series: dict[tuple[float, ...], list[Curve]] = {}  # a panel for each series
    for run, end in enumerate(ends):
        curves = curves_by_series.setdefault((*end.history[-1:], *end.truth), [])
        if not curves:
            curves.append(_true_values(end))
        curves.append(_multi_step_values(run, end))
    for curves in curves_by_series.values():
        title = f"forecast of the last {len(curves[1].validation) - 1:,} validation values"
        panels.append(Panel(title, "value", curves, x_label="steps ahead", linear=True, dots=False))
    errors = [_error_by_step(run, history.metrics) for run, history in enumerate(histories)]
    panels.append(Panel(ERROR_BY_STEP, ERROR, errors, x_label="steps ahead"))
    return draw_curves(names, panels, caption="error: mean over all windows")


def forecast_figure(
    end: ColumnForecast,
    metrics: Mapping[str, float],
    method: str,
    recursive_errors: Mapping[str, float] | None = None,
) -> "Figure":
    """The end of a series with its forecasts of one run, and the error by forecast step.

    `method` is direct or recursive; `recursive_errors` are those of a direct model whose forecasts
    are fed back row by row.
    """
    names = [f"{method} forecast", "one step ahead"]
    names += ["recursive forecast, row by row"] if end.recursive else []
    steps = len(end.forecast)
    known = len(end.truth)  # no values for a forecast of the future
    curves = [_true_values(end), _multi_step_values(0, end)]
    start = 1 if known else 1 - len(end.one_step)
    curves.append(Curve(1, [], list(enumerate(end.one_step, start))))
    if end.recursive:
        curves.append(Curve(2, [], list(enumerate([end.history[-1], *end.recursive]))))
    title = f"{end.column}: {'the last' if known else 'the next'} {steps:,} values"
    panels = [Panel(title, "value", curves, x_label="steps ahead", linear=True, dots=False)]
    errors = [_error_by_step(0, metrics)]
    caption = "error: mean over all windows"
    if recursive_errors:
        errors.append(_error_by_step(2, recursive_errors))
        caption += f"; row by row: over at most {RECURSIVE_WINDOWS}"
    if errors[0].validation:
        panels.append(Panel(ERROR_BY_STEP, ERROR, errors, x_label="steps ahead"))
    return draw_curves(names, panels, caption=caption)


def _true_values(end: ColumnForecast) -> Curve:
    return Curve(TRUTH, [], list(enumerate([*end.history, *end.truth], 1 - len(end.history))))


def _multi_step_values(run: int, end: ColumnForecast) -> Curve:
    return Curve(run, [], list(enumerate([end.history[-1], *end.forecast])))


def _error_by_step(run: int, metrics: Mapping[str, float]) -> Curve:
    """The error of each step ahead that was measured."""
    points = sorted(
        (int(name.removeprefix("mse_")), value)
        for name, value in metrics.items()
        if name.removeprefix("mse_").isdigit()
    )
    return Curve(run, [], points)


def by_length_curves(names: Sequence[str], runs: Sequence[ByLength]) -> "Figure":
    """A panel per metric: the metric over the length of the example, a curve per run."""
    metrics = dict.fromkeys(name for run in runs for name in run.ranges[0].metrics)
    panels = []
    for metric in metrics:
        curves = [
            Curve(
                index,
                [],
                [
                    (span.mean, span.metrics[metric])
                    for span in run.ranges
                    if metric in span.metrics
                ],
            )
            for index, run in enumerate(runs)
        ]
        title = metric.replace("_", " ")
        panels.append(Panel(title, title, curves, from_zero=True))
    return draw_curves(names, panels, x_label=f"source length in {runs[0].unit}")


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
