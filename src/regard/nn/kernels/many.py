"""Kernels that write one token for many rows: the layer of `few`, with products on tensor cores.

A vector is normed by whoever multiplies it: beside the stream x lies g * x for the gain g of the
norm to come, and sums of squares, one for each program that wrote. Where the outputs are too few
to keep the card busy, programs share the inputs too, and who is last adds up.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.nn.kernels.common import (
    INTERPRETED,
    Bend,
    bent,
    early,
    numbers,
    shared_memory,
    sixty_fourths,
    vector,
    wait,
)
from regard.nn.packed import Matrix

ROWS = 64  # of a program: what tensor cores take at once
# Outputs of a program, inputs of a step of its loop, steps that are loaded ahead, and warps, for
# many outputs or few and weights of floats or int8: the fastest on an H200. They fill a
# multiprocessor, so that those of the next kernel, which come early, spread evenly.
SIZES = {
    (True, False): (128, 128, 4, 4),
    (False, False): (64, 128, 4, 4),
    (True, True): (128, 128, 6, 8),
    (False, True): (64, 256, 4, 4),
}
PROGRAMS = 132  # as many as there are multiprocessors


@triton.jit
def _multiplied(
    x,
    weight,
    n,
    inside,
    m,
    rows,
    width,
    begin,
    end,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    SOME: tl.constexpr,
    DEEP: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The vectors m times rows n of W, over some of the inputs.

    In pairs, W is the left factor: it goes to the tensor cores from registers, where it is made
    into floats, and the next of it is made while they multiply.
    """
    PACKED: tl.constexpr = 2 if PAIRS else 1
    if PAIRS:
        weight = weight.to(tl.pointer_type(tl.int16))
    x_at = x + m.to(tl.int64)[:, None] * width
    w_at = weight + n.to(tl.int64)[:, None] * (width // PACKED)
    y = tl.zeros((SOME, ROWS) if PAIRS else (ROWS, SOME), tl.float32)
    for start in range(begin, end, DEEP):
        k = start + tl.arange(0, DEEP)
        w_k = start // PACKED + tl.arange(0, DEEP // PACKED)
        there, real = (m < rows)[:, None], inside[:, None]
        if not EVEN:
            there, real = there & (k < end)[None, :], real & (w_k < end // PACKED)[None, :]
        a = tl.load(x_at + k[None, :], mask=there, other=0.0)
        w = tl.load(w_at + w_k[None, :], mask=real, other=0)
        if PAIRS:
            y = tl.dot(sixty_fourths(w), tl.trans(a), y)
        else:
            y = tl.dot(a, tl.trans(w.to(a.dtype)), y, input_precision="ieee")
    return 64 * tl.trans(y) if PAIRS else y


@triton.jit
def _added_up(y, parts, arrived, SPLITS: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr):
    """The sum of all shares of the inputs, and whether this program is the last, who has it."""
    if SPLITS == 1:
        return y, tl.full((), True, tl.int1)
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    parts += tile.to(tl.int64) * SPLITS * ROWS * SOME
    place = tl.arange(0, ROWS)[:, None] * SOME + tl.arange(0, SOME)[None, :]
    tl.store(parts + tl.program_id(1) * ROWS * SOME + place, y)
    tl.debug_barrier()  # all of this share is written before it counts as arrived
    last = tl.atomic_add(arrived + tile, 1) == SPLITS - 1
    if last:
        tl.store(arrived + tile, 0)
        y = tl.zeros((ROWS, SOME), tl.float32)
        for share in tl.static_range(SPLITS):  # in their order, so that the sum is always the same
            y += tl.load(parts + share * ROWS * SOME + place, volatile=True)
    return y, last


@triton.jit
def _normed(squares, m, rows, width, eps, pieces, PIECES: tl.constexpr):
    """What the vectors m are divided by to be normed, inverted."""
    piece = tl.arange(0, PIECES)
    real = (m < rows)[:, None] & (piece < pieces)[None, :]
    each = tl.load(squares + piece[None, :] * rows + m[:, None], mask=real, other=0.0)
    return tl.rsqrt(tl.sum(each, 1) / width + eps)


@triton.jit
def _pairs(y, ROWS: tl.constexpr, SOME: tl.constexpr):
    """Every other column, and those between."""
    return tl.split(tl.reshape(y, (ROWS, SOME // 2, 2)))


@triton.jit
def _project_kernel(
    x,
    squares,
    weight,
    scale,
    bias,
    out,
    parts,
    arrived,
    rows,
    outputs,
    width,
    share,
    eps,
    pieces,
    PIECES: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    BEND: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    SOME: tl.constexpr,
    DEEP: tl.constexpr,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """f(W n(x) + b), or, gated, f(W n(x)) times what the second half of W gives."""
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if GATED:
        every = tl.program_id(0) * (SOME // 2) + tl.arange(0, SOME) // 2
        n = every + outputs * (tl.arange(0, SOME) % 2)
    else:
        every = tl.program_id(0) * SOME + tl.arange(0, SOME)
        n = every
    inside = every < outputs
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, width)
    scales = numbers(scale, n, inside, SCALED, 1.0)
    biases = numbers(bias, n, inside, BIASED, 0.0)
    wait(EARLY)
    y = _multiplied(x, weight, n, inside, m, rows, width, begin, end, EVEN, ROWS, SOME, DEEP, PAIRS)
    y, last = _added_up(y, parts, arrived, SPLITS, ROWS, SOME)
    if last:
        y *= _normed(squares, m, rows, width, eps, pieces, PIECES)[:, None]
        y = y * scales[None, :] + biases[None, :]
        row = m[:, None].to(tl.int64)
        if GATED:
            z, up = _pairs(y, ROWS, SOME)
            at = (tl.program_id(0) * (SOME // 2) + tl.arange(0, SOME // 2))[None, :]
            z = bent(z, BEND) * up
        else:
            at = n[None, :]
            z = bent(y, BEND)
        real = (row < rows) & (at < outputs)
        tl.store(out + row * outputs + at, z.to(out.dtype.element_ty), mask=real)


@triton.jit
def _add_kernel(
    x,
    weight,
    scale,
    bias,
    stream,
    gain,
    onward,
    ready,
    squares,
    parts,
    arrived,
    rows,
    outputs,
    width,
    share,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    SOME: tl.constexpr,
    DEEP: tl.constexpr,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The stream + W x + b, and what its next norm needs."""
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * SOME + tl.arange(0, SOME)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, width)
    inside = n < outputs
    scales = numbers(scale, n, inside, SCALED, 1.0)
    biases = numbers(bias, n, inside, BIASED, 0.0)
    g = tl.load(gain + n, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    y = _multiplied(x, weight, n, inside, m, rows, width, begin, end, EVEN, ROWS, SOME, DEEP, PAIRS)
    y, last = _added_up(y, parts, arrived, SPLITS, ROWS, SOME)
    if last:
        real = (m < rows)[:, None] & inside[None, :]
        at = m[:, None].to(tl.int64) * outputs + n[None, :]
        y = y * scales[None, :] + biases[None, :]
        y = tl.where(real, y + tl.load(stream + at, mask=real, other=0.0), 0.0)
        tl.store(onward + at, y, mask=real)
        tl.store(ready + at, (y * g[None, :]).to(ready.dtype.element_ty), mask=real)
        tl.store(squares + tl.program_id(0) * rows + m, tl.sum(y * y, 1), mask=m < rows)


@triton.jit
def _begin_kernel(x, gain, stream, ready, squares, width, WIDE: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDE)
    g = vector(gain, 0, width, WIDE)
    wait(EARLY)
    v = vector(x + row * width, 0, width, WIDE)
    at = row * width + columns
    tl.store(stream + at, v, mask=columns < width)
    tl.store(ready + at, (v * g).to(ready.dtype.element_ty), mask=columns < width)
    tl.store(squares + row, tl.sum(v * v))


class Flow(NamedTuple):
    """The stream of each row, and what its next norm needs."""

    stream: Float[Tensor, "rows dim"]  # float32
    ready: Float[Tensor, "rows dim"]  # times the gain of that norm
    squares: Float[Tensor, "pieces rows"]  # sums of them, over some of the columns each
    eps: float

    @classmethod
    def begin(cls, x: Float[Tensor, "rows dim"], gain: Tensor, eps: float) -> "Flow":
        """Of embedded ids."""
        rows, width = x.shape
        flow = cls._of(x, 1, eps)
        wide = triton.next_power_of_2(width)
        _begin_kernel[(rows,)](x, gain, *flow[:3], width, WIDE=wide, num_warps=8, **early())
        return flow

    @classmethod
    def _of(cls, like: Tensor, pieces: int, eps: float) -> "Flow":
        stream = torch.empty_like(like, dtype=torch.float32)
        return cls(stream, torch.empty_like(like), stream.new_empty(pieces, len(like)), eps)

    def project(
        self,
        matrix: Matrix,
        arrived: Tensor,
        bend: Bend = Bend(),  # noqa: B008 -- a frozen value
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "rows outputs"]:
        """Normed and multiplied; bent, and gated."""
        x, outputs = self.ready, len(matrix.weight) // (1 + bend.gated)
        out = x.new_empty(len(x), outputs, dtype=dtype)
        grid, shape = _shape(x, matrix)
        _project_kernel[grid](
            x,
            self.squares,
            matrix.weight,
            matrix.scale,
            matrix.bias,
            out,
            _parts(x, grid, shape),
            arrived,
            len(x),
            outputs,
            x.shape[1],
            shape.pop("share"),
            self.eps,
            len(self.squares),
            PIECES=triton.next_power_of_2(len(self.squares)),
            SCALED=matrix.scale is not None,
            BIASED=matrix.bias is not None,
            GATED=bend.gated,
            BEND=bend.name,
            SPLITS=grid[1],
            **shape,
            **early(),
        )
        return out

    def add(
        self,
        x: Float[Tensor, "rows inputs"],
        matrix: Matrix,
        gain: Float[Tensor, " dim"],
        eps: float,
        arrived: Tensor,
    ) -> "Flow":
        """W x + b on top of the stream, towards the norm that has this gain."""
        outputs = len(matrix.weight)
        grid, shape = _shape(x, matrix)
        flow = self._of(self.ready, grid[0], eps)
        _add_kernel[grid](
            x,
            matrix.weight,
            matrix.scale,
            matrix.bias,
            self.stream,
            gain,
            *flow[:3],
            _parts(x, grid, shape),
            arrived,
            len(x),
            outputs,
            x.shape[1],
            shape.pop("share"),
            SCALED=matrix.scale is not None,
            BIASED=matrix.bias is not None,
            SPLITS=grid[1],
            **shape,
            **early(),
        )
        return flow


def _shape(x: Tensor, matrix: Matrix) -> tuple[tuple[int, int, int], dict[str, int]]:
    """How many programs make the outputs, share the inputs and take the rows, and their sizes."""
    (rows, width), outputs = x.shape, len(matrix.weight)
    large, pairs = outputs >= 64 * PROGRAMS, _pairwise(x, matrix)
    some, most, stages, warps = SIZES[large, matrix.scale is not None]
    deep = max(16, min(most * 2 // x.itemsize, triton.next_power_of_2(width)))
    tiles, steps = triton.cdiv(outputs, some), triton.cdiv(width, deep)
    splits = 1 if large else min(steps, max(1, round(PROGRAMS / tiles)))
    share = deep * triton.cdiv(steps, splits)
    each = deep * (ROWS * x.itemsize + some * matrix.weight.itemsize)
    as_float = deep * some * x.itemsize * (matrix.scale is not None and not pairs)
    shape = {
        "share": share,
        "EVEN": width % deep == 0,
        "ROWS": ROWS,
        "SOME": some,
        "DEEP": deep,
        "PAIRS": pairs,
        "num_warps": warps,
        "num_stages": max(1, min(stages, (shared_memory(x) - as_float) // each)),
    }
    return (tiles, triton.cdiv(width, share), triton.cdiv(rows, ROWS)), shape


def _pairwise(x: Tensor, matrix: Matrix) -> bool:
    """Whether weights of int8 are read two at a time, as `sixty_fourths` wants them."""
    eight = matrix.scale is not None and x.dtype == torch.bfloat16
    return eight and x.shape[1] % 2 == 0 and not INTERPRETED


def _parts(x: Tensor, grid: tuple[int, int, int], shape: dict[str, int]) -> Tensor:
    """Room for the shares of the inputs."""
    tiles, splits, blocks = grid
    size = 0 if splits == 1 else tiles * splits * blocks * ROWS * shape["SOME"]
    return x.new_empty(size, dtype=torch.float32)
