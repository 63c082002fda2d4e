"""Kernels that write one token for few rows: few of them, since each takes microseconds to begin.

A layer is five: norm, queries, keys, values, turn and store; attention; its output onto the
stream; norm, gate and up; down onto the stream. `accel.packed_decoder` does the same in torch.

Vectors of the stream are float32. Weights are of any float, or int8 with a scale per output.
Each kernel loads all that the one before it does not write, its weights above all, and only then
waits for it (PDL): memory does not rest between two of them. What two before it wrote is there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import (
    Bend,
    Pairing,
    bent,
    early,
    numbers,
    vector,
    wait,
)
from regard.accel.packed import Matrix
from regard.nn.state import KVCache

PIECE = 2048  # inputs that are multiplied at once
HELD = {  # numbers of W in a program, and its warps, for one or two rows of W at a time: an H200's
    (1, False): (1 << 14, 8),
    (2, False): (1 << 13, 4),
    (1, True): (1 << 13, 4),
    (2, True): (1 << 14, 4),
}


@triton.jit
def _rows(weight, rows, inside, begin, width, WIDE: tl.constexpr):
    """Some columns of some rows of a matrix."""
    columns = begin + tl.arange(0, WIDE)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(weight + at, mask=inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _product(w, v):
    return tl.sum(w.to(tl.float32) * v[None, :], 1)


@triton.jit
def _angles(p, inside, at, wave, cos, sin, waves):
    """How far each pair is turned at its position; not at all where it has no wave."""
    which = tl.load(wave + p, mask=inside, other=-1)
    turns = inside & (which >= 0)
    c = tl.load(cos + at * waves + which, mask=turns, other=1.0)
    s = tl.load(sin + at * waves + which, mask=turns, other=0.0)
    return c, s


@triton.jit
def _put(y, n, inside, at, row, q, keys, values, q_width, k_width, capacity, HEAD: tl.constexpr):
    """Outputs n of a packed product to where they belong: q, or row `at` of keys or of values."""
    tl.store(q + row * q_width + n, y.to(q.dtype.element_ty), mask=inside & (n < q_width))
    k = n - q_width
    kind = keys.dtype.element_ty
    place = (row * (k_width // HEAD) + k // HEAD) * capacity * HEAD + at * HEAD + k % HEAD
    tl.store(keys + place, y.to(kind), mask=inside & (k >= 0) & (k < k_width))
    place -= (k_width // HEAD) * capacity * HEAD  # of v = k - k_width
    tl.store(values + place, y.to(kind), mask=inside & (k >= k_width))


@triton.jit
def _look_up_kernel(
    x,
    gain,
    weight,
    scale,
    bias,
    first,
    second,
    wave,
    cos,
    sin,
    lengths,
    q,
    keys,
    values,
    pairs,
    width,
    eps,
    waves,
    q_width,
    k_width,
    capacity,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDE: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * SOME + tl.arange(0, SOME)
    inside = p < pairs
    one = tl.load(first + p, mask=inside, other=0)
    two = tl.load(second + p, mask=inside, other=0)
    w_one = _rows(weight, one, inside, 0, width, WIDE)
    w_two = _rows(weight, two, inside, 0, width, WIDE)
    g = vector(gain, 0, width, WIDE)
    at = tl.load(lengths + row)
    c, s = _angles(p, inside, at, wave, cos, sin, waves)
    scale_one = numbers(scale, one, inside, SCALED, 1.0)
    scale_two = numbers(scale, two, inside, SCALED, 1.0)
    bias_one = numbers(bias, one, inside, BIASED, 0.0)
    bias_two = numbers(bias, two, inside, BIASED, 0.0)
    wait(EARLY)
    v = vector(x + row * width, 0, width, WIDE)
    size = tl.rsqrt(tl.sum(v * v) / width + eps)
    a = _product(w_one, v * g) * size * scale_one + bias_one
    b = _product(w_two, v * g) * size * scale_two + bias_two
    a, b = a * c - b * s, b * c + a * s
    _put(a, one, inside, at, row, q, keys, values, q_width, k_width, capacity, HEAD)
    _put(b, two, inside, at, row, q, keys, values, q_width, k_width, capacity, HEAD)


@triton.jit
def _project_kernel(
    x,
    gain,
    weight,
    scale,
    bias,
    stream,
    out,
    outputs,
    width,
    eps,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    BEND: tl.constexpr,
    PIECES: tl.constexpr,
    WIDE: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out = stream + f(W n(x) + b), or, gated, f(W n(x)) times what the second half of W gives."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * SOME + tl.arange(0, SOME)
    inside = n < outputs
    w = _rows(weight, n, inside, 0, width, WIDE)
    scales = numbers(scale, n, inside, SCALED, 1.0)
    biases = numbers(bias, n, inside, BIASED, 0.0)
    before = tl.zeros((SOME,), tl.float32)
    if ADDED:
        before = tl.load(stream + row * outputs + n, mask=inside, other=0.0)
    if GATED:
        w_up = _rows(weight, n + outputs, inside, 0, width, WIDE)
        scales_up = numbers(scale, n + outputs, inside, SCALED, 1.0)
        biases_up = numbers(bias, n + outputs, inside, BIASED, 0.0)
    if NORM:
        g = vector(gain, 0, width, WIDE)
    wait(EARLY)
    x += row * width
    y, up = tl.zeros((SOME,), tl.float32), tl.zeros((SOME,), tl.float32)
    squares = tl.zeros((), tl.float32)
    for piece in tl.static_range(PIECES):
        if piece > 0:
            w = _rows(weight, n, inside, piece * WIDE, width, WIDE)
            if GATED:
                w_up = _rows(weight, n + outputs, inside, piece * WIDE, width, WIDE)
            if NORM:
                g = vector(gain, piece * WIDE, width, WIDE)
        v = vector(x, piece * WIDE, width, WIDE)
        if NORM:
            squares += tl.sum(v * v)
            v *= g
        y += _product(w, v)
        if GATED:
            up += _product(w_up, v)
    if NORM:
        size = tl.rsqrt(squares / width + eps)
        y, up = y * size, up * size
    y = bent(y * scales + biases, BEND)
    if GATED:
        y *= up * scales_up + biases_up
    tl.store(out + row * outputs + n, (before + y).to(out.dtype.element_ty), mask=inside)


def look_up(
    x: Tensor,
    gain: Tensor,
    eps: float,
    matrix: Matrix,
    pairing: Pairing,
    waves: tuple[Tensor, ...],
    state: KVCache,
    lengths: Tensor,
) -> Tensor:
    """Norm, queries, keys and values; turned; keys and values stored; the queries come back."""
    rows, width = x.shape
    q_width, k_width = _widths(len(matrix.weight), state)
    q = torch.empty(rows, q_width, dtype=torch.float32, device=x.device)
    shape = _shape(matrix, 2)
    pieces = shape.pop("PIECES")
    shape |= {"WIDE": shape["WIDE"] * triton.next_power_of_2(pieces)}
    _look_up_kernel[(rows, triton.cdiv(len(pairing.first), shape["SOME"]))](
        x,
        gain,
        matrix.weight,
        matrix.scale,
        matrix.bias,
        pairing.first,
        pairing.second,
        pairing.wave,
        *waves,
        lengths,
        q,
        state.keys,
        state.values,
        len(pairing.first),
        width,
        eps,
        waves[0].shape[1],
        q_width,
        k_width,
        state.keys.shape[2],
        SCALED=matrix.scale is not None,
        BIASED=matrix.bias is not None,
        HEAD=state.keys.shape[3],
        **shape,
        **early(),
    )
    return q


def project(
    x: Tensor,
    matrix: Matrix,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    stream: Tensor | None = None,
    bend: Bend = Bend(),  # noqa: B008 -- a frozen value
) -> Tensor:
    """A product with what stands before and after it: a norm; a bend, a gate, the stream."""
    rows, width = x.shape
    outputs = len(matrix.weight) // (1 + bend.gated)
    out = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    shape = _shape(matrix, 1 + bend.gated)
    _project_kernel[(rows, triton.cdiv(outputs, shape["SOME"]))](
        x,
        gain,
        matrix.weight,
        matrix.scale,
        matrix.bias,
        stream,
        out,
        outputs,
        width,
        eps,
        NORM=gain is not None,
        SCALED=matrix.scale is not None,
        BIASED=matrix.bias is not None,
        ADDED=stream is not None,
        GATED=bend.gated,
        BEND=bend.name,
        **shape,
        **early(),
    )
    return out


def _shape(matrix: Matrix, together: int) -> dict[str, int]:
    """How many outputs a program makes, so that it holds enough to be busy."""
    width = matrix.weight.shape[1]
    wide = min(PIECE, triton.next_power_of_2(width))
    held, warps = HELD[together, matrix.weight.itemsize == 1]
    return {
        "PIECES": triton.cdiv(width, wide),
        "WIDE": wide,
        "SOME": max(1, held // (wide * together)),
        "num_warps": warps,
    }


def _widths(outputs: int, state: KVCache) -> tuple[int, int]:
    """How many of the outputs of a packed product are queries, and how many are keys."""
    keys = state.keys.shape[1] * state.keys.shape[3]
    return outputs - 2 * keys, keys
