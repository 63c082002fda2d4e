"""The linear layers of a block, packed for decoding: fewer and larger matmuls per token."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8, Int32
from torch import Tensor, nn

from regard.nn.attention import Attention
from regard.nn.block import Block, FeedForward, GatedFeedForward, LayerNorm, RMSNorm

BLOCKED_ELEMENTS = 1 << 18  # above this size a weight makes a CPU matmul memory-bound
BLOCKS = 16  # blocks of rows of such a weight, which the cores share
ROWS_IN_FLOAT32 = 1 << 14  # of a weight that are converted at once
INT4_GROUP = 128  # inputs that share a scale
INT4_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # clipping ratios that are tried for each group
GEMV_ROWS = 4  # up to this many vectors, the weight is the left factor
RESIDUAL_SCALE = 254  # an int8 activation has a residual in int8, with a step smaller by this


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    r"""y = W x + b, with W in floating point, or in int8 with one scale s for each output:

        W_ij = s_i * w_ij,      s_i = max_j |W_ij| / 127,      w_ij rounded to the nearest

    or in int4 with one scale for each output and group of 128 inputs, w from -8 to 7, the largest
    weight of a group at -8, or clipped where that lowers the squared error. Eight inputs are one
    int32, the first in its lowest bits, each stored as w + 8; inputs are padded with zeros to whole
    groups. These are for kernels only.

    A decode step is bound by the time to read W; int8 has half the bytes of bfloat16. FBGEMM, which
    torch contains for x86, multiplies int8 and float16 weights on a CPU:

        float16   x and y are in float32
        int8      x ~ c (h + r / 254), h and the residual r in int8, two rows of one integer matmul
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
    fbgemm: Any = None  # weight and scale, of float16 also the bias, in FBGEMM's layout

    @classmethod
    def of(cls, *layers: nn.Linear) -> "PackedLinear":
        """Several layers of the same input as one; their weights become views of the packed one."""
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
        return replace(layer, fbgemm=_fbgemm_int8(layer)) if on_cpu and has_exact_int8() else layer

    def to_float16(self) -> "PackedLinear":
        """The same layer with float16 weights, for a CPU."""
        weight, bias = self.weight.half(), self.bias
        if not has_fbgemm():
            return PackedLinear(weight, bias)
        packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        return PackedLinear(weight, bias, fbgemm=packed)

    def quantize_int4(self) -> "PackedLinear":
        """The same layer with int4 weights; biases are unchanged."""
        parts = [_quantize_int4(rows) for rows in self.weight.detach().split(ROWS_IN_FLOAT32)]
        words, scales = (torch.cat(each) for each in zip(*parts, strict=True))
        return PackedLinear(words, self.bias, scales)

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        is_int4 = self.scale is not None and self.scale.ndim == 2
        return 4 if is_int4 else 8 * self.weight.itemsize

    @property
    def inputs(self) -> int:
        """The number of inputs, in int4 that of whole groups."""
        return self.weight.shape[1] * (8 if self.bits == 4 else 1)

    def dequantize(self, dtype: torch.dtype) -> Float[Tensor, "outputs inputs"]:
        """W in floating point, in int4 with padded inputs."""
        if self.scale is None:
            return self.weight.to(dtype)
        if self.bits == 8:
            return self.weight.to(dtype) * self.scale.to(dtype).unsqueeze(1)
        shifts = torch.arange(0, 32, 4, device=self.weight.device, dtype=torch.int32)
        w = ((self.weight.unsqueeze(2) >> shifts) & 15) - 8
        grouped = w.view(len(w), -1, INT4_GROUP).to(dtype)
        return (grouped * self.scale.to(dtype).unsqueeze(2)).flatten(1)

    def for_cpu(self) -> "PackedLinear":
        """The same in the layout that a CPU reads fastest, for float32.

        A small weight is transposed, as a copy where outputs are not fewer than inputs. A large
        one is viewed as blocks of rows for a batched matmul, since a CPU multiplies a matrix and
        one vector on a single core.
        """
        if self.weight.is_cuda or self.weight.dtype != torch.float32:
            return self
        (outputs, inputs), transposed = self.weight.shape, self.weight.t()
        if self.weight.numel() < BLOCKED_ELEMENTS:
            copied = transposed.contiguous() if outputs >= inputs else transposed
            return replace(self, transposed=copied)
        even = self.weight[: outputs - outputs % BLOCKS]
        return replace(self, blocks=even.unflatten(0, (BLOCKS, -1)))

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """W x + b."""
        if self.transposed is not None:
            if self.bias is None:
                return x @ self.transposed
            return torch.addmm(self.bias, x, self.transposed)
        if self.blocks is not None:
            y = self._blocked_matmul(x, self.blocks)
            return y if self.bias is None else y + self.bias
        if self.fbgemm is not None:
            if self.scale is None:
                y = torch.ops.quantized.linear_dynamic_fp16(x, self.fbgemm)
                return cast(Tensor, y)
            y = _matmul_int8(x, self.fbgemm)
            return y if self.bias is None else y + self.bias
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
        if self.transposed is None:
            return out.copy_(self(x))
        if self.bias is None:
            return torch.mm(x, self.transposed, out=out)
        return torch.addmm(self.bias, x, self.transposed, out=out)

    def add_to(
        self, residual: Float[Tensor, "rows outputs"], x: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "rows outputs"]:
        """residual + W x + b."""
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
        rest = self.weight[count * outputs :]
        return torch.cat((y, F.linear(x, rest)), 1) if len(rest) else y


@dataclass(frozen=True, slots=True, eq=False)
class FusedNormLinear:
    r"""A linear layer and the norm of its input, in the form that kernels compute in one pass.

        RMSNorm       W (x / r * g) + b               =  W (g x) / r + b
        LayerNorm     W ((x - m) / s * g + h) + b     =  (W (g x) - m W g) / s + (W h + b)

    Mean, variance and matmul need x only once. What does not depend on x is computed here.
    """

    layer: PackedLinear
    gain: Float[Tensor, " inputs"] | None = None  # None: no norm
    eps: float = 0.0
    mean_weight: Float[Tensor, " outputs"] | None = None  # W g, of a LayerNorm
    bias: Float[Tensor, " outputs"] | None = None

    @classmethod
    def of(cls, layer: PackedLinear, norm: nn.Module | None = None) -> "FusedNormLinear":
        """A layer after a norm, or after none."""
        if norm is None:
            return cls(layer, bias=layer.bias)
        if isinstance(norm, RMSNorm):
            return cls(layer, norm.gain.detach().float(), norm.eps, None, layer.bias)
        assert isinstance(norm, LayerNorm)
        gain, shift = norm.weight.detach().float(), norm.bias
        bias = None if layer.bias is None else layer.bias.detach().float()
        if shift is not None:
            shifted = layer.matvec_float32(shift.detach().float())
            bias = shifted if bias is None else shifted + bias
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
        """Pack a block; its own weights become views of the packed ones."""
        attention, ffn = block.attention, cast(FeedForward, block.ffn)
        gate_up = [ffn.gate, ffn.up] if isinstance(ffn, GatedFeedForward) else [ffn.up]
        layers = [
            PackedLinear.of(attention.query, attention.key, attention.value),
            PackedLinear.of(attention.out),
            PackedLinear.of(*gate_up),
            PackedLinear.of(ffn.down),
        ]
        return cls(block, attention, ffn, attention.score.scale, *map(convert, layers))


@cache
def has_fbgemm() -> bool:
    """Whether torch has FBGEMM's matmuls."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@cache
def has_exact_int8() -> bool:
    """Whether FBGEMM's int8 matmul is exact; without VNNI instructions, 16-bit sums saturate."""
    if not has_fbgemm():
        return False
    largest = torch.full((16, 64), 127, dtype=torch.int8)
    y = _matmul_int8(torch.ones(1, 64), _fbgemm_int8(PackedLinear(largest, None, torch.ones(16))))
    return bool(torch.allclose(y, torch.full_like(y, 64 * 127)))


def _fbgemm_int8(layer: PackedLinear) -> Any:
    """The int8 weight of a layer and its scales in FBGEMM's layout."""
    scale = cast(Tensor, layer.scale)
    zeros = torch.zeros(len(scale), dtype=torch.long)
    with warnings.catch_warnings():  # torch 2.13 warns that quantized tensors will be removed
        warnings.simplefilter("ignore")
        weight = torch._make_per_channel_quantized_tensor(layer.weight, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)


def _matmul_int8(x: Float[Tensor, "rows inputs"], fbgemm: Any) -> Float[Tensor, "rows outputs"]:
    """W x, with x as an int8 vector and its int8 residual, two rows of one matmul.

    Each row of x has its own scale, so that no row depends on the others.
    """
    scale = (x.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
    x = x / scale
    both = torch.cat((x, (x - x.round()).mul_(RESIDUAL_SCALE)))
    y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(both, 1.0, 128, fbgemm)
    first, second = y.chunk(2)
    return torch.add(first, second, alpha=1 / RESIDUAL_SCALE).mul_(scale)


def _quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The words and the scales of some rows of W."""
    dtype, padding = weight.dtype, -weight.shape[1] % INT4_GROUP
    groups = F.pad(weight.float(), (0, padding)).unflatten(1, (-1, INT4_GROUP))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best, w, scale = torch.full_like(largest, torch.inf), groups, largest
    for clip in INT4_CLIPS:
        tried = largest * (clip / -8)
        tried = tried.where(tried != 0, 1.0).to(dtype).float()  # as it is stored
        rounded = (groups / tried).round().clamp(-8, 7)
        error = (rounded * tried - groups).square().sum(2, keepdim=True)
        better = error < best
        best, scale = best.where(~better, error), scale.where(~better, tried)
        w = w.where(~better, rounded)
    shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)
    nibbles = (w.flatten(1).to(torch.int32) + 8).unflatten(1, (-1, 8))
    return (nibbles << shifts).sum(2, dtype=torch.int32), scale.squeeze(2).to(dtype)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors concatenated; each becomes a view of the result.

    Tensors that already are consecutive views of one storage are not moved, so that a decoder
    that was packed earlier stays valid.
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
