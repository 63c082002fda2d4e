"""Curves of several runs as figures: of training, and by length."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from regard.errors import ConfigError
from regard.explain.render.curves import TRUTH, Curve, Panel, draw_curves
from regard.pipelines.by_length import ByLength
from regard.training.tracking.history import History, downsample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 120  # of a training curve
UNITS = {"loss": "nats per target", "bits_per_byte": "bits per byte", "accuracy": "fraction"}
SCORES = ("accuracy", "f1", "bleu", "chrf")  # on a linear axis that starts at 0
DERIVED = ("perplexity",)  # follows from the loss


def history_curves(names: Sequence[str], histories: Sequence[History]) -> "Figure":
    """A panel per metric over the steps, a curve per run.

    The metrics are the training loss, those of the validation data and the logged taps.
    """
    metrics = dict.fromkeys(
        name for history in histories for name in history.validation if name not in DERIVED
    )
    if any(history.losses for history in histories):
        metrics = {"loss": None, **metrics}
    metrics |= dict.fromkeys(name for history in histories for name in history.taps)
    if not metrics:
        raise ConfigError("nothing to draw: none of these runs has logged a step yet")
    panels = []
    for metric in metrics:
        curves = [
            _curve(run, history, metric)
            for run, history in enumerate(histories)
            if metric == "loss" or metric in history.validation or metric in history.taps
        ]
        title = metric.replace("_", " ")
        from_zero = metric in SCORES
        panels.append(Panel(title, UNITS.get(metric, title), curves, from_zero=from_zero))
    return draw_curves(names, panels)


def _curve(run: int, history: History, metric: str) -> Curve:
    """The values of a metric over the steps; of a closed-form model its only value."""
    points = history.validation.get(metric) or history.taps.get(metric, [])
    if history.is_closed_form:
        return Curve(run, [], [], level=points[-1][1] if points else None)
    losses = downsample(history.losses, MAX_POINTS) if metric == "loss" else []
    return Curve(run, losses, points)


def forecast_curves(
    names: Sequence[str],
    histories: Sequence[History],
    forecasts: Sequence[tuple[list[float], list[float], list[float]]],
) -> "Figure":
    """The end of each run's validation series with its forecast, and the error by steps ahead.

    `forecasts` are the values before the forecast, the true values and the forecast ones.
    """
    panels = []
    truths: dict[tuple[float, ...], list[Curve]] = {}  # the panels: a series each
    for run, (before, truth, forecast) in enumerate(forecasts):
        curves = truths.setdefault((*before[-1:], *truth), [])
        if not curves:
            series = enumerate([*before, *truth], 1 - len(before))
            curves.append(Curve(TRUTH, [], list(series)))
        curves.append(Curve(run, [], list(enumerate([before[-1], *forecast]))))
    for curves in truths.values():
        title = f"forecast of the last {len(curves[1].validation) - 1:,} validation values"
        panels.append(Panel(title, "value", curves, x_label="steps ahead", linear=True, dots=False))
    errors = [
        Curve(
            run,
            [],
            sorted(
                (int(name.removeprefix("fed_back_")), value)
                for name, value in history.metrics.items()
                if name.removeprefix("fed_back_").isdigit()
            ),
        )
        for run, history in enumerate(histories)
    ]
    title = "error of forecasts, in standard deviations²"
    panels.append(Panel(title, "mean squared error", errors, x_label="steps ahead"))
    return draw_curves(names, panels, caption="forecasts are fed back as inputs")


def by_length_curves(names: Sequence[str], runs: Sequence[ByLength]) -> "Figure":
    """A panel per metric: the metric over the length of the example, a curve per run."""
    metrics = dict.fromkeys(name for run in runs for name in run.ranges[0].metrics)
    panels = []
    for metric in metrics:
        curves = [
            Curve(
                number,
                [],
                [
                    (span.mean, span.metrics[metric])
                    for span in run.ranges
                    if metric in span.metrics
                ],
            )
            for number, run in enumerate(runs)
        ]
        title = metric.replace("_", " ")
        panels.append(Panel(title, title, curves, from_zero=True))
    return draw_curves(names, panels, x_label=f"source length in {runs[0].unit}")
