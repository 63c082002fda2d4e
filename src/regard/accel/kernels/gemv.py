"""Triton kernels of a decode step of few rows: matrix-vector products (gemv).

A layer is five kernels, since each takes microseconds to launch: norm, q, k and v with their
rotation and the KV cache; attention; its output projection and the residual; norm, gate and up;
down and the residual. Norms of q and k need one more, and so does each norm after a branch. In a
parallel block, the output projection, down and the residual are one kernel, and norm, gate and up
run beside attention. `accel.packed_decoder` computes the same in torch.

The residual stream is float32. Weights are floating point, int8 with a scale per output, or int4
with a scale per output and group of inputs (`accel.packed`). With programmatic dependent launch
(PDL) each kernel first loads data that the previous kernel does not write, above all its weights,
and then waits for that kernel, so that weights are also read while the previous kernel ends.
Results of kernels before the previous one are already visible.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import (
    INTERPRETED,
    FFNActivation,
    RotaryPairs,
    activate,
    dequantize_words,
    launch_next,
    load_per_output,
    load_vector,
    pdl_options,
    wait_for_previous,
)
from regard.accel.packed import INT4_GROUP, FusedNormLinear, PackedLinear
from regard.nn.state import KVCache

MIN_PROGRAMS = 1 if INTERPRETED else 128  # occupies most of the multiprocessors of an H200
MAX_PROGRAMS = (1 << 16) - 1  # of CUDA, in the second dimension of a grid
BLOCK_INPUTS = 2048  # inputs that are multiplied at once, with int8 and int4 weights
PREFETCHING_PROGRAMS = 576  # number of programs that fit a GPU with two blocks of weights each
GROUP = tl.constexpr(INT4_GROUP)
# Elements of W in a program and its warps, by (rows of W per output, bits of a weight): the fastest
# on an H200.
PROGRAM_SIZES = {
    (1, 8): (1 << 13, 4),
    (2, 8): (1 << 14, 4),
    (1, 4): (1 << 14, 4),
    (2, 4): (1 << 14, 4),
}


class Program(NamedTuple):
    """The part of a floating-point W that a program multiplies, and how."""

    block: int  # inputs that are multiplied at once
    rows: int  # of W
    warps: int
    # whether each block is summed at once; else only the sum of all blocks, which has fewer
    # reductions and needs more registers
    sums_each_block: bool = False


# The fastest on an H200 by the shape of a layer: `python bench/gpu_gemv.py`.
PROGRAMS = {
    "many_rows": Program(512, 16, 4),
    "norm": Program(512, 8, 4),
    "narrow": Program(1024, 8, 8),  # without a norm
    "wide": Program(2048, 4, 4, sums_each_block=True),
    "wide_few_rows": Program(2048, 2, 4),
    "two_layers": Program(2048, 2, 4, sums_each_block=True),
}
WIDE, FEW_ROWS, MANY_ROWS = 2560, 1152, 1 << 14  # inputs, rows of W, rows of W


@triton.jit
def _load_rows(weight, scale, rows, inside, begin, width, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """A block of columns of rows of W, as words for int8 and int4; for int4 also its scales."""
    scales = 0.0
    if BITS == 0:
        w = _load_block(weight, rows, inside, begin, width, BLOCK)
    elif BITS == 8:
        words = weight.to(tl.pointer_type(tl.int32))
        w = _load_block(words, rows, inside, begin // 4, width // 4, BLOCK // 4)
    else:
        groups = tl.cdiv(width, GROUP)
        w = _load_block(weight, rows, inside, begin // 8, groups * (GROUP // 8), BLOCK // 8)
        scales = _load_block(scale, rows, inside, begin // GROUP, groups, BLOCK // GROUP)
    return w, scales


@triton.jit
def _load_block(x, rows, inside, begin, width, BLOCK: tl.constexpr):
    columns = begin + tl.arange(0, BLOCK)
    position = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(x + position, mask=inside[:, None] & (columns < width)[None, :], other=0)


@triton.jit
def _accumulate(terms, block, v, BITS: tl.constexpr):
    """Add to `terms`, whose sum over the columns is W v, a block of `_load_rows` times v.

    int8 is multiplied without its scales. With one column of terms, the block is summed at once.
    """
    w, scales = block
    if BITS == 0:
        products = w.to(tl.float32) * v[None, :]
    else:
        products = dequantize_words(w, BITS) * v[None, :]
        if BITS == 4:
            groups = tl.reshape(products, (w.shape[0], v.shape[0] // GROUP, GROUP))
            products = tl.sum(groups, 2) * scales.to(tl.float32)
    if terms.shape[1] == 1:
        products = tl.sum(products, 1, keep_dims=True)
    return terms + products


@triton.jit
def _load_rotation(p, inside, position, frequency_index, cos, sin, num_frequencies):
    """cos and sin of each pair at its position; 1 and 0 for pairs without a frequency."""
    index = tl.load(frequency_index + p, mask=inside, other=-1)
    rotated = inside & (index >= 0)
    c = tl.load(cos + position * num_frequencies + index, mask=rotated, other=1.0)
    s = tl.load(sin + position * num_frequencies + index, mask=rotated, other=0.0)
    return c, s


@triton.jit
def _store_qkv(
    y, n, inside, position, row, q, keys, values, q_width, k_width, capacity, HEAD_DIM: tl.constexpr
):
    """Store outputs n of the packed projection: to q, or to the KV cache at `position`."""
    tl.store(q + row * q_width + n, y.to(q.dtype.element_ty), mask=inside & (n < q_width))
    k = n - q_width
    dtype = keys.dtype.element_ty
    offset = (
        (row * (k_width // HEAD_DIM) + k // HEAD_DIM) * capacity * HEAD_DIM
        + position * HEAD_DIM
        + k % HEAD_DIM
    )
    tl.store(keys + offset, y.to(dtype), mask=inside & (k >= 0) & (k < k_width))
    offset -= (k_width // HEAD_DIM) * capacity * HEAD_DIM  # of v = k - k_width
    tl.store(values + offset, y.to(dtype), mask=inside & (k >= k_width))


@triton.jit
def _qkv_kernel(
    x,
    gain,
    weight,
    scale,
    bias,
    mean_weight,
    paired_outputs,
    frequency_index,
    cos,
    sin,
    lengths,
    q,
    keys,
    values,
    pairs,
    width,
    eps,
    num_frequencies,
    q_width,
    k_width,
    capacity,
    NORM: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SUMS_EACH_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm, packed projection and rotation of pairs of outputs; k and v go to the KV cache."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    element = 2 * tl.program_id(1) * OUTPUTS + tl.arange(0, 2 * OUTPUTS)  # two for each pair
    inside = element < 2 * pairs
    n = tl.load(paired_outputs + element, mask=inside, other=0)
    w = _load_rows(weight, scale, n, inside, 0, width, BLOCK, BITS)
    if NORM:
        g = load_vector(gain, 0, width, BLOCK)
    position = tl.load(lengths + row)
    c, s = _load_rotation(p, p < pairs, position, frequency_index, cos, sin, num_frequencies)
    scales = load_per_output(scale, n, inside, HAS_SCALE, 1.0)
    biases = load_per_output(bias, n, inside, HAS_BIAS, 0.0)
    mean_weights = load_per_output(mean_weight, n, inside, LAYER_NORM, 0.0)
    wait_for_previous(PDL)
    terms = tl.zeros((2 * OUTPUTS, 1 if SUMS_EACH_BLOCK else BLOCK), tl.float32)
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for block in tl.static_range(NUM_BLOCKS):
        if block > 0:
            w = _load_rows(weight, scale, n, inside, block * BLOCK, width, BLOCK, BITS)
        v = load_vector(x + row * width, block * BLOCK, width, BLOCK)
        if NORM:
            if block > 0:
                g = load_vector(gain, block * BLOCK, width, BLOCK)
            squares += v * v
            total += v
            v *= g
        terms = _accumulate(terms, w, v, BITS)
    y = tl.sum(terms, 1) * scales
    if NORM:
        mean = tl.sum(total) / width if LAYER_NORM else 0.0
        rstd = tl.rsqrt(tl.sum(squares) / width - mean * mean + eps)
        y = (y - mean * mean_weights) * rstd
    a, b = tl.split(tl.reshape(y + biases, (OUTPUTS, 2)))
    y = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (2 * OUTPUTS,))
    _store_qkv(y, n, inside, position, row, q, keys, values, q_width, k_width, capacity, HEAD_DIM)


@triton.jit
def _linear_kernel(
    x,
    gain,
    weight,
    scale,
    bias,
    mean_weight,
    second_x,
    second_weight,
    second_bias,
    residual,
    out,
    outputs,
    width,
    second_width,
    eps,
    NORM: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SECOND_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BITS: tl.constexpr,
    PREFETCH: tl.constexpr,  # the first two blocks are loaded before the wait
    NUM_BLOCKS: tl.constexpr,
    SECOND_NUM_BLOCKS: tl.constexpr,  # 0: there is no second linear layer
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SUMS_EACH_BLOCK: tl.constexpr,
    READS_PREVIOUS: tl.constexpr,  # whether x is a result of the previous kernel
    PDL: tl.constexpr,
):
    """residual + f(W n(x) + b), n the norm; GATED: f(...) times (second half of W) n(x) + b.

    The output of a second linear layer, which has no norm, is added to W n(x) + b.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside, up_row = n < outputs, n + outputs
    if not READS_PREVIOUS:
        launch_next(PDL)
    w = _load_rows(weight, scale, n, inside, 0, width, BLOCK, BITS)
    if GATED:
        up_w = _load_rows(weight, scale, up_row, inside, 0, width, BLOCK, BITS)
    if PREFETCH:
        if NUM_BLOCKS > 1:
            next_w = _load_rows(weight, scale, n, inside, BLOCK, width, BLOCK, BITS)
        else:
            next_w = _load_rows(second_weight, scale, n, inside, 0, second_width, BLOCK, BITS)
    scales = load_per_output(scale, n, inside, HAS_SCALE, 1.0)
    biases = load_per_output(bias, n, inside, HAS_BIAS, 0.0)
    biases += load_per_output(second_bias, n, inside, HAS_SECOND_BIAS, 0.0)
    mean_weights = load_per_output(mean_weight, n, inside, LAYER_NORM, 0.0)
    if GATED:
        up_scales = load_per_output(scale, up_row, inside, HAS_SCALE, 1.0)
        up_biases = load_per_output(bias, up_row, inside, HAS_BIAS, 0.0)
        up_mean_weights = load_per_output(mean_weight, up_row, inside, LAYER_NORM, 0.0)
    residual_in = tl.zeros((OUTPUTS,), tl.float32)
    if HAS_RESIDUAL:
        residual_in = tl.load(residual + row * outputs + n, mask=inside, other=0.0)
    if NORM:
        g = load_vector(gain, 0, width, BLOCK)
    if READS_PREVIOUS:
        wait_for_previous(PDL)
    TERMS: tl.constexpr = 1 if SUMS_EACH_BLOCK else BLOCK
    terms, up_terms = tl.zeros((OUTPUTS, TERMS), tl.float32), tl.zeros((OUTPUTS, TERMS), tl.float32)
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for block in tl.static_range(NUM_BLOCKS + SECOND_NUM_BLOCKS):
        if block == 1 and PREFETCH:
            w = next_w
        elif block > 0 and block < NUM_BLOCKS:
            w = _load_rows(weight, scale, n, inside, block * BLOCK, width, BLOCK, BITS)
        elif block >= NUM_BLOCKS:
            begin = (block - NUM_BLOCKS) * BLOCK
            w = _load_rows(second_weight, scale, n, inside, begin, second_width, BLOCK, BITS)
        if GATED and block > 0:
            up_w = _load_rows(weight, scale, up_row, inside, block * BLOCK, width, BLOCK, BITS)
        if block < NUM_BLOCKS:
            v = load_vector(x + row * width, block * BLOCK, width, BLOCK)
        else:
            begin = (block - NUM_BLOCKS) * BLOCK
            v = load_vector(second_x + row * second_width, begin, second_width, BLOCK)
        if NORM:
            if block > 0:
                g = load_vector(gain, block * BLOCK, width, BLOCK)
            squares += v * v
            total += v
            v *= g
        terms = _accumulate(terms, w, v, BITS)
        if GATED:
            up_terms = _accumulate(up_terms, up_w, v, BITS)
    y, up = tl.sum(terms, 1) * scales, tl.zeros((OUTPUTS,), tl.float32)
    if GATED:
        up = tl.sum(up_terms, 1) * up_scales
    if NORM:
        mean = tl.sum(total) / width if LAYER_NORM else 0.0
        rstd = tl.rsqrt(tl.sum(squares) / width - mean * mean + eps)
        y = (y - mean * mean_weights) * rstd
        if GATED:
            up = (up - mean * up_mean_weights) * rstd
    y = activate(y + biases, ACTIVATION)
    if GATED:
        y *= up + up_biases
    if not READS_PREVIOUS:
        wait_for_previous(PDL)  # the next kernel waits for this one alone
    tl.store(out + row * outputs + n, (residual_in + y).to(out.dtype.element_ty), mask=inside)


def project_qkv(
    x: Tensor,
    norm_linear: FusedNormLinear,
    pairs: RotaryPairs,
    tables: tuple[Tensor, ...],  # cos and sin
    cache: KVCache,
    lengths: Tensor,
) -> Tensor:
    """Compute norm, packed projection and rotation; store k and v in the KV cache, return q."""
    (rows, width), layer = x.shape, norm_linear.layer
    k_width = cache.keys.shape[1] * cache.keys.shape[3]
    q_width = len(layer.weight) - 2 * k_width
    q = torch.empty(rows, q_width, dtype=torch.float32, device=x.device)
    options = _launch_options(layer, 2, "norm")
    num_pairs = len(pairs.frequency_index)
    _qkv_kernel[(rows, triton.cdiv(num_pairs, options["OUTPUTS"]))](
        x,
        norm_linear.gain,
        layer.weight,
        layer.scale,
        norm_linear.bias,
        norm_linear.mean_weight,
        pairs.outputs,
        pairs.frequency_index,
        *tables,
        lengths,
        q,
        cache.keys,
        cache.values,
        num_pairs,
        width,
        norm_linear.eps,
        tables[0].shape[1],
        q_width,
        k_width,
        cache.keys.shape[2],
        NORM=norm_linear.gain is not None,
        LAYER_NORM=norm_linear.mean_weight is not None,
        HAS_BIAS=norm_linear.bias is not None,
        HEAD_DIM=cache.keys.shape[3],
        **options,
        **pdl_options(),
    )
    return q


def linear(
    x: Tensor,
    norm_linear: FusedNormLinear,
    *,
    residual: Tensor | None = None,
    activation: FFNActivation = FFNActivation(),  # noqa: B008 -- a frozen value
    added: tuple[Tensor, FusedNormLinear] | None = None,
    reads_previous: bool = True,
) -> Tensor:
    """residual + f(W n(x) + b): n is the norm, f the activation or gate; each is optional.

    `added` is the input of a second linear layer without a norm, and this layer: its output is
    added to W n(x) + b. Both have floating-point weights. If x is not a result of the previous
    kernel (`reads_previous=False`), this kernel runs beside it, and ends after it.
    """
    (rows, width), layer = x.shape, norm_linear.layer
    outputs = len(layer.weight) // (1 + activation.gated)
    out = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    second_x, second = (None, None) if added is None else added
    second_width = 0 if second is None else second.layer.inputs
    has_norm = norm_linear.gain is not None
    options = _linear_options(layer, 1 + activation.gated, second_width, has_norm=has_norm)
    _linear_kernel[(rows, triton.cdiv(outputs, options["OUTPUTS"]))](
        x,
        norm_linear.gain,
        layer.weight,
        layer.scale,
        norm_linear.bias,
        norm_linear.mean_weight,
        second_x,
        None if second is None else second.layer.weight,
        None if second is None else second.bias,
        residual,
        out,
        outputs,
        width,
        second_width,
        norm_linear.eps,
        NORM=norm_linear.gain is not None,
        LAYER_NORM=norm_linear.mean_weight is not None,
        HAS_BIAS=norm_linear.bias is not None,
        HAS_SECOND_BIAS=second is not None and second.bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=activation.gated,
        ACTIVATION=activation.name,
        READS_PREVIOUS=reads_previous,
        **options,
        **pdl_options(),
    )
    return out


def _launch_options(layer: PackedLinear, rows_per_output: int, kind: str) -> dict[str, int]:
    """Launch options with which a program reads enough of W to hide memory latency."""
    width = layer.inputs
    if layer.bits >= 16:
        program = PROGRAMS[kind]
    else:
        block = min(BLOCK_INPUTS, triton.next_power_of_2(width))
        elements, warps = PROGRAM_SIZES[rows_per_output, layer.bits]
        program = Program(block, elements // block, warps, sums_each_block=True)
    block = min(program.block, triton.next_power_of_2(width))
    outputs = max(1, program.rows // rows_per_output)
    while outputs > 1 and len(layer.weight) < outputs * rows_per_output * MIN_PROGRAMS:
        outputs //= 2
    while len(layer.weight) > outputs * rows_per_output * MAX_PROGRAMS:
        outputs *= 2
    return {
        "BITS": 0 if layer.bits > 8 or width % 4 else layer.bits,
        "HAS_SCALE": layer.bits == 8,
        "NUM_BLOCKS": triton.cdiv(width, block),
        "BLOCK": block,
        "OUTPUTS": outputs,
        "SUMS_EACH_BLOCK": program.sums_each_block,
        "num_warps": program.warps,
    }


def _linear_options(
    layer: PackedLinear, rows_per_output: int, second_width: int = 0, *, has_norm: bool
) -> dict[str, int]:
    """Launch options of one linear layer, or of the sum of two."""
    width, rows = layer.inputs, len(layer.weight)
    if second_width:
        kind = "two_layers"
    elif width >= WIDE:
        kind = "wide" if rows >= FEW_ROWS else "wide_few_rows"
    elif rows >= MANY_ROWS:
        kind = "many_rows"
    else:
        kind = "norm" if has_norm else "narrow"
    options = _launch_options(layer, rows_per_output, kind)
    blocks = options["NUM_BLOCKS"]
    second_blocks = triton.cdiv(second_width, options["BLOCK"])
    fits = rows <= options["OUTPUTS"] * PREFETCHING_PROGRAMS
    has_two_blocks = blocks + second_blocks == 2 or second_blocks > 0
    return options | {
        "SECOND_NUM_BLOCKS": second_blocks,
        "PREFETCH": layer.bits >= 16 and rows_per_output == 1 and has_two_blocks and fits,
    }
