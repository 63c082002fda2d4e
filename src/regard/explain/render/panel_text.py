"""The panels of a figure as text for a terminal."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from regard.explain.figures.panels import (
    Bars,
    FigureData,
    Heatmap,
    Lines,
    Network,
    Scatter,
    Segmentations,
    Surface,
    Table,
    Tree,
)
from regard.explain.render.panel_layout import cell_text, label
from regard.explain.render.panels import visible_words
from regard.explain.render.terminal import heatmap
from regard.explain.render.token_text import cells, ordinal, truncate

BAR = 30  # cells of the longest bar
LINES = 20  # rows of the table of a curve
PLOT_ROWS = 24  # of a scatter plot
HEAT_ROWS = 48  # rows of a heat map; of a larger one, every n-th row


def text(data: FigureData, *, width: int, colour: bool) -> str:
    """The title, the panels as tables, heat maps, bars or trees, and the caption."""
    parts = [data.title]
    for panel in data.panels:
        parts.append("")
        if panel.title:
            parts.append(panel.title)
        parts += TEXT[type(panel)](panel, width, colour)
    if data.numbers:
        parts.append("")
        parts += _align([[name, cell_text(value)] for name, value in data.numbers.items()], {1})
    return "\n".join([*parts, "", *textwrap.wrap(data.caption, width)])


def _align(rows: Sequence[Sequence[str]], right: set[int], width: int | None = None) -> list[str]:
    """Rows as lines with aligned columns, those in `right` right-aligned."""
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        line = ""
        for index, (cell, size) in enumerate(zip(row, widths, strict=True)):
            space = " " * (size - cells(cell))
            line += (space + cell if index in right else cell + space) + "  "
        lines.append(line.rstrip() if width is None else truncate(line.rstrip(), width))
    return lines


def _table(panel: Table, width: int, colour: bool) -> list[str]:
    rows = [[visible_words(cell_text(cell)) for cell in row] for row in panel.rows]
    columns = range(len(panel.header))
    right = {c for c in columns if not any(isinstance(row[c], str) for row in panel.rows)}
    return _align([panel.header, *rows], right, width)


def _heat(panel: Heatmap, width: int, colour: bool) -> list[str]:
    stride = -(-len(panel.rows) // HEAT_ROWS)
    values = torch.tensor([list(row) for row in panel.values[::stride]], dtype=torch.float32)
    rows = list(panel.rows[::stride])
    fits = max(1, (width - 18) // 1)
    across = -(-len(panel.columns) // fits)
    lines = heatmap(
        values[:, ::across],
        rows,
        list(panel.columns[::across]),
        width=width,
        colour=colour,
        high=panel.high,
    ).split("\n")
    skipped = [
        f"every {ordinal(n)} {what}" for n, what in ((stride, "row"), (across, "column")) if n > 1
    ]
    lines += [" and ".join(skipped)] if skipped else []
    axes = [f"down: {panel.y_label}"] if panel.y_label else []
    axes += [f"across: {panel.x_label}"] if panel.x_label else []
    return [*lines, *(["; ".join(axes)] if axes else [])]


def _lines(panel: Lines, width: int, colour: bool) -> list[str]:
    series = {**panel.series, **panel.reference_lines}
    places = sorted({x for points in series.values() for x, _ in points})
    places = places[:: -(-len(places) // LINES) or 1]
    values = {name: dict(points) for name, points in series.items()}
    rows = [[panel.x_label, *series]]
    for x in places:
        rows.append(
            [f"{x:,.6g}", *("" if (y := v.get(x)) is None else f"{y:.4g}" for v in values.values())]
        )
    return [f"({panel.y_label})", *_align(rows, set(range(len(rows[0]))), width)]


def _bars(panel: Bars, width: int, colour: bool) -> list[str]:
    """A column of values for each series, and bars of the last."""
    *_, last = panel.series.values()
    largest = max(map(abs, last), default=0) or 1
    columns = zip(panel.labels, *panel.series.values(), strict=True)
    rows = [
        [label(text), *map(_short, values), "█" * round(BAR * abs(values[-1]) / largest)]
        for text, *values in columns
    ]
    header = [panel.x_label, *(panel.series if len(panel.series) > 1 else [panel.y_label]), ""]
    table = _align([header, *rows], set(range(1, len(header) - 1)), width)
    return [*([f"({panel.y_label})"] if len(panel.series) > 1 and panel.y_label else []), *table]


def _short(value: float) -> str:
    return f"{value:.3g}"


def _scatter(panel: Scatter, width: int, colour: bool) -> list[str]:
    """The labels at their places; of two labels at one place, the first."""
    (left, bottom), (right, top) = (
        [function(point[axis] for point in panel.points) for axis in (0, 1)]
        for function in (min, max)
    )
    grid = [[" "] * width for _ in range(PLOT_ROWS)]
    for name, (x, y) in zip(panel.labels, panel.points, strict=True):
        shown = label(name)
        column = round((width - cells(shown) - 1) * (x - left) / (right - left or 1))
        row = round((PLOT_ROWS - 1) * (top - y) / (top - bottom or 1))
        place = slice(column, column + len(shown))
        if not "".join(grid[row][max(0, column - 1) : column + len(shown) + 1]).strip():
            grid[row][place] = list(shown)
    return ["".join(row).rstrip() for row in grid]


def _tree(panel: Tree, width: int, colour: bool) -> list[str]:
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(panel.nodes):
        children.setdefault(node.parent, []).append(index)
    lines = []

    def show(index: int, margin: str, branch: str, after: str) -> None:
        node = panel.nodes[index]
        value = "" if node.parent is None else f"  {node.value:.2f}"
        mark = "  ◀ best" if node.best and index not in children else ""
        left = "" if node.kept else "  (dropped)"
        lines.append(truncate(f"{margin}{branch}{label(node.label)}{value}{left}{mark}", width))
        below = children.get(index, [])
        for child in below:
            last = child == below[-1]
            show(child, margin + after, "└─ " if last else "├─ ", "   " if last else "│  ")

    for root in children[None]:
        show(root, "", "", "")
    return lines


def _network(panel: Network, width: int, colour: bool) -> list[str]:
    rows = [
        [name, *(mark or "·" for mark in marks)]
        for name, marks in zip(panel.layers, panel.marks, strict=True)
    ][::-1]
    rows.append(["", *map(label, panel.positions)])
    return _align(rows, set(range(1, len(rows[0]))), width)


def _segmentations(panel: Segmentations, width: int, colour: bool) -> list[str]:
    lines = []
    margin = max(map(len, panel.labels)) + 2
    for name, line in zip(panel.labels, panel.pieces, strict=True):
        pieces = "│".join(label(piece) for piece in line)
        wrapped = textwrap.wrap(pieces, max(20, width - margin), break_on_hyphens=False)
        lines.append(name.ljust(margin) + (wrapped[0] if wrapped else ""))
        lines += [" " * margin + rest for rest in wrapped[1:]]
    return lines


def _surface(panel: Surface, width: int, colour: bool) -> list[str]:
    names = [f"{place:.2f}" for place in panel.x]
    rows = [f"{place:.2f}" for place in panel.y]
    heat = Heatmap(
        rows=rows[::-1],
        columns=names,
        values=panel.values[::-1],
        x_label=panel.x_label,
        y_label=panel.y_label,
    )
    return _heat(heat, width, colour)


TEXT: dict[type[Any], Callable[[Any, int, bool], list[str]]] = {
    Table: _table,
    Heatmap: _heat,
    Lines: _lines,
    Bars: _bars,
    Scatter: _scatter,
    Tree: _tree,
    Network: _network,
    Segmentations: _segmentations,
    Surface: _surface,
}
