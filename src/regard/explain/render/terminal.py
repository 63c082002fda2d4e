"""Attention maps as text, with colours or without."""

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.errors import ShapeError
from regard.explain.render.label import blend, cells, clusters, shade, truncate, visible

SHADES = " ░▒▓█"
COLOUR_MAP = [(22, 24, 44), (96, 42, 122), (214, 84, 88), (255, 236, 160)]  # dark to bright
RESET = "\x1b[0m"
ROW_CELLS, COLUMN_LINES = 16, 12  # the longest row label, and column label
SMALL_ROWS, SMALL_COLUMNS = 12, 24  # the most cells of a map in an overview
GAP = 2
ABOVE_THRESHOLD = 1 + 1e-6  # just above the weight where a shade begins, despite rounding


def heatmap(
    weights: Float[Tensor, "rows columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    width: int,
    colour: bool,
) -> str:
    """An attention map for the terminal: rows attend to columns, whose labels read downwards.

    A cell's shade grows with the square root of its weight, relative to the largest, so that
    small weights are visible. Columns beyond `width` are left out; a last line says how many.
    """
    if tuple(weights.shape) != (len(rows), len(columns)):
        raise ShapeError(
            f"{len(rows)} row and {len(columns)} column labels do not match weights of shape "
            f"{tuple(weights.shape)}"
        )
    row_labels = [truncate(visible(row), min(ROW_CELLS, width // 3)) for row in rows]
    column_labels = [clusters(truncate(visible(column), COLUMN_LINES)) for column in columns]
    margin = max(map(cells, row_labels), default=0) + 1
    fits_wide = margin + 2 * len(columns) <= width
    wide = any(cells(cluster) > 1 for top in column_labels for cluster in top)
    cell = 2 if fits_wide or wide else 1
    shown = min(len(columns), max(0, width - margin) // cell)
    largest = float(weights.max()) if weights.numel() else 0.0

    height = max(map(len, column_labels[:shown]), default=0)
    lines = []
    for line in range(height):
        marks = [
            top[line - height + len(top)] if line >= height - len(top) else ""
            for top in column_labels
        ]
        padded = "".join(mark + " " * (cell - cells(mark)) for mark in marks[:shown])
        lines.append((" " * margin + padded).rstrip())
    for side, values in zip(row_labels, weights[:, :shown].tolist(), strict=True):
        label = " " * (margin - 1 - cells(side)) + side + " "
        lines.append(label + _shade_row(values, largest, cell, colour))
    lines.append(_scale(largest, width, colour))
    if shown < len(columns):
        lines.append(
            truncate(f"… {len(columns) - shown} of {len(columns)} columns not shown", width)
        )
    return "\n".join(lines)


def heads_overview(
    weights: Float[Tensor, "heads rows columns"], *, width: int, colour: bool
) -> str:
    """All heads of a layer as small maps side by side, shaded as in `heatmap` on one scale.

    A map that is too large is max-pooled.
    """
    heads, rows, columns = weights.shape
    rows, columns = min(rows, SMALL_ROWS), min(columns, SMALL_COLUMNS, width)
    small = F.adaptive_max_pool2d(weights, (rows, columns))
    largest = float(weights.max()) if weights.numel() else 0.0
    cell = 2 if columns <= min(SMALL_COLUMNS, width) // 2 else 1
    map_width = max(cell * columns, len(f"head {heads - 1}"))
    per_line = max(1, (width + GAP) // (map_width + GAP))
    blank = " " * (map_width - cell * columns)
    lines = []
    for first in range(0, heads, per_line):
        group = range(first, min(first + per_line, heads))
        lines.append((" " * GAP).join(f"head {head}".ljust(map_width) for head in group).rstrip())
        for row in range(rows):
            parts = (_shade_row(small[head, row].tolist(), largest, cell, colour) for head in group)
            lines.append((blank + " " * GAP).join(parts))
        lines.append("")
    return "\n".join([*lines, _scale(largest, width, colour)])


def _shade_row(values: Sequence[float], largest: float, cell: int, colour: bool) -> str:
    fractions = [shade(value, largest) for value in values]
    if not colour:
        return "".join(SHADES[min(int(fraction * 5), 4)] * cell for fraction in fractions)
    text = ""
    for fraction in fractions:
        red, green, blue = blend(COLOUR_MAP, fraction)
        text += f"\x1b[48;2;{red};{green};{blue}m" + " " * cell
    return text + RESET


def _scale(largest: float, width: int, colour: bool) -> str:
    """The legend: the weight at which each shade begins."""
    if width < 48:
        return truncate(f"largest {largest:.2f}", width)
    steps = [(step / 5) ** 2 * largest for step in range(1, 5)]
    shades = [_shade_row([ABOVE_THRESHOLD * step], largest, 2, colour) for step in steps]
    marks = (f"{shaded} {step:.2f}" for shaded, step in zip(shades, steps, strict=True))
    return "  ".join([*marks, f"largest {largest:.2f}"])
