"""float32 matmuls with oneDNN, which torch contains, on processors on which MKL is slow.

On AMD processors MKL uses AVX2 instructions. oneDNN uses AVX-512 where the processor supports it:
it takes half the time on a Zen 5, and up to a tenth less on a Zen 4 (docs/results.md). The weights
keep their layout; `accel.onednn` copies them to oneDNN's layout.
`torch.backends.mkldnn.enabled = False` switches it off.
"""

import platform
import re
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn import loss
from regard.nn.attention import Attention

ZEN_5_FAMILY = 26
MIN_MULTIPLY_ADDS = 1 << 20  # rows * inputs * outputs; smaller matmuls lose more than they gain


@cache
def is_onednn_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL: AMD processors with AVX-512.

    This depends on the processor, not on a measurement, so that a resumed run has the same bits.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_avx512 and "AuthenticAMD" in _cpu_info()


@cache
def has_full_width_avx512() -> bool:
    """Whether an AMD processor computes 512 bits at once, as a Zen 5 does and a Zen 4 does not."""
    family = re.search(r"family\s*:?\s*(\d+)", _cpu_info(), re.IGNORECASE)
    return is_onednn_faster() and family is not None and int(family[1]) >= ZEN_5_FAMILY


def _cpu_info() -> str:
    """A description of the processor that contains its vendor and family."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text() if cpuinfo.exists() else platform.processor()


def uses_onednn(a: Float[Tensor, "*rows inputs"], b: Float[Tensor, "inputs outputs"]) -> bool:
    """Whether `matmul` and `linear` use oneDNN for these matrices; otherwise they call torch."""
    return (
        not torch.compiler.is_compiling()  # first: the other conditions cannot be traced
        and a.numel() * b.shape[1] >= MIN_MULTIPLY_ADDS
        and is_onednn_faster()
        and bool(torch.backends.mkldnn.enabled)
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
    )


def _matmul(
    a: Float[Tensor, "rows inputs"], b: Float[Tensor, "inputs outputs"], bias: Tensor | None = None
) -> Float[Tensor, "rows outputs"]:
    # torch copies a left operand that is not contiguous, so the smaller matrix is put there
    is_transposed = bias is None and not a.is_contiguous() and a.numel() > b.numel()
    left, right = (b.t(), a) if is_transposed else (a, b.t())
    product = cast(Tensor, torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], ""))
    return product.t() if is_transposed else product


def matmul(
    a: Float[Tensor, "rows inputs"],
    b: Float[Tensor, "inputs outputs"],
    *,
    out: Float[Tensor, "rows outputs"] | None = None,
    add: bool = False,
) -> Float[Tensor, "rows outputs"]:
    """As `nn.loss.matmul`, with oneDNN where that is faster; without gradients."""
    if not uses_onednn(a, b):
        return loss.matmul(a, b, out=out, add=add)
    product = _matmul(a, b)
    if out is None:
        return product
    return out.add_(product) if add else out.copy_(product)


def bmm(
    a: Float[Tensor, "batch rows inputs"], b: Float[Tensor, "batch inputs columns"]
) -> Float[Tensor, "batch rows columns"]:
    """a b, as `torch.bmm`; without gradients."""
    if not uses_onednn(a[0], b[0]):
        return torch.bmm(a, b)
    return torch.stack([_matmul(*pair) for pair in zip(a, b, strict=True)])


def baddbmm(
    x: Float[Tensor, "batch rows columns"],
    a: Float[Tensor, "batch rows inputs"],
    b: Float[Tensor, "batch inputs columns"],
    *,
    beta: float,
    alpha: float = 1.0,
) -> Float[Tensor, "batch rows columns"]:
    """beta x + alpha a b, as `torch.baddbmm`; without gradients."""
    if not uses_onednn(a[0], b[0]):
        return torch.baddbmm(x, a, b, beta=beta, alpha=alpha)
    return bmm(a, b).mul_(alpha).add_(x, alpha=beta)


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b; the matmuls of y, dx and dW use oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _matmul(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (dy,) = grad_outputs
        dx = linear(dy, weight.t()) if ctx.needs_input_grad[0] else None
        dweight = linear(dy.t(), x.t()) if ctx.needs_input_grad[1] else None
        return dx, dweight, dy.sum(0) if ctx.has_bias else None


def linear(
    x: Float[Tensor, "*rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> Float[Tensor, "*rows outputs"]:
    """`F.linear` with gradients of any order, with oneDNN where that is faster."""
    if not uses_onednn(x, weight.t()):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


def attach_onednn_linear(model: nn.Module) -> None:
    """Let the linear layers of a model use oneDNN where that is faster."""
    if not is_onednn_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear_forward, module)  # type: ignore[method-assign]
        if isinstance(module, Attention):
            module._fused_qkv = partial(_fused_qkv, module)  # type: ignore[method-assign]


def _linear_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _fused_qkv(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return Attention._fused_qkv(attention, x, linear)


ATTACHED = (_linear_forward, _fused_qkv)
