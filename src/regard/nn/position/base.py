"""The three doors through which a model can learn where a token stands."""

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
        """Rotate the first 2 * pairs coordinates; the others pass."""
        width = 2 * self.cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        whole = x.dtype == torch.float32 and x.shape[-1] % 2 == 0  # pairs that are complex numbers
        if self.interleaved and whole and not torch.compiler.is_compiling():
            turned = self._at_once(turned)
        else:
            turned = self._in_parts(turned).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    def _in_parts(self, x: Tensor) -> Tensor:
        a, b = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        first, second = a * self.cos - b * self.sin, b * self.cos + a * self.sin
        if self.interleaved:
            return torch.stack((first, second), dim=-1).flatten(-2)
        return torch.cat((first, second), dim=-1)

    def _at_once(self, x: Tensor) -> Tensor:
        """A rotation is a product of complex numbers: one kernel instead of eight, on a CPU."""
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(self.cos, self.sin)).flatten(-2)


class Position(nn.Module):
    """How a model learns where a token stands. There are three doors; open one.

    `positions` holds the absolute position of every token, so decoding states and packed documents
    need no special case. Each door is asked once per forward pass.
    """

    each_layer = False  # add `embed` to the input of every layer's attention, not once

    def embed(self, positions: Positions) -> Float[Tensor, "#batch time dim"] | None:
        """CellState to add to the embeddings."""
        return None

    def rotation(self, positions: Positions) -> Rotation | None:
        """Rotations of the queries and keys of every layer."""
        return None

    def bias(
        self, query_positions: Positions, key_positions: Int[Tensor, "#batch seen"]
    ) -> Float[Tensor, "#batch heads time seen"] | None:
        """Numbers to add to the scores of every layer."""
        return None
