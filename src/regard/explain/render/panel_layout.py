"""The layout of panels, in inches: sizes, columns of tables, labels of points, nodes of trees."""

import math
from collections.abc import Callable
from typing import Any

from regard.explain.figures.panels import (
    Bars,
    Cell,
    Heatmap,
    LinePlot,
    Network,
    Point,
    Scatter,
    Segmentations,
    Surface,
    Table,
    Tree,
)
from regard.explain.render.token_text import truncate, visible

PAGE = 11.0  # inches: the widest row of panels
CELL, MAX_HEATMAP = 0.19, 3.6  # inches: a cell of a heat map, the largest heat map
MAX_CELL = 110  # characters of a table cell
ROW_HEIGHT = 0.24  # inches, of a row of a table
CHARACTER_WIDTH = 0.078  # inches, at size 9
MAX_LABEL = 22  # terminal cells of the longest label of an axis or a table
MARGIN = 0.08  # around the points of a scatter plot, as a fraction of their range


def label(text: str) -> str:
    """A label of an axis: printable, not too long."""
    return truncate(visible(text) if text.strip() != text or not text else text, MAX_LABEL)


def cell_text(cell: Cell) -> str:
    """A cell of a table: a float has four significant digits, or no decimals from 10,000 on."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else truncate(cell, MAX_CELL)


def is_numeric(panel: Table, column: int) -> bool:
    """Whether no cell of a column is a text, so that the column is right-aligned."""
    return not any(isinstance(row[column], str) for row in panel.rows)


def table_widths(panel: Table) -> list[float]:
    """The width of each column."""
    columns = zip(panel.header, *([cell_text(c) for c in row] for row in panel.rows), strict=True)
    return [CHARACTER_WIDTH * (max(map(len, column)) + 3) for column in columns]


def _table_size(panel: Table) -> tuple[float, float]:
    return sum(table_widths(panel)) + 0.2, ROW_HEIGHT * (len(panel.rows) + 1) + 0.5


def _heat_size(panel: Heatmap) -> tuple[float, float]:
    sides = (panel.columns, panel.rows)
    grid_width, grid_height = (min(CELL * len(side), MAX_HEATMAP) for side in sides)
    column_label, row_label = (
        CHARACTER_WIDTH * max((len(label(text)) for text in side), default=0) for side in sides
    )
    width = max(grid_width + row_label + 1.4, CHARACTER_WIDTH * len(panel.title) + 0.5)
    return width, grid_height + column_label + 1.1


def _lines_size(panel: LinePlot) -> tuple[float, float]:
    return 5.2, 3.4


def bars_size(panel: Bars) -> tuple[float, float]:
    """Wide enough for all bars, up to the page."""
    bars = len(panel.labels) * (len(panel.series) + 1)
    return max(3.6, min(0.1 * bars + 1.2, PAGE)), 2.9


def _scatter_size(panel: Scatter) -> tuple[float, float]:
    return 7.0, 5.0


def _tree_size(panel: Tree) -> tuple[float, float]:
    depth, leaves = 1 + max(node_depths(panel)), max(node_rows(panel)) + 1
    widest = max(len(node_text(node)) for node in panel.nodes)
    return min(PAGE, depth * (CHARACTER_WIDTH * widest + 0.5) + 0.3), max(1.6, 0.3 * leaves + 0.6)


def _network_size(panel: Network) -> tuple[float, float]:
    return min(PAGE, 0.34 * len(panel.positions) + 1.6), 0.62 * len(panel.layers) + 0.9


def segment_widths(panel: Segmentations) -> tuple[float, float]:
    """The width of the labels, and of the longest line of tokens."""
    longest = max(sum(piece_width(piece) for piece in line) for line in panel.pieces)
    return CHARACTER_WIDTH * (max(map(len, panel.labels)) + 2), longest


def piece_width(piece: str) -> float:
    """The width of a token."""
    return CHARACTER_WIDTH * (len(label(piece)) + 0.9)


def _segmentations_size(panel: Segmentations) -> tuple[float, float]:
    return min(PAGE, sum(segment_widths(panel)) + 0.3), 1.35 * ROW_HEIGHT * len(panel.labels) + 0.4


def _surface_size(panel: Surface) -> tuple[float, float]:
    return 5.2, 4.0


SIZES: dict[type[Any], Callable[[Any], tuple[float, float]]] = {
    Table: _table_size,
    Heatmap: _heat_size,
    LinePlot: _lines_size,
    Bars: bars_size,
    Scatter: _scatter_size,
    Tree: _tree_size,
    Network: _network_size,
    Segmentations: _segmentations_size,
    Surface: _surface_size,
}


def scatter_axes(panel: Scatter) -> Point:
    """The size of the axes, without the labels around them."""
    width, height = _scatter_size(panel)
    return width - 0.65, height - 0.45


def label_offsets(panel: Scatter) -> list[Point]:
    """The offset of each label's centre from its point, in inches: the first free place near it."""
    width, height = scatter_axes(panel)
    sides = [[point[axis] for point in panel.points] for axis in (0, 1)]
    scales = [
        size / ((1 + 2 * MARGIN) * (max(side) - min(side)) or 1.0)
        for size, side in zip((width, height), sides, strict=True)
    ]
    places = [(point[0] * scales[0], point[1] * scales[1]) for point in panel.points]
    # the frame, with the margins of `_draw_scatter`
    lows, highs = ([end(place[axis] for place in places) for axis in (0, 1)] for end in (min, max))
    width, height = (high - low for low, high in zip(lows, highs, strict=True))
    edges = (
        (lows[0] + highs[0]) / 2,
        (lows[1] + highs[1]) / 2,
        (1 + 2 * MARGIN) * width,
        (1 + 2 * MARGIN) * height,
    )
    occupied = [(x, y, 0.06, 0.06) for x, y in places]
    offsets = []
    for text, (x, y) in zip(panel.labels, places, strict=True):
        label_width, label_height = CHARACTER_WIDTH * (len(label(text)) + 0.5), 0.15
        for step in range(40 * 16):
            ring, angle = step // 16, math.pi / 8 * (step % 16 + 2)
            dx = (0.06 + 0.09 * ring + label_width / 2) * math.cos(angle)
            dy = (0.06 + 0.09 * ring + label_height / 2) * math.sin(angle)
            box = (x + dx, y + dy, label_width, label_height)
            if _inside(box, edges) and not any(overlap(box, other) for other in occupied):
                break
        occupied.append(box)
        offsets.append((dx, dy))
    return offsets


Box = tuple[float, float, float, float]  # x and y of the centre, width and height


def _inside(box: Box, frame: Box) -> bool:
    return all(
        abs(box[axis] - frame[axis]) <= (frame[axis + 2] - box[axis + 2]) / 2 for axis in (0, 1)
    )


def overlap(first: Box, second: Box) -> bool:
    """Whether two boxes have a common area."""
    return (
        abs(first[0] - second[0]) < (first[2] + second[2]) / 2
        and abs(first[1] - second[1]) < (first[3] + second[3]) / 2
    )


def node_children(panel: Tree) -> dict[int | None, list[int]]:
    """The children of each node, by its index; those of None are the roots."""
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(panel.nodes):
        children.setdefault(node.parent, []).append(index)
    return children


def node_depths(panel: Tree) -> list[int]:
    """The distance of each node from its root."""
    depths: list[int] = []
    for node in panel.nodes:
        depths.append(0 if node.parent is None else depths[node.parent] + 1)
    return depths


def node_rows(panel: Tree) -> list[float]:
    """The row of each node: leaves in order, parents in the middle of their children."""
    children = node_children(panel)
    places = [0.0] * len(panel.nodes)
    next_free = 0

    def place(index: int) -> None:
        nonlocal next_free
        below = children.get(index, [])
        for child in below:
            place(child)
        if below:
            places[index] = (places[below[0]] + places[below[-1]]) / 2
        else:
            places[index] = next_free
            next_free += 1

    for root in children[None]:
        place(root)
    return places


def node_text(node: Any) -> str:
    """The label of a node, and its value except at the root."""
    value = "" if node.parent is None else f"  {node.value:.2f}"
    return f"{label(node.label)}{value}"
