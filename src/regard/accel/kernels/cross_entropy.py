"""The Triton kernel of the cross-entropy and its gradient with respect to the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import IS_INTERPRETED, tanh

COLUMNS, WARPS = 4096, 32  # columns of a block, and warps of a program
LOG2E = tl.constexpr(1.4426950408889634)  # the hardware computes powers of 2


@triton.jit
def _load_logits(
    logits, bias, cap, columns, vocab, width, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr
):
    """Logits with bias and soft cap, and the derivative of the cap.

    Logits from column `vocab` on must be -inf (`_exclude_padding`), and remain so.
    """
    x = tl.load(logits + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=columns < vocab, other=0.0).to(tl.float32)
    cap_gradient = 1.0
    if HAS_CAP:
        capped = tanh(x / cap)
        cap_gradient = 1 - capped * capped
        x = tl.where(columns < vocab, cap * capped, -float("inf"))
    return x, cap_gradient


@triton.jit
def _exclude_padding(logits, vocab, width, COLUMNS: tl.constexpr):
    """Write -inf to the logits of one row from column `vocab` on.

    They can then be loaded up to `width`, which is a multiple of 64. Triton combines loads of
    neighbouring columns only if the bound of the mask is a multiple of their number, and a
    vocabulary may have any size.
    """
    for start in range(vocab, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        tl.store(logits + columns, -float("inf"), mask=columns < width)
    tl.debug_barrier()


@triton.jit
def _to_dtype(x, DTYPE: tl.constexpr):
    """x in another type, rounded to the nearest value."""
    if IS_INTERPRETED and tl.float8e5 == DTYPE:
        # The interpreter of Triton 3.7 rounds up without a carry to the exponent. e5m2 is the upper
        # half of a float16.
        bits = x.to(tl.float16).to(tl.int16, bitcast=True)
        bits += 0x7F + ((bits >> 8) & 1)
        return (bits >> 8).to(tl.int8).to(DTYPE, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _cross_entropy_with_gradient(
    logits,
    bias,
    targets,
    losses,
    gradient,
    vocab,
    width,
    label_smoothing,
    cap,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row: maximum, sum of exponentials and loss; then the gradient times `scale`.

    `gradient` may be `logits`.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    gradient += row * width
    _exclude_padding(logits, vocab, width, COLUMNS)
    target = tl.load(targets + row)
    scored = target != -1
    lanes = tl.arange(0, COLUMNS)  # each lane has its own maximum and sums until the end
    running_max = tl.full([COLUMNS], -1e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    logit_sum = tl.zeros([COLUMNS], tl.float32)
    # two blocks at a time: the sum is rescaled half as often
    for start in range(0, vocab, 2 * COLUMNS):
        columns = start + lanes
        x, _ = _load_logits(logits, bias, cap, columns, vocab, width, HAS_BIAS, HAS_CAP)
        following = columns + COLUMNS
        y, _ = _load_logits(logits, bias, cap, following, vocab, width, HAS_BIAS, HAS_CAP)
        if SMOOTH:
            logit_sum += tl.where(columns < vocab, x, 0.0) + tl.where(following < vocab, y, 0.0)
        new_max = tl.maximum(running_max, tl.maximum(x, y))
        scaled_max = new_max * LOG2E
        total = total * tl.exp2((running_max - new_max) * LOG2E)  # 1 before the first block
        total += tl.exp2(x * LOG2E - scaled_max) + tl.exp2(y * LOG2E - scaled_max)
        running_max = new_max
    row_max = tl.max(running_max) * LOG2E
    log2_total = row_max + tl.log2(tl.sum(total * tl.exp2(running_max * LOG2E - row_max)))
    target_logit, target_cap_gradient = _load_logits(
        logits, bias, cap, tl.maximum(target, 0), vocab, width, HAS_BIAS, HAS_CAP
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
        x, cap_gradient = _load_logits(logits, bias, cap, columns, vocab, width, HAS_BIAS, HAS_CAP)
        result = tl.exp2(x * LOG2E - log2_total) * cap_gradient
        if SMOOTH:
            result -= tl.where(
                scored & (columns < vocab), label_smoothing / vocab * cap_gradient, 0.0
            )
        result = _to_dtype(result * scale, gradient.dtype.element_ty)
        tl.store(gradient + columns, result, mask=columns < width)
    tl.debug_barrier()
    result = _to_dtype(target_gradient * scale, gradient.dtype.element_ty)
    tl.store(gradient + target, result, mask=scored)


def cross_entropy_with_gradient(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab: int,
    label_smoothing: float,
    cap: float | None,
    gradient_dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """As `accel.cross_entropy.cross_entropy_with_gradient`."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    gradient = logits
    if gradient_dtype is not None:
        gradient = torch.empty_like(logits, dtype=gradient_dtype)
    _cross_entropy_with_gradient[(len(logits),)](
        logits,
        bias,
        targets,
        losses,
        gradient,
        vocab,
        logits.shape[1],
        label_smoothing,
        1.0 if cap is None else cap,
        scale,
        HAS_BIAS=bias is not None,
        HAS_CAP=cap is not None,
        SMOOTH=label_smoothing > 0,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return losses, gradient
