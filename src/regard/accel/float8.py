"""FP8 training: linear layers whose matmuls multiply 8-bit floats, on GPUs that support them.

Every operand has one scale (tensorwise dynamic scaling), with which its largest absolute value
becomes the largest value of the format:

    x = s x8,      s = max |x| / 448 (e4m3)  or  / 57344 (e5m2)

Activations and weights are e4m3, with 3 bits of mantissa; gradients are e5m2, which has the larger
range (Micikevicius et al. 2022). Accumulation is in float32 and results are in bfloat16, as without
FP8; weights and optimizer state stay in float32. `accel.compile` attaches this to the wide linear
layers of blocks; `accel.float8_cross_entropy` is the loss of a language model head.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.accel.matmul import is_large_in_graph
from regard.nn.attention import Attention
from regard.nn.block import Block, FeedForward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_COMPUTE_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
SIZE_MULTIPLE = 16  # every size of a matmul must be a multiple of it
# Layers with fewer inputs or outputs, and losses over fewer tokens, stay in bfloat16: finding the
# scales and converting takes as long as their matmuls gain. With FP8 in linear layers of a width of
# 768 a training step is 0.98 times as fast, of 2,048 1.22 times (H200). The limit of the number of
# tokens was not measured.
MIN_WIDTH = 1024
Scaled = tuple[Tensor, Tensor]  # x8 and s


def unsupported_reason(device: torch.device) -> str | None:
    """Why a device has no FP8 matmuls; None if it has."""
    if device.type != "cuda":
        return f"it needs a CUDA GPU, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_COMPUTE_CAPABILITY:
        name, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        return f"it needs compute capability 8.9, and {name} has {version}"
    return None


def quantize(x: Tensor, dtype: torch.dtype) -> Scaled:
    """x8 and s; a tensor of zeros gives zeros."""
    max_value = torch.finfo(dtype).max
    scale = (x.abs().amax().float() / max_value).clamp_min(torch.finfo(torch.float32).tiny)
    return (x.float() / scale).clamp(-max_value, max_value).to(dtype), scale


def scaled_matmul(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast_accum: bool) -> Tensor:
    """a bᵀ for row-major a and b; `fast_accum`, for forward passes, accumulates with fewer bits."""
    (a8, a_scale), (b8, b_scale) = a, b
    if not a8.is_cuda:
        return ((a8.float() @ b8.float().T) * (a_scale * b_scale)).to(dtype)
    result: Tensor = torch._scaled_mm(
        a8, b8.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast_accum
    )
    return result


def _transpose(x: Scaled) -> Scaled:
    return x[0].t().contiguous(), x[1]


class _Float8Linear(torch.autograd.Function):
    """y = x Wᵀ; the matmuls of y, dx and dW are in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = quantize(x, E4M3), quantize(weight, E4M3)
        ctx.save_for_backward(*x8, *w8)
        ctx.weight_dtype = weight.dtype
        return scaled_matmul(x8, w8, x.dtype, fast_accum=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        (dy,) = grad_outputs
        dy8 = quantize(dy, E5M2)
        dx = scaled_matmul(dy8, _transpose((w8, w_scale)), dy.dtype, fast_accum=False)
        dy8, x8 = _transpose(dy8), _transpose((x8, x_scale))
        return dx, scaled_matmul(dy8, x8, dy.dtype, fast_accum=False).to(ctx.weight_dtype)


def float8_linear(
    x: Float[Tensor, "*rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> Float[Tensor, "*rows outputs"]:
    """W x + b with an FP8 matmul; the result has the dtype of autocast, where it is enabled."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    y: Tensor = _Float8Linear.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(y.dtype)


def attach_float8(model: nn.Module) -> None:
    """Give the wide linear layers of blocks an FP8 forward, which compiled training steps use.

    A layer is wide with at least 1,024 inputs and outputs. The original forward runs for sizes that
    are not a multiple of 16 and for small inputs. With LoRA, the matmul with the frozen weight is
    in FP8, those of the low-rank update are not.
    """
    for block in model.modules():
        if isinstance(block, Block):
            _attach_to_block(block)


def _attach_to_block(block: Block) -> None:
    for module in block.modules():
        if isinstance(module, FeedForward) and any(map(_is_wide, module.children())):
            vars(module).pop("forward", None)  # of `accel.compile`, with GELU as an epilogue
        if _is_wide(module):
            module.forward = MethodType(_float8_forward, module)
        if isinstance(module, Attention) and module.can_fuse_qkv and _is_wide(module.query):
            module._fused_qkv = MethodType(_float8_qkv, module)  # type: ignore[method-assign]


def _is_wide(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and min(layer.in_features, layer.out_features) >= MIN_WIDTH


def _float8_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return _linear(x, layer.weight, layer.bias)


def _float8_qkv(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with one FP8 matmul."""
    return Attention._fused_qkv(attention, x, _linear)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    sizes = (x[..., 0].numel(), *weight.shape)
    function = float8_linear if can_use_float8(x, weight, sizes) else F.linear
    return function(x, weight, bias)


def can_use_float8(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> bool:
    """Whether x Wᵀ is large and in a compiled graph, and these sizes are those of FP8 matmuls."""
    return is_large_in_graph(x, weight) and not any(size % SIZE_MULTIPLE for size in sizes)


ATTACHED = (_float8_forward, _float8_qkv)
