"""The Triton kernel that transposes a matrix of bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 32, 4  # words of four bytes along each side of a tile, and warps of a program


@triton.jit
def _exchange(low, high, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Exchange the upper parts of the words of `low` with the lower parts of those of `high`."""
    difference = ((low >> SHIFT) ^ high) & MASK
    return low ^ (difference << SHIFT), high ^ difference


@triton.jit
def _transpose(x, out, rows, columns, TILE: tl.constexpr):
    """x is (4 rows, columns) and `out` (4 columns, rows), both in words of four bytes.

    The bytes of four words are a 4 x 4 matrix, which two rounds of exchanges transpose.
    """
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    source = x + 4 * row[:, None].to(tl.int64) * columns + column[None, :]
    a = tl.load(source, mask=inside)  # bytes of four columns, of the first of four rows
    b = tl.load(source + columns, mask=inside)
    c = tl.load(source + 2 * columns, mask=inside)
    d = tl.load(source + 3 * columns, mask=inside)
    a, c = _exchange(a, c, 16, 0xFFFF)
    b, d = _exchange(b, d, 16, 0xFFFF)
    a, b = _exchange(a, b, 8, 0x00FF00FF)
    c, d = _exchange(c, d, 8, 0x00FF00FF)
    inside = (row[None, :] < rows) & (column[:, None] < columns)
    target = out + 4 * column[:, None].to(tl.int64) * rows + row[None, :]
    tl.store(target, tl.trans(a), mask=inside)
    tl.store(target + rows, tl.trans(b), mask=inside)
    tl.store(target + 2 * rows, tl.trans(c), mask=inside)
    tl.store(target + 3 * rows, tl.trans(d), mask=inside)


def transpose(x: Tensor) -> Tensor:
    """The transpose of a contiguous matrix of 8-bit values, whose sizes are multiples of 4."""
    assert x.is_contiguous()
    rows, columns = (size // 4 for size in x.shape)
    out = x.new_empty(x.shape[1], x.shape[0])
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, TILE))
    words, out_words = x.view(torch.int32), out.view(torch.int32)
    _transpose[grid](words, out_words, rows, columns, TILE=TILE, num_warps=WARPS)
    return out
