"""The loss of a read-out over a vocabulary, which never holds all the logits at once."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 25  # logits held at a time: 128 MiB in float32
CHUNK_ELEMENTS_CUDA = 1 << 28  # there few large products are faster than many small ones
ALIGNED = 64  # on CUDA, W gets rows of zeros up to a multiple: its kernels are slow with others
WHOLE_ELEMENTS = 1 << 20  # so few are held whole: torch's own kernels are faster then
IGNORED = -1  # a target that is not scored


def soft_cap(logits: Float[Tensor, "*any"], cap: float | None) -> Float[Tensor, "*any"]:
    """cap tanh(logits / cap): none is beyond ±cap (Gemma 2). None leaves them alone."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _capped(logits: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """The bent logits and their slope."""
    bent = torch.tanh(logits / cap)
    return cap * bent, 1 - bent.square()


def _slope(logp: Tensor, goal: Tensor, smoothing: float) -> Tensor:
    """softmax - target distribution: the gradient of cross-entropy by its logits."""
    if torch.compiler.is_compiling():  # one expression, which becomes one kernel
        hit = torch.arange(logp.shape[-1], device=logp.device) == goal
        return logp.exp() - smoothing / logp.shape[-1] - (1 - smoothing) * hit.to(logp.dtype)
    slope = logp.exp_().sub_(smoothing / logp.shape[-1])
    return slope.scatter_add_(-1, goal, slope.new_full(goal.shape, smoothing - 1))


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of a linear read-out, its gradient formed in the forward pass.

    Logits of one chunk of positions exist at a time, and only once: what the backward pass
    needs is the gradient with respect to x, W and b, which is known as soon as the chunk is.
    The sums are not kept in place: torch 2.11's compile would save them as they were at first.
    """

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
        rows, vocab = len(x), len(weight)
        size = max(1, min(rows, (CHUNK_ELEMENTS_CUDA if x.is_cuda else CHUNK_ELEMENTS) // vocab))
        spare = -vocab % ALIGNED if x.is_cuda else 0
        matrix = F.pad(weight, (0, 0, 0, spare)) if spare else weight
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=x.device)
        dx: list[Tensor] = []
        dweight = dbias = torch.zeros_like(total)
        for start in range(0, rows, size):
            part, goal = x[start : start + size], targets[start : start + size]
            scored = goal != IGNORED
            goal = goal.clamp_min(0).unsqueeze(-1)
            logits = (part @ matrix.T)[:, :vocab].to(wide)  # softmax in float32, always
            logits = logits if bias is None else logits + bias
            slope = None
            if cap is not None:
                logits, slope = _capped(logits, cap)
            logp = logits.log_softmax(-1)
            loss = -logp.gather(-1, goal).squeeze(-1)
            if smoothing:
                loss = (1 - smoothing) * loss - smoothing * logp.mean(-1)
            total = total + (loss * scored).sum()
            if not learning:
                continue
            grad = _slope(logp, goal, smoothing) * scored.unsqueeze(-1)
            grad = grad if slope is None else grad * slope
            if bias is not None:
                dbias = dbias + grad.sum(0)
            grad = F.pad(grad.to(part.dtype), (0, spare)) if spare else grad.to(part.dtype)
            dx.append(grad @ matrix)
            dweight = dweight + (grad.T @ part)[:vocab].to(wide)
        if learning:
            ctx.save_for_backward(torch.cat(dx), dweight, dbias)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

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
