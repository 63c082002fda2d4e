"""Attention maps with their tokens: of one module, and of all modules of a model."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxtyping import Float, UInt8
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.explain.data_frame import data_frame
from regard.explain.render.explorer import PAGE_STYLE, explorer
from regard.explain.render.figure import check_suffix, encode, page, save
from regard.explain.render.maps import draw_maps, head_names
from regard.explain.render.terminal import heads_overview, heatmap
from regard.explain.render.token_text import strongest
from regard.explain.trace import check_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Kind = Literal["self", "cross", "states"]


@dataclass(frozen=True, slots=True)
class ShownImage:
    """The image under a map between patches."""

    pixels: UInt8[Tensor, "channels height width"]
    grid: tuple[int, int]  # patches per column and per row
    skipped: int = 0  # tokens before the patches: the class token


@dataclass(frozen=True, slots=True, repr=False)
class AttentionMap:
    """The attention weights of one sequence with its tokens: rows attend to columns.

    `kind` is "self", "cross" for an alignment, or "states": gates and states of a recurrent cell,
    tokens × units. `names` are those of the maps, by default head 0, head 1 …
    """

    rows: list[str]
    columns: list[str]
    weights: Float[Tensor, "heads rows columns"]
    names: list[str] | None = None
    kind: Kind = "self"
    image: ShownImage | None = None

    def __post_init__(self) -> None:
        size = (len(self.rows), len(self.columns))
        if self.weights.shape[1:] != size:
            raise ShapeError(
                f"{size[0]} row and {size[1]} column labels do not match weights of shape "
                f"{tuple(self.weights.shape)}"
            )

    @property
    def headings(self) -> list[str]:
        """The name of each map."""
        return head_names(len(self.weights)) if self.names is None else self.names

    def __repr__(self) -> str:
        maps, rows, columns = self.weights.shape
        if self.kind == "states":
            return f"AttentionMap({', '.join(self.headings)}: {rows} tokens × {columns} units)"
        heads = "1 head" if maps == 1 else f"{maps} heads"
        return f"AttentionMap({heads}, {rows} × {columns} tokens)"

    def _repr_html_(self) -> str:
        return explorer({"attention": self})

    def mean(self) -> Float[Tensor, "rows columns"]:
        """The average over heads."""
        return self.weights.mean(0)

    def text(self, head: int | None = None, *, width: int = 100, colour: bool = False) -> str:
        """A heat map for a terminal: one head, or all; of all heads of an alignment, the mean."""
        high = strongest(0.0, len(self.columns))
        if head is None and self.rows == self.columns:
            return heads_overview(self.weights, width=width, colour=colour, high=high)
        weights = self.mean() if head is None else self._heads(head)[0][0]
        return heatmap(weights, self.rows, self.columns, width=width, colour=colour, high=high)

    def figure(self, head: int | None = None, *, title: str = "attention") -> "Figure":
        """All heads side by side, or one of them, as a matplotlib figure."""
        weights, headings = self._heads(head)
        return draw_maps(weights, self.rows, self.columns, headings=headings, title=title)

    def save(self, path: Path | str, head: int | None = None, *, title: str = "attention") -> None:
        """Write all heads or one of them as .svg, .png, .pdf or .html, by the suffix of `path`.

        `title` is shown in the picture: the layer, for instance.
        """
        suffix = Path(path).suffix
        check_suffix(suffix)
        if suffix != ".html":
            save(encode(self.figure(head, title=title), suffix), path)
            return
        AttentionMaps({title: self}).save(path, head)

    def to_pandas(self, head: int | None = None) -> "DataFrame":
        """The weights of one head, or their mean, as a table of row tokens × column tokens."""
        weights = self.mean() if head is None else self._heads(head)[0][0]
        return data_frame(weights.tolist(), index=self.rows, columns=self.columns)

    def _heads(self, head: int | None) -> tuple[Tensor, list[str]]:
        """The weights of all heads or of one, and their headings."""
        if head is None:
            return self.weights, self.headings
        check_numbers([head], len(self.weights), "head")
        return self.weights[head : head + 1], self.headings[head : head + 1]

    def one_head(self, head: int) -> "AttentionMap":
        """A map of one head only."""
        weights, names = self._heads(head)
        return AttentionMap(self.rows, self.columns, weights, names, self.kind, self.image)


class AttentionMaps(dict[str, AttentionMap]):
    """The attention maps of several modules by path; a notebook shows them as one page."""

    def _repr_html_(self) -> str:
        return explorer(self)

    @property
    def self_attention(self) -> list[AttentionMap]:
        """The maps of self-attention of the decoder, or else of the encoder, by layer."""
        maps = [each for each in self.items() if each[1].kind == "self"]
        inner = [each for each in maps if not each[0].startswith("encoder")] or maps
        if not inner:
            raise ConfigError(f"no self-attention here; there is {', '.join(self)}")
        return [each for _, each in sorted(inner, key=lambda item: _numbers(item[0]))]

    def save(self, path: Path | str, head: int | None = None) -> None:
        """Write an interactive .html page with all layers and heads; needs no network."""
        if Path(path).suffix != ".html":
            raise ConfigError(
                f"{path}: all layers are written as .html; save one of {', '.join(self)} as a "
                "picture: maps[name].save(path)"
            )
        shown = self if head is None else {name: each.one_head(head) for name, each in self.items()}
        save(page("attention", explorer(shown), PAGE_STYLE).encode(), path)


def _numbers(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]
