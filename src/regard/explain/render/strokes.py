"""Drawings of pen strokes: as SVG, as characters of a terminal, and as figures."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = NDArray[Any]  # (points, 3): dx, dy, lift
CELL, MARGIN = 100.0, 8.0  # side and margin of a drawing in an SVG
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # dots of a character
MAX_COORDINATE = 1e6  # largest coordinate of a drawing, in the unit of its data


def strokes(points: Points) -> list[NDArray[np.float64]]:
    """The strokes of a drawing, as absolute positions: (points, 2) each; the pen starts at 0."""
    positions = np.cumsum(np.asarray(points, np.float64)[:, :2], 0)
    positions = np.clip(positions, -MAX_COORDINATE, MAX_COORDINATE)
    ends = np.flatnonzero(points[:-1, 2] > 0) + 1
    return np.split(positions, ends)


def _scaled_strokes(points: Points, size: float) -> list[NDArray[np.float64]]:
    """The strokes of a drawing, scaled and centred in a square of this size."""
    lines = strokes(points)
    positions = np.concatenate(lines)
    low, high = positions.min(0), positions.max(0)
    scale = size / max(float((high - low).max()), 1e-9)
    shift = (size - (high - low) * scale) / 2
    return [(line - low) * scale + shift for line in lines]


def _grid_strokes(
    drawings: Sequence[Points], columns: int
) -> tuple[int, int, list[NDArray[np.float64]]]:
    """The columns and rows of a grid of drawings, and the strokes of all, at their positions."""
    columns = max(1, min(columns, len(drawings)))
    lines = []
    for index, points in enumerate(drawings):
        row, column = divmod(index, columns)
        for stroke in _scaled_strokes(points, CELL - 2 * MARGIN):
            lines.append(stroke + np.array([column, row]) * CELL + MARGIN)
    return columns, -(-len(drawings) // columns), lines


def to_svg(drawings: Sequence[Points], columns: int = 8) -> str:
    """The drawings in rows, each scaled into a square; y points down, as on a screen."""
    columns, rows, lines = _grid_strokes(drawings, columns)
    paths = []
    for line in lines:
        if len(line) == 1:
            line = np.concatenate([line, line + 0.01])  # a dot
        coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        paths.append(f'<polyline points="{coordinates}"/>')
    width, height = columns * CELL, rows * CELL
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">\n<rect width="100%" height="100%" fill="white"/>\n'
        '<g fill="none" stroke="black" stroke-width="2" stroke-linecap="round" '
        'stroke-linejoin="round">\n' + "\n".join(paths) + "\n</g>\n</svg>\n"
    )


def to_text(drawings: Sequence[Points], width: int = 16) -> str:
    """The drawings side by side in braille characters, each `width` wide and half as high."""
    columns, rows = 2 * width, 2 * width  # dots
    canvas = np.zeros((rows // 4, width * len(drawings)), dtype=np.int64)
    for index, points in enumerate(drawings):
        for stroke in _scaled_strokes(points, columns - 2):
            for x, y in _dots(stroke):
                bit = BRAILLE[y % 4][x % 2]
                canvas[y // 4, index * width + x // 2] |= bit
    return "\n".join("".join(chr(0x2800 + int(cell)) for cell in row).rstrip() for row in canvas)


def _dots(stroke: NDArray[np.float64]) -> set[tuple[int, int]]:
    """The dots of a polyline, without gaps."""
    dots = {(int(x), int(y)) for x, y in stroke}
    for start, end in pairwise(stroke):
        steps = int(np.abs(end - start).max()) + 1
        for fraction in np.linspace(0, 1, steps + 1):
            x, y = start + fraction * (end - start)
            dots.add((int(x), int(y)))
    return dots


def figure(drawings: Sequence[Points], columns: int = 8) -> "Figure":
    """The drawings of `to_svg` as a figure of matplotlib, for other formats."""
    from regard.explain.render.figure import new_figure, style

    columns, rows, lines = _grid_strokes(drawings, columns)
    with style():
        result = new_figure(columns, rows)
        axes = result.subplots()
        axes.set_xlim(0, columns * CELL)
        axes.set_ylim(rows * CELL, 0)
        axes.set_axis_off()
        for line in lines:
            axes.plot(line[:, 0], line[:, 1], color="black", lw=1, marker="")
    return result
