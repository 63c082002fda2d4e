"""The CUDA kernel of the operator `regard::linear_cross_entropy`; see `nn.loss` for the formula."""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.accel.kernels import can_run_kernels
from regard.accel.matmul import matmul_into
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
    padded = F.pad(weight, (0, 0, 0, -vocab % VOCAB_MULTIPLE)) if vocab % VOCAB_MULTIPLE else weight
    return loss.chunked_cross_entropy(
        x,
        padded,
        bias,
        targets,
        vocab,
        label_smoothing,
        cap,
        needs_grad,
        frozen,
        cross_entropy_with_gradient=_cross_entropy_with_gradient,
        matmul_into=matmul_into,
    )


def _cross_entropy_with_gradient(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab: int,
    label_smoothing: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    if not can_run_kernels(logits):
        return loss.cross_entropy_with_gradient(logits, bias, targets, vocab, label_smoothing, cap)
    from regard.accel.kernels import cross_entropy as kernels

    return kernels.cross_entropy_with_gradient(logits, bias, targets, vocab, label_smoothing, cap)


torch.library.register_kernel("regard::linear_cross_entropy", "cuda", linear_cross_entropy)
