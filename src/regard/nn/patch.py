"""From an image to vectors: patches instead of words."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ShapeError


class PatchEmbedding(nn.Module):
    r"""Cut an image into squares and embed each, row by row, behind a vector for the whole.

        x_0 = c,    x_i = W patch_i + b

    W a matrix for all patches: a convolution whose stride is its width. c is learned and stands
    for no patch; what it has gathered after the last layer describes the image (Dosovitskiy et
    al. 2020). Without `cls` there is no x_0.
    """

    def __init__(self, channels: int, dim: int, patch: int, *, cls: bool = True) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, dim, patch, stride=patch)
        nn.init.trunc_normal_(self.patch.weight, std=(channels * patch**2) ** -0.5)
        nn.init.zeros_(self.patch.bias)  # type: ignore[arg-type]
        self.cls = nn.Parameter(torch.zeros(dim)) if cls else None

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch time dim"]:
        """The vectors."""
        (side, _), channels = self.patch.kernel_size, self.patch.in_channels
        _, given, height, width = images.shape
        if given != channels:
            raise ShapeError(f"images of {given} channels; the model reads {channels}")
        if height % side or width % side:
            raise ShapeError(
                f"an image of {height} × {width} pixels cannot be cut into patches of {side}"
            )
        x: Tensor = self.patch(images).flatten(2).transpose(1, 2)  # (batch, patches, dim)
        if self.cls is None:
            return x
        return torch.cat((self.cls.to(x.dtype).expand(len(x), 1, -1), x), dim=1)

    if TYPE_CHECKING:
        __call__ = forward


def stretched(
    table: Float[Tensor, "positions dim"], height: int, width: int, *, kept: int
) -> Float[Tensor, "time dim"]:
    """Learned positions of a square of patches, for one of another size.

    The last positions lie in a square; between them a bicubic curve is drawn. The `kept` before
    them belong to no patch and stay (Dosovitskiy et al. 2020, section 3.2).
    """
    first, square = table[:kept], table[kept:]
    side = round(len(square) ** 0.5)
    grid = square.T.unflatten(1, (side, side)).unsqueeze(0)  # (1, dim, side, side)
    wanted = F.interpolate(grid, (height, width), mode="bicubic", align_corners=False)
    return torch.cat((first, wanted.squeeze(0).flatten(1).T))
