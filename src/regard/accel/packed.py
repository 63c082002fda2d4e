"""The linear layers of a block, packed for decoding: fewer and larger matmuls per token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8, Int32
from torch import Tensor, nn

from regard.accel.fbgemm_linear import Float16Linear, Int8Linear, has_exact_int8, has_fbgemm
from regard.nn.attention import Attention
from regard.nn.block import Block, FeedForward, GatedFeedForward
from regard.nn.norm import LayerNorm, RMSNorm

BLOCKED_ELEMENTS = 1 << 18  # above this size a weight makes a CPU matmul memory-bound
BLOCKS = 16  # blocks of rows of such a weight, which the cores share
ROWS_IN_FLOAT32 = 1 << 14  # rows of a weight that are converted to float32 at once
INT4_GROUP = 128  # inputs that share a scale
INT4_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # clipping ratios to try for each group
GEMV_ROWS = 4  # up to this many vectors, the weight is the left operand


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    r"""y = W x + b, with W in floating point, or in int8 with one scale s for each output:

        W_ij = s_i * w_ij,      s_i = max_j |W_ij| / 127,      w_ij rounded to an integer

    or in int4 with one scale for each output and group of 128 inputs, w from -8 to 7, the largest
    weight of a group at -8, or clipped where that lowers the squared error. Eight inputs are one
    int32, the first in its lowest bits, each stored as w + 8; inputs are padded with zeros to whole
    groups. Only the Triton kernels read int4.

    A decode step is bound by the time to read W; int8 has half the bytes of bfloat16. FBGEMM, which
    torch contains for x86, multiplies int8 (`Int8Linear`) and float16 weights with float32 x on a
    CPU.
    """

    weight: (
        Float[Tensor, "outputs inputs"]
        | Int8[Tensor, "outputs inputs"]
        | Int32[Tensor, "outputs words"]
    )
    bias: Float[Tensor, " outputs"] | None = None
    # None: the weight is in floating point
    scale: Float[Tensor, " outputs"] | Float[Tensor, "outputs groups"] | None = None
    transposed: Float[Tensor, "inputs outputs"] | None = None  # of a small weight, on a CPU
    blocks: Float[Tensor, "blocks outputs_per_block inputs"] | None = None  # of a large weight
    int8: Int8Linear | None = None  # with a copy in FBGEMM's layout
    float16: Float16Linear | None = None  # likewise
    onednn: Callable[[Tensor], Tensor] | None = None  # with a copy in oneDNN's layout
    onednn_rows: int = 1  # the smallest batch for which `onednn` is faster than `blocks`

    @classmethod
    def of(cls, *layers: nn.Linear) -> "PackedLinear":
        """Pack layers that read the same input; their weights become views of the packed weight."""
        weight = _pack([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return cls(weight, _pack(biases) if biases else None)

    def quantize_int8(self) -> "PackedLinear":
        """The same layer with int8 weights; biases are unchanged."""
        weight = self.weight.float()
        scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        rounded = (weight / scale.unsqueeze(1)).round().to(torch.int8)
        layer = PackedLinear(rounded, self.bias, scale.to(self.weight.dtype))
        on_cpu = not weight.is_cuda and self.weight.dtype == torch.float32
        if not on_cpu or not has_exact_int8():
            return layer
        return replace(layer, int8=Int8Linear.of(rounded, scale))

    def to_float16(self) -> "PackedLinear":
        """The same layer with float16 weights, for a CPU."""
        weight, bias = self.weight.half(), self.bias
        float16 = Float16Linear.of(weight, bias) if has_fbgemm() else None
        return PackedLinear(weight, bias, float16=float16)

    def quantize_int4(self) -> "PackedLinear":
        """The same layer with int4 weights; biases are unchanged."""
        parts = [_quantize_int4(rows) for rows in self.weight.detach().split(ROWS_IN_FLOAT32)]
        words, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return PackedLinear(words, self.bias, scales)

    @property
    def uses_fbgemm(self) -> bool:
        """Whether FBGEMM multiplies by the weight."""
        return self.int8 is not None or self.float16 is not None

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        is_int4 = self.scale is not None and self.scale.ndim == 2
        return 4 if is_int4 else 8 * self.weight.itemsize

    @property
    def inputs(self) -> int:
        """The number of inputs; of int4 weights, with the padding to whole groups."""
        return self.weight.shape[1] * (8 if self.bits == 4 else 1)

    def dequantize(self, dtype: torch.dtype) -> Float[Tensor, "outputs inputs"]:
        """W in floating point; of int4 weights, with padded inputs."""
        if self.scale is None:
            return self.weight.to(dtype)
        if self.bits == 8:
            return self.weight.to(dtype) * self.scale.to(dtype).unsqueeze(1)
        shifts = torch.arange(0, 32, 4, device=self.weight.device, dtype=torch.int32)
        w = ((self.weight.unsqueeze(2) >> shifts) & 15) - 8
        grouped = w.view(len(w), -1, INT4_GROUP).to(dtype)
        return (grouped * self.scale.to(dtype).unsqueeze(2)).flatten(1)

    def for_cpu(self) -> "PackedLinear":
        """The same layer in the layout that a CPU reads fastest, for float32.

        A small weight is transposed, as a copy where outputs are not fewer than inputs. A large
        one is viewed as blocks of rows for a batched matmul, since a CPU multiplies a matrix and
        one vector on a single core.
        """
        if self.weight.is_cuda or self.weight.dtype != torch.float32:
            return self
        (outputs, inputs), transposed = self.weight.shape, self.weight.t()
        if self.weight.numel() < BLOCKED_ELEMENTS:
            transposed = transposed.contiguous() if outputs >= inputs else transposed
            return replace(self, transposed=transposed)
        whole_blocks = self.weight[: outputs - outputs % BLOCKS]
        return replace(self, blocks=whole_blocks.unflatten(0, (BLOCKS, -1)))

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """W x + b."""
        if self.onednn is not None and len(x) >= self.onednn_rows:
            return self.onednn(x)
        if self.transposed is not None:
            if self.bias is None:
                return x @ self.transposed
            return torch.addmm(self.bias, x, self.transposed)
        if self.blocks is not None:
            y = self._blocked_matmul(x, self.blocks)
            return y if self.bias is None else y + self.bias
        if self.int8 is not None:
            return self.int8(x, self.bias)
        if self.float16 is not None:
            return self.float16(x)
        if self.scale is None and x.dtype == self.weight.dtype:
            return F.linear(x, self.weight, self.bias)
        if self.scale is None:
            y = F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)
            return y if self.bias is None else y + self.bias
        if x.is_cuda or x.shape[1] % 64:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        else:  # torch's kernel (2.13) is fast with bfloat16, and wrong for odd widths
            ones = torch.ones_like(self.scale, dtype=torch.bfloat16)
            y = torch._weight_int8pack_mm(x.bfloat16(), self.weight, ones).to(x.dtype) * self.scale
        return y if self.bias is None else y + self.bias

    def apply(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """W x + b for vectors of any batch shape."""
        return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def matvec_float32(self, x: Float[Tensor, " inputs"]) -> Float[Tensor, " outputs"]:
        """W x in float32, for one vector: exact also for weights of lower precision."""
        if self.bits == 4:
            return self.dequantize(torch.float32) @ F.pad(x, (0, self.inputs - len(x)))
        y = torch.cat([rows.float() @ x for rows in self.weight.detach().split(ROWS_IN_FLOAT32)])
        return y if self.scale is None else y * self.scale.float()

    def write_to(
        self, out: Float[Tensor, "rows outputs"], x: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "rows outputs"]:
        """Write W x + b to `out`."""
        if self.int8 is not None:
            return self.int8(x, self.bias, out)
        if self.transposed is None:
            return out.copy_(self(x))
        if self.bias is None:
            return torch.mm(x, self.transposed, out=out)
        return torch.addmm(self.bias, x, self.transposed, out=out)

    def add_to(
        self, residual: Float[Tensor, "rows outputs"], x: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "rows outputs"]:
        """residual + W x + b."""
        if self.int8 is not None:
            return self.int8(x, residual if self.bias is None else residual + self.bias)
        if self.float16 is not None or self.onednn is not None:
            return self(x).add_(residual)
        if self.weight.dtype != x.dtype or self.blocks is not None:
            return residual + self(x)
        if self.bias is not None:
            residual = residual + self.bias
        weight = self.weight.t() if self.transposed is None else self.transposed
        return torch.addmm(residual, x, weight)

    def _blocked_matmul(self, x: Tensor, blocks: Tensor) -> Tensor:
        """W x, block by block."""
        rows, count, outputs = len(x), *blocks.shape[:2]
        if rows <= GEMV_ROWS:
            y = torch.bmm(blocks, x.t().expand(count, -1, -1)).permute(2, 0, 1)
        else:
            y = torch.bmm(x.expand(count, -1, -1), blocks.transpose(1, 2)).transpose(0, 1)
        y = y.reshape(rows, count * outputs)
        other_rows = self.weight[count * outputs :]
        return torch.cat((y, F.linear(x, other_rows)), 1) if len(other_rows) else y


@dataclass(frozen=True, slots=True, eq=False)
class FusedNormLinear:
    r"""A linear layer and the norm of its input, in the form that kernels compute in one pass.

        RMSNorm       W (x / r * g) + b               =  W (g x) / r + b
        LayerNorm     W ((x - m) / s * g + h) + b     =  (W (g x) - m W g) / s + (W h + b)

    Mean, variance and matmul are computed in one pass over x. `of` precomputes W g and W h + b.
    """

    layer: PackedLinear
    gain: Float[Tensor, " inputs"] | None = None  # None: no norm
    eps: float = 0.0
    mean_weight: Float[Tensor, " outputs"] | None = None  # W g, of a LayerNorm
    bias: Float[Tensor, " outputs"] | None = None

    @classmethod
    def of(cls, layer: PackedLinear, norm: nn.Module | None = None) -> "FusedNormLinear":
        """A linear layer and the norm of its input, if it has one."""
        if norm is None:
            return cls(layer, bias=layer.bias)
        if isinstance(norm, RMSNorm):
            return cls(layer, norm.gain.detach().float(), norm.eps, None, layer.bias)
        assert isinstance(norm, LayerNorm)
        gain, shift = norm.weight.detach().float(), norm.bias
        bias = None if layer.bias is None else layer.bias.detach().float()
        if shift is not None:
            projected_shift = layer.matvec_float32(shift.detach().float())
            bias = projected_shift if bias is None else projected_shift + bias
        return cls(layer, gain, norm.eps, layer.matvec_float32(gain), bias)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlock:
    """The four matmuls of a block, with the block and its modules.

    Reading an attribute of a module takes a microsecond; reading one of this class is faster.
    """

    block: Block
    attention: Attention
    ffn: FeedForward
    score_scale: float
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear  # gate and up, or up alone
    down: PackedLinear

    @classmethod
    def of(
        cls, block: Block, convert: Callable[[PackedLinear], PackedLinear] = PackedLinear.for_cpu
    ) -> "PackedBlock":
        """Pack the linear layers of a block; its weights become views of the packed ones."""
        attention, ffn = block.attention, cast(FeedForward, block.ffn)
        gate_up = [ffn.gate, ffn.up] if isinstance(ffn, GatedFeedForward) else [ffn.up]
        layers = [
            PackedLinear.of(attention.query, attention.key, attention.value),
            PackedLinear.of(attention.out),
            PackedLinear.of(*gate_up),
            PackedLinear.of(ffn.down),
        ]
        return cls(block, attention, ffn, attention.score.scale, *map(convert, layers))

    def ffn_hidden(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows hidden"]:
        """The hidden vectors of the feed-forward network."""
        gate_up = self.gate_up.apply(x)
        if not isinstance(self.ffn, GatedFeedForward):
            return self.ffn.activation(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return self.ffn.activation(gate).mul_(up)

    def apply_ffn(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The feed-forward network."""
        return self.down.apply(self.ffn_hidden(x))


def _quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows of W to int4; return the words and the scales."""
    dtype, padding = weight.dtype, -weight.shape[1] % INT4_GROUP
    groups = F.pad(weight.float(), (0, padding)).unflatten(1, (-1, INT4_GROUP))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    lowest_error, w, scale = torch.full_like(largest, torch.inf), groups, largest
    for clip in INT4_CLIPS:
        candidate = largest * (clip / -8)
        candidate = candidate.where(candidate != 0, 1.0).to(dtype).float()  # as it is stored
        rounded = (groups / candidate).round().clamp(-8, 7)
        error = (rounded * candidate - groups).square().sum(2, keepdim=True)
        better = error < lowest_error
        lowest_error = lowest_error.where(~better, error)
        scale, w = scale.where(~better, candidate), w.where(~better, rounded)
    shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)
    nibbles = (w.flatten(1).to(torch.int32) + 8).unflatten(1, (-1, 8))
    return (nibbles << shifts).sum(2, dtype=torch.int32), scale.squeeze(2).to(dtype)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors concatenated; each becomes a view of the result.

    Tensors that are already consecutive views of one storage are not moved, so that a decoder that
    was packed earlier stays valid.
    """
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first
    rows = [len(tensor) for tensor in tensors]
    if _are_consecutive(tensors):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    packed = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, view in zip(tensors, packed.split(rows), strict=True):
        tensor.data = view
    return packed


def _are_consecutive(tensors: Sequence[Tensor]) -> bool:
    storage, address = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == address
        if not same or not tensor.is_contiguous():
            return False
        address += tensor.nbytes
    return True
