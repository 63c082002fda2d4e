"""Attention maps as one self-contained SVG, without scripts, fonts or links."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from jaxtyping import Float
from torch import Tensor

from regard.errors import ShapeError
from regard.explain.render.label import blend, cells, shade, truncate, visible
from regard.explain.render.picture import document

COLOUR_MAP = [(255, 255, 255), (133, 180, 222), (33, 96, 165), (8, 36, 84)]  # light to dark
CELL = 18  # pixels, as everything here
FONT = 12  # as `document` sets it
ADVANCE = 7.5  # pixels per character of a monospaced font of that size, rounded up
LABEL_CELLS = 24  # the longest label
HEADING, GAP, EDGE = 26, 24, 12
PAGE = 1600  # the largest width of maps side by side


def heatmap_svg(
    weights: Float[Tensor, "heads rows columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    headings: Sequence[str] | None = None,
) -> str:
    """Attention maps with their tokens as an SVG image; each cell has its weight as a tooltip.

    Heads are side by side under their `headings` ("head 0", "head 1", …) on one scale: a
    cell's shade grows with the square root of its weight, so that small weights are visible.
    """
    heads = weights.shape[0]
    headings = [f"head {head}" for head in range(heads)] if headings is None else headings
    if tuple(weights.shape) != (len(headings), len(rows), len(columns)):
        raise ShapeError(
            f"{len(headings)} headings, {len(rows)} row and {len(columns)} column labels "
            f"do not match weights of shape {tuple(weights.shape)}"
        )
    row_labels = [truncate(visible(row), LABEL_CELLS) for row in rows]
    column_labels = [truncate(visible(column), LABEL_CELLS) for column in columns]
    titles = [truncate(_visible_words(heading), 60) for heading in headings]
    largest = float(weights.max()) if weights.numel() else 0.0

    left = _length(row_labels) + 6
    above = HEADING + _length(column_labels) + 6
    across = max(CELL * len(columns), _length(titles))
    panel_width, panel_height = left + across, above + CELL * len(rows)
    per_line = min(heads, max(1, (PAGE - 2 * EDGE + GAP) // (panel_width + GAP)))
    lines = -(-heads // per_line) if heads else 0
    width = max(2 * EDGE + per_line * (panel_width + GAP) - GAP, 220)
    height = 2 * EDGE + lines * (panel_height + GAP) + 36

    parts = []
    for head, values in enumerate(weights.tolist()):
        x = EDGE + head % per_line * (panel_width + GAP)
        y = EDGE + head // per_line * (panel_height + GAP)
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _panel(titles[head], row_labels, column_labels, values, largest, left, above)
        parts.append("</g>")
    parts.append(_scale(largest, EDGE, height - EDGE - 28))
    return document("attention", width, height, parts, "monospace")


def _visible_words(text: str) -> str:
    """Like `visible`, but spaces between words stay spaces."""
    return " ".join(visible(word) for word in text.split(" ") if word)


def _panel(
    title: str,
    row_labels: list[str],
    column_labels: list[str],
    values: list[list[float]],
    largest: float,
    left: int,
    above: int,
) -> list[str]:
    grid_width, grid_height = CELL * len(column_labels), CELL * len(row_labels)
    parts = [f'<text x="{left}" y="{FONT + 1}" font-weight="bold">{escape(title)}</text>']
    for column, label in enumerate(column_labels):
        x, y = left + CELL * column + CELL // 2 + FONT // 3, above - 5
        parts.append(f'<text transform="translate({x} {y}) rotate(-90)">{escape(label)}</text>')
    for row, label in enumerate(row_labels):
        y = above + CELL * row + CELL // 2 + FONT // 3
        parts.append(f'<text x="{left - 5}" y="{y}" text-anchor="end">{escape(label)}</text>')
    for row, (side, line) in enumerate(zip(row_labels, values, strict=True)):
        for column, (top, weight) in enumerate(zip(column_labels, line, strict=True)):
            if weight == 0:  # masked: stays white
                continue
            red, green, blue = blend(COLOUR_MAP, shade(weight, largest))
            parts.append(
                f'<rect x="{left + CELL * column}" y="{above + CELL * row}" '
                f'width="{CELL}" height="{CELL}" fill="#{red:02x}{green:02x}{blue:02x}">'
                f"<title>{escape(side)} → {escape(top)}: {weight:.3f}</title></rect>"
            )
    parts.append(
        f'<rect x="{left}" y="{above}" width="{grid_width}" height="{grid_height}" '
        'fill="none" stroke="#999"/>'
    )
    return parts


def _scale(largest: float, x: int, y: int) -> str:
    steps, step_width = 20, 8
    boxes = [
        '<rect x="{}" y="{}" width="{}" height="{}" fill="#{:02x}{:02x}{:02x}"/>'.format(
            x + step_width * step, y, step_width, CELL - 6, *blend(COLOUR_MAP, step / (steps - 1))
        )
        for step in range(steps)
    ]
    length = step_width * steps
    boxes.append(
        f'<rect x="{x}" y="{y}" width="{length}" height="{CELL - 6}" fill="none" stroke="#999"/>'
    )
    for fraction, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        boxes.append(
            f'<text x="{x + fraction * length:.0f}" y="{y + CELL + FONT - 6}" '
            f'text-anchor="{anchor}">{fraction**2 * largest:.2f}</text>'
        )
    return f"<g>{''.join(boxes)}</g>"


def _length(labels: Sequence[str]) -> int:
    return math.ceil(ADVANCE * max(map(cells, labels), default=0))
