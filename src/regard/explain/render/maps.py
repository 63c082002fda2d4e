"""Maps of tokens over tokens, such as attention weights: as a figure and as HTML."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.errors import ShapeError
from regard.explain.render.figure import new_figure, style
from regard.explain.render.token_text import (
    attention_vmax,
    css_colour,
    head_names,
    shade,
    truncate,
    visible,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# in inches: a cell, a heading, a gap, the colour bar, the widest figure
CELL, HEADING, GAP, BAR, PAGE = 0.22, 0.25, 0.15, 0.55, 16.0
MAX_MAP, MIN_LABEL_SPACING = 9.0, 0.11  # inches: sides of a map, distances of labels
LABEL_CELLS = 24  # terminal cells of the longest label
THUMB = 0.7  # inches: a map of an overview
VECTOR_CELLS = 4096  # a map with more cells is rasterized
HTML_CELLS = 64  # the most rows and columns of a map in HTML; larger ones are max-pooled


def check_labels(
    weights: Tensor, rows: Sequence[str], columns: Sequence[str], headings: Sequence[str]
) -> None:
    """Raise if there is not one label for each row, column and head."""
    if tuple(weights.shape) != (len(headings), len(rows), len(columns)):
        raise ShapeError(
            f"{len(headings)} headings, {len(rows)} row and {len(columns)} column labels "
            f"do not match weights of shape {tuple(weights.shape)}"
        )


def value_range(weights: Tensor) -> tuple[float, float]:
    """The smallest and the largest value; 0 and 0 if there are no values."""
    if not weights.numel():
        return 0.0, 0.0
    return float(weights.min()), float(weights.max())


def draw_maps(
    weights: Float[Tensor, "heads rows columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    headings: Sequence[str] | None = None,
    title: str = "attention",
) -> "Figure":
    """Maps with their tokens, side by side on one colour scale.

    Weights are coloured by their square root, signed values linearly around white; the label of the
    colour bar says which.
    """
    headings = head_names(range(len(weights))) if headings is None else headings
    check_labels(weights, rows, columns, headings)
    row_labels, column_labels = _labels(rows), _labels(columns)
    row_width, column_width, heading_width = map(
        _label_width, (row_labels, column_labels, headings)
    )
    above = HEADING + column_width
    cell = min(CELL, MAX_MAP / max(len(rows), len(columns), 1))
    label_stride = math.ceil(MIN_LABEL_SPACING / cell)  # every n-th row and column has a label
    grid_width, grid_height = cell * max(len(columns), 1), cell * max(len(rows), 1)
    step = max(grid_width, heading_width) + GAP
    square_columns = math.sqrt(len(headings) * (above + grid_height) / step)  # of a square figure
    map_columns = max(int((PAGE - row_width) / step), math.ceil(square_columns))
    map_columns = max(1, min(len(headings), map_columns))
    map_rows = -(-len(headings) // map_columns)
    width = max(2 * GAP + row_width + map_columns * step, 3.0)
    height = map_rows * (above + grid_height + GAP) + 2 * GAP + BAR
    low, _ = value_range(weights)
    with style():
        from matplotlib.cm import ScalarMappable

        figure = new_figure(width, height, constrained=False)
        figure.set_label(title)
        scale, colour_map = _colours(weights, len(columns))
        colours = ScalarMappable(scale, colour_map)

        def axes_at(left: float, top: float, axes_width: float, axes_height: float) -> Any:
            """Axes at a distance from the left and the top edge, in inches."""
            return figure.add_axes(
                (
                    left / width,
                    1 - (top + axes_height) / height,
                    axes_width / width,
                    axes_height / height,
                )
            )

        for index, (heading, values) in enumerate(zip(headings, weights, strict=True)):
            line, column = divmod(index, map_columns)
            top = GAP + line * (above + grid_height + GAP)
            left = GAP + row_width + column * step
            axes = axes_at(left, top + above, grid_width, grid_height)
            axes.pcolormesh(
                values.float().numpy(force=True),
                norm=scale,
                cmap=colours.cmap,
                rasterized=len(rows) * len(columns) > VECTOR_CELLS,
            )
            axes.invert_yaxis()
            axes.grid(False)
            axes.spines[:].set_visible(True)
            axes.tick_params(length=0, labeltop=True, labelbottom=False)
            size = min(10.0, 52 * cell * label_stride)
            for set_ticks, labels in (
                (axes.set_xticks, column_labels),
                (axes.set_yticks, row_labels if column == 0 else []),
            ):
                ticks = [index + 0.5 for index in range(0, len(labels), label_stride)]
                set_ticks(ticks, labels[::label_stride], size=size)
            axes.tick_params(axis="x", labelrotation=90)
            figure.text(left / width, 1 - (top + 0.15) / height, heading, weight="bold")
        bar = axes_at(GAP + row_width, height - BAR, min(3.0, width - row_width - 3 * GAP), 0.12)
        figure.colorbar(colours, cax=bar, orientation="horizontal").outline.set_visible(False)
        bar.tick_params(labelsize=8)
        scale_name = "value" if low < 0 else "weight, square-root scale"
        bar.set_xlabel(f"{title}: {scale_name}", size=8, loc="left")
    return figure


def draw_overview(
    modules: Mapping[str, tuple[Float[Tensor, "heads rows columns"], Sequence[str]]],
    *,
    title: str = "attention",
) -> "Figure":
    """All maps of several modules: a row for each module, a small map without labels for each head.

    A module is given as its maps and their names. Each module has its own colour scale, as in
    `draw_maps`; its range is below the name of the module.
    """
    names = [truncate(name, 2 * LABEL_CELLS) for name in modules]
    map_columns = max(len(headings) for _, headings in modules.values())
    left, step = _label_width(names) + GAP, THUMB + GAP / 2
    width = max(left + map_columns * step + GAP, 3.0)
    height = len(modules) * (step + HEADING) + 2 * HEADING
    with style():
        figure = new_figure(width, height, constrained=False)
        figure.set_label(title)
        figure.text(GAP / width, 1 - 0.18 / height, title, weight="bold")
        for row, (name, (values, headings)) in enumerate(modules.items()):
            top = 1.5 * HEADING + row * (step + HEADING)
            label_height = 1 - (top + HEADING + THUMB / 2) / height
            figure.text((left - GAP) / width, label_height, names[row], ha="right", va="center")
            scale, colours = _colours(values, values.shape[-1])
            kind = "linear scale" if value_range(values)[0] < 0 else "square-root scale"
            figure.text(
                (left - GAP) / width,
                label_height - 0.2 / height,
                f"{scale.vmin:.2g} to {scale.vmax:.2g}, {kind}",
                size=7,
                ha="right",
                va="center",
            )
            for column, (heading, weights) in enumerate(zip(headings, values, strict=True)):
                corner = (left + column * step) / width, 1 - (top + HEADING + THUMB) / height
                axes = figure.add_axes((*corner, THUMB / width, THUMB / height), label=name)
                axes.imshow(
                    weights.float().numpy(force=True),
                    norm=scale,
                    cmap=colours,
                    aspect="auto",
                    interpolation="antialiased",
                )
                axes.set_title(truncate(heading.replace("_", " "), 12), size=7, loc="center")
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                axes.spines[:].set_visible(True)
    return figure


def _colours(weights: Tensor, columns: int) -> tuple[Any, str]:
    """The scale and the colour map: linear around 0 if signed, else of the square root."""
    from matplotlib.colors import CenteredNorm, PowerNorm

    low, high = value_range(weights)
    if low < 0:
        return CenteredNorm(0.0, max(-low, high)), "RdBu_r"
    return PowerNorm(0.5, 0.0, attention_vmax(high, columns)), "Blues"


def html_maps(
    weights: Float[Tensor, "heads rows columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    headings: Sequence[str] | None = None,
) -> str:
    """The maps of `draw_maps` as HTML tables; the tooltip of a cell is its value."""
    headings = head_names(range(len(weights))) if headings is None else headings
    check_labels(weights, rows, columns, headings)
    low, high = value_range(weights)
    largest = max(-low, high)
    top = largest if low < 0 else attention_vmax(largest, len(columns))
    note = "linear scale" if low < 0 else "square-root scale"
    note = f"{note}; largest {largest:.3g}"
    if len(rows) > HTML_CELLS or len(columns) > HTML_CELLS:
        size = (min(len(rows), HTML_CELLS), min(len(columns), HTML_CELLS))
        note = f"each cell is the largest of several: {len(rows)} × {len(columns)} tokens; {note}"
        weights, rows = F.adaptive_max_pool2d(weights, size), _pool_labels(rows, size[0])
        columns = _pool_labels(columns, size[1])
    tables = (
        _html_map(heading, values, _labels(rows), _labels(columns), top, low < 0)
        for heading, values in zip(headings, weights.tolist(), strict=True)
    )
    return f'<div style="font: 12px monospace">{"".join(tables)}<div>{escape(note)}</div></div>'


def _html_map(
    heading: str,
    values: list[list[float]],
    rows: list[str],
    columns: list[str],
    largest: float,
    signed: bool,
) -> str:
    upright = "display: inline-block; writing-mode: vertical-rl; transform: rotate(180deg)"
    top = "".join(
        f'<th style="padding: 2px; font-weight: normal; background: none; vertical-align: bottom">'
        f'<span style="{upright}">{escape(column)}</span></th>'
        for column in columns
    )
    lines = [f"<tr><td></td>{top}</tr>"]
    for side, row in zip(rows, values, strict=True):
        line = (
            f'<td style="width: 14px; height: 14px; padding: 0; background: '
            f'{css_colour(shade(value, largest, signed=signed), signed=signed)}" '
            f'title="{escape(f"{side} → {column}: {value:.3f}")}"></td>'
            for column, value in zip(columns, row, strict=True)
        )
        side_cell = f'<td style="padding: 0 5px; text-align: right">{escape(side)}</td>'
        lines.append(f'<tr style="background: none">{side_cell}{"".join(line)}</tr>')
    table = f'<table style="border-collapse: collapse; margin: 0">{"".join(lines)}</table>'
    return (
        f'<div style="display: inline-block; margin: 0 16px 12px 0; vertical-align: top">'
        f"<b>{escape(heading)}</b>{table}</div>"
    )


def _label_width(labels: Sequence[str]) -> float:
    """The width of the widest label at size 10, in inches, plus a margin."""
    with style():
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import text_to_path

        font = FontProperties(size=10)
        sizes = [text_to_path.get_text_width_height_descent(text, font, False) for text in labels]
    return max((width for width, _, _ in sizes), default=0.0) / 72 + 0.1


def _labels(tokens: Sequence[str]) -> list[str]:
    return [truncate(visible(token), LABEL_CELLS) for token in tokens]


def _pool_labels(labels: Sequence[str], size: int) -> list[str]:
    """The first label of each group of `adaptive_max_pool2d`."""
    return [labels[index * len(labels) // size] for index in range(size)]
