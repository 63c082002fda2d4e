"""Patch embeddings of images (ViT)."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ShapeError


class PatchEmbedding(nn.Module):
    r"""Split an image into patches and embed each, row by row, after a class token.

        x_0 = c,    x_i = W patch_i + b

    W is the same for all patches: a convolution whose stride is its kernel size. The class token
    c is learned; its output after the last layer represents the image (Dosovitskiy et al. 2020).
    Without `cls` there is no x_0.
    """

    def __init__(
        self, channels: int, dim: int, patch_size: int | tuple[int, int], *, cls: bool = True
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        nn.init.trunc_normal_(self.patch.weight, std=self.patch.weight[0].numel() ** -0.5)
        nn.init.zeros_(self.patch.bias)  # type: ignore[arg-type]
        self.cls = nn.Parameter(torch.zeros(dim)) if cls else None

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch time dim"]:
        """The embeddings of the class token, if there is one, and of the patches."""
        patch_size, channels = self.patch.kernel_size, self.patch.in_channels
        _, image_channels, height, width = images.shape
        if image_channels != channels:
            raise ShapeError(
                f"images have {image_channels} channels, but the model needs {channels}"
            )
        patch_height, patch_width = patch_size
        if height % patch_height or width % patch_width:
            raise ShapeError(
                f"an image of {height} × {width} pixels cannot be split into patches of "
                f"{patch_height} × {patch_width}; resize it"
            )
        x: Tensor = self.patch(images).flatten(2).transpose(1, 2)  # (batch, patches, dim)
        if self.cls is None:
            return x
        return torch.cat((self.cls.to(x.dtype).expand(len(x), 1, -1), x), dim=1)

    if TYPE_CHECKING:
        __call__ = forward


def interpolate_positions(
    table: Float[Tensor, "positions dim"],
    grid: tuple[int, int],
    new_grid: tuple[int, int],
    *,
    num_prefix_tokens: int,
) -> Float[Tensor, "time dim"]:
    """Resize the learned position embeddings of a grid of patches to another grid.

    The grid is interpolated bicubically; the first `num_prefix_tokens` rows of the table
    belong to no patch and are copied (Dosovitskiy et al. 2020, section 3.2).
    """
    prefix, patches = table[:num_prefix_tokens], table[num_prefix_tokens:]
    image = patches.T.unflatten(1, grid).unsqueeze(0)  # (1, dim, height, width)
    resized = F.interpolate(image, new_grid, mode="bicubic", align_corners=False)
    return torch.cat((prefix, resized.squeeze(0).flatten(1).T))
