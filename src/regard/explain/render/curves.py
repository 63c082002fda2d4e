"""Line charts of several runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from regard.explain.render.figure import new_figure, style
from regard.explain.render.token_text import truncate, visible_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 5.2, 3.6  # size of a panel in inches
INITIAL_DIVISOR = 10  # the first tenth of a training curve may be cropped
LOG_RATIO = 3.0  # an axis is logarithmic if its largest value is this many times its smallest
MAX_TICKS = 9  # ticks of a logarithmic axis
MIN_LOG_VALUE = 1e-100  # the smallest value of a logarithmic axis
MAX_NAME_CELLS = 48  # terminal cells of the longest name
HORIZONTAL = {"marker": "", "ls": (0, (6, 3))}  # the line of a model fitted without gradients
TRUTH = -1  # the run of a curve of true values
COLOURS = 7  # colours of the style; further lines are dashed
DASHES = ("-", (0, (4, 2)), (0, (1, 2)), (0, (6, 2, 1, 2)))  # of lines that may coincide
MAX_DATES = 8  # dates of an axis


@dataclass(frozen=True, slots=True)
class Curve:
    """One run in one panel: training values thin, validation values thick with dots.

    A model fitted without gradients has one value, drawn as a horizontal line.
    """

    run: int  # index into the names of the legend; or TRUTH
    training: Points
    validation: Points
    level: float | None = None


@dataclass(frozen=True, slots=True)
class MetricPanel:
    """One metric of all runs."""

    title: str
    unit: str
    curves: Sequence[Curve]
    from_zero: bool = False  # the axis starts at 0, as for fractions and scores
    linear: bool = False  # never logarithmic
    dots: bool = True  # draw the points of the thick curves as dots
    x_label: str | None = None  # overrides the label of all panels
    dates: bool = False  # the horizontal axis shows dates, given in days since 1970


def draw_curves(
    names: Sequence[str],
    panels: Sequence[MetricPanel],
    x_label: str = "steps",
    caption: str = "thick, with dots: validation",
    *,
    dashes: bool = False,
) -> "Figure":
    """A panel per metric, two in a row, and a legend above them.

    `caption` says what the thick curves are. `dashes` gives each run its own dashes, over wide true
    values, so that curves that coincide can be told apart.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    curves = [curve for panel in panels for curve in panel.curves]
    if any(curve.training for curve in curves):
        caption += "; thin: training"
    if any(curve.level is not None for curve in curves):
        caption += "; horizontal line: a model fitted without gradients"
    legend_names = [printable(name) for name in names]
    levels = {curve.run for curve in curves if curve.level is not None}
    runs = list(range(len(names)))
    if any(curve.run == TRUTH for curve in curves):
        legend_names, runs = [*legend_names, "true values"], [*runs, TRUTH]
    lines = [_line_style(run, dashes) | (HORIZONTAL if run in levels else {}) for run in runs]
    if dashes:
        lines = [line | {"marker": ""} for line in lines]
    legend_columns = max(1, int(columns * WIDTH / (0.09 * max(map(len, legend_names)) + 0.6)))
    legend_height = 0.25 * -(-len(legend_names) // legend_columns) + 0.4
    with style():
        figure = new_figure(columns * WIDTH, rows * HEIGHT + legend_height)
        figure.set_label("curves of " + ", ".join(legend_names))
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            _draw_panel(axes, panel, panel.x_label or x_label, dashes)
        handles = [figure.axes[0].plot([], [], **line)[0] for line in lines]
        figure.legend(
            handles,
            legend_names,
            loc="outside upper left",
            ncols=legend_columns,
            title=caption,
            title_fontsize=9,
            alignment="left",
        )
    return figure


def _draw_panel(axes: Any, panel: MetricPanel, x_label: str, dashes: bool) -> None:
    curves = _without_steep_start(panel.curves)
    values = [
        *(value for curve in curves for _, value in (*curve.training, *curve.validation)),
        *(curve.level for curve in curves if curve.level is not None),
    ]
    low, high = min(values, default=0.0), max(values, default=0.0)
    logarithmic = (
        not panel.from_zero and not panel.linear and low > MIN_LOG_VALUE and high / low >= LOG_RATIO
    )
    for curve in curves:
        if curve.training:
            line = _line_style(curve.run) | {
                "linewidth": 1.0,
                "alpha": 0.45,
                "marker": "",
                "ls": "-",
            }
            axes.plot(*zip(*curve.training, strict=True), **line)
    for curve in curves:  # thick curves, drawn over the thin ones
        if curve.level is not None:
            axes.axhline(curve.level, **_line_style(curve.run) | HORIZONTAL)
        elif curve.validation:
            line = _line_style(curve.run, dashes)
            if not panel.dots and len(curve.validation) > 1:
                line["marker"] = ""
            elif dashes:  # single values, with nothing known between them
                line["ls"] = ""
            axes.plot(*zip(*curve.validation, strict=True), **line)
    positions = [x for curve in curves for x, _ in (*curve.training, *curve.validation)]
    if not positions:
        axes.set_xticks([])
    elif min(positions) >= 0 and not panel.linear:
        axes.set_xlim(left=0)
    axes.set_title(panel.title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(f"{panel.unit}{', log scale' if logarithmic else ''}")
    if logarithmic:
        axes.set_yscale("log")
        axes.set_yticks(_log_ticks(low, high), minor=False)
        axes.set_yticks([], minor=True)
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
    for axis in (axes.yaxis,) if panel.dates else (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    if panel.dates:
        _show_dates(axes.xaxis)


def _show_dates(axis: Any) -> None:
    """Label an axis of days since 1970 with dates: the first in full, then what changes."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.ticker import FixedFormatter

    axis.axis_date()
    locator = AutoDateLocator(maxticks=MAX_DATES)  # type: ignore[no-untyped-call]
    axis.set_major_locator(locator)
    low, high = axis.get_view_interval()
    ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
    if not ticks:
        return
    labels = ConciseDateFormatter(locator).format_ticks(ticks)  # type: ignore[no-untyped-call]
    axis.set_ticks(ticks)
    axis.set_major_formatter(FixedFormatter([_first_date(ticks), *labels[1:]]))


def _first_date(days: Sequence[float]) -> str:
    """The first of several dates in full, in two lines: the part in which they differ is above."""
    from matplotlib.dates import num2date

    dates = [num2date(day) for day in days]  # type: ignore[no-untyped-call]
    if any(date.second for date in dates):
        return f"{dates[0]:%H:%M:%S\n%d %b %Y}"
    if any(date.hour or date.minute for date in dates):
        return f"{dates[0]:%H:%M\n%d %b %Y}"
    if any(date.day != 1 for date in dates):
        return f"{dates[0]:%d\n%b %Y}"
    if any(date.month != 1 for date in dates):
        return f"{dates[0]:%b\n%Y}"
    return f"{dates[0]:%Y}"


def _line_style(run: int, dashes: bool = False) -> dict[str, Any]:
    """The line style of a run; runs beyond the seventh reuse the colours with dashed lines."""
    if run == TRUTH:
        width, colour = (4.0, "#cccccc") if dashes else (1.5, "#999999")
        return {"color": colour, "linewidth": width, "marker": ""}
    dashed = run // COLOURS % 2 == 1
    return {
        "color": f"C{run % COLOURS}",
        "linewidth": 2.8 if dashes and run % len(DASHES) == 0 else 2.0 if dashes else 2.2,
        "marker": "o",
        "markersize": 5,
        "ls": DASHES[run % len(DASHES)] if dashes else "--" if dashed else "-",
    }


def _without_steep_start(curves: Sequence[Curve]) -> list[Curve]:
    """The curves without the steep start of training, which would flatten everything after it.

    Nothing else is cut: a diverging run stays visible.
    """
    later = [
        point
        for curve in curves
        for point in (*curve.validation, *curve.training[len(curve.training) // INITIAL_DIVISOR :])
    ]
    top = max((value for _, value in later), default=math.inf)
    return [
        replace(curve, training=list(dropwhile(lambda point: point[1] > top, curve.training)))
        for curve in curves
    ]


def _log_ticks(low: float, high: float) -> list[float]:
    """Round tick values with similar ratios.

    >>> _log_ticks(1.4, 11)
    [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]
    >>> _log_ticks(1e-18, 0.5)
    [1e-18, 1e-16, 1e-14, 1e-12, 1e-10, 1e-08, 1e-06, 0.0001, 0.01]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 6, 8), (1, 2, 5), (1,)):
        ticks = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= MAX_TICKS:
            break
    return ticks[:: -(-len(ticks) // MAX_TICKS) or 1]


def printable(name: str) -> str:
    """A name without control characters, at most 48 terminal cells wide."""
    return truncate(visible_words(name), MAX_NAME_CELLS)
