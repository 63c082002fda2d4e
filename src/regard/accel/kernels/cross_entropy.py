"""The Triton kernel of the cross-entropy and its gradient with respect to the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import tanh

COLUMNS, WARPS = 4096, 32  # columns of a block, and warps of a program
LOG2E = tl.constexpr(1.4426950408889634)  # the hardware computes powers of 2


@triton.jit
def _load_logits(logits, bias, cap, columns, inside, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Logits with bias and soft cap, -inf where not `inside`, and the derivative of the cap."""
    x = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    cap_gradient = 1.0
    if HAS_CAP:
        capped = tanh(x / cap)
        cap_gradient = 1 - capped * capped
        x = tl.where(inside, cap * capped, -float("inf"))
    return x, cap_gradient


@triton.jit
def _cross_entropy_with_gradient(
    logits,
    bias,
    targets,
    losses,
    vocab,
    width,
    label_smoothing,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row: maximum, sum of exponentials and loss; then the gradient overwrites the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    scored = target != -1
    lanes = tl.arange(0, COLUMNS)  # each lane has its own maximum and sums until the end
    running_max = tl.full([COLUMNS], -1e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    logit_sum = tl.zeros([COLUMNS], tl.float32)
    # two blocks at a time: the sum is rescaled half as often
    for start in range(0, vocab, 2 * COLUMNS):
        columns = start + lanes
        inside, inside_next = columns < vocab, columns + COLUMNS < vocab
        x, _ = _load_logits(logits, bias, cap, columns, inside, HAS_BIAS, HAS_CAP)
        y, _ = _load_logits(logits, bias, cap, columns + COLUMNS, inside_next, HAS_BIAS, HAS_CAP)
        if SMOOTH:
            logit_sum += tl.where(inside, x, 0.0) + tl.where(inside_next, y, 0.0)
        new_max = tl.maximum(running_max, tl.maximum(x, y))
        scaled_max = new_max * LOG2E
        total = total * tl.exp2((running_max - new_max) * LOG2E)  # 1 before the first block
        total += tl.exp2(x * LOG2E - scaled_max) + tl.exp2(y * LOG2E - scaled_max)
        running_max = new_max
    row_max = tl.max(running_max) * LOG2E
    log2_total = row_max + tl.log2(tl.sum(total * tl.exp2(running_max * LOG2E - row_max)))
    target_logit, target_cap_gradient = _load_logits(
        logits, bias, cap, target, scored, HAS_BIAS, HAS_CAP
    )
    loss = log2_total / LOG2E - (1 - label_smoothing) * target_logit
    if SMOOTH:
        loss -= label_smoothing * tl.sum(logit_sum) / vocab
    tl.store(losses + row, tl.where(scored, loss, 0.0))
    target_gradient = (
        tl.exp2(target_logit * LOG2E - log2_total) - label_smoothing / vocab - (1 - label_smoothing)
    ) * target_cap_gradient
    log2_total = tl.where(scored, log2_total, float("inf"))  # gradient 0
    tl.debug_barrier()  # the target's logit is read before it is overwritten
    for start in range(0, width, COLUMNS):
        columns = start + lanes
        x, cap_gradient = _load_logits(
            logits, bias, cap, columns, columns < vocab, HAS_BIAS, HAS_CAP
        )
        gradient = tl.exp2(x * LOG2E - log2_total) * cap_gradient
        if SMOOTH:
            gradient -= tl.where(
                scored & (columns < vocab), label_smoothing / vocab * cap_gradient, 0.0
            )
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < width)
    tl.debug_barrier()
    tl.store(logits + target, target_gradient.to(logits.dtype.element_ty), mask=scored)


def cross_entropy_with_gradient(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab: int,
    label_smoothing: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """As `nn.loss.cross_entropy_with_gradient`; the gradient overwrites the logits."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _cross_entropy_with_gradient[(len(logits),)](
        logits,
        bias,
        targets,
        losses,
        vocab,
        logits.shape[1],
        label_smoothing,
        1.0 if cap is None else cap,
        HAS_BIAS=bias is not None,
        HAS_CAP=cap is not None,
        SMOOTH=label_smoothing > 0,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return losses, logits
