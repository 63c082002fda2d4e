"""Attention over the regions of an image, drawn on the image for each word of its caption."""

from typing import TYPE_CHECKING

import torch.nn.functional as F

from regard.explain.render.figure import new_figure, style
from regard.explain.token_map import AttentionMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 6  # images side by side
INCHES = 1.4  # side of an image


class ImageAttentionMap(AttentionMap):
    """The attention weights of each token of a caption over the regions of its image."""

    __slots__ = ()

    def figure(self, head: int | None = None, *, title: str = "") -> "Figure":
        """The image for each token, brighter where it attends to; the mean of the heads or one."""
        assert self.image is not None
        weights = self.mean() if head is None else self.one_head(head).values[0]
        pixels = self.image.pixels.movedim(0, -1).float().cpu() / 255  # (height, width, channels)
        pixels = pixels.expand(-1, -1, 3)
        cells = weights.unflatten(1, self.image.grid).unsqueeze(1).cpu()
        cells = cells / cells.amax((2, 3), keepdim=True).clamp_min(1e-9)
        bright = F.interpolate(cells, pixels.shape[:2], mode="nearest").squeeze(1)
        columns = min(COLUMNS, len(self.rows))
        lines = -(-len(self.rows) // columns)
        with style():
            figure = new_figure(INCHES * columns, (INCHES + 0.25) * lines)
            figure.set_label(f"{title or self.title} of each token over the image")
            for index, (token, weight) in enumerate(zip(self.rows, bright, strict=True)):
                axes = figure.add_subplot(lines, columns, index + 1)
                shown = pixels * (0.25 + 0.75 * weight.unsqueeze(2))
                axes.imshow(shown.numpy(), interpolation="nearest")
                axes.set_title(token.strip() or repr(token))
                axes.set_axis_off()
        return figure
