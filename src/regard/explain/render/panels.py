"""The panels of a figure as one matplotlib figure."""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
from regard.explain.render.figure import new_figure, style
from regard.explain.render.panel_layout import (
    CELL,
    CHARACTER_WIDTH,
    MARGIN,
    MAX_HEATMAP,
    PAGE,
    SIZES,
    bars_size,
    cell_text,
    is_numeric,
    label,
    label_offsets,
    node_depths,
    node_rows,
    node_text,
    piece_width,
    segment_widths,
    table_widths,
)
from regard.explain.render.token_text import visible_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK = 0.7  # the text of a cell with a darker shade is white
CONTOURS = 16  # colours of a surface
LEGEND_COLUMNS = 3  # columns of the legend of a bar chart
CAPTION_CHARACTERS = 14.5  # characters of the caption per inch


def draw(data: FigureData) -> "Figure":
    """The panels in rows, the title above them and the caption below."""
    sizes = [SIZES[type(panel)](panel) for panel in data.panels]
    rows = _rows(sizes)
    width = max(sum(sizes[index][0] for index in row) for row in rows)
    width = min(max(width, 5.0), PAGE + 1)
    heights = [max(sizes[index][1] for index in row) for row in rows]
    caption = "\n".join(
        textwrap.fill(line, int(width * CAPTION_CHARACTERS))
        for line in (_numbers(data), data.caption)
        if line
    )
    below = 0.18 * (caption.count("\n") + 1) + 0.12
    with style():
        figure = new_figure(width, sum(heights) + below + 0.35)
        figure.set_label(f"{data.title}. {data.caption}")
        figure.suptitle(data.title, x=0.01, ha="left", weight="bold", size=12)
        parts: Any = figure.subfigures(len(rows) + 1, 1, height_ratios=[*heights, below])
        for part, row, height in zip(parts, rows, heights, strict=False):
            widths = [sizes[index][0] for index in row]
            spare = width - sum(widths)
            widths += [spare] if spare > 0.3 else []  # an empty column: no panel is stretched
            grid = part.subplots(1, len(widths), width_ratios=widths, squeeze=False)
            grid[0][-1].set_visible(len(widths) == len(row))
            for axes, index in zip(grid[0], row, strict=False):
                panel = data.panels[index]
                axes.set_title(panel.title, size=10)
                DRAW[type(panel)](axes, panel)
                if isinstance(panel, Table | Segmentations):  # rows of one height in every figure
                    axes.set_ylim(axes.get_ylim()[0] * max(1, height / sizes[index][1]), 0)
        parts[-1].text(0.01, 0.95, caption, size=9, color="#444444", va="top")
    return figure


def _numbers(data: FigureData) -> str:
    return " · ".join(f"{name}: {cell_text(value)}" for name, value in data.numbers.items())


def _rows(sizes: Sequence[tuple[float, float]]) -> list[list[int]]:
    """The panels of each row, as many as fit on the page."""
    rows: list[list[int]] = [[]]
    for index, (width, _) in enumerate(sizes):
        used = sum(sizes[other][0] for other in rows[-1])
        if rows[-1] and used + width > PAGE:
            rows.append([])
        rows[-1].append(index)
    return rows


def _hide_axes(axes: Any) -> None:
    axes.grid(False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _draw_table(axes: Any, panel: Table) -> None:
    from matplotlib import colormaps

    _hide_axes(axes)
    widths = table_widths(panel)
    edges = [sum(widths[:column]) for column in range(len(widths) + 1)]
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(len(panel.rows) + 1, 0)
    axes.axhline(1, color="#999999", linewidth=0.8)
    colours = colormaps["Blues"]
    for index, row in enumerate([panel.header, *panel.rows]):
        for column, cell in enumerate(row):
            right = is_numeric(panel, column)
            place = (
                edges[column + 1] - CHARACTER_WIDTH if right else edges[column] + CHARACTER_WIDTH
            )
            shade = 0.0 if panel.shades is None or not index else panel.shades[index - 1][column]
            if shade:
                corner = (edges[column], index)
                axes.add_patch(_rectangle(corner, widths[column], colours(0.85 * shade)))
            text = visible_words(cell_text(cell))
            axes.text(
                place,
                index + 0.5,
                text,
                ha="right" if right else "left",
                va="center",
                size=9,
                weight="normal" if index else "bold",
                color="white" if 0.85 * shade > DARK else "#222222",
            )


def _rectangle(corner: tuple[float, float], width: float, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, 1, color=colour, linewidth=0)


def _draw_heat(axes: Any, panel: Heatmap) -> None:
    from matplotlib.colors import CenteredNorm, Normalize

    flat = [value for row in panel.values for value in row if math.isfinite(value)]
    low, high = min(flat, default=0.0), panel.high or max(flat, default=1.0)
    signed = panel.signed or low < 0
    scale = CenteredNorm(0.0, max(-low, high)) if signed else Normalize(0.0, high or 1.0)
    mesh = axes.imshow(  # "none": SVG files hold one pixel for each cell
        [list(row) for row in panel.values],
        norm=scale,
        cmap="RdBu_r" if signed else "Blues",
        interpolation="none",
        aspect="auto",
        extent=(0, len(panel.columns), len(panel.rows), 0),
    )
    axes.grid(False)
    axes.spines[:].set_visible(True)
    axes.tick_params(length=0, labelsize=8)
    numeric = all(text.lstrip("-").isdigit() for text in panel.columns)
    longest = max(map(len, panel.columns), default=0)
    rotated = longest > 2 and not numeric
    needed = 0.14 if rotated else CHARACTER_WIDTH * longest + 0.05  # inches of a label
    for set_ticks, labels, space in (
        (axes.set_xticks, panel.columns, needed),
        (axes.set_yticks, panel.rows, 0.14),
    ):
        cell = min(CELL, MAX_HEATMAP / max(1, len(labels)))
        places = range(0, len(labels), math.ceil(space / cell))
        set_ticks([place + 0.5 for place in places], [label(labels[place]) for place in places])
    axes.tick_params(axis="x", labelrotation=90 if rotated else 0)
    axes.set_xlabel(panel.x_label, size=9)
    axes.set_ylabel(panel.y_label, size=9)
    _colour_bar(axes, mesh)


def _colour_bar(axes: Any, mappable: Any, **options: Any) -> None:
    bar = axes.figure.colorbar(mappable, ax=axes, fraction=0.05, pad=0.02, aspect=30, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    bar.solids.set_rasterized(True)  # one image in an SVG file instead of 256 shapes


def _draw_lines(axes: Any, panel: LinePlot) -> None:
    from matplotlib.ticker import LogLocator

    few = max(map(len, panel.series.values()), default=0) <= 40
    for name, points in panel.series.items():
        marker = "o" if few else ""
        axes.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=4)
    for name, points in panel.reference_lines.items():
        guide = {"color": "#777777", "linewidth": 1.0, "linestyle": "--"}
        axes.plot(*zip(*points, strict=True), label=name, **guide)
    axes.set_xlabel(panel.x_label, size=9)
    axes.set_ylabel(panel.y_label, size=9)
    for used, set_scale, axis in (
        (panel.log_x, axes.set_xscale, axes.xaxis),
        (panel.log_y, axes.set_yscale, axes.yaxis),
    ):
        if used:
            set_scale("log")
            axis.set_minor_formatter(lambda value, _: "")
            low, high = axis.get_view_interval()
            if high < 100 * low:  # a power of ten alone would be the only label
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda v, _: f"{v:,.0f}" if abs(v) >= 1e4 else f"{v:,.6g}")
    places = sorted({x for points in panel.series.values() for x, _ in points})
    if panel.log_x and len(places) <= 9:
        axes.set_xticks(places)
    axes.tick_params(labelsize=8)
    if len(panel.series) + len(panel.reference_lines) > 1:
        axes.legend(fontsize=8)


def _draw_bars(axes: Any, panel: Bars) -> None:
    width = 0.8 / len(panel.series)
    for index, (name, values) in enumerate(panel.series.items()):
        places = [place + (index + 0.5) * width - 0.4 for place in range(len(values))]
        axes.bar(places, values, width, label=name)
    axes.set_xticks(range(len(panel.labels)), [label(text) for text in panel.labels], size=8)
    if (
        sum(len(label(text)) + 1 for text in panel.labels) * CHARACTER_WIDTH
        > bars_size(panel)[0] - 1
    ):
        axes.tick_params(axis="x", labelrotation=90)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(False, axis="x")
    axes.set_xlabel(panel.x_label, size=9)
    axes.set_ylabel(panel.y_label, size=9)
    if len(panel.series) > 1:
        legend_rows = math.ceil(len(panel.series) / LEGEND_COLUMNS)
        largest = max(max(values) for values in panel.series.values())
        right = [value for values in panel.series.values() for value in values[len(values) // 2 :]]
        if max(right) > 0.5 * largest:  # no free corner: room above the bars
            axes.set_ylim(0, largest * (1.08 + 0.13 * legend_rows))
        axes.legend(fontsize=8, ncols=LEGEND_COLUMNS, loc="upper right")
    if not any(map(any, panel.series.values())):
        axes.set_ylim(0, 1)


def _draw_scatter(axes: Any, panel: Scatter) -> None:
    x, y = zip(*panel.points, strict=True)
    axes.scatter(x, y, s=12)
    names = [label(text) for text in panel.labels]
    for name, point, (dx, dy) in zip(names, panel.points, label_offsets(panel), strict=True):
        is_far = math.hypot(dx, dy) > 0.3 + CHARACTER_WIDTH * len(name) / 2
        axes.annotate(
            name,
            point,
            (72 * dx, 72 * dy),
            textcoords="offset points",
            ha="center",
            va="center",
            size=8,
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "lw": 0.6} if is_far else None,
        )
    axes.margins(MARGIN)
    axes.set_xlabel(panel.x_label, size=9)
    axes.set_ylabel(panel.y_label, size=9)
    axes.tick_params(labelsize=8)


def _draw_tree(axes: Any, panel: Tree) -> None:
    _hide_axes(axes)
    depths, places = node_depths(panel), node_rows(panel)
    for node, depth, place in zip(panel.nodes, depths, places, strict=True):
        colour = "#d55e00" if node.best else "#0072b2" if node.kept else "#aaaaaa"
        if node.parent is not None:
            start = (depths[node.parent], places[node.parent])
            line_width = 2.2 if node.best else 1.2 if node.kept else 0.8
            axes.plot(
                (start[0], depth), (start[1], place), color=colour, linewidth=line_width, zorder=1
            )
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour}
        axes.text(depth, place, node_text(node), va="center", ha="center", size=8, bbox=box)
    axes.set_xlim(-0.45, max(depths) + 0.55)
    axes.set_ylim(max(places) + 0.6, -0.6)


def _draw_network(axes: Any, panel: Network) -> None:
    _hide_axes(axes)
    for layer, position, to_layer, to_position in panel.edges:
        axes.plot(
            (position, to_position), (layer, to_layer), color="#0072b2", linewidth=0.7, zorder=1
        )
    size = 190 if len(panel.positions) <= 24 else 60
    for layer, marks in enumerate(panel.marks):
        for position, mark in enumerate(marks):
            face = "#cfe3f2" if mark else "white"
            edge = "#0072b2" if mark else "#cccccc"
            axes.scatter(position, layer, s=size, color=face, edgecolors=edge, zorder=2)
            if mark and mark != "•" and size > 100:
                axes.text(position, layer, mark, ha="center", va="center", size=8, zorder=3)
    axes.set_yticks(range(len(panel.layers)), panel.layers, size=9)
    axes.set_xticks(range(len(panel.positions)), map(label, panel.positions), size=8)
    axes.set_xlabel(panel.x_label, size=9)
    if max(map(len, panel.positions)) > 2 and len(panel.positions) > 8:
        axes.tick_params(axis="x", labelrotation=90)
    axes.tick_params(length=0)
    axes.set_xlim(-0.7, len(panel.positions) - 0.3)
    axes.set_ylim(-0.5, len(panel.layers) - 0.5)


def _draw_segmentations(axes: Any, panel: Segmentations) -> None:
    """Tokens in two alternating shades, so that their boundaries can be seen."""
    _hide_axes(axes)
    start, longest = segment_widths(panel)
    axes.set_xlim(0, start + longest)
    axes.set_ylim(1.35 * len(panel.labels), 0)
    for line_index, (name, line) in enumerate(zip(panel.labels, panel.pieces, strict=True)):
        top, left = 1.35 * line_index, start
        axes.text(0, top + 0.5, name, va="center", size=9, weight="bold")
        for index, piece in enumerate(line):
            width = piece_width(piece)
            axes.add_patch(_rectangle((left, top), width, ("#cfe3f2", "#f6dcc6")[index % 2]))
            place = (left + width / 2, top + 0.5)
            axes.text(*place, label(piece), ha="center", va="center", size=8)
            left += width


def _draw_surface(axes: Any, panel: Surface) -> None:
    step = (panel.high - panel.low or 1.0) / CONTOURS
    levels = [panel.low + step * n for n in range(CONTOURS + 1)]
    filled = axes.contourf(
        panel.x, panel.y, panel.values, levels=levels, cmap="Blues", extend="both"
    )
    least, most = min(map(min, panel.values)), max(map(max, panel.values))
    inside = [level for level in levels if least < level < most]
    if inside:
        lines = axes.contour(
            panel.x, panel.y, panel.values, levels=inside, colors="#555555", linewidths=0.5
        )
        axes.clabel(lines, inside[::2], fmt="%.1f", fontsize=7)
    axes.plot(0, 0, marker="+", color="#d55e00", markersize=10)
    axes.grid(False)
    axes.set_xlabel(panel.x_label, size=9)
    axes.set_ylabel(panel.y_label, size=9)
    axes.tick_params(labelsize=8)
    _colour_bar(axes, filled, format="%.1f", label=panel.scale_label)


DRAW: dict[type[Any], Callable[[Any, Any], None]] = {
    Table: _draw_table,
    Heatmap: _draw_heat,
    LinePlot: _draw_lines,
    Bars: _draw_bars,
    Scatter: _draw_scatter,
    Tree: _draw_tree,
    Network: _draw_network,
    Segmentations: _draw_segmentations,
    Surface: _draw_surface,
}
