"""Triton kernels of a decode step of many rows: matmuls on tensor cores (gemm).

The layers are those of `gemv`. A norm is applied inside the matmul that follows it: kernels write
the residual stream x, g * x with the gain g of the next norm, and partial sums of x and x^2. Where
the outputs are too few to occupy the GPU, programs also split the inputs (split-K), and the last
one to finish sums the splits.

Vectors multiplied with int8 weights that are read four at a time (`reads_packed_int8`) have their
columns permuted (`common.permute_columns`). The kernel that computes such vectors writes them in
this order, by permuting the rows of its W.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.accel.kernels.common import (
    INTERPRETED,
    FFNActivation,
    activate,
    dequantize_int8,
    is_hopper,
    load_per_output,
    pdl_options,
    permute_columns,
    shared_memory,
    wait_for_previous,
    wait_for_wgmma,
)
from regard.accel.packed import FusedNormLinear, PackedLinear

BLOCK_ROWS = 64  # rows per program: those of one tensor core instruction
# Outputs of a program, inputs of an iteration, stages and warps, for (many outputs, int8 weights):
# the fastest on an H200. A program fills a multiprocessor, so that those of the next kernel, which
# start early, are spread evenly.
PROGRAM_SIZES = {
    (True, False): (128, 128, 4, 4),
    (False, False): (64, 128, 4, 4),
    (True, True): (128, 64, 8, 8),
    (False, True): (64, 128, 6, 4),
}
NUM_SMS = 132  # the multiprocessors of an H200


@triton.jit
def _matmul_split_k(
    x,
    weight,
    n,
    inside,
    m,
    rows,
    width,
    inputs_per_split,
    EVEN_INPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PACKED_INT8: tl.constexpr,
    WAIT_WGMMA: tl.constexpr,
):
    """The vectors m times rows n of W, over this program's share of the inputs.

    With PACKED_INT8, W is the left operand: tensor cores read it from registers, where it is
    dequantized.
    """
    INT8_PER_WORD: tl.constexpr = 4 if PACKED_INT8 else 1
    begin = tl.program_id(1) * inputs_per_split
    end = tl.minimum(begin + inputs_per_split, width)
    if PACKED_INT8:
        weight = weight.to(tl.pointer_type(tl.int32))
    x_rows = x + m.to(tl.int64)[:, None] * width
    w_rows = weight + n.to(tl.int64)[:, None] * (width // INT8_PER_WORD)
    BLOCK_ROWS: tl.constexpr = m.shape[0]
    OUTPUTS: tl.constexpr = n.shape[0]
    y = tl.zeros((OUTPUTS, BLOCK_ROWS) if PACKED_INT8 else (BLOCK_ROWS, OUTPUTS), tl.float32)
    for start in range(begin, end, BLOCK_INPUTS):
        if WAIT_WGMMA:
            wait_for_wgmma(start)
        k = start + tl.arange(0, BLOCK_INPUTS)
        w_k = start // INT8_PER_WORD + tl.arange(0, BLOCK_INPUTS // INT8_PER_WORD)
        x_mask, w_mask = (m < rows)[:, None], inside[:, None]
        if not EVEN_INPUTS:
            x_mask, w_mask = (
                x_mask & (k < end)[None, :],
                w_mask & (w_k < end // INT8_PER_WORD)[None, :],
            )
        a = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_rows + w_k[None, :], mask=w_mask, other=0)
        if PACKED_INT8:
            y = tl.dot(dequantize_int8(w), tl.trans(a), y)
        else:
            y = tl.dot(a, tl.trans(w.to(a.dtype)), y, input_precision="ieee")
    return 64 * tl.trans(y) if PACKED_INT8 else y


@triton.jit
def _sum_split_k(
    y, partials, counters, SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, OUTPUTS: tl.constexpr
):
    """Sum the splits of the inputs.

    Return the sum, which only the last program to finish has, and whether this program is the last.
    """
    if SPLITS == 1:
        return y, tl.full((), True, tl.int1)
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    partials += tile.to(tl.int64) * SPLITS * BLOCK_ROWS * OUTPUTS
    offset = tl.arange(0, BLOCK_ROWS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    tl.store(partials + tl.program_id(1) * BLOCK_ROWS * OUTPUTS + offset, y)
    tl.debug_barrier()  # all of this split is written before it is counted
    is_last = tl.atomic_add(counters + tile, 1) == SPLITS - 1
    if is_last:
        tl.store(counters + tile, 0)
        y = tl.zeros((BLOCK_ROWS, OUTPUTS), tl.float32)
        for split in tl.static_range(SPLITS):  # in order, so that the sum is deterministic
            y += tl.load(partials + split * BLOCK_ROWS * OUTPUTS + offset, volatile=True)
    return y, is_last


@triton.jit
def _sum_parts(parts, m, rows, num_parts, BLOCK_PARTS: tl.constexpr):
    """The sums of the vectors m, from the partial sums in `parts`."""
    part = tl.arange(0, BLOCK_PARTS)
    valid = (m < rows)[:, None] & (part < num_parts)[None, :]
    sums = tl.load(parts + part[None, :] * rows + m[:, None], mask=valid, other=0.0)
    return tl.sum(sums, 1)


@triton.jit
def _split_pairs(y, BLOCK_ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """The even and the odd columns."""
    return tl.split(tl.reshape(y, (BLOCK_ROWS, OUTPUTS // 2, 2)))


@triton.jit
def _project_kernel(
    x,
    sums,
    weight,
    scale,
    bias,
    mean_weight,
    out,
    partials,
    counters,
    rows,
    outputs,
    width,
    inputs_per_split,
    eps,
    num_parts,
    BLOCK_PARTS: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PACKED_INT8: tl.constexpr,
    WAIT_WGMMA: tl.constexpr,
    PERMUTE: tl.constexpr,
    PDL: tl.constexpr,
):
    """f(W n(x) + b), n the norm; GATED: f(gate) times up, the halves of W n(x) + b."""
    m = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    RESULTS: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    offset = tl.program_id(0) * RESULTS + tl.arange(0, OUTPUTS) // (OUTPUTS // RESULTS)
    inside = offset < outputs
    n = permute_columns(offset) if PERMUTE else offset
    if GATED:
        n += outputs * (tl.arange(0, OUTPUTS) % 2)
    scales = load_per_output(scale, n, inside, HAS_SCALE, 1.0)
    biases = load_per_output(bias, n, inside, HAS_BIAS, 0.0)
    mean_weights = load_per_output(mean_weight, n, inside, LAYER_NORM, 0.0)
    wait_for_previous(PDL)
    y = _matmul_split_k(
        x,
        weight,
        n,
        inside,
        m,
        rows,
        width,
        inputs_per_split,
        EVEN_INPUTS,
        BLOCK_INPUTS,
        PACKED_INT8,
        WAIT_WGMMA,
    )
    y, is_last = _sum_split_k(y, partials, counters, SPLITS, BLOCK_ROWS, OUTPUTS)
    if is_last:
        y *= scales[None, :]
        squares = sums + num_parts * rows
        variance = _sum_parts(squares, m, rows, num_parts, BLOCK_PARTS) / width
        if LAYER_NORM:
            mean = _sum_parts(sums, m, rows, num_parts, BLOCK_PARTS) / width
            variance -= mean * mean
            y -= mean[:, None] * mean_weights[None, :]
        y = y * tl.rsqrt(variance + eps)[:, None] + biases[None, :]
        if GATED:
            z, up = _split_pairs(y, BLOCK_ROWS, OUTPUTS)
            z = activate(z, ACTIVATION) * up
        else:
            z = activate(y, ACTIVATION)
        row = m[:, None].to(tl.int64)
        columns = (tl.program_id(0) * RESULTS + tl.arange(0, RESULTS))[None, :]
        valid = (row < rows) & (columns < outputs)
        tl.store(out + row * outputs + columns, z.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _add_kernel(
    x,
    weight,
    scale,
    bias,
    residual,
    gain,
    new_residual,
    scaled,
    sums,
    partials,
    counters,
    rows,
    outputs,
    width,
    inputs_per_split,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PACKED_INT8: tl.constexpr,
    WAIT_WGMMA: tl.constexpr,
    PERMUTE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = residual + W x + b, g * y with the gain g of the next norm, partial sums of y and y^2."""
    m = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offset = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = permute_columns(offset) if PERMUTE else offset
    inside = offset < outputs
    scales = load_per_output(scale, n, inside, HAS_SCALE, 1.0)
    biases = load_per_output(bias, n, inside, HAS_BIAS, 0.0)
    g = tl.load(gain + n, mask=inside, other=0.0).to(tl.float32)
    valid = (m < rows)[:, None] & inside[None, :]
    columns = m[:, None].to(tl.int64) * outputs + offset[None, :]
    # written at least two kernels before
    residual_in = tl.load(residual + columns, mask=valid, other=0.0)
    wait_for_previous(PDL)
    y = _matmul_split_k(
        x,
        weight,
        n,
        inside,
        m,
        rows,
        width,
        inputs_per_split,
        EVEN_INPUTS,
        BLOCK_INPUTS,
        PACKED_INT8,
        WAIT_WGMMA,
    )
    y, is_last = _sum_split_k(y, partials, counters, SPLITS, BLOCK_ROWS, OUTPUTS)
    if is_last:
        y = y * scales[None, :] + biases[None, :] + residual_in
        tl.store(new_residual + columns, y, mask=valid)
        tl.store(scaled + columns, (y * g[None, :]).to(scaled.dtype.element_ty), mask=valid)
        part = sums + tl.program_id(0) * rows + m
        tl.store(part, tl.sum(y, 1), mask=m < rows)
        tl.store(part + tl.num_programs(0) * rows, tl.sum(y * y, 1), mask=m < rows)


@triton.jit
def _start_kernel(
    x,
    gain,
    residual,
    scaled,
    sums,
    width,
    BLOCK: tl.constexpr,
    PERMUTE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The embeddings x as residual, g * x with the gain g of the first norm, sums of x and x^2."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    column = permute_columns(offset) if PERMUTE else offset
    inside = offset < width
    g = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    v = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    columns = row * width + offset
    tl.store(residual + columns, v, mask=inside)
    tl.store(scaled + columns, (v * g).to(scaled.dtype.element_ty), mask=inside)
    tl.store(sums + row, tl.sum(v))
    tl.store(sums + tl.num_programs(0) + row, tl.sum(v * v))


def reads_packed_int8(layer: PackedLinear, dtype: torch.dtype) -> bool:
    """Whether int8 weights are read four at a time; the inputs then have permuted columns."""
    is_int8 = layer.scale is not None and dtype == torch.bfloat16
    return is_int8 and layer.weight.shape[1] % 64 == 0 and not INTERPRETED


class ResidualStream(NamedTuple):
    """The residual stream x of each row, and the inputs of its next norm."""

    residual: Float[Tensor, "rows dim"]  # x, in float32
    scaled: Float[Tensor, "rows dim"]  # x times the gain of that norm
    sums: Float[Tensor, "2 parts rows"]  # partial sums of x and of x^2
    permuted: bool  # whether the columns are permuted, for packed int8 weights

    @classmethod
    def start(
        cls,
        x: Float[Tensor, "rows dim"],
        consumer: FusedNormLinear,
    ) -> "ResidualStream":
        """The residual stream at the embeddings; the first linear layer is `consumer`."""
        rows, width = x.shape
        result = cls._of(x, 1, reads_packed_int8(consumer.layer, x.dtype))
        _start_kernel[(rows,)](
            x,
            consumer.gain,
            *result[:3],
            width,
            BLOCK=triton.next_power_of_2(width),
            PERMUTE=result.permuted,
            num_warps=8,
            **pdl_options(),
        )
        return result

    @classmethod
    def _of(cls, like: Tensor, num_parts: int, permuted: bool) -> "ResidualStream":
        residual = torch.empty_like(like, dtype=torch.float32)
        sums = residual.new_empty(2, num_parts, len(like))
        return cls(residual, torch.empty_like(like), sums, permuted)

    def project(
        self,
        norm_linear: FusedNormLinear,
        counters: Tensor,
        activation: FFNActivation = FFNActivation(),  # noqa: B008 -- a frozen value
        dtype: torch.dtype | None = None,
        consumer: PackedLinear | None = None,
    ) -> Float[Tensor, "rows outputs"]:
        """f(W n(x) + b), with its columns in the order that `consumer` needs."""
        x, layer = self.scaled, norm_linear.layer
        outputs = len(layer.weight) // (1 + activation.gated)
        out = x.new_empty(len(x), outputs, dtype=dtype)
        grid, options = _launch_options(x, layer)
        assert self.permuted == options["PACKED_INT8"]
        _project_kernel[grid](
            x,
            self.sums,
            layer.weight,
            layer.scale,
            norm_linear.bias,
            norm_linear.mean_weight,
            out,
            _empty_partials(x, grid, options),
            counters,
            len(x),
            outputs,
            x.shape[1],
            options.pop("inputs_per_split"),
            norm_linear.eps,
            self.sums.shape[1],
            BLOCK_PARTS=triton.next_power_of_2(self.sums.shape[1]),
            LAYER_NORM=norm_linear.mean_weight is not None,
            HAS_SCALE=layer.scale is not None,
            HAS_BIAS=norm_linear.bias is not None,
            GATED=activation.gated,
            ACTIVATION=activation.name,
            SPLITS=grid[1],
            PERMUTE=consumer is not None and reads_packed_int8(consumer, out.dtype),
            **options,
            **pdl_options(),
        )
        return out

    def add(
        self,
        x: Float[Tensor, "rows inputs"],
        layer: PackedLinear,
        consumer: FusedNormLinear,
        counters: Tensor,
    ) -> "ResidualStream":
        """The residual stream + W x + b, scaled for the norm of `consumer`.

        The kernel reads the residual before the previous kernel has ended, so that kernel must not
        be the one that wrote it.
        """
        outputs = len(layer.weight)
        grid, options = _launch_options(x, layer)
        result = self._of(self.scaled, grid[0], self.permuted)
        _add_kernel[grid](
            x,
            layer.weight,
            layer.scale,
            layer.bias,
            self.residual,
            consumer.gain,
            *result[:3],
            _empty_partials(x, grid, options),
            counters,
            len(x),
            outputs,
            x.shape[1],
            options.pop("inputs_per_split"),
            HAS_SCALE=layer.scale is not None,
            HAS_BIAS=layer.bias is not None,
            SPLITS=grid[1],
            PERMUTE=self.permuted,
            **options,
            **pdl_options(),
        )
        return result


def _launch_options(x: Tensor, layer: PackedLinear) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The grid (tiles of outputs, splits of inputs, blocks of rows), and options of a launch."""
    (rows, width), outputs = x.shape, len(layer.weight)
    many_outputs, packed_int8 = outputs >= 64 * NUM_SMS, reads_packed_int8(layer, x.dtype)
    outputs_per_program, max_block, stages, warps = PROGRAM_SIZES[
        many_outputs, layer.scale is not None
    ]
    min_block = 64 if packed_int8 else 16
    block_inputs = max(min_block, min(max_block * 2 // x.itemsize, triton.next_power_of_2(width)))
    output_tiles, blocks = (
        triton.cdiv(outputs, outputs_per_program),
        triton.cdiv(width, block_inputs),
    )
    splits = 1 if many_outputs else min(blocks, max(1, round(NUM_SMS / output_tiles)))
    inputs_per_split = block_inputs * triton.cdiv(blocks, splits)
    stage_bytes = block_inputs * (
        BLOCK_ROWS * x.itemsize + outputs_per_program * layer.weight.itemsize
    )
    dequantized_bytes = (
        block_inputs
        * outputs_per_program
        * x.itemsize
        * (layer.scale is not None and not packed_int8)
    )
    options = {
        "inputs_per_split": inputs_per_split,
        "EVEN_INPUTS": width % block_inputs == 0,
        "BLOCK_ROWS": BLOCK_ROWS,
        "OUTPUTS": outputs_per_program,
        "BLOCK_INPUTS": block_inputs,
        "PACKED_INT8": packed_int8,
        "WAIT_WGMMA": packed_int8 and is_hopper(),
        "num_warps": warps,
        "num_stages": max(1, min(stages, (shared_memory(x) - dequantized_bytes) // stage_bytes)),
    }
    return (
        output_tiles,
        triton.cdiv(width, inputs_per_split),
        triton.cdiv(rows, BLOCK_ROWS),
    ), options


def _empty_partials(x: Tensor, grid: tuple[int, int, int], options: dict[str, int]) -> Tensor:
    """A buffer for the partial sums of the splits."""
    output_tiles, splits, blocks = grid
    size = 0 if splits == 1 else output_tiles * splits * blocks * BLOCK_ROWS * options["OUTPUTS"]
    return x.new_empty(size, dtype=torch.float32)
