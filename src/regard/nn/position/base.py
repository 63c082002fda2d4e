"""The protocol of position encodings: vectors to add, rotations of q and k, or score biases."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Positions = Int[Tensor, "#batch time"]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotations of queries and keys, one angle per position and pair of coordinates."""

    cos: Float[Tensor, "#batch 1 time pairs"]
    sin: Float[Tensor, "#batch 1 time pairs"]
    interleaved: bool = False  # pairs are (0,1), (2,3) … instead of (0,d/2), (1,d/2+1) …

    def apply(
        self, x: Float[Tensor, "batch heads time head_dim"]
    ) -> Float[Tensor, "batch heads time head_dim"]:
        """Rotate the first 2 * pairs coordinates; the others are unchanged."""
        width = 2 * self.cos.shape[-1]
        rotated, rest = x[..., :width], x[..., width:]
        if self.interleaved and x.dtype == torch.float32 and x.shape[-1] % 2 == 0:
            rotated = rotate_complex(rotated, self.cos, self.sin)
        else:
            rotated = rotate_pairs(rotated, self.cos, self.sin, self.interleaved).to(x.dtype)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin)"""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def rotate_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_pairs` of interleaved pairs, as one complex multiplication: faster on a CPU."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


class Position(nn.Module):
    """No position encoding; a subclass overrides one of three methods.

    `positions` holds the absolute position of every token, so KV caches and packed documents
    need no special case. Each method is called once per forward pass, for all layers.
    """

    each_layer = False  # add `embed` to the input of every layer's attention, not once

    def in_window(self) -> "Position":
        """The position encoding of layers with a sliding window."""
        return self

    def embed(self, positions: Positions) -> Float[Tensor, "#batch time dim"] | None:
        """Vectors to add to the embeddings."""
        return None

    def rotation(self, positions: Positions) -> Rotation | None:
        """Rotations of the queries and keys of every layer."""
        return None

    def bias(
        self, query_positions: Positions, key_positions: Int[Tensor, "#batch seen"]
    ) -> Float[Tensor, "#batch heads time seen"] | None:
        """Biases to add to the attention scores of every layer."""
        return None
