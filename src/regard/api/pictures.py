"""Curves of several runs as a `Picture`: of training, by length, of gradient norms."""

from collections.abc import Sequence

from regard.errors import ConfigError
from regard.explain.gradient import GradientFlow
from regard.explain.render.curves import Curve, Panel, draw_curves
from regard.explain.render.picture import Picture
from regard.pipelines.by_length import ByLength
from regard.training.tracking.history import History, downsample

MAX_POINTS = 120  # of a training curve
MAX_DOTS = 80  # of a gradient curve
UNITS = {"loss": "nats per target", "bits_per_byte": "bits per byte", "accuracy": "fraction"}
DERIVED = ("perplexity",)  # follows from the loss


def history_curves(names: Sequence[str], histories: Sequence[History]) -> Picture:
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
            Curve(
                run,
                downsample(history.losses, MAX_POINTS) if metric == "loss" else [],
                history.validation.get(metric) or history.taps.get(metric, []),
            )
            for run, history in enumerate(histories)
        ]
        title = metric.replace("_", " ")
        panels.append(Panel(title, UNITS.get(metric, title), curves))
    return draw_curves(names, panels)


def by_length_curves(names: Sequence[str], runs: Sequence[ByLength]) -> Picture:
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


def gradient_curves(names: Sequence[str], flows: Sequence[GradientFlow], layer: int = 0) -> Picture:
    """Gradient norm over distance from the last position; norms of zero are left out."""
    norms = [flow.by_distance(layer) for flow in flows]
    stride = -(-max(map(len, norms)) // MAX_DOTS)
    curves = [
        Curve(
            run,
            [],
            [(back, values[back]) for back in range(0, len(values), stride) if values[back] > 0],
        )
        for run, values in enumerate(norms)
    ]
    panel = Panel("gradient of the last token's loss", "norm", curves)
    caption = "norm of the gradient of the last token's loss at each earlier position"
    return draw_curves(names, [panel], x_label="positions back", caption=caption)
