"""The loss of a read-out over a vocabulary, which never holds all the logits at once."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.accel.kernels import usable
from regard.accel.matmul import put_product

CHUNK_ELEMENTS = 1 << 25  # logits held at a time: 128 MiB in float32
CHUNK_ELEMENTS_CUDA = 1 << 28  # there few large products are faster than many small ones
ALIGNED = 64  # on CUDA, W gets rows of zeros up to a multiple: its kernels are slow with others
WHOLE_ELEMENTS = 1 << 20  # so few are held whole: torch's own kernels are faster then
IGNORED = -1  # a target that is not scored


def soft_cap(logits: Float[Tensor, "*any"], cap: float | None) -> Float[Tensor, "*any"]:
    """cap tanh(logits / cap): none is beyond ±cap (Gemma 2). None leaves them alone."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def softmax_slope(
    logits: Float[Tensor, "rows columns"],
    bias: Float[Tensor, " vocab"] | None,
    targets: Int[Tensor, " rows"],
    vocab: int,
    smoothing: float,
    cap: float | None,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows columns"]]:
    """Cross-entropy of each row, and its gradient by the logits, in their type.

        loss = -(1 - e) log p(target) - e / V sum_v log p(v)
        slope = p - e / V - (1 - e) [v is the target]

    Columns from `vocab` on are no logits: their slope is 0. `accel.kernels.cross_entropy` has the
    same for CUDA, as one kernel that writes the slope over the logits.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scored = targets != IGNORED
    goal = targets.clamp_min(0).unsqueeze(-1)
    bent = logits[:, :vocab].to(wide)  # softmax in float32, always
    bent = bent if bias is None else bent + bias
    bend = None
    if cap is not None:
        bent = torch.tanh(bent / cap)
        bend, bent = 1 - bent.square(), cap * bent
    logp = bent.log_softmax(-1)
    loss = -logp.gather(-1, goal).squeeze(-1)
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * logp.mean(-1)
    slope = logp.exp_().sub_(smoothing / vocab)
    slope.scatter_add_(-1, goal, slope.new_full(goal.shape, smoothing - 1))
    slope.mul_(scored.unsqueeze(-1) if bend is None else bend * scored.unsqueeze(-1))
    spare = logits.shape[1] - vocab
    slope = slope.to(logits.dtype)
    return loss * scored, F.pad(slope, (0, spare)) if spare else slope


@torch.library.custom_op("regard::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    cap: float | None,
    learning: bool,
) -> list[Tensor]:
    """The summed loss, and while learning its gradient by x, W and b: to a compiler, one thing.

    Logits of one chunk of positions exist at a time, and only once: their slope is known as
    soon as they are.
    """
    rows, vocab = len(x), len(weight)
    limit, aligned = (CHUNK_ELEMENTS_CUDA, ALIGNED) if x.is_cuda else (CHUNK_ELEMENTS, 1)
    size = 1 << max(0, (limit // vocab).bit_length() - 1)  # products are fast with powers of 2
    matrix = F.pad(weight, (0, 0, 0, -vocab % aligned)) if vocab % aligned else weight
    loss, *gradients = _results(x, matrix, bias, learning)
    for each in (loss, *gradients[1:]):
        each.zero_()
    for start in range(0, rows, size):
        part, goal = x[start : start + size], targets[start : start + size]
        logits = part.new_empty(len(part), len(matrix))
        put_product(logits, part, matrix.T)
        losses, slope = _softmax_slope(logits, bias, goal, vocab, smoothing, cap)
        loss += losses.sum()
        if not learning:
            continue
        dx, dmatrix, dbias = gradients
        put_product(dx[start : start + size], slope, matrix)
        put_product(dmatrix, slope.T, part, add=True)
        if bias is not None:
            dbias += slope[:, :vocab].sum(0, dtype=dbias.dtype)
    if learning:
        gradients[1] = gradients[1][:vocab]
    return [loss, *gradients]


@_linear_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, *given: object) -> list[Tensor]:
    return _results(x, weight, bias, bool(given[-1]))


def _results(x: Tensor, weight: Tensor, bias: Tensor | None, learning: bool) -> list[Tensor]:
    """Room for the loss and its gradients: sums are kept in float32 at least."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    loss = x.new_empty((), dtype=wide)
    if not learning:
        return [loss]
    dbias = x.new_empty(0 if bias is None else len(bias), dtype=wide)
    return [loss, x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=wide), dbias]


def _softmax_slope(logits: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """By the kernel where there is one."""
    if usable(logits):
        from regard.accel.kernels import cross_entropy as kernels

        return kernels.softmax_slope(logits, *given)
    return softmax_slope(logits, *given)


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of a linear read-out, its gradient formed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        cap: float | None,
        learning: bool,
    ) -> Tensor:
        loss, *gradients = _linear_cross_entropy(x, weight, bias, targets, smoothing, cap, learning)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = outer
        dx, dweight, dbias = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dbias = None if bias_dtype is None else (dbias * scale).to(bias_dtype)
        dx, dweight = (dx * scale).to(x_dtype), (dweight * scale).to(weight_dtype)
        return dx, dweight, dbias, None, None, None, None


def linear_cross_entropy(
    x: Float[Tensor, "*rows dim"],
    weight: Float[Tensor, "vocab dim"],
    bias: Float[Tensor, " vocab"] | None,
    targets: Int[Tensor, "*rows"],
    *,
    smoothing: float = 0.0,
    cap: float | None = None,
) -> Float[Tensor, ""]:
    r"""Cross-entropy of softmax(W x + b) against the targets, summed over those that count.

        loss = sum_n [ -(1 - e) log p_n(target_n) - e / V sum_v log p_n(v) ]

    e is label smoothing (Szegedy et al. 2016, as torch defines it); `cap` bends the logits as
    `soft_cap` does. Targets of -1 are not scored. The logits are made in chunks, each once; the
    full matrix never exists unless it is small.
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    if len(x) * len(weight) <= WHOLE_ELEMENTS:
        return cross_entropy(soft_cap(F.linear(x, weight, bias), cap), targets, smoothing)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    learning = torch.is_grad_enabled()
    result: Tensor = _LinearCrossEntropy.apply(x, weight, bias, targets, smoothing, cap, learning)  # type: ignore[no-untyped-call]
    return result


def cross_entropy(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, " rows"], smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """The same from logits that are there, in float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )
