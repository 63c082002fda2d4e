"""Kernels for CUDA, in Triton: each does what a plain function of `nn` says, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 4096, 32  # of a row, at a time
LOG2E = tl.constexpr(1.4426950408889634)  # powers of 2 are what the hardware computes


@triton.jit
def _bend(logits, bias, cap, columns, inside, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Logits with bias and cap, -inf outside, and the slope of the cap."""
    x = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    bend = 1.0
    if HAS_CAP:
        flat = 2 * tl.sigmoid(2 * x / cap) - 1  # tanh
        bend = 1 - flat * flat
        x = tl.where(inside, cap * flat, -float("inf"))
    return x, bend


@triton.jit
def _softmax_gradient(
    logits,
    bias,
    targets,
    losses,
    vocab,
    width,
    smoothing,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row: its largest logit, sum of exponentials and loss, then the slope over the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    scored = target != -1
    lanes = tl.arange(0, COLUMNS)  # each has a maximum and sums of its own until the end
    most = tl.full([COLUMNS], -1e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    plain = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocab, 2 * COLUMNS):  # two at a time, to scale the sum half as often
        columns = start + lanes
        inside, beside = columns < vocab, columns + COLUMNS < vocab
        x, _ = _bend(logits, bias, cap, columns, inside, HAS_BIAS, HAS_CAP)
        y, _ = _bend(logits, bias, cap, columns + COLUMNS, beside, HAS_BIAS, HAS_CAP)
        if SMOOTH:
            plain += tl.where(inside, x, 0.0) + tl.where(beside, y, 0.0)
        higher = tl.maximum(most, tl.maximum(x, y))
        top = higher * LOG2E
        total = total * tl.exp2((most - higher) * LOG2E)  # 1 where nothing was seen
        total += tl.exp2(x * LOG2E - top) + tl.exp2(y * LOG2E - top)
        most = higher
    highest = tl.max(most) * LOG2E
    log_total = highest + tl.log2(tl.sum(total * tl.exp2(most * LOG2E - highest)))
    wanted, lever = _bend(logits, bias, cap, target, scored, HAS_BIAS, HAS_CAP)
    loss = log_total / LOG2E - (1 - smoothing) * wanted
    if SMOOTH:
        loss -= smoothing * tl.sum(plain) / vocab
    tl.store(losses + row, tl.where(scored, loss, 0.0))
    there = (tl.exp2(wanted * LOG2E - log_total) - smoothing / vocab - (1 - smoothing)) * lever
    log_total = tl.where(scored, log_total, float("inf"))  # no slope
    tl.debug_barrier()  # the wanted logit has been read before it is written over
    for start in range(0, width, COLUMNS):
        columns = start + lanes
        x, bend = _bend(logits, bias, cap, columns, columns < vocab, HAS_BIAS, HAS_CAP)
        slope = tl.exp2(x * LOG2E - log_total) * bend
        if SMOOTH:
            slope -= tl.where(scored & (columns < vocab), smoothing / vocab * bend, 0.0)
        tl.store(logits + columns, slope.to(logits.dtype.element_ty), mask=columns < width)
    tl.debug_barrier()
    tl.store(logits + target, there.to(logits.dtype.element_ty), mask=scored)


def softmax_gradient(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab: int,
    smoothing: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """As `nn.loss.softmax_gradient`; the slope takes the place of the logits."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _softmax_gradient[(len(logits),)](
        logits,
        bias,
        targets,
        losses,
        vocab,
        logits.shape[1],
        smoothing,
        1.0 if cap is None else cap,
        HAS_BIAS=bias is not None,
        HAS_CAP=cap is not None,
        SMOOTH=smoothing > 0,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return losses, logits
