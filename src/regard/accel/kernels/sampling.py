"""Kernels that cut logits and draw a token: one program for each row."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels.common import number_of, ranking, uniform

PIECE = 1024  # logits of a piece
PIECES = 16  # that are looked at together


@triton.jit
def _some(logits, start, vocab, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """Some pieces of a row, one under the other, and where each begins."""
    begin = start + tl.arange(0, PIECES) * PIECE
    n = begin[:, None] + tl.arange(0, PIECE)[None, :]
    return tl.load(logits + n, mask=n < vocab, other=-float("inf")), begin


@triton.jit
def _draw_kernel(
    logits, keys, used, lengths, failed, ids, vocab, PIECES: tl.constexpr, PIECE: tl.constexpr
):
    """As `generate.chain.draw`, with the numbers of `generate.sampler_context.RowGenerators`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    count = tl.load(used + row)
    u = uniform(tl.load(keys + row), count)
    most = -float("inf")
    for start in range(0, vocab, PIECES * PIECE):
        x, _ = _some(logits, start, vocab, PIECES, PIECE)
        most = tl.maximum(most, tl.max(x))
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, PIECES * PIECE):
        x, _ = _some(logits, start, vocab, PIECES, PIECE)
        total += tl.sum(tl.exp(x - most).to(tl.float64))
    # the first piece with which the sum passes the aim, or the last that has a share at all
    aim, reached, before = u * total, tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    here, last = vocab, 0
    for start in range(0, vocab, PIECES * PIECE):
        x, begin = _some(logits, start, vocab, PIECES, PIECE)
        sums = tl.sum(tl.exp(x - most).to(tl.float64), 1)
        passed = (reached + tl.cumsum(sums, 0) > aim) & (sums > 0)
        first = tl.min(tl.where(passed, begin, vocab))
        if (here == vocab) & (first < vocab):
            here, before = first, reached + tl.sum(tl.where(begin < first, sums, 0.0))
        last = tl.maximum(last, tl.max(tl.where(sums > 0, begin, 0)))
        reached += tl.sum(sums)
    n = tl.minimum(here, last) + tl.arange(0, PIECE)
    x = tl.load(logits + n, mask=n < vocab, other=-float("inf"))
    share = tl.exp(x - most).to(tl.float64)
    passed = (before + tl.cumsum(share, 0) > aim) & (share > 0) & (here < vocab)
    first = tl.min(tl.where(passed, n, vocab))
    final = tl.max(tl.where(share > 0, n, 0))
    tl.store(ids + row, tl.minimum(first, final).to(tl.int64))
    tl.store(used + row, count + 1)
    whole = (most - most == 0) & (total == total)  # the largest may overlook a NaN
    length = tl.load(lengths + row)
    tl.store(failed + row, tl.minimum(tl.load(failed + row), length), mask=~whole)


@triton.jit
def _top_k_kernel(logits, out, vocab, k, WIDE: tl.constexpr):
    """Halve the range of numbers that may be the k-th largest until there is one."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, WIDE)
    x = tl.load(logits + row * vocab + n, mask=n < vocab, other=-float("inf"))
    low, high = ranking(tl.full((), -float("inf"), tl.float32)), ranking(tl.max(x)) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        found = tl.sum((x >= number_of(middle)).to(tl.int32))
        low = tl.where(found >= k, middle, low)
        high = tl.where(found > k, high, tl.where(found == k, low + 1, middle))
    least = tl.min(tl.where(x >= number_of(low), x, float("inf")))
    kept = tl.where((x >= least) | (x != x), x, -float("inf"))
    tl.store(out + row * vocab + n, kept, mask=n < vocab)


def draw(
    logits: Float[Tensor, "rows vocab"],
    keys: Int[Tensor, " rows"],
    used: Int[Tensor, " rows"],
    lengths: Int[Tensor, " rows"],
    failed: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """One token per row from softmax(logits), by the next random number of each row.

    A row with nothing to draw from is noted in `failed`, by its length when it first was so.
    """
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.long, device=logits.device)
    _draw_kernel[(rows,)](
        logits.contiguous(),
        keys,
        used,
        lengths,
        failed,
        ids,
        vocab,
        PIECES=PIECES,
        PIECE=PIECE,
        num_warps=16,
    )
    return ids


def top_k(logits: Float[Tensor, "rows vocab"], k: int) -> Float[Tensor, "rows vocab"]:
    """As `generate.samplers.truncation.TopK` without `exact`, for float32."""
    rows, vocab = logits.shape
    out, wide = logits.new_empty(rows, vocab), triton.next_power_of_2(vocab)
    warps = min(32, max(4, wide // 4096))
    _top_k_kernel[(rows,)](logits.contiguous(), out, vocab, k, WIDE=wide, num_warps=warps)
    return out
