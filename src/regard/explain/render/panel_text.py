"""The panels of a figure as text for a terminal."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from regard.explain.figures.panels import (
    Bars,
    FigureData,
    Heatmap,
    LinePlot,
    Network,
    Scatter,
    Segmentations,
    Surface,
    Table,
    Tree,
)
from regard.explain.render.panel_layout import (
    cell_text,
    is_numeric,
    label,
    node_children,
    node_text,
)
from regard.explain.render.terminal import heatmap
from regard.explain.render.token_text import display_width, ordinal, truncate, visible_words

MAX_BAR = 30  # cells of the longest bar
MAX_CURVE_ROWS = 20  # the most rows of the table of a curve
PLOT_ROWS = 24  # rows of a scatter plot
MIN_TEXT_WIDTH = 24  # cells of a column of text that is wrapped
MAX_HEAT_ROWS = 48  # the most rows of a heat map; a larger one shows every n-th row


def text(data: FigureData, *, width: int, colour: bool) -> str:
    """The title, the panels as tables, heat maps, bars or trees, and the caption."""
    parts = textwrap.wrap(data.title, width)
    for panel in data.panels:
        parts.append("")
        if panel.title:
            parts += textwrap.wrap(panel.title, width)
        parts += TEXT[type(panel)](panel, width, colour)
    if data.numbers:
        parts.append("")
        numbers = [[name, cell_text(value)] for name, value in data.numbers.items()]
        parts += _fit(numbers[0], numbers[1:], {1}, width)
    return "\n".join([*parts, "", *textwrap.wrap(data.caption, width)])


def _align(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Rows as lines with aligned columns, those in `right` right-aligned."""
    sizes = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    return [_line(row, dict(enumerate(sizes)), right) for row in rows]


def _line(row: Sequence[str], sizes: Mapping[int, int], right: set[int]) -> str:
    """One line of a table; `sizes` are the widths of its columns by their index."""
    line = ""
    for cell, (column, size) in zip(row, sizes.items(), strict=True):
        space = " " * (size - display_width(cell))
        line += (space + cell if column in right else cell + space) + "  "
    return line.rstrip()


def _fit(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: set[int], width: int
) -> list[str]:
    """A table that is no wider than `width`.

    If it is too wide, its widest column of text is wrapped. If that is not enough, headers take
    several lines, and the columns that do not fit continue below, with the first column repeated.
    """
    table = [header, *rows]
    widths = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    columns = range(len(header))
    if (sizes := _shrink(widths, columns, right, width)) is not None:
        return _wrapped_rows(table, sizes, right)
    widths = [
        max(
            [
                *(display_width(row[column]) for row in rows),
                *map(display_width, header[column].split()),
                1,
            ]
        )
        for column in columns
    ]
    groups = [[0]]
    for column in columns[1:]:
        together = [*groups[-1], column]
        if len(groups[-1]) > 1 and _shrink(widths, together, right, width) is None:
            groups.append([0])
        groups[-1].append(column)
    lines: list[str] = []
    for group in groups:
        fitted = _shrink(widths, group, right, width) or {
            column: widths[column] for column in group
        }
        part = [[row[column] for column in group] for row in table]
        lines += [""] * bool(lines) + [
            truncate(line, width) for line in _wrapped_rows(part, fitted, right)
        ]
    return lines


def _shrink(
    widths: Sequence[int], columns: Sequence[int], right: set[int], width: int
) -> dict[int, int] | None:
    """The width of each column, with the widest text column narrowed; None if they do not fit."""
    sizes = {column: widths[column] for column in columns}
    excess = sum(sizes.values()) + 2 * (len(sizes) - 1) - width
    if excess > 0:
        widest = max((c for c in columns if c not in right), key=sizes.__getitem__, default=None)
        if widest is None or sizes[widest] - excess < MIN_TEXT_WIDTH:
            return None
        sizes[widest] -= excess
    return sizes


def _wrapped_rows(
    table: Sequence[Sequence[str]], sizes: Mapping[int, int], right: set[int]
) -> list[str]:
    """The lines of a table; the cells of the header are aligned at the bottom."""
    lines = []
    for index, row in enumerate(table):
        wrapped = [_wrap(cell, size) for cell, size in zip(row, sizes.values(), strict=True)]
        height = max(map(len, wrapped))
        blanks = [[""] * (height - len(cell)) for cell in wrapped]
        filled = [
            [*blank, *cell] if index == 0 else [*cell, *blank]
            for cell, blank in zip(wrapped, blanks, strict=True)
        ]
        lines += [_line(parts, sizes, right) for parts in zip(*filled, strict=True)]
    return lines


def _wrap(text: str, width: int) -> list[str]:
    """The lines of a cell; spaces at its beginning are kept."""
    first, *others = textwrap.wrap(text, width, drop_whitespace=False) or [""]
    return [first.rstrip(), *(line.strip() for line in others if line.strip())]


def _table(panel: Table, width: int, colour: bool) -> list[str]:
    rows = [[visible_words(cell_text(cell)) for cell in row] for row in panel.rows]
    right = {column for column in range(len(panel.header)) if is_numeric(panel, column)}
    return _fit(panel.header, rows, right, width)


def _heat(panel: Heatmap, width: int, colour: bool) -> list[str]:
    row_stride = -(-len(panel.rows) // MAX_HEAT_ROWS)
    values = torch.tensor([list(row) for row in panel.values[::row_stride]], dtype=torch.float32)
    rows = list(panel.rows[::row_stride])
    column_stride = -(-len(panel.columns) // max(1, width - 18))
    lines = heatmap(
        values[:, ::column_stride],
        rows,
        list(panel.columns[::column_stride]),
        width=width,
        colour=colour,
        high=panel.high,
        low=0.0,
        signed=panel.signed,
    ).split("\n")
    return _label_axes(panel, lines, row_stride, column_stride)


def _label_axes(
    panel: Heatmap | Surface, lines: list[str], row_stride: int, column_stride: int
) -> list[str]:
    """The lines of a map, then a line on skipped rows and columns and one with the axis labels."""
    skipped = [
        f"every {ordinal(n)} {what}"
        for n, what in ((row_stride, "row"), (column_stride, "column"))
        if n > 1
    ]
    lines += [" and ".join(skipped)] if skipped else []
    axes = [f"down: {panel.y_label}"] if panel.y_label else []
    axes += [f"across: {panel.x_label}"] if panel.x_label else []
    return [*lines, *(["; ".join(axes)] if axes else [])]


def _lines(panel: LinePlot, width: int, colour: bool) -> list[str]:
    series = {**panel.series, **panel.reference_lines}
    places = sorted({x for points in series.values() for x, _ in points})
    places = places[:: -(-len(places) // MAX_CURVE_ROWS) or 1]
    values = {name: dict(points) for name, points in series.items()}
    rows = [
        [
            f"{x:,.6g}",
            *("" if (y := v.get(x)) is None else cell_text(float(y)) for v in values.values()),
        ]
        for x in places
    ]
    header = [panel.x_label, *series]
    unit = [] if panel.y_label == panel.title else [f"({panel.y_label})"]
    return [*unit, *_fit(header, rows, set(range(len(header))), width)]


def _bars(panel: Bars, width: int, colour: bool) -> list[str]:
    """A column of values for each series, and bars of the last, where there is room."""
    several = len(panel.series) > 1
    *_, (name, last) = panel.series.items()
    columns = zip(panel.labels, *panel.series.values(), strict=True)
    rows = [[label(text), *map(_short, values)] for text, *values in columns]
    header = [panel.x_label, *(panel.series if several else [panel.y_label])]
    right = set(range(1, len(header)))
    room = min(MAX_BAR, width - 2 - max(map(display_width, _align([header, *rows], right))))
    if room > len(name):
        largest = max(map(abs, last), default=0) or 1
        header = [*header, name if several else ""]
        bars = ("█" * round(room * abs(value) / largest) for value in last)
        rows = [[*row, bar] for row, bar in zip(rows, bars, strict=True)]
    table = _fit(header, rows, right, width)
    return [*([f"({panel.y_label})"] if several and panel.y_label else []), *table]


def _short(value: float) -> str:
    return f"{value:.3g}"


def _scatter(panel: Scatter, width: int, colour: bool) -> list[str]:
    """The labels at their places; a label that would cover an earlier one is only counted."""
    (left, bottom), (right, top) = (
        [function(point[axis] for point in panel.points) for axis in (0, 1)]
        for function in (min, max)
    )
    grid = [[" "] * width for _ in range(PLOT_ROWS)]
    covered = 0
    for name, (x, y) in zip(panel.labels, panel.points, strict=True):
        label_text = label(name)
        column = round((width - display_width(label_text) - 1) * (x - left) / (right - left or 1))
        row = round((PLOT_ROWS - 1) * (top - y) / (top - bottom or 1))
        place = slice(column, column + len(label_text))
        if not "".join(grid[row][max(0, column - 1) : column + len(label_text) + 1]).strip():
            grid[row][place] = list(label_text)
        else:
            covered += 1
    note = [f"… {covered} of {len(panel.labels)} labels not shown: they would cover others"]
    return [*("".join(row).rstrip() for row in grid), *(note if covered else [])]


def _tree(panel: Tree, width: int, colour: bool) -> list[str]:
    children = node_children(panel)
    lines = []

    def show(index: int, margin: str, branch: str, after: str) -> None:
        node = panel.nodes[index]
        mark = "  ◀ best" if node.best and index not in children else ""
        pruned = "" if node.kept else "  (pruned)"
        lines.append(truncate(f"{margin}{branch}{node_text(node)}{pruned}{mark}", width))
        below = children.get(index, [])
        for child in below:
            last = child == below[-1]
            show(child, margin + after, "└─ " if last else "├─ ", "   " if last else "│  ")

    for root in children[None]:
        show(root, "", "", "")
    return lines


def _network(panel: Network, width: int, colour: bool) -> list[str]:
    """The marks of all layers, the last first; labels of positions read downwards if too wide."""
    marks = [[mark or "·" for mark in layer] for layer in panel.marks][::-1]
    rows = [[name, *layer] for name, layer in zip(panel.layers[::-1], marks, strict=True)]
    places = list(map(label, panel.positions))
    lines = _align([*rows, ["", *places]], set(range(1, len(rows[0]))))
    if max(map(display_width, lines)) <= width:
        return lines
    margin = max(map(display_width, panel.layers)) + 1
    mark_width = max(display_width(mark) for layer in marks for mark in layer)
    step = max(mark_width, min(mark_width + 1, (width - margin) // max(1, len(places))))
    lines = [
        name.ljust(margin) + "".join(mark.rjust(step) for mark in layer) for name, *layer in rows
    ]
    for index in range(max(map(len, places))):
        column = "".join((place[index : index + 1] or " ").rjust(step) for place in places)
        lines.append((" " * margin + column).rstrip())
    return [truncate(line, width) for line in lines]


def _segmentations(panel: Segmentations, width: int, colour: bool) -> list[str]:
    lines = []
    margin = max(map(len, panel.labels)) + 2
    for name, pieces in zip(panel.labels, panel.pieces, strict=True):
        text = "│".join(label(piece) for piece in pieces)
        wrapped = textwrap.wrap(text, max(20, width - margin), break_on_hyphens=False)
        lines.append(name.ljust(margin) + (wrapped[0] if wrapped else ""))
        lines += [" " * margin + line for line in wrapped[1:]]
    return lines


def _surface(panel: Surface, width: int, colour: bool) -> list[str]:
    """The values as a heat map on the colour scale of the panel; y grows upwards."""
    row_stride, column_stride = (
        -(-len(panel.y) // MAX_HEAT_ROWS),
        -(-len(panel.x) // max(1, width - 18)),
    )
    values = torch.tensor([list(row) for row in panel.values[::-1][::row_stride]])
    lines = heatmap(
        values[:, ::column_stride],
        [f"{place:.2f}" for place in panel.y[::-1][::row_stride]],
        [f"{place:.2f}" for place in panel.x[::column_stride]],
        width=width,
        colour=colour,
        low=panel.low,
        high=panel.high,
    ).split("\n")
    return _label_axes(panel, [*lines, f"shades: {panel.scale_label}"], row_stride, column_stride)


TEXT: dict[type[Any], Callable[[Any, int, bool], list[str]]] = {
    Table: _table,
    Heatmap: _heat,
    LinePlot: _lines,
    Bars: _bars,
    Scatter: _scatter,
    Tree: _tree,
    Network: _network,
    Segmentations: _segmentations,
    Surface: _surface,
}
