"""Attention weights, and gates and states of recurrent cells, with their tokens."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from jaxtyping import Float, UInt8
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.explain.data_frame import data_frame
from regard.explain.render.explorer import PAGE_STYLE, explorer
from regard.explain.render.figure import check_suffix, encode, page, save
from regard.explain.render.maps import draw_maps, draw_overview
from regard.explain.render.terminal import heads_overview, heatmap
from regard.explain.render.token_text import attention_vmax, head_names
from regard.explain.trace import check_indices

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Kind = Literal["self", "cross"]


@dataclass(frozen=True, slots=True, repr=False)
class TokenMap:
    """Matrices of one module, such as one for each head, with the labels of rows and columns.

    `names` are those of the matrices, by default head 0, head 1 … The argument `head` of the
    methods is the index of a matrix, also where the matrices are gates.
    """

    rows: list[str]
    columns: list[str]
    values: Float[Tensor, "maps rows columns"]
    names: list[str] | None = None
    title: ClassVar[str] = "values"
    noun: ClassVar[str] = "head"  # what one matrix is called

    def __post_init__(self) -> None:
        size = (len(self.rows), len(self.columns))
        if self.values.shape[1:] != size:
            raise ShapeError(
                f"{size[0]} row and {size[1]} column labels do not match values of shape "
                f"{tuple(self.values.shape)}"
            )

    @property
    def kind(self) -> str:
        """How the interactive page shows it: "self" or "cross" for attention, or "states"."""
        return "states"

    @property
    def image(self) -> "PatchGridImage | None":
        """The image that the columns are regions of."""
        return None

    @property
    def headings(self) -> list[str]:
        """The name of each matrix."""
        return head_names(range(len(self.values))) if self.names is None else self.names

    def _repr_html_(self) -> str:
        return explorer({self.title: self})

    def mean(self) -> Float[Tensor, "rows columns"]:
        """The mean of the matrices."""
        return self.values.mean(0)

    def text(self, head: int | None = None, *, width: int = 100, colour: bool = False) -> str:
        """A heat map of one head or of all heads, for a terminal.

        All heads of self-attention are drawn side by side. Of cross-attention, of some rows only,
        and of gates and states, the mean is drawn.
        """
        high = attention_vmax(0.0, len(self.columns))
        if head is None and self.rows == self.columns and self.kind != "cross":
            return heads_overview(self.values, width=width, colour=colour, high=high)
        values = self.mean() if head is None else self.one_map(head).values[0]
        return heatmap(values, self.rows, self.columns, width=width, colour=colour, high=high)

    def figure(self, head: int | None = None, *, title: str = "") -> "Figure":
        """All heads side by side, or one of them, as a matplotlib figure."""
        selected = self if head is None else self.one_map(head)
        return draw_maps(
            selected.values,
            self.rows,
            self.columns,
            headings=selected.headings,
            title=title or self.title,
        )

    def save(self, path: Path | str, head: int | None = None, *, title: str = "") -> None:
        """Write all heads or one of them as .svg, .png, .pdf or .html, by the suffix of `path`.

        `title` is shown in the figure: the layer, for instance.
        """
        suffix = Path(path).suffix
        check_suffix(suffix)
        if suffix == ".html":
            selected = self if head is None else self.one_map(head)
            _save_page(self.title, {title or self.title: selected}, path)
        else:
            save(encode(self.figure(head, title=title), suffix), path)

    def to_pandas(self, head: int | None = None) -> "DataFrame":
        """The values of one head, or their mean, as a table of rows × columns."""
        values = self.mean() if head is None else self.one_map(head).values[0]
        return data_frame(values.tolist(), index=self.rows, columns=self.columns)

    def one_map(self, head: int) -> "TokenMap":
        """The map of one head, or of one gate."""
        check_indices([head], len(self.values), self.noun)
        chosen = slice(head, head + 1)
        return replace(self, values=self.values[chosen], names=self.headings[chosen])


@dataclass(frozen=True, slots=True)
class PatchGridImage:
    """The image that is drawn under an attention map, and its grid of patches."""

    pixels: UInt8[Tensor, "channels height width"]
    grid: tuple[int, int]  # rows and columns of patches
    prefix_tokens: int = 0  # tokens before the patches: 1 with a class token


@dataclass(frozen=True, slots=True, repr=False)
class AttentionMap(TokenMap):
    """The attention weights of one sequence, one matrix for each head: rows attend to columns.

    `kind` is "self" or "cross", for self- or cross-attention.
    """

    kind: Kind = "self"
    image: PatchGridImage | None = None
    title: ClassVar[str] = "attention"

    @property
    def weights(self) -> Float[Tensor, "heads rows columns"]:
        """The attention weights."""
        return self.values

    def __repr__(self) -> str:
        maps, rows, columns = self.values.shape
        heads = "1 head" if maps == 1 else f"{maps} heads"
        return f"{type(self).__name__}({heads}, {rows} × {columns} tokens)"


@dataclass(frozen=True, slots=True, repr=False)
class StateMap(TokenMap):
    """The gates and the state of a recurrent cell, one matrix for each: tokens × units."""

    title: ClassVar[str] = "states"
    noun: ClassVar[str] = "gate"

    def __repr__(self) -> str:
        _, rows, columns = self.values.shape
        return f"StateMap({', '.join(self.headings)}: {rows} tokens × {columns} units)"


Map = TypeVar("Map", bound=TokenMap)


class TokenMaps(dict[str, Map]):
    """The maps of several modules by path; a notebook shows all of them in one element."""

    title = "maps"

    def _repr_html_(self) -> str:
        return explorer(self)

    def figure(self, head: int | None = None) -> "Figure":
        """All layers and heads, or one head of each layer, as a matplotlib figure."""
        selected = self._select(head)
        modules = {
            name: (token_map.values, token_map.headings) for name, token_map in selected.items()
        }
        return draw_overview(modules, title=self.title)

    def save(self, path: Path | str, head: int | None = None) -> None:
        """Write all layers and heads, or one head of each layer, by the suffix of `path`.

        .html is an interactive page, which needs no network; .svg, .png and .pdf are `figure`.
        """
        suffix = Path(path).suffix
        check_suffix(suffix)
        if suffix == ".html":
            _save_page(self.title, self._select(head), path)
        else:
            save(encode(self.figure(head), suffix), path)

    def _select(self, head: int | None) -> Mapping[str, TokenMap]:
        if head is None:
            return self
        return {name: token_map.one_map(head) for name, token_map in self.items()}


class AttentionMaps(TokenMaps[AttentionMap]):
    """The attention maps of several modules."""

    title = "attention"

    @property
    def self_attention(self) -> list[AttentionMap]:
        """The maps of self-attention of the decoder, or else of the encoder, by layer."""
        maps = {name: token_map for name, token_map in self.items() if token_map.kind == "self"}
        names = [name for name in maps if not name.startswith("encoder")] or list(maps)
        if not names:
            raise ConfigError(f"no self-attention among these maps: {', '.join(self)}")
        return [maps[name] for name in sorted(names, key=_layer_indices)]


class StateMaps(TokenMaps[StateMap]):
    """The gates and states of several recurrent cells."""

    title = "states"


def _save_page(title: str, maps: Mapping[str, TokenMap], path: Path | str) -> None:
    save(page(title, explorer(maps), PAGE_STYLE).encode(), path)


def _layer_indices(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]
