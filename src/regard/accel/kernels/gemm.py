"""Kernels that write one token for many rows: the layer of `few`, with products on tensor cores.

A vector is normed by whoever multiplies it: beside the stream x lies g * x for the gain g of the
norm to come, and sums of squares, one for each program that wrote. Where the outputs are too few
to keep the card busy, programs share the inputs too, and who is last adds up.

Vectors that meet int8 four at a time (`in_fours`) lie in another order (`common.shuffled`), which
they are written in: a program makes its outputs in that order by taking the rows of W in it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.accel.kernels.common import (
    INTERPRETED,
    Bend,
    bent,
    early,
    hopper,
    numbers,
    settle,
    shared_memory,
    shuffled,
    sixty_fourths,
    wait,
)
from regard.accel.packed import Matrix

ROWS = 64  # of a program: what tensor cores take at once
# Outputs of a program, inputs of a step of its loop, steps that are loaded ahead, and warps, for
# many outputs or few and weights of floats or int8: the fastest on an H200. They fill a
# multiprocessor, so that those of the next kernel, which come early, spread evenly.
SIZES = {
    (True, False): (128, 128, 4, 4),
    (False, False): (64, 128, 4, 4),
    (True, True): (128, 64, 8, 8),
    (False, True): (64, 128, 6, 4),
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
    share,
    EVEN: tl.constexpr,
    DEEP: tl.constexpr,
    FOURS: tl.constexpr,
    SETTLED: tl.constexpr,
):
    """The vectors m times rows n of W, over this program's share of the inputs.

    In fours, W is the left factor: it goes to the tensor cores from registers, where it is made
    into floats.
    """
    PACKED: tl.constexpr = 4 if FOURS else 1
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, width)
    if FOURS:
        weight = weight.to(tl.pointer_type(tl.int32))
    x_at = x + m.to(tl.int64)[:, None] * width
    w_at = weight + n.to(tl.int64)[:, None] * (width // PACKED)
    ROWS: tl.constexpr = m.shape[0]
    SOME: tl.constexpr = n.shape[0]
    y = tl.zeros((SOME, ROWS) if FOURS else (ROWS, SOME), tl.float32)
    for start in range(begin, end, DEEP):
        if SETTLED:
            settle(start)
        k = start + tl.arange(0, DEEP)
        w_k = start // PACKED + tl.arange(0, DEEP // PACKED)
        there, real = (m < rows)[:, None], inside[:, None]
        if not EVEN:
            there, real = there & (k < end)[None, :], real & (w_k < end // PACKED)[None, :]
        a = tl.load(x_at + k[None, :], mask=there, other=0.0)
        w = tl.load(w_at + w_k[None, :], mask=real, other=0)
        if FOURS:
            y = tl.dot(sixty_fourths(w), tl.trans(a), y)
        else:
            y = tl.dot(a, tl.trans(w.to(a.dtype)), y, input_precision="ieee")
    return 64 * tl.trans(y) if FOURS else y


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
    FOURS: tl.constexpr,
    SETTLED: tl.constexpr,
    SHUFFLED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """f(W n(x) + b), or, gated, f(W n(x)) times what the second half of W gives."""
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    EACH: tl.constexpr = SOME // 2 if GATED else SOME
    place = tl.program_id(0) * EACH + tl.arange(0, SOME) // (SOME // EACH)
    inside = place < outputs
    n = shuffled(place) if SHUFFLED else place
    if GATED:
        n += outputs * (tl.arange(0, SOME) % 2)
    scales = numbers(scale, n, inside, SCALED, 1.0)
    biases = numbers(bias, n, inside, BIASED, 0.0)
    wait(EARLY)
    y = _multiplied(x, weight, n, inside, m, rows, width, share, EVEN, DEEP, FOURS, SETTLED)
    y, last = _added_up(y, parts, arrived, SPLITS, ROWS, SOME)
    if last:
        y *= _normed(squares, m, rows, width, eps, pieces, PIECES)[:, None]
        y = y * scales[None, :] + biases[None, :]
        if GATED:
            z, up = _pairs(y, ROWS, SOME)
            z = bent(z, BEND) * up
        else:
            z = bent(y, BEND)
        row = m[:, None].to(tl.int64)
        at = (tl.program_id(0) * EACH + tl.arange(0, EACH))[None, :]
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
    FOURS: tl.constexpr,
    SETTLED: tl.constexpr,
    SHUFFLED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The stream + W x + b, and what its next norm needs."""
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(0) * SOME + tl.arange(0, SOME)
    n = shuffled(place) if SHUFFLED else place
    inside = place < outputs
    scales = numbers(scale, n, inside, SCALED, 1.0)
    biases = numbers(bias, n, inside, BIASED, 0.0)
    g = tl.load(gain + n, mask=inside, other=0.0).to(tl.float32)
    real = (m < rows)[:, None] & inside[None, :]
    at = m[:, None].to(tl.int64) * outputs + place[None, :]
    before = tl.load(stream + at, mask=real, other=0.0)  # written two kernels ago or more
    wait(EARLY)
    y = _multiplied(x, weight, n, inside, m, rows, width, share, EVEN, DEEP, FOURS, SETTLED)
    y, last = _added_up(y, parts, arrived, SPLITS, ROWS, SOME)
    if last:
        y = y * scales[None, :] + biases[None, :] + before
        tl.store(onward + at, y, mask=real)
        tl.store(ready + at, (y * g[None, :]).to(ready.dtype.element_ty), mask=real)
        tl.store(squares + tl.program_id(0) * rows + m, tl.sum(y * y, 1), mask=m < rows)


@triton.jit
def _begin_kernel(
    x,
    gain,
    stream,
    ready,
    squares,
    width,
    WIDE: tl.constexpr,
    SHUFFLED: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDE)
    column = shuffled(place) if SHUFFLED else place
    inside = place < width
    g = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    v = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    at = row * width + place
    tl.store(stream + at, v, mask=inside)
    tl.store(ready + at, (v * g).to(ready.dtype.element_ty), mask=inside)
    tl.store(squares + row, tl.sum(v * v))


def in_fours(matrix: Matrix, dtype: torch.dtype) -> bool:
    """Whether its int8 are read four at a time, by vectors that lie `shuffled`."""
    eight = matrix.scale is not None and dtype == torch.bfloat16
    return eight and matrix.weight.shape[1] % 64 == 0 and not INTERPRETED


class Flow(NamedTuple):
    """The stream of each row, and what its next norm needs."""

    stream: Float[Tensor, "rows dim"]  # float32
    ready: Float[Tensor, "rows dim"]  # times the gain of that norm
    squares: Float[Tensor, "pieces rows"]  # sums of them, over some of the columns each
    eps: float
    shuffled: bool  # the columns, as their readers take them

    @classmethod
    def begin(
        cls, x: Float[Tensor, "rows dim"], gain: Float[Tensor, " dim"], eps: float, reader: Matrix
    ) -> "Flow":
        """Of embedded ids, for the matrices of a model, of which `reader` is one."""
        rows, width = x.shape
        flow = cls._of(x, 1, eps, in_fours(reader, x.dtype))
        _begin_kernel[(rows,)](
            x,
            gain,
            *flow[:3],
            width,
            WIDE=triton.next_power_of_2(width),
            SHUFFLED=flow.shuffled,
            num_warps=8,
            **early(),
        )
        return flow

    @classmethod
    def _of(cls, like: Tensor, pieces: int, eps: float, shuffled: bool) -> "Flow":
        stream = torch.empty_like(like, dtype=torch.float32)
        squares = stream.new_empty(pieces, len(like))
        return cls(stream, torch.empty_like(like), squares, eps, shuffled)

    def project(
        self,
        matrix: Matrix,
        arrived: Tensor,
        bend: Bend = Bend(),  # noqa: B008 -- a frozen value
        dtype: torch.dtype | None = None,
        reader: Matrix | None = None,
    ) -> Float[Tensor, "rows outputs"]:
        """Normed and multiplied; bent, and gated; in the order in which `reader` takes it."""
        x, outputs = self.ready, len(matrix.weight) // (1 + bend.gated)
        out = x.new_empty(len(x), outputs, dtype=dtype)
        grid, shape = _shape(x, matrix)
        assert self.shuffled == shape["FOURS"]
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
            SHUFFLED=reader is not None and in_fours(reader, out.dtype),
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
        """W x + b on top of the stream, towards the norm that has this gain; x as W takes it.

        The stream is read before the kernel that was launched last has ended: not one of its.
        """
        outputs = len(matrix.weight)
        grid, shape = _shape(x, matrix)
        flow = self._of(self.ready, grid[0], eps, self.shuffled)
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
            SHUFFLED=self.shuffled,
            **shape,
            **early(),
        )
        return flow


def _shape(x: Tensor, matrix: Matrix) -> tuple[tuple[int, int, int], dict[str, int]]:
    """How many programs make the outputs, share the inputs and take the rows, and their sizes."""
    (rows, width), outputs = x.shape, len(matrix.weight)
    large, fours = outputs >= 64 * PROGRAMS, in_fours(matrix, x.dtype)
    some, most, stages, warps = SIZES[large, matrix.scale is not None]
    least = 64 if fours else 16
    deep = max(least, min(most * 2 // x.itemsize, triton.next_power_of_2(width)))
    tiles, steps = triton.cdiv(outputs, some), triton.cdiv(width, deep)
    splits = 1 if large else min(steps, max(1, round(PROGRAMS / tiles)))
    share = deep * triton.cdiv(steps, splits)
    each = deep * (ROWS * x.itemsize + some * matrix.weight.itemsize)
    as_float = deep * some * x.itemsize * (matrix.scale is not None and not fours)
    shape = {
        "share": share,
        "EVEN": width % deep == 0,
        "ROWS": ROWS,
        "SOME": some,
        "DEEP": deep,
        "FOURS": fours,
        "SETTLED": fours and hopper(),
        "num_warps": warps,
        "num_stages": max(1, min(stages, (shared_memory(x) - as_float) // each)),
    }
    return (tiles, triton.cdiv(width, share), triton.cdiv(rows, ROWS)), shape


def _parts(x: Tensor, grid: tuple[int, int, int], shape: dict[str, int]) -> Tensor:
    """Room for the shares of the inputs."""
    tiles, splits, blocks = grid
    size = 0 if splits == 1 else tiles * splits * blocks * ROWS * shape["SOME"]
    return x.new_empty(size, dtype=torch.float32)
