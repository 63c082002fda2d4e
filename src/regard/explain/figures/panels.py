"""The data of a figure and of its panels, as plain values that are drawn elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Cell = str | int | float | None
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of cells under a header; `shades` colours cells from 0 (white) to 1 (dark)."""

    title: str = ""
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    shades: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Heatmap:
    """A matrix of values; diverging colours, white at 0, if values have both signs or `signed`."""

    title: str = ""
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    x_label: str = ""
    y_label: str = ""
    high: float | None = None  # the value of the darkest colour; None: the largest
    signed: bool = False  # diverging colours even if no value is below 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinePlot:
    """Curves of points (x, y); `reference_lines` are thin dashed lines, such as the theory."""

    title: str = ""
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    reference_lines: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """One bar for each label and series."""

    title: str = ""
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]
    x_label: str = ""
    y_label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    """Labelled points in a plane."""

    title: str = ""
    labels: Sequence[str]
    points: Sequence[Point]
    x_label: str = ""
    y_label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of a tree; nodes come after their parents."""

    label: str
    parent: int | None  # index of the parent
    value: float  # log P of the path
    kept: bool = True  # False: pruned by the search
    best: bool = False  # on the best path


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A tree that grows to the right."""

    title: str = ""
    nodes: Sequence[Node]


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Layers of units over positions, the input first, and the edges between layers.

    `marks` are short texts inside the units; units without one are not part of the computation
    that is shown.
    """

    title: str = ""
    layers: Sequence[str]
    positions: Sequence[str]
    marks: Sequence[Sequence[str]]  # for each layer, one mark per position
    edges: Sequence[tuple[int, int, int, int]]  # layer, position, to layer, position
    x_label: str = "position"


@dataclass(frozen=True, kw_only=True, slots=True)
class Segmentations:
    """One text split into tokens by several tokenizers, one line for each tokenizer."""

    title: str = ""
    labels: Sequence[str]
    pieces: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """Values over a grid, drawn as contour lines."""

    title: str = ""
    x: Sequence[float]
    y: Sequence[float]
    values: Sequence[Sequence[float]]  # for each y, one value per x
    low: float  # `low` and `high` are the ends of the colour scale, which several panels may share
    high: float
    scale_label: str  # the label of the colour scale
    x_label: str = ""
    y_label: str = ""


Panel = Table | Heatmap | LinePlot | Bars | Scatter | Tree | Network | Segmentations | Surface
KINDS: dict[type[Any], str] = {  # names of the panels in JSON
    Table: "table",
    Heatmap: "heatmap",
    LinePlot: "lines",
    Bars: "bars",
    Scatter: "scatter",
    Tree: "tree",
    Network: "network",
    Segmentations: "segmentations",
    Surface: "surface",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureData:
    """The contents of a figure: its title, its panels, its numbers by name, and a caption."""

    title: str
    caption: str
    panels: Sequence[Panel]
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The figure as plain lists and dicts, for JSON."""
        panels = [{"kind": KINDS[type(panel)], **asdict(panel)} for panel in self.panels]
        plain = {"title": self.title, "caption": self.caption, "numbers": dict(self.numbers)}
        return {**plain, "panels": panels}
