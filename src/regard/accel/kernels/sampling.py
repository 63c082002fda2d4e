"""Triton kernels for top-k and for sampling a token: one program per row."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels.common import from_sort_key, to_sort_key, uniform

BLOCK = 1024  # logits of a block
BLOCKS = 16  # blocks that are read at once


@triton.jit
def _load_blocks(logits, start, vocab, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Several blocks of a row, as rows of a matrix, and where each begins."""
    begin = start + tl.arange(0, BLOCKS) * BLOCK
    n = begin[:, None] + tl.arange(0, BLOCK)[None, :]
    return tl.load(logits + n, mask=n < vocab, other=-float("inf")), begin


@triton.jit
def _sample_kernel(
    logits,
    keys,
    counters,
    lengths,
    failure_lengths,
    ids,
    vocab,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`generate.chain.sample_token`, with numbers from `generate.sampling_state.RowGenerators`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    count = tl.load(counters + row)
    u = uniform(tl.load(keys + row), count)
    largest = -float("inf")
    for start in range(0, vocab, BLOCKS * BLOCK):
        x, _ = _load_blocks(logits, start, vocab, BLOCKS, BLOCK)
        largest = tl.maximum(largest, tl.max(x))
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, BLOCKS * BLOCK):
        x, _ = _load_blocks(logits, start, vocab, BLOCKS, BLOCK)
        total += tl.sum(tl.exp(x - largest).to(tl.float64))
    # the first block in which the cumulative sum exceeds the threshold, or the last with any weight
    threshold, cumulative, before = (
        u * total,
        tl.full((), 0.0, tl.float64),
        tl.full((), 0.0, tl.float64),
    )
    chosen_block, last_block = vocab, 0
    for start in range(0, vocab, BLOCKS * BLOCK):
        x, begin = _load_blocks(logits, start, vocab, BLOCKS, BLOCK)
        sums = tl.sum(tl.exp(x - largest).to(tl.float64), 1)
        exceeds = (cumulative + tl.cumsum(sums, 0) > threshold) & (sums > 0)
        first = tl.min(tl.where(exceeds, begin, vocab))
        if (chosen_block == vocab) & (first < vocab):
            chosen_block, before = first, cumulative + tl.sum(tl.where(begin < first, sums, 0.0))
        last_block = tl.maximum(last_block, tl.max(tl.where(sums > 0, begin, 0)))
        cumulative += tl.sum(sums)
    n = tl.minimum(chosen_block, last_block) + tl.arange(0, BLOCK)
    x = tl.load(logits + n, mask=n < vocab, other=-float("inf"))
    weights = tl.exp(x - largest).to(tl.float64)
    exceeds = (before + tl.cumsum(weights, 0) > threshold) & (weights > 0) & (chosen_block < vocab)
    first = tl.min(tl.where(exceeds, n, vocab))
    last_id = tl.max(tl.where(weights > 0, n, 0))
    tl.store(ids + row, tl.minimum(first, last_id).to(tl.int64))
    tl.store(counters + row, count + 1)
    finite = (largest - largest == 0) & (total == total)  # the maximum may miss a NaN
    length = tl.load(lengths + row)
    failure_length = tl.minimum(tl.load(failure_lengths + row), length)
    tl.store(failure_lengths + row, failure_length, mask=~finite)


@triton.jit
def _top_k_kernel(logits, out, vocab, k, BLOCK_VOCAB: tl.constexpr):
    """Find the k-th largest logit by bisection, and set all smaller ones to -inf."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_VOCAB)
    x = tl.load(logits + row * vocab + n, mask=n < vocab, other=-float("inf"))
    low, high = to_sort_key(tl.full((), -float("inf"), tl.float32)), to_sort_key(tl.max(x)) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        count_above = tl.sum((x >= from_sort_key(middle)).to(tl.int32))
        low = tl.where(count_above >= k, middle, low)
        high = tl.where(count_above > k, high, tl.where(count_above == k, low + 1, middle))
    threshold = tl.min(tl.where(x >= from_sort_key(low), x, float("inf")))
    result = tl.where((x >= threshold) | (x != x), x, -float("inf"))
    tl.store(out + row * vocab + n, result, mask=n < vocab)


def sample_token(
    logits: Float[Tensor, "rows vocab"],
    keys: Int[Tensor, " rows"],
    counters: Int[Tensor, " rows"],
    lengths: Int[Tensor, " rows"],
    failure_lengths: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """One token per row from softmax(logits), by the next random number of each row.

    For a row whose largest logit is not finite (all are -inf, or one is inf or NaN),
    `failure_lengths` is set to its length when this first happened.
    """
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.long, device=logits.device)
    _sample_kernel[(rows,)](
        logits.contiguous(),
        keys,
        counters,
        lengths,
        failure_lengths,
        ids,
        vocab,
        BLOCKS=BLOCKS,
        BLOCK=BLOCK,
        num_warps=16,
    )
    return ids


def top_k(logits: Float[Tensor, "rows vocab"], k: int) -> Float[Tensor, "rows vocab"]:
    """As `generate.samplers.truncation.TopK` without `exact`, for float32."""
    rows, vocab = logits.shape
    out, block_vocab = logits.new_empty(rows, vocab), triton.next_power_of_2(vocab)
    warps = min(32, max(4, block_vocab // 4096))
    _top_k_kernel[(rows,)](
        logits.contiguous(), out, vocab, k, BLOCK_VOCAB=block_vocab, num_warps=warps
    )
    return out
