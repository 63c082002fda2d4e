"""The Triton kernel of norms after a branch (sandwich norm) or after the residual sum (post-norm).

The kernels of linear layers also apply the norm of their input. A norm of their output needs the
complete output, so it is a separate kernel.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from regard.accel.kernels.common import load_vector, pdl_options, wait_for_previous
from regard.nn.norm import LayerNorm, RMSNorm


@triton.jit
def _residual_kernel(
    x,
    branch,
    gain,
    bias,
    out,
    width,
    eps,
    residual_scale,
    POST: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """x + n(branch); with POST, n(residual_scale x + branch)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    g = load_vector(gain, 0, width, BLOCK)
    wait_for_previous(PDL)
    residual = load_vector(x + row * width, 0, width, BLOCK)
    y = load_vector(branch + row * width, 0, width, BLOCK)
    if POST:
        y += residual_scale * residual
    if LAYER_NORM:
        y = tl.where(inside, y - tl.sum(y) / width, 0.0)
    y *= tl.rsqrt(tl.sum(y * y) / width + eps) * g
    if HAS_BIAS:
        y += load_vector(bias, 0, width, BLOCK)
    if not POST:
        y += residual
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=inside)


class OutputNorm(NamedTuple):
    """A norm with its gain in float32."""

    gain: Float[Tensor, " dim"]
    bias: Float[Tensor, " dim"] | None
    eps: float
    is_layer_norm: bool  # else RMSNorm

    @classmethod
    def of(cls, norm: nn.Module) -> "OutputNorm":
        """The norm of a block."""
        if isinstance(norm, LayerNorm):
            return cls(norm.weight.detach().float(), norm.bias, norm.eps, True)
        assert isinstance(norm, RMSNorm)
        return cls(norm.gain.detach().float(), None, norm.eps, False)


def add_branch(
    x: Float[Tensor, "rows dim"],
    branch: Float[Tensor, "rows dim"],
    norm: OutputNorm,
    *,
    post: bool,
    residual_scale: float = 1.0,
) -> Float[Tensor, "rows dim"]:
    """x + n(branch), or n(residual_scale * x + branch) with `post`, in float32."""
    (rows, width), out = x.shape, torch.empty_like(x, dtype=torch.float32)
    _residual_kernel[(rows,)](
        x,
        branch,
        norm.gain,
        norm.bias,
        out,
        width,
        norm.eps,
        residual_scale,
        POST=post,
        LAYER_NORM=norm.is_layer_norm,
        HAS_BIAS=norm.bias is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
        **pdl_options(),
    )
    return out
