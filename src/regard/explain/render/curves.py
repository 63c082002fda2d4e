"""Line charts of several runs, with a colour-blind-safe palette."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from regard.explain.render.label import cells, truncate, visible
from regard.explain.render.picture import Dot, Label, Line, Picture, Shape

Points = Sequence[tuple[float, float]]

# Okabe and Ito 2008
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY, GRID_COLOUR, AXIS_COLOUR = "#555555", "#e4e4e4", "#999999"
WIDTH, HEIGHT = 430, 270  # of the inside of a panel
LEFT, RIGHT, ABOVE, BELOW, EDGE = 62, 22, 34, 48, 14  # margins of a panel; of the picture
LEGEND = 20  # height of a line of the legend
WARMUP_PART = 10  # the first tenth of a training curve may be cropped
LOG_RATIO = 3.0  # largest over smallest value from which an axis is logarithmic
MAX_TICKS = 9  # of a logarithmic axis
SMALLEST = 1e-100  # value on a logarithmic axis
NAME = 48  # columns of the longest name
ADVANCE = 7.2  # pixels per character, rounded up


@dataclass(frozen=True, slots=True)
class Curve:
    """One run in one panel: training values thin, validation values thick with dots."""

    run: int  # index into the names of the legend
    training: Points
    validation: Points


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric of all runs."""

    title: str
    unit: str
    curves: Sequence[Curve]
    from_zero: bool = False  # of fractions and scores, whose axis starts at 0


def draw_curves(
    names: Sequence[str],
    panels: Sequence[Panel],
    x_label: str = "steps",
    caption: str = "thick, with dots: validation",
) -> Picture:
    """A panel per metric, two in a row, and a legend above them.

    `caption` says what the thick curves are.
    """
    per_line = min(2, len(panels))
    panel_width, panel_height = LEFT + WIDTH + RIGHT, ABOVE + HEIGHT + BELOW
    width = 2 * EDGE + per_line * panel_width
    if any(curve.training for panel in panels for curve in panel.curves):
        caption += "; thin: training"
    legend, top = _legend(names, width, caption)
    height = top + -(-len(panels) // per_line) * panel_height + EDGE
    picture = Picture("curves of " + ", ".join(map(_printable, names)), width, height, legend)
    for number, panel in enumerate(panels):
        x = EDGE + number % per_line * panel_width + LEFT
        y = top + number // per_line * panel_height + ABOVE
        picture.shapes += _panel(panel, names, x_label, x, y)
    return picture


def _legend(names: Sequence[str], width: int, caption: str) -> tuple[list[Shape], int]:
    """A line sample and a name per run, wrapped; and the y coordinate where the legend ends."""
    shapes: list[Shape] = []
    x, y = float(EDGE + LEFT), EDGE + LEGEND
    for number, name in enumerate(map(_printable, names)):
        length = 34 + ADVANCE * cells(name) + 22
        if x + length > width and x > EDGE + LEFT:
            x, y = EDGE + LEFT, y + LEGEND
        colour, dashed = _style(number)
        shapes.append(Line([(x, y - 4), (x + 26, y - 4)], colour, 2.5, dashed))
        shapes.append(Dot(x + 13, y - 4, 3.5, colour))
        shapes.append(Label(x + 34, y, name, size=13))
        x += length
    shapes.append(Label(EDGE + LEFT, y + LEGEND, caption, size=11, colour=GREY))
    return shapes, y + LEGEND + 6


def _panel(panel: Panel, names: Sequence[str], x_label: str, x: float, y: float) -> list[Shape]:
    curves = _without_warmup(panel.curves)
    points = [point for curve in curves for point in (*curve.training, *curve.validation)]
    steps = _Axis.from_values([step for step, _ in points], x, x + WIDTH, from_zero=True)
    values = _Axis.from_values(
        [value for _, value in points], y + HEIGHT, y, from_zero=panel.from_zero
    )
    shapes: list[Shape] = [
        Label(x, y - 12, panel.title, size=14, bold=True),
        *(
            Line([(x, tick_y), (x + WIDTH, tick_y)], GRID_COLOUR)
            for tick_y in map(values.pixel, values.ticks)
        ),
        *(
            Line([(tick_x, y), (tick_x, y + HEIGHT)], GRID_COLOUR)
            for tick_x in map(steps.pixel, steps.ticks)
        ),
        Line([(x, y), (x, y + HEIGHT), (x + WIDTH, y + HEIGHT)], AXIS_COLOUR),
    ]
    for tick in values.ticks:
        shapes.append(Label(x - 7, values.pixel(tick) + 4, f"{tick:,.6g}", "end", colour=GREY))
    for tick in steps.ticks:
        shapes.append(
            Label(steps.pixel(tick), y + HEIGHT + 18, f"{tick:,.6g}", "middle", colour=GREY)
        )
    unit = f"{panel.unit}{', log scale' if values.logarithmic else ''}"
    shapes.append(Label(x + WIDTH / 2, y + HEIGHT + 38, x_label, "middle"))
    shapes.append(Label(x - 48, y + HEIGHT / 2, unit, "middle", upwards=True))
    for thin in (True, False):  # validation curves are drawn last, on top
        for curve in curves:
            colour, dashed = _style(curve.run)
            series = curve.training if thin else curve.validation
            pixels = [(steps.pixel(step), values.pixel(value)) for step, value in series]
            if len(pixels) > 1:
                tint = _lighten(colour) if thin else colour
                shapes.append(Line(pixels, tint, 1.2 if thin else 2.5, dashed and not thin))
            if not thin:
                shapes += [
                    Dot(
                        *pixel,
                        3.5,
                        colour,
                        f"{_printable(names[curve.run])}, {step:,.0f}: {value:.5g}",
                    )
                    for pixel, (step, value) in zip(pixels, series, strict=True)
                ]
    return shapes


def _without_warmup(curves: Sequence[Curve]) -> list[Curve]:
    """The curves without the steep start of training, which would flatten everything after it.

    Nothing else is cut: a diverging run stays visible.
    """
    later = [
        point
        for curve in curves
        for point in (*curve.validation, *curve.training[len(curve.training) // WARMUP_PART :])
    ]
    top = max((value for _, value in later), default=math.inf)
    return [
        replace(curve, training=list(dropwhile(lambda point: point[1] > top, curve.training)))
        for curve in curves
    ]


@dataclass(frozen=True, slots=True)
class _Axis:
    """A scale from values to pixels, and its tick values."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool
    ticks: Sequence[float]

    @classmethod
    def from_values(
        cls, values: Sequence[float], start: float, end: float, from_zero: bool = False
    ) -> "_Axis":
        """An axis that holds all values; with `from_zero` it is linear and starts at 0."""
        low, high = min(values), max(values)
        if from_zero:
            low = 0.0
        logarithmic = not from_zero and low > SMALLEST and high / low >= LOG_RATIO
        if logarithmic:
            margin = (high / low) ** 0.04
            low, high = low / margin, high * margin
        else:
            margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
            low, high = (
                low if from_zero else low - margin,
                high + (0 if from_zero and high > low else margin),
            )
        ticks = _log_ticks(low, high) if logarithmic else _ticks(low, high)
        return cls(low, high, start, end, logarithmic, ticks)

    def pixel(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def _ticks(low: float, high: float, max_ticks: int = 8) -> list[float]:
    """Round tick values between two numbers.

    >>> _ticks(0, 2000)
    [0.0, 500.0, 1000.0, 1500.0, 2000.0]
    """
    min_step = (high - low) / max_ticks
    unit = 10.0 ** math.floor(math.log10(min_step))
    step = next(unit * digit for digit in (1, 2, 5, 10) if unit * digit >= min_step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


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


def _style(run: int) -> tuple[str, bool]:
    """The colour of a run, and whether its line is dashed: when the colours start again."""
    return COLOURS[run % len(COLOURS)], run // len(COLOURS) % 2 == 1


def _lighten(colour: str) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - 0.45 * (255 - part)):02x}" for part in parts)


def _printable(name: str) -> str:
    return truncate(
        "".join(" " if character == " " else visible(character) for character in name), NAME
    )
