"""Chunked cross-entropy of an output layer: only one chunk of the logits is in memory at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 25  # logits in memory at a time: 128 MiB in float32
CHUNK_ELEMENTS_CUDA = 1 << 28  # on a GPU a few large matmuls are faster than many small ones
UNCHUNKED_ELEMENTS = 1 << 20  # up to this many logits, torch's unchunked kernels are faster
IGNORE_INDEX = -1  # a target that is not scored (ignore_index of F.cross_entropy)


def soft_cap(logits: Float[Tensor, "*any"], cap: float | None) -> Float[Tensor, "*any"]:
    """Logit soft-capping: cap tanh(logits / cap), between ±cap (Gemma 2); None changes nothing."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def cross_entropy_with_gradient(
    logits: Float[Tensor, "rows columns"],
    bias: Float[Tensor, " vocab"] | None,
    targets: Int[Tensor, " rows"],
    vocab: int,
    label_smoothing: float,
    cap: float | None,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows columns"]]:
    """Cross-entropy of each row, and its gradient with respect to the logits, in their dtype.

        loss = -(1 - e) log p(target) - e / V sum_v log p(v)
        gradient = p - e / V - (1 - e) [v is the target]

    Columns from `vocab` on are padding: their gradient is 0.
    """
    compute_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scored = targets != IGNORE_INDEX
    targets = targets.clamp_min(0).unsqueeze(-1)
    capped = logits[:, :vocab].to(compute_dtype)  # softmax in float32, always
    capped = capped if bias is None else capped + bias
    cap_gradient = None
    if cap is not None:
        capped = torch.tanh(capped / cap)
        cap_gradient, capped = 1 - capped.square(), cap * capped
    logp = capped.log_softmax(-1)
    loss = -logp.gather(-1, targets).squeeze(-1)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * logp.mean(-1)
    gradient = logp.exp_().sub_(label_smoothing / vocab)
    gradient.scatter_add_(-1, targets, gradient.new_full(targets.shape, label_smoothing - 1))
    factor = scored.unsqueeze(-1)
    gradient.mul_(factor if cap_gradient is None else cap_gradient * factor)
    padding = logits.shape[1] - vocab
    gradient = gradient.to(logits.dtype)
    return loss * scored, F.pad(gradient, (0, padding)) if padding else gradient


def matmul(
    a: Float[Tensor, "rows inputs"],
    b: Float[Tensor, "inputs outputs"],
    *,
    out: Float[Tensor, "rows outputs"] | None = None,
    add: bool = False,
) -> Float[Tensor, "rows outputs"]:
    """a @ b, written to `out` if it is given; with `add`, accumulated into `out`, in its dtype."""
    if not add or out is None:
        return torch.mm(a, b, out=out)
    if out.dtype == a.dtype:
        return out.addmm_(a, b)
    if out.is_cuda:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return out.add_(a @ b)


def chunked_cross_entropy(
    x: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "columns dim"],
    bias: Float[Tensor, " vocab"] | None,
    targets: Int[Tensor, " rows"],
    label_smoothing: float,
    cap: float | None,
    needs_grad: bool,
    frozen: bool = False,
    *,
    vocab: int | None = None,  # rows of W without padding; None: all
    cross_entropy_with_gradient: Callable[..., tuple[Tensor, Tensor]] = cross_entropy_with_gradient,
    matmul: Callable[..., Tensor] = matmul,
) -> list[Tensor]:
    """The summed loss and, with `needs_grad`, its gradients with respect to x, W and b.

    The gradient of W is empty if W is `frozen`. Only the logits of one chunk of rows exist at a
    time. They are not recomputed in the backward pass: their gradient is computed here. Rows of W
    from `vocab` on are padding.
    """
    vocab = len(weight) if vocab is None else vocab
    limit = CHUNK_ELEMENTS_CUDA if x.is_cuda else CHUNK_ELEMENTS
    # a power of 2, with which matmuls are fast
    chunk_size = 1 << max(0, (limit // vocab).bit_length() - 1)
    loss, *gradients = _empty_results(x, weight, bias, needs_grad, frozen)
    for total in (loss, *gradients[1:]):
        total.zero_()
    for start in range(0, len(x), chunk_size):
        rows = x[start : start + chunk_size]
        logits = matmul(rows, weight.T)
        losses, gradient = cross_entropy_with_gradient(
            logits, bias, targets[start : start + chunk_size], vocab, label_smoothing, cap
        )
        loss += losses.sum()
        if not needs_grad:
            continue
        dx, dweight, dbias = gradients
        matmul(gradient, weight, out=dx[start : start + chunk_size])
        if not frozen:
            matmul(gradient.T, rows, out=dweight, add=True)
        if bias is not None:
            dbias += gradient[:, :vocab].sum(0, dtype=dbias.dtype)
    if needs_grad and not frozen:
        gradients[1] = gradients[1][:vocab]
    return [loss, *gradients]


@torch.library.custom_op("regard::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    label_smoothing: float,
    cap: float | None,
    needs_grad: bool,
    frozen: bool = False,
) -> list[Tensor]:
    """`chunked_cross_entropy` as one operator; `accel` registers kernels for it."""
    return chunked_cross_entropy(x, weight, bias, targets, label_smoothing, cap, needs_grad, frozen)


@_linear_cross_entropy.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    label_smoothing: float,
    cap: float | None,
    needs_grad: bool,
    frozen: bool = False,
) -> list[Tensor]:
    return _empty_results(x, weight, bias, needs_grad, frozen)


def _empty_results(
    x: Tensor, weight: Tensor, bias: Tensor | None, needs_grad: bool, frozen: bool
) -> list[Tensor]:
    """Buffers for the loss and its gradients; sums are float32 at least."""
    compute_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    loss = x.new_empty((), dtype=compute_dtype)
    if not needs_grad:
        return [loss]
    dbias = x.new_empty(0 if bias is None else len(bias), dtype=compute_dtype)
    shape = (0, 0) if frozen else weight.shape
    return [loss, x.new_empty(x.shape), weight.new_empty(shape, dtype=compute_dtype), dbias]


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of a linear layer; its gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        label_smoothing: float,
        cap: float | None,
        needs_grad: bool,
        frozen: bool,
    ) -> Tensor:
        loss, *gradients = _linear_cross_entropy(
            x, weight, bias, targets, label_smoothing, cap, needs_grad, frozen
        )
        ctx.frozen = frozen
        ctx.save_for_backward(*gradients)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        dx, dweight, dbias = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dbias = None if bias_dtype is None else (dbias * grad_output).to(bias_dtype)
        dweight = None if ctx.frozen else (dweight * grad_output).to(weight_dtype)
        return (dx * grad_output).to(x_dtype), dweight, dbias, None, None, None, None, None


def linear_cross_entropy(
    x: Float[Tensor, "*rows dim"],
    weight: Float[Tensor, "vocab dim"],
    bias: Float[Tensor, " vocab"] | None,
    targets: Int[Tensor, "*rows"],
    *,
    label_smoothing: float = 0.0,
    cap: float | None = None,
) -> Float[Tensor, ""]:
    r"""Cross-entropy of softmax(W x + b) against the targets, summed over the scored ones.

        loss = sum_n [ -(1 - e) log p_n(target_n) - e / V sum_v log p_n(v) ]

    e is label smoothing (Szegedy et al. 2016, as torch defines it); `cap` as in `soft_cap`.
    Targets of -1 are not scored. The logits are computed in chunks; the full matrix exists only
    if it is small.
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    if len(x) * len(weight) <= UNCHUNKED_ELEMENTS:
        return cross_entropy(soft_cap(F.linear(x, weight, bias), cap), targets, label_smoothing)
    frozen = not weight.requires_grad
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    needs_grad = torch.is_grad_enabled()
    result: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, targets, label_smoothing, cap, needs_grad, frozen
    )
    return result


def cross_entropy(
    logits: Float[Tensor, "rows vocab"],
    targets: Int[Tensor, " rows"],
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] = (),
) -> Float[Tensor, ""]:
    """The summed cross-entropy of logits, in float32 at least; targets of -1 are not scored.

    With `class_weights` the loss of a target is multiplied by the weight of its class.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits,
        targets,
        weight=logits.new_tensor(class_weights) if class_weights else None,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
