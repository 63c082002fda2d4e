"""Features of the regions of an image, which a decoder attends to."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn.patch import PatchEmbedding


class ConvolutionFeatures(nn.Module):
    r"""A vector for each region of `patch_size` × `patch_size` pixels, by strided convolutions.

        z_0 = image,    z_i = relu(norm(K_i * z_{i-1}))   3 × 3, stride 2, i = 1 .. log2(patch_size)
        h   = P z + p                                     of each region, row by row

    The receptive field of a vector is 2 patch_size - 1 pixels wide: its region, and a margin of
    patch_size - 1 pixels above it and to its left.
    """

    def __init__(self, channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        stages = patch_size.bit_length() - 1
        widths = [channels, *(max(16, dim >> (stages - 1 - n)) for n in range(stages))]
        self.stages = nn.ModuleList(
            _Convolution(widths[n], widths[n + 1], stride=2) for n in range(stages)
        )
        self.project = nn.Conv2d(widths[-1], dim, 1)

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch regions dim"]:
        """The vectors of the regions."""
        z = images
        for stage in self.stages:
            z = stage(z)
        regions: Tensor = self.project(z).flatten(2).transpose(1, 2)
        return regions

    if TYPE_CHECKING:
        __call__ = forward


class _Convolution(nn.Module):
    """relu(norm(K * z)); `norm` is a LayerNorm over the channels at each position."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(channels, width, 3, stride=stride, padding=1)
        self.norm = nn.LayerNorm(width)

    def forward(self, z: Tensor) -> Tensor:
        channels_last: Tensor = self.norm(self.kernel(z).movedim(1, -1))
        return channels_last.relu().movedim(-1, 1)


class PatchFeatures(PatchEmbedding):
    """A vector for each region: a linear function of its pixels (Dosovitskiy et al. 2020)."""

    def __init__(self, channels: int, dim: int, patch_size: int) -> None:
        super().__init__(channels, dim, patch_size, cls=False)


FEATURES: dict[str, type[ConvolutionFeatures] | type[PatchFeatures]] = {
    "convolution": ConvolutionFeatures,
    "patches": PatchFeatures,
}


class RegionConvolution(nn.Module):
    """h + relu(norm(K * h)): a residual 3 × 3 convolution over the grid of regions."""

    def __init__(self, dim: int, grid: int) -> None:
        super().__init__()
        self.grid, self.convolution = grid, _Convolution(dim, dim)

    def forward(
        self, regions: Float[Tensor, "batch regions dim"]
    ) -> Float[Tensor, "batch regions dim"]:
        """The vectors, each with information from the neighbouring regions."""
        z = regions.transpose(1, 2).unflatten(2, (self.grid, self.grid))
        update: Tensor = self.convolution(z)
        return regions + update.flatten(2).transpose(1, 2)


class RegionPositions(nn.Module):
    """h_i + p_i: learned position embeddings of the regions, as in ViT."""

    def __init__(self, regions: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(regions, dim))
        nn.init.normal_(self.table, std=0.02)

    def forward(
        self, regions: Float[Tensor, "batch regions dim"]
    ) -> Float[Tensor, "batch regions dim"]:
        """The vectors plus the position embeddings of their regions."""
        return regions + self.table
