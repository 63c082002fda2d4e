"""The Triton kernel of dropout masks.

The compiler computes a random number generator once for every element, which takes longer than
reading and writing the element. Here one computation gives eight elements, 16 bits for each.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 256, 4  # groups of eight elements per program


@triton.jit
def _join_halves(words):
    """The lower and the upper 16 bits of random words."""
    return tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)


@triton.jit
def _dropout_mask(mask, seeds, index, count, threshold, BLOCK: tl.constexpr):
    groups = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(tl.load(seeds + index), groups)  # Philox
    first = tl.join(_join_halves(a), _join_halves(b))
    second = tl.join(_join_halves(c), _join_halves(d))
    bits = tl.reshape(tl.join(first, second), (8 * BLOCK,))
    elements = tl.program_id(0).to(tl.int64) * 8 * BLOCK + tl.arange(0, 8 * BLOCK)
    tl.store(mask + elements, bits >= threshold, mask=elements < count)


def dropout_mask(seeds: Tensor, index: int, shape: Sequence[int], p: float) -> Tensor:
    """False with probability p, rounded to a multiple of 2^-16; random by `seeds[index]`."""
    mask = torch.empty(shape, dtype=torch.bool, device=seeds.device)
    grid = (triton.cdiv(mask.numel(), 8 * BLOCK),)
    threshold = round(p * (1 << 16))
    _dropout_mask[grid](mask, seeds, index, mask.numel(), threshold, BLOCK=BLOCK, num_warps=WARPS)
    return mask
