"""Kernels of the operator `regard::linear_cross_entropy`; see `nn.loss` for the formula."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.accel import matmul, onednn_matmul
from regard.accel.kernels import can_run_kernels
from regard.nn import loss

VOCAB_MULTIPLE = 64  # W is padded to a multiple of this many rows: other sizes are slow


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    label_smoothing: float,
    cap: float | None,
    needs_grad: bool,
    frozen: bool = False,
) -> list[Tensor]:
    """`nn.loss.chunked_cross_entropy` with padded logits, autotuned matmuls and a fused softmax."""
    vocab = len(weight)
    padding = -vocab % VOCAB_MULTIPLE
    padded_weight = F.pad(weight, (0, 0, 0, padding)) if padding else weight
    return loss.chunked_cross_entropy(
        x,
        padded_weight,
        bias,
        targets,
        label_smoothing,
        cap,
        needs_grad,
        frozen,
        vocab=vocab,
        cross_entropy_with_gradient=cross_entropy_with_gradient,
        matmul=matmul.matmul,
    )


def cross_entropy_with_gradient(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab: int,
    label_smoothing: float,
    cap: float | None,
    *,
    gradient_dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`nn.loss.cross_entropy_with_gradient` as a kernel, which overwrites the logits.

    The gradient is multiplied by `scale` and has the dtype `gradient_dtype`; None: that of the
    logits.
    """
    arguments = (logits, bias, targets, vocab, label_smoothing, cap)
    if can_run_kernels(logits):
        from regard.accel.kernels import cross_entropy as kernels

        return kernels.cross_entropy_with_gradient(*arguments, gradient_dtype, scale)
    losses, gradient = loss.cross_entropy_with_gradient(*arguments)
    return losses, (gradient * scale).to(gradient_dtype or gradient.dtype)


OPERATOR = "regard::linear_cross_entropy"
torch.library.register_kernel(OPERATOR, "cuda", linear_cross_entropy)
torch.library.register_kernel(
    OPERATOR, "cpu", partial(loss.chunked_cross_entropy, matmul=onednn_matmul.matmul)
)
