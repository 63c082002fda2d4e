"""The matrices of a layer, packed for writing one token at a time: fewer, larger products."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn

from regard.nn.attention import Attention
from regard.nn.block import Block
from regard.nn.ffn import FeedForward, GatedFeedForward

LARGE = 1 << 18  # numbers in a matrix from which on reading them is what a product costs a CPU
BLOCKS = 16  # of the rows of such a matrix, for the cores to share
FEW = 4  # vectors, up to which the matrix is the left factor


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    r"""y = W x + b, with W in floats, or in int8 with one scale s for each output:

        W_ij = s_i * w_ij,      s_i = max_j |W_ij| / 127,      w_ij rounded to the nearest

    Reading W is what a token costs, and int8 is half of bfloat16, a quarter of float32.
    """

    weight: Float[Tensor, "outputs inputs"] | Int8[Tensor, "outputs inputs"]
    bias: Float[Tensor, " outputs"] | None = None
    scale: Float[Tensor, " outputs"] | None = None  # None: the weights are floats
    across: Float[Tensor, "inputs outputs"] | None = None  # the same, small, for a CPU
    blocks: Float[Tensor, "blocks some inputs"] | None = None  # the same, large; see `turned`

    @classmethod
    def of(cls, *parts: nn.Linear) -> "Matrix":
        """Several matrices of the same input as one; each becomes a view of it, kept once."""
        weight = _packed([part.weight for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(weight, _packed(biases) if biases else None)

    def int8(self) -> "Matrix":
        """The same with weights of eight bits; biases stay as they are."""
        weight = self.weight.float()
        scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        rounded = (weight / scale.unsqueeze(1)).round().to(torch.int8)
        return Matrix(rounded, self.bias, scale.to(self.weight.dtype))

    def turned(self) -> "Matrix":
        """The same, as a CPU reads it fastest in float32: a small matrix with rows that are inputs,
        as a copy where the outputs are not fewer; a large one in blocks, views that are multiplied
        side by side, since a product with one vector is otherwise one core's work."""
        if self.weight.is_cuda or self.weight.dtype != torch.float32:
            return self
        (outputs, inputs), across = self.weight.shape, self.weight.t()
        if self.weight.numel() < LARGE:
            return replace(self, across=across.contiguous() if outputs >= inputs else across)
        even = self.weight[: outputs - outputs % BLOCKS]
        return replace(self, blocks=even.unflatten(0, (BLOCKS, -1)))

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """W x + b."""
        if self.across is not None:
            return x @ self.across if self.bias is None else torch.addmm(self.bias, x, self.across)
        if self.blocks is not None:
            y = self._by_blocks(x, self.blocks)
            return y if self.bias is None else y + self.bias
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        if x.is_cuda or x.shape[1] % 64:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        else:  # torch's kernel for it (2.13) is fast with bfloat16, and wrong for odd widths
            ones = torch.ones_like(self.scale, dtype=torch.bfloat16)
            y = torch._weight_int8pack_mm(x.bfloat16(), self.weight, ones).to(x.dtype) * self.scale
        return y if self.bias is None else y + self.bias

    def into(
        self, room: Float[Tensor, "rows outputs"], x: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "rows outputs"]:
        """W x + b, in a tensor that is there already."""
        if self.across is None:
            return room.copy_(self(x))
        if self.bias is None:
            return torch.mm(x, self.across, out=room)
        return torch.addmm(self.bias, x, self.across, out=room)

    def onto(
        self, stream: Float[Tensor, "rows outputs"], x: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "rows outputs"]:
        """stream + W x + b."""
        if self.scale is not None or self.blocks is not None:
            return stream + self(x)
        if self.bias is not None:
            stream = stream + self.bias
        return torch.addmm(stream, x, self.weight.t() if self.across is None else self.across)

    def _by_blocks(self, x: Tensor, blocks: Tensor) -> Tensor:
        """W x, every block of its rows by itself."""
        rows, count, some = len(x), *blocks.shape[:2]
        if rows <= FEW:
            y = torch.bmm(blocks, x.t().expand(count, -1, -1)).permute(2, 0, 1)
        else:
            y = torch.bmm(x.expand(count, -1, -1), blocks.transpose(1, 2)).transpose(0, 1)
        y = y.reshape(rows, count * some)
        rest = self.weight[count * some :]
        return torch.cat((y, F.linear(x, rest)), 1) if len(rest) else y


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlock:
    """The four products of a layer, beside the block they come from and its parts.

    To ask a module for a part of it takes a microsecond, and there are many in a token.
    """

    block: Block
    attention: Attention
    ffn: FeedForward
    scale: float  # of the scores
    look_up: Matrix  # queries, keys, values
    out: Matrix
    wide: Matrix  # gate and up, or up alone
    narrow: Matrix

    @classmethod
    def of(cls, block: Block, *, int8: bool = False) -> "PackedBlock":
        """Pack a block, whose own matrices become views of the packed ones."""
        attention, ffn = block.attention, cast(FeedForward, block.ffn)
        wide = [ffn.gate, ffn.up] if isinstance(ffn, GatedFeedForward) else [ffn.up]
        matrices = [
            Matrix.of(attention.query, attention.key, attention.value),
            Matrix.of(attention.out),
            Matrix.of(*wide),
            Matrix.of(ffn.down),
        ]
        ready = (each.int8() if int8 else each.turned() for each in matrices)
        return cls(block, attention, ffn, attention.score.scale, *ready)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """The tensors one under the other, each now a view of the whole."""
    if len(parts) == 1:
        return parts[0].detach()
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole
