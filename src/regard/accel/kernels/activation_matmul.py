"""Triton kernels of matmuls with GELU, in its exact form, or with the derivative of GELU or ReLU.

cuBLASLt has no such epilogues, or slow ones. The forward pass writes GELU and its derivative, so
that the backward pass multiplies by what it reads. Two programs share a multiprocessor: one
computes GELU while the other multiplies matrices.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.accel.kernels import ACTIVATION_TILE as BLOCK
from regard.accel.kernels.common import IS_INTERPRETED
from regard.accel.support import GPUProperties

BLOCK_INNER = 64  # inputs of an iteration
STAGES, WARPS, BACKWARD_WARPS = 3, 8, 4
PROGRAMS_PER_MULTIPROCESSOR = 2
GROUP = 8  # tiles of neighboring rows that are computed at the same time, for the L2 cache


@triton.jit
def _approximate(x, INSTRUCTION: tl.constexpr):
    return tl.inline_asm_elementwise(
        INSTRUCTION + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gelu(x):
    """x Φ(x) and its derivative Φ(x) + x φ(x), with an error below 1e-6.

    1 - Φ(|x|) = φ(x) times a polynomial of t = 1 / (1 + p |x|) (Abramowitz and Stegun 7.1.26).
    """
    t, exponent = 1.0 + 0.23164189 * tl.abs(x), -0.7213475204444817 * x * x
    if IS_INTERPRETED:
        t, e = 1 / t, tl.exp2(exponent)
    else:
        t, e = _approximate(t, "rcp"), _approximate(exponent, "ex2")
    polynomial = -0.7265760135 + t * 0.5307027145
    polynomial = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * polynomial))
    tail = e * t * polynomial
    cdf = tl.where(x > 0, 1 - tail, tail)
    return x * cdf, cdf + 0.3989422804014327 * x * e


@triton.jit
def _activation_matmul(
    a,
    b,
    bias,
    out,
    saved,
    sums,
    rows,
    width,
    inner,
    programs,
    BACKWARD: tl.constexpr,
    RELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
):
    """GELU(a bᵀ + bias) and its derivative `saved`; BACKWARD: `accel.matmul.matmul_derivative`.

    With HAS_BIAS, the sums of the columns are written for each tile.
    """
    HALF: tl.constexpr = BLOCK // 2
    tile_rows, tile_columns = tl.cdiv(rows, BLOCK), width // BLOCK
    for tile in tl.range(
        tl.program_id(0), tile_rows * tile_columns, programs, flatten=not BACKWARD
    ):
        first = tile // (GROUP * tile_columns) * GROUP
        group = tl.minimum(tile_rows - first, GROUP)
        place = tile % (GROUP * tile_columns)
        tile_row, column = first + place % group, place // group * BLOCK
        row = tile_row * BLOCK
        y = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in range(0, inner, BLOCK_INNER):
            left = a.load([row, k])
            right = b.load([k, column]) if BACKWARD else b.load([column, k]).T
            if IS_INTERPRETED:  # which multiplies no bfloat16
                left, right = left.to(tl.float32), right.to(tl.float32)
            y = tl.dot(left, right, y)
        halves = y.reshape(BLOCK, 2, HALF).permute(0, 2, 1).split()
        for i in tl.static_range(2):
            start = column + i * HALF
            columns = start + tl.arange(0, HALF)
            if BACKWARD:
                factor = saved.load([row, start]).to(tl.float32)
                v = tl.where(factor <= 0, 0.0, halves[i]) if RELU else halves[i] * factor
                if HAS_BIAS:
                    tl.store(sums + tile_row * width + columns, tl.sum(v, 0))
            else:
                v = halves[i]
                if HAS_BIAS:
                    v += tl.load(bias + columns).to(tl.float32)[None, :]
                v, dv = _gelu(v)
                saved.store([row, start], dv.to(saved.dtype))
            out.store([row, start], v.to(out.dtype))


def matmul_gelu(
    x: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "ffn_dim dim"],
    bias: Float[Tensor, " ffn_dim"] | None,
) -> tuple[Float[Tensor, "rows ffn_dim"], Float[Tensor, "rows ffn_dim"]]:
    """GELU(x Wᵀ + b), and the derivative of GELU there."""
    out, derivative = (x.new_empty(len(x), len(weight)) for _ in range(2))
    multiprocessors = GPUProperties.of(x.device).multiprocessors if x.is_cuda else 1
    programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    _launch(x, weight, bias, out, derivative, None, programs, backward=False, relu=False)
    return out, derivative


def matmul_derivative(
    gradient: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "dim ffn_dim"],
    saved: Float[Tensor, "rows ffn_dim"],
    has_bias: bool,
    relu: bool,
) -> tuple[Float[Tensor, "rows ffn_dim"], Float[Tensor, " ffn_dim"] | None]:
    """As `accel.matmul.matmul_derivative`, with sums in float32."""
    out, tile_rows = torch.empty_like(saved), triton.cdiv(len(saved), BLOCK)
    width = out.shape[1]
    sums = saved.new_empty(tile_rows, width, dtype=torch.float32) if has_bias else None
    programs = tile_rows * (width // BLOCK)
    _launch(gradient, weight, None, out, saved, sums, programs, backward=True, relu=relu)
    return out, None if sums is None else sums.sum(0)


def _launch(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    saved: Tensor,
    sums: Tensor | None,
    programs: int,
    *,
    backward: bool,
    relu: bool,
) -> None:
    half = [BLOCK, BLOCK // 2]
    _activation_matmul[(programs,)](
        TensorDescriptor.from_tensor(a, [BLOCK, BLOCK_INNER]),
        TensorDescriptor.from_tensor(b, [BLOCK_INNER, BLOCK] if backward else [BLOCK, BLOCK_INNER]),
        bias,
        TensorDescriptor.from_tensor(out, half),
        TensorDescriptor.from_tensor(saved, half),
        sums,
        *out.shape,
        a.shape[1],
        programs,
        BACKWARD=backward,
        RELU=relu,
        HAS_BIAS=bias is not None or sums is not None,
        BLOCK=BLOCK,
        BLOCK_INNER=BLOCK_INNER,
        GROUP=GROUP,
        num_warps=BACKWARD_WARPS if backward else WARPS,
        num_stages=STAGES,
    )
