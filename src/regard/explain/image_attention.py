"""Attention over the regions of an image, drawn on the image."""

from textwrap import wrap
from typing import TYPE_CHECKING

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.explain.render.figure import new_figure, style
from regard.explain.render.terminal import heads_overview
from regard.explain.render.token_text import attention_vmax, truncate, visible
from regard.explain.token_map import AttentionMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 6  # images side by side
INCHES = 1.4  # side of an image
CHARACTER = 0.072  # width of a character of the heading in inches
MAX_TITLE = 14  # characters above an image
GREY = 0.6  # of regions without attention


class ImageAttentionMap(AttentionMap):
    """The attention weights over the regions of an image.

    In cross-attention, the queries are the tokens of a caption; in self-attention, the patches of
    the image.
    """

    __slots__ = ()

    def region_weights(
        self, head: int | None = None
    ) -> tuple[list[str], Float[Tensor, "maps height width"]]:
        """The weights as maps of the image, and the names of the maps.

        Cross-attention has one map for each token: the mean over the heads, or one head.
        Self-attention has one map for each head: the weights of the class token, or without one
        the mean of the weights of all patches.
        """
        assert self.image is not None
        selected = self if head is None else self.one_map(head)
        if self.kind == "cross":
            names, weights = self.rows, selected.mean()
        else:
            names = selected.headings
            weights = selected.values[:, 0] if self._has_class_token else selected.values.mean(1)
        return names, weights[:, self.image.prefix_tokens :].unflatten(1, self.image.grid)

    @property
    def _has_class_token(self) -> bool:
        return self.rows[:1] == ["<cls>"]

    @property
    def _explanation(self) -> str:
        """The queries whose weights the maps show."""
        if self.kind == "cross":
            return "of each token over the image"
        return "of <cls> over the image" if self._has_class_token else "to each patch, mean"

    def text(self, head: int | None = None, *, width: int = 100, colour: bool = False) -> str:
        """Maps of the image for a terminal; for one head of self-attention, all its weights."""
        if self.kind == "self" and head is not None:
            return super().text(head, width=width, colour=colour)
        names, weights = self.region_weights(head)
        titles = map(visible, names) if self.kind == "cross" else names
        maps = heads_overview(
            weights,
            width=width,
            colour=colour,
            high=attention_vmax(0.0, len(self.columns)),
            headings=[truncate(name, MAX_TITLE) for name in titles],
            unit="regions",
        )
        return f"{self.title} {self._explanation}\n{maps}"

    def figure(self, head: int | None = None, *, title: str = "") -> "Figure":
        """The image for each map of `region_weights`, faded to grey where the weights are small."""
        assert self.image is not None
        names, cells = self.region_weights(head)
        pixels = self.image.pixels.movedim(0, -1).float().cpu() / 255  # (height, width, channels)
        pixels = pixels.expand(-1, -1, 3)
        cells = cells.unsqueeze(1).cpu()
        cells = cells / cells.amax((2, 3), keepdim=True).clamp_min(1e-9)
        opacities = 0.1 + 0.9 * F.interpolate(cells, pixels.shape[:2], mode="nearest").squeeze(1)
        columns = min(COLUMNS, len(names))
        lines = -(-len(names) // columns)
        with style():
            explanation = f"{f'{title}: ' if title else ''}{self.title} {self._explanation}"
            width = max(3.2, INCHES * columns)
            heading = wrap(explanation, int(width / CHARACTER))
            height = (INCHES + 0.25) * lines + 0.15 + 0.15 * len(heading)
            figure = new_figure(width, height)
            figure.set_label(explanation)
            figure.suptitle("\n".join(heading), size=9, x=0.01, ha="left")
            for index, (name, opacity) in enumerate(zip(names, opacities, strict=True)):
                axes = figure.add_subplot(lines, columns, index + 1)
                faded = GREY + opacity.unsqueeze(2) * (pixels - GREY)
                axes.imshow(faded.numpy(), interpolation="nearest")
                axes.set_title(truncate(name.strip() or repr(name), MAX_TITLE))
                axes.set_axis_off()
        return figure
