"""Attention maps as text, with colours or without."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.errors import ShapeError
from regard.explain.render.token_text import (
    blend,
    cells,
    clusters,
    palette_number,
    shade,
    truncate,
    visible,
)

SHADES, NEGATIVE = " ░▒▓█", " ·:=#"  # without colours
COLOUR_MAP = [(22, 24, 44), (96, 42, 122), (214, 84, 88), (255, 236, 160)]  # dark to bright
SIGNED_MAP = [(70, 150, 255), (22, 24, 44), (255, 96, 70)]  # below 0, 0, above
RESET = "\x1b[0m"
ROW_CELLS, COLUMN_LINES = 16, 12  # the longest row label, and column label
SMALL_ROWS, SMALL_COLUMNS = 12, 24  # the most cells of a map in an overview
GAP = 2
FULL_SHADE = 0.64  # of the largest weight, from which on a cell has the strongest shade
ABOVE_THRESHOLD = 1 + 1e-6  # just above the weight where a shade begins, despite rounding


def heatmap(
    weights: Float[Tensor, "rows columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    width: int,
    colour: bool,
    high: float | None = None,
) -> str:
    """An attention map for the terminal: rows attend to columns, whose labels read downwards.

    A cell's shade grows with the square root of its weight, so that small weights are visible;
    signed values have two scales of shades, which are linear. `high` is the value drawn with the
    strongest shade, by default the largest value; the last line is a legend. Columns beyond `width`
    are left out, and a line says how many.
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
    scale = _Scale.of(weights, high)

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
        lines.append(label + _shade_row(values, scale, cell, colour))
    lines += _legend(scale, width, colour) + _equal_weights(weights, width)
    if shown < len(columns):
        lines.append(
            truncate(f"… {len(columns) - shown} of {len(columns)} columns not shown", width)
        )
    return "\n".join(lines)


def heads_overview(
    weights: Float[Tensor, "heads rows columns"],
    *,
    width: int,
    colour: bool,
    high: float | None = None,
) -> str:
    """All heads of a layer as small maps side by side, shaded as in `heatmap` on one scale.

    A map that is too large is max-pooled, and a last line says so.
    """
    heads, all_rows, all_columns = weights.shape
    rows, columns = min(all_rows, SMALL_ROWS), min(all_columns, SMALL_COLUMNS, width)
    small = F.adaptive_max_pool2d(weights, (rows, columns))
    scale = _Scale.of(weights, high)
    cell = 2 if columns <= min(SMALL_COLUMNS, width) // 2 else 1
    map_width = max(cell * columns, len(f"head {heads - 1}"))
    per_line = max(1, (width + GAP) // (map_width + GAP))
    blank = " " * (map_width - cell * columns)
    lines = []
    for first in range(0, heads, per_line):
        group = range(first, min(first + per_line, heads))
        lines.append((" " * GAP).join(f"head {head}".ljust(map_width) for head in group).rstrip())
        for row in range(rows):
            parts = (_shade_row(small[head, row].tolist(), scale, cell, colour) for head in group)
            lines.append((blank + " " * GAP).join(parts))
        lines.append("")
    lines += _legend(scale, width, colour) + _equal_weights(weights, width)
    if (rows, columns) != (all_rows, all_columns):
        sizes = f"{all_rows} × {all_columns} tokens in {rows} × {columns} cells"
        lines += textwrap.wrap(f"{sizes}: each cell is the largest of several", width)
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Scale:
    """The largest absolute value, that of the strongest shade, and whether values are signed."""

    largest: float
    high: float
    signed: bool

    @classmethod
    def of(cls, weights: Tensor, high: float | None) -> "_Scale":
        largest = float(weights.abs().max()) if weights.numel() else 0.0
        signed = bool((weights < 0).any())
        return cls(largest, largest if signed else max(largest, high or 0.0), signed)


def _equal_weights(weights: Tensor, width: int) -> list[str]:
    """A line if all cells have one shade."""
    if not weights.numel() or not (largest := float(weights.max())) > 0:
        return []
    smallest = float(weights.min())
    if smallest < FULL_SHADE * largest:
        return []
    low, high = (f"{value:.3g}" for value in (smallest, largest))
    between = f"about equal, {high}" if low == high else f"between {low} and {high}"
    return textwrap.wrap(f"all weights are {between}, so all have one shade", width)


def _shade_row(values: Sequence[float], scale: _Scale, cell: int, colour: bool) -> str:
    signed = scale.signed
    strengths = [shade(value, scale.high, signed=signed) for value in values]
    if not colour:
        shades = [(NEGATIVE if s < 0 else SHADES, min(int(abs(s) * 5), 4)) for s in strengths]
        return "".join(characters[step] * cell for characters, step in shades)
    text = ""
    for strength in strengths:
        map_, fraction = (SIGNED_MAP, (strength + 1) / 2) if signed else (COLOUR_MAP, strength)
        text += f"\x1b[48;5;{palette_number(blend(map_, fraction))}m" + " " * cell
    return text + RESET


def _legend(scale: _Scale, width: int, colour: bool) -> list[str]:
    """The value at which each shade begins, and how shades grow."""
    signed, high = scale.signed, scale.high
    growth = "linear" if signed else "square-root scale"
    note = truncate(f"largest {scale.largest:.2f}, {growth}", width)
    fractions = [step / 5 if signed else (step / 5) ** 2 for step in range(1, 5)]
    steps = [fraction * high for fraction in fractions]
    lines = []
    for sign in (1, -1) if signed else (1,):
        marks = [
            _shade_row([ABOVE_THRESHOLD * sign * step], scale, 2, colour) + f" {sign * step:.2f}"
            for step in steps
        ]
        lines.append("  ".join(marks))
    plain = 4 * (3 + len(f"{-high if signed else high:.2f}")) + 6
    if width < plain:
        return [note]
    if signed or plain + 2 + len(note) > width:
        return [*lines, note]
    return [f"{lines[0]}  {note}"]
