"""Curves of several runs beside each other, readable at first glance and by the colour-blind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from regard.explain.render.label import cells, cut, visible
from regard.explain.render.picture import Dot, Line, Picture, Shape, Words

Points = Sequence[tuple[float, float]]

# Okabe and Ito 2008: told apart by the colour-blind, and in print
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY, FAINT, QUIET = "#555555", "#e4e4e4", "#999999"
WIDTH, HEIGHT = 430, 270  # of the inside of a panel
LEFT, RIGHT, ABOVE, BELOW, EDGE = 62, 22, 34, 48, 14  # around it; around all of them
LEGEND = 20  # pixels of a line of it
BEGINNING = 10  # of a training curve, this part of it may lie above the panel
STEEP = 3.0  # largest over smallest from which an axis is logarithmic
MOST_TICKS = 9  # of a logarithmic axis
SMALLEST = 1e-100  # that a logarithmic axis shows
NAME = 48  # cells of the longest name
ADVANCE = 7.2  # pixels of a character, with something to spare


@dataclass(frozen=True, slots=True)
class Curve:
    """One run in one panel: what it learned from, thin; what was held out, thick with dots."""

    run: int  # which of the names in the legend
    training: Points
    held_out: Points


@dataclass(frozen=True, slots=True)
class Panel:
    """All runs by one measure."""

    title: str
    unit: str
    curves: Sequence[Curve]
    from_zero: bool = False  # of shares and scores, where 0 means that nothing is right


def draw_curves(
    names: Sequence[str],
    panels: Sequence[Panel],
    across: str = "steps",
    told: str = "thick, with dots: held out",
) -> Picture:
    """A panel for each measure, two in a row, and a legend above them all.

    `told` says what the thick curves are.
    """
    beside = min(2, len(panels))
    panel_width, panel_height = LEFT + WIDTH + RIGHT, ABOVE + HEIGHT + BELOW
    width = 2 * EDGE + beside * panel_width
    if any(curve.training for panel in panels for curve in panel.curves):
        told += "; thin: what it learned from"
    legend, top = _legend(names, width, told)
    height = top + -(-len(panels) // beside) * panel_height + EDGE
    picture = Picture("curves of " + ", ".join(map(_shown, names)), width, height, legend)
    for number, panel in enumerate(panels):
        x = EDGE + number % beside * panel_width + LEFT
        y = top + number // beside * panel_height + ABOVE
        picture.shapes += _panel(panel, names, across, x, y)
    return picture


def _legend(names: Sequence[str], width: int, told: str) -> tuple[list[Shape], int]:
    """A sign and a name for each run, in as many lines as they need; and where they end."""
    shapes: list[Shape] = []
    x, y = float(EDGE + LEFT), EDGE + LEGEND
    for number, name in enumerate(map(_shown, names)):
        length = 34 + ADVANCE * cells(name) + 22
        if x + length > width and x > EDGE + LEFT:
            x, y = EDGE + LEFT, y + LEGEND
        colour, dashed = _style(number)
        shapes.append(Line([(x, y - 4), (x + 26, y - 4)], colour, 2.5, dashed))
        shapes.append(Dot(x + 13, y - 4, 3.5, colour))
        shapes.append(Words(x + 34, y, name, size=13))
        x += length
    shapes.append(Words(EDGE + LEFT, y + LEGEND, told, size=11, colour=GREY))
    return shapes, y + LEGEND + 6


def _panel(panel: Panel, names: Sequence[str], across: str, x: float, y: float) -> list[Shape]:
    curves = _in_sight(panel.curves)
    points = [point for curve in curves for point in (*curve.training, *curve.held_out)]
    steps = _Axis.around([step for step, _ in points], x, x + WIDTH, flat=True)
    values = _Axis.around([value for _, value in points], y + HEIGHT, y, flat=panel.from_zero)
    shapes: list[Shape] = [
        Words(x, y - 12, panel.title, size=14, bold=True),
        *(Line([(x, at), (x + WIDTH, at)], FAINT) for at in map(values.at, values.ticks)),
        *(Line([(at, y), (at, y + HEIGHT)], FAINT) for at in map(steps.at, steps.ticks)),
        Line([(x, y), (x, y + HEIGHT), (x + WIDTH, y + HEIGHT)], QUIET),
    ]
    for tick in values.ticks:
        shapes.append(Words(x - 7, values.at(tick) + 4, f"{tick:,.6g}", "end", colour=GREY))
    for tick in steps.ticks:
        shapes.append(Words(steps.at(tick), y + HEIGHT + 18, f"{tick:,.6g}", "middle", colour=GREY))
    unit = f"{panel.unit}{', log scale' if values.logarithmic else ''}"
    shapes.append(Words(x + WIDTH / 2, y + HEIGHT + 38, across, "middle"))
    shapes.append(Words(x - 48, y + HEIGHT / 2, unit, "middle", upwards=True))
    for thin in (True, False):  # those that matter more lie above
        for curve in curves:
            colour, dashed = _style(curve.run)
            line = curve.training if thin else curve.held_out
            places = [(steps.at(step), values.at(value)) for step, value in line]
            if len(places) > 1:
                tint = _paler(colour) if thin else colour
                shapes.append(Line(places, tint, 1.2 if thin else 2.5, dashed and not thin))
            if not thin:
                shapes += [
                    Dot(
                        *place, 3.5, colour, f"{_shown(names[curve.run])}, {step:,.0f}: {value:.5g}"
                    )
                    for place, (step, value) in zip(places, line, strict=True)
                ]
    return shapes


def _in_sight(curves: Sequence[Curve]) -> list[Curve]:
    """The same without the steep beginnings, which lie above all that follows and would flatten it.

    Nothing else is left out: a run that diverges is seen to.
    """
    rest = [
        point
        for curve in curves
        for point in (*curve.held_out, *curve.training[len(curve.training) // BEGINNING :])
    ]
    top = max((value for _, value in rest), default=math.inf)
    return [
        replace(curve, training=list(dropwhile(lambda point: point[1] > top, curve.training)))
        for curve in curves
    ]


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to pixels, and the values that are written beside it."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool
    ticks: Sequence[float]

    @classmethod
    def around(
        cls, found: Sequence[float], start: float, end: float, flat: bool = False
    ) -> "_Axis":
        """An axis with room for all values; a flat one is never logarithmic and begins at 0."""
        low, high = min(found), max(found)
        if flat:
            low = 0.0
        logarithmic = not flat and low > SMALLEST and high / low >= STEEP
        if logarithmic:
            room = (high / low) ** 0.04
            low, high = low / room, high * room
        else:
            room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
            low, high = low if flat else low - room, high + (0 if flat and high > low else room)
        ticks = _log_ticks(low, high) if logarithmic else _ticks(low, high)
        return cls(low, high, start, end, logarithmic, ticks)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def _ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers between two others.

    >>> _ticks(0, 2000)
    [0.0, 500.0, 1000.0, 1500.0, 2000.0]
    """
    least = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(least))
    step = next(unit * each for each in (1, 2, 5, 10) if unit * each >= least)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(each * step, 12) for each in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers whose ratios are alike.

    >>> _log_ticks(1.4, 11)
    [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]
    >>> _log_ticks(1e-18, 0.5)
    [1e-18, 1e-16, 1e-14, 1e-12, 1e-10, 1e-08, 1e-06, 0.0001, 0.01]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ways = ((1, 1.5, 2, 3, 4, 6, 8), (1, 2, 5), (1,))
    for way in ways:
        found = [float(f"{each}e{decade}") for decade in decades for each in way]
        found = [each for each in found if low <= each <= high]
        if len(found) <= MOST_TICKS:
            break
    return found[:: -(-len(found) // MOST_TICKS) or 1]


def _style(run: int) -> tuple[str, bool]:
    """The colour of a run; after all colours they come again, dashed."""
    return COLOURS[run % len(COLOURS)], run // len(COLOURS) % 2 == 1


def _paler(colour: str) -> str:
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - 0.45 * (255 - part)):02x}" for part in parts)


def _shown(name: str) -> str:
    return cut("".join(" " if each == " " else visible(each) for each in name), NAME)
