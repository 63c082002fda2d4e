"""Attention maps as text, with colours or without."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.errors import ShapeError
from regard.explain.render.token_text import (
    clusters,
    display_width,
    head_names,
    shade,
    truncate,
    visible,
)

SHADES, NEGATIVE = " ░▒▓█", " ·:=#"  # without colours
# indices of the terminal's 256 colours, from dark to bright
COLOUR_MAP = (234, 53, 89, 125, 161, 167, 203, 209, 215, 221, 229)
ABOVE_ZERO, BELOW_ZERO = (234, 52, 88, 124, 160, 203, 210), (234, 17, 18, 25, 32, 39, 81)
RESET = "\x1b[0m"
ROW_CELLS, COLUMN_LINES = 16, 12  # the largest width of a row label, and height of a column label
SMALL_ROWS, SMALL_COLUMNS = 12, 24  # the largest size of a map in an overview
GAP = 2
ABOVE_THRESHOLD = 1 + 1e-6  # just above the weight where a shade begins, despite rounding


def heatmap(
    weights: Float[Tensor, "rows columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    width: int,
    colour: bool,
    high: float | None = None,
    low: float | None = None,
    signed: bool = False,
) -> str:
    """An attention map for the terminal: rows attend to columns, whose labels read downwards.

    A cell's shade grows with the square root of its weight, so that small weights are visible. It
    grows linearly if `low`, the value of the weakest shade, is given, if `signed`, or if a value is
    below 0; values below 0 have separate shades. The strongest shade is that of the largest value,
    or of `high` if that is larger; a map that is signed or has a value below 0 ignores `high`. The
    last line is a legend. Columns beyond `width` are left out, and a line says how many.
    """
    if tuple(weights.shape) != (len(rows), len(columns)):
        raise ShapeError(
            f"{len(rows)} row and {len(columns)} column labels do not match weights of shape "
            f"{tuple(weights.shape)}"
        )
    row_labels = [truncate(visible(row), min(ROW_CELLS, width // 3)) for row in rows]
    column_labels = [clusters(truncate(visible(column), COLUMN_LINES)) for column in columns]
    margin = max(map(display_width, row_labels), default=0) + 1
    fits_wide = margin + 2 * len(columns) <= width
    has_wide_cluster = any(
        display_width(cluster) > 1 for label in column_labels for cluster in label
    )
    cell_width = 2 if fits_wide or has_wide_cluster else 1
    shown_columns = min(len(columns), max(0, width - margin) // cell_width)
    scale = _Scale.of(weights, high, low, signed)

    height = max(map(len, column_labels[:shown_columns]), default=0)
    lines = []
    for line in range(height):
        marks = [
            label[line - height + len(label)] if line >= height - len(label) else ""
            for label in column_labels
        ]
        padded = "".join(
            mark + " " * (cell_width - display_width(mark)) for mark in marks[:shown_columns]
        )
        lines.append((" " * margin + padded).rstrip())
    for row_label, values in zip(row_labels, weights[:, :shown_columns].tolist(), strict=True):
        padding = " " * (margin - 1 - display_width(row_label))
        lines.append(f"{padding}{row_label} " + _shade_row(values, scale, cell_width, colour))
    lines += _legend(scale, width, colour) + _note_same_shade(weights, scale, width, colour)
    if shown_columns < len(columns):
        lines.append(
            truncate(f"… {len(columns) - shown_columns} of {len(columns)} columns not shown", width)
        )
    return "\n".join(lines)


def heads_overview(
    weights: Float[Tensor, "heads rows columns"],
    *,
    width: int,
    colour: bool,
    high: float | None = None,
    headings: Sequence[str] | None = None,
    unit: str = "tokens",
) -> str:
    """All heads of a layer as small maps side by side, shaded as in `heatmap` on one scale.

    A map that is too large is max-pooled, and a last line says so. `headings` are the names of the
    maps, by default head 0, head 1 …; `unit` is what rows and columns count.
    """
    heads, all_rows, all_columns = weights.shape
    names = head_names(range(heads)) if headings is None else headings
    rows, columns = min(all_rows, SMALL_ROWS), min(all_columns, SMALL_COLUMNS, width)
    small = F.adaptive_max_pool2d(weights, (rows, columns))
    scale = _Scale.of(weights, high)
    cell_width = 2 if columns <= min(SMALL_COLUMNS, width) // 2 else 1
    map_width = max(cell_width * columns, *map(display_width, names), 1)
    per_line = max(1, (width + GAP) // (map_width + GAP))
    blank = " " * (map_width - cell_width * columns)
    lines = []
    for first in range(0, heads, per_line):
        group = range(first, min(first + per_line, heads))
        titles = (names[head] + " " * (map_width - display_width(names[head])) for head in group)
        lines.append((" " * GAP).join(titles).rstrip())
        for row in range(rows):
            parts = (
                _shade_row(small[head, row].tolist(), scale, cell_width, colour) for head in group
            )
            lines.append((blank + " " * GAP).join(parts))
        lines.append("")
    lines += _legend(scale, width, colour) + _note_same_shade(small, scale, width, colour)
    if (rows, columns) != (all_rows, all_columns):
        sizes = f"{all_rows} × {all_columns} {unit} in {rows} × {columns} cells"
        lines += textwrap.wrap(f"{sizes}: each cell is the largest of several", width)
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Scale:
    """How shades grow: linearly from `low` to `high`; from 0 if `low` is None, see `shade`."""

    largest: float  # the largest magnitude
    high: float
    low: float | None  # None: from 0, on a square-root scale, or a linear one if signed
    signed: bool

    @classmethod
    def of(
        cls,
        weights: Tensor,
        high: float | None,
        low: float | None = None,
        signed: bool = False,
    ) -> "_Scale":
        largest = float(weights.abs().max()) if weights.numel() else 0.0
        signed = signed or bool((weights < 0).any())
        top = largest if signed else max(largest, high or 0.0)
        return cls(largest, top, None if signed else low, signed)

    def strength(self, value: float) -> float:
        """The strength of a shade, 0 to 1, or from -1 if signed."""
        if self.low is None:
            return shade(value, self.high, signed=self.signed)
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def value(self, strength: float) -> float:
        """The value of a shade of this strength, from 0 to 1."""
        if self.low is not None:
            return self.low + strength * (self.high - self.low)
        return self.high * (strength if self.signed else strength**2)

    @property
    def decimals(self) -> int:
        """The decimals that tell the shades of small values apart."""
        span = self.high - (self.low or 0.0)
        return 2 if span <= 0 else max(2, 1 - math.floor(math.log10(span)))


def _note_same_shade(values: Tensor, scale: _Scale, width: int, colour: bool) -> list[str]:
    """A line that says that all cells have the same shade, if they do."""
    if not values.numel() or not float(values.max()) > 0:
        return []
    smallest, largest = float(values.min()), float(values.max())
    shades = [_shade_row([value], scale, 1, colour) for value in (smallest, largest)]
    if shades[0] != shades[1]:
        return []
    low, high = (f"{value:.3g}" for value in (smallest, largest))
    between = f"about equal, {high}" if low == high else f"between {low} and {high}"
    return textwrap.wrap(f"all values are {between}, so all have the same shade", width)


def _shade_row(values: Sequence[float], scale: _Scale, cell_width: int, colour: bool) -> str:
    strengths = [scale.strength(value) for value in values]
    if not colour:
        shades = [(NEGATIVE if s < 0 else SHADES, _step(s, len(SHADES))) for s in strengths]
        return "".join(characters[step] * cell_width for characters, step in shades)
    text = ""
    for strength in strengths:
        colours: Sequence[int] = COLOUR_MAP
        if scale.signed:
            colours = BELOW_ZERO if strength < 0 else ABOVE_ZERO
        text += f"\x1b[48;5;{colours[_step(strength, len(colours))]}m" + " " * cell_width
    return text + RESET


def _step(strength: float, steps: int) -> int:
    """The index of the shade of this strength."""
    return max(0, min(int(abs(strength) * steps), steps - 1))


def _legend(scale: _Scale, width: int, colour: bool) -> list[str]:
    """The value at which each shade begins, and how shades grow."""
    growth = "square-root scale" if scale.low is None and not scale.signed else "linear"
    decimals = scale.decimals
    note = truncate(f"largest {scale.largest:.{decimals}f}, {growth}", width)
    steps = [scale.value(step / len(SHADES)) for step in range(1, len(SHADES))]
    lines = []
    for sign in (1, -1) if scale.signed else (1,):
        marks = [
            _shade_row([ABOVE_THRESHOLD * sign * step], scale, 2, colour)
            + f" {sign * step:.{decimals}f}"
            for step in steps
        ]
        lines.append("  ".join(marks))
    legend_width = 4 * (3 + len(f"{-scale.high if scale.signed else scale.high:.{decimals}f}")) + 6
    if width < legend_width:
        return [note]
    if scale.signed or legend_width + 2 + len(note) > width:
        return [*lines, note]
    return [f"{lines[0]}  {note}"]
