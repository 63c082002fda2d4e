"""The loss of a language model head with FP8 matmuls; see `nn.loss` for the formula.

x and W are quantized once to e4m3 (`accel.float8`). The gradient of the logits, p - [v is the
target], is written as e5m2 with a constant scale, since its largest absolute value is at most 1.
e5m2, because rare tokens have tiny probabilities: in a model of 16,384 words, e4m3 rounds to zero
18 % of the gradient that lowers the logits of the rarer half of them, e5m2 0.3 %. Relative errors
of dx and dW from this rounding are 0.04 in e5m2 and 0.02 in e4m3, those from FP8 x and W 0.03 and
0.11.

Only the logits of one chunk of rows exist at a time, in bfloat16. FP8 matmuls need operands that
are row-major along the inner dimension, so x, W and the gradient are transposed for dx and dW.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.accel import cublaslt
from regard.accel.cross_entropy import VOCAB_MULTIPLE, cross_entropy_with_gradient
from regard.accel.float8 import (
    E4M3,
    E5M2,
    MIN_WIDTH,
    SIZE_MULTIPLE,
    Scaled,
    can_use_float8,
    quantize,
    scaled_matmul,
)
from regard.accel.kernels import can_run_kernels
from regard.nn.head import LMHead

CHUNK_ELEMENTS = 1 << 29  # logits in memory at a time: 8,192 rows of GPT-2's, 0.8 GB
GRADIENT_SCALE = 2.0**15  # the largest power of 2 in e5m2; a gradient of ±1 is exact


@torch.library.custom_op("regard::float8_cross_entropy", mutates_args=())
def _float8_cross_entropy(
    x8: Tensor,
    x_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    targets: Tensor,
    vocab: int,
    frozen: bool,
) -> list[Tensor]:
    """The summed loss, and its gradients with respect to x (bfloat16) and W (float32).

    The gradient of W is empty if W is `frozen`. Rows of W from `vocab` on are padding.
    """
    loss, dx, dweight = _empty_results(x8, w8, frozen)
    loss.zero_()
    weight, weight_transposed = (w8, w_scale), (_transpose(w8), w_scale)
    gradient_scale = torch.full_like(x_scale, 1 / GRADIENT_SCALE)
    # a power of 2, with which matmuls are fast
    chunk_size = max(SIZE_MULTIPLE, 1 << (CHUNK_ELEMENTS // len(w8)).bit_length() - 1)
    for start in range(0, len(x8), chunk_size):
        rows = slice(start, start + chunk_size)
        losses, gradient = logit_gradient((x8[rows], x_scale), weight, targets[rows], vocab)
        loss += losses.sum()
        _matmul((gradient, gradient_scale), weight_transposed, dx[rows])
        if not frozen:
            transposed = (_transpose(gradient), gradient_scale), (_transpose(x8[rows]), x_scale)
            _matmul(*transposed, dweight, add=start > 0)
    return [loss, dx, dweight]


@_float8_cross_entropy.register_fake
def _(
    x8: Tensor,
    x_scale: Tensor,
    w8: Tensor,
    w_scale: Tensor,
    targets: Tensor,
    vocab: int,
    frozen: bool,
) -> list[Tensor]:
    return _empty_results(x8, w8, frozen)


def _empty_results(x8: Tensor, w8: Tensor, frozen: bool) -> list[Tensor]:
    """Buffers for the loss and its gradients."""
    loss = x8.new_empty((), dtype=torch.float32)
    dx = torch.empty_like(x8, dtype=torch.bfloat16)
    return [loss, dx, w8.new_empty((0, 0) if frozen else w8.shape, dtype=torch.float32)]


def logit_gradient(
    x: Scaled, weight: Scaled, targets: Int[Tensor, " rows"], vocab: int
) -> tuple[Float[Tensor, " rows"], Tensor]:
    """The cross-entropy of each row, and its gradient with respect to the logits x Wᵀ.

    The gradient is e5m2 and multiplied by `GRADIENT_SCALE`.
    """
    (x8, _), (w8, _) = x, weight
    logits = x8.new_empty(len(x8), len(w8), dtype=torch.bfloat16)
    _matmul(x, weight, logits, fast_accum=True)
    return cross_entropy_with_gradient(
        logits, None, targets, vocab, 0.0, None, gradient_dtype=E5M2, scale=GRADIENT_SCALE
    )


def _transpose(x8: Tensor) -> Tensor:
    if not can_run_kernels(x8):
        return x8.t().contiguous()
    from regard.accel.kernels import transpose

    return transpose.transpose(x8)


def _matmul(
    a: Scaled, b: Scaled, out: Tensor, *, add: bool = False, fast_accum: bool = False
) -> None:
    """Write a bᵀ to `out`, or add it to `out`; a and b are row-major."""
    (a8, a_scale), (b8, b_scale) = a, b
    scales = a_scale, b_scale
    if cublaslt.float8_matmul(a8, b8.t(), out, scales, add=add, fast_accum=fast_accum):
        return
    result = scaled_matmul(a, b, out.dtype, fast_accum=fast_accum)
    if add:
        out.add_(result)
    else:
        out.copy_(result)


def operands(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and its scale in FP8, then W with padding and its scale."""
    padding = -len(weight) % VOCAB_MULTIPLE
    return *quantize(x, E4M3), *quantize(F.pad(weight, (0, 0, 0, padding)), E4M3)


class _Float8LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of a linear layer; its gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, frozen: bool) -> Tensor:
        vocab = len(weight)
        loss, dx, dweight = _float8_cross_entropy(*operands(x, weight), targets, vocab, frozen)
        ctx.save_for_backward(dx, dweight[:vocab])
        ctx.frozen, ctx.dtypes = frozen, (x.dtype, weight.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        dx, dweight = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        dweight = None if ctx.frozen else (dweight * grad_output).to(weight_dtype)
        return (dx * grad_output).to(x_dtype), dweight, None, None


def float8_linear_cross_entropy(
    x: Float[Tensor, "*rows dim"],
    weight: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, "*rows"],
) -> Float[Tensor, ""]:
    """`nn.loss.linear_cross_entropy` with FP8 matmuls.

    The number of rows and the width must be multiples of 16.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    frozen = not weight.requires_grad
    loss: Tensor = _Float8LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), weight, targets.flatten(), frozen
    )
    return loss


def attach_float8_loss(model: nn.Module) -> None:
    """Give language model heads a loss with FP8 matmuls, which compiled training steps use.

    The original loss runs for numbers of rows and widths that are not a multiple of 16, for small
    inputs, without gradients, and with a bias, a soft cap or label smoothing. Heads with fewer than
    1,024 tokens keep it too, and those with a loss of their own, such as negative sampling.
    """
    for module in model.modules():
        if not isinstance(module, LMHead) or type(module).loss is not LMHead.loss:
            continue
        if len(module.matrix) >= MIN_WIDTH:
            module.loss = MethodType(_float8_loss, module)  # type: ignore[method-assign]


def _float8_loss(
    head: LMHead, x: Tensor, targets: Tensor, *, label_smoothing: float = 0.0
) -> Tensor:
    weight = head.matrix
    is_plain = head.bias is None and head.cap is None and not label_smoothing
    sizes = (targets.numel(), weight.shape[1])  # the vocabulary is padded to a multiple
    if is_plain and torch.is_grad_enabled() and can_use_float8(x, weight, sizes):
        return float8_linear_cross_entropy(head.prepare(x), weight, targets)
    return LMHead.loss(head, x, targets, label_smoothing=label_smoothing)


ATTACHED = (_float8_loss,)
