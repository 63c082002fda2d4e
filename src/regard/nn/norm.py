"""Norms: LayerNorm in two forms, BatchNorm, RMSNorm."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn


class LayerNorm(nn.Module):
    r"""y = (x - mean(x)) / sqrt(var(x) + eps) * g + b      (Ba et al. 2016)"""

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The normalized vectors; computed in float32, even under autocast."""
        normed = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(x.dtype)  # autocast gives float32


class LayerNormStd(LayerNorm):
    r"""y = (x - mean(x)) / (std(x) + eps) * g + b

    The form of some lectures and implementations: eps is added to the standard deviation instead of
    the variance.
    """

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The normalized vectors; computed in float32, even under autocast."""
        values = x if x.dtype == torch.float64 else x.float()
        centred = values - values.mean(-1, keepdim=True)
        # the gradient of sqrt at 0 is infinite, so the variance is clamped
        std = centred.square().mean(-1, keepdim=True).clamp_min(1e-30).sqrt()
        y = centred / (std + self.eps) * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class BatchNorm(nn.Module):
    r"""y = (x - m) / sqrt(v + eps) * g + b, per feature (Ioffe & Szegedy 2015).

    m and v are the mean and the variance of a feature over all positions of all rows of a batch,
    without padding. In evaluation they are moving averages that training has updated,

        m <- 0.9 m + 0.1 mean(x),      v <- 0.9 v + 0.1 var(x)

    In training the output at one position depends on all others, including later ones, so BatchNorm
    is for encoders only. Activation checkpointing, distributed training and `train.ema` would make
    the moving averages wrong and are rejected.
    """

    momentum = 0.1
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(
        self, x: Float[Tensor, "*rows dim"], valid: Bool[Tensor, "*#rows"] | None = None
    ) -> Float[Tensor, "*rows dim"]:
        """The normalized vectors; `valid` is False on padding. Computed in float32."""
        values = x if x.dtype == torch.float64 else x.float()
        m, v = self.running_mean, self.running_var
        if self.training:
            m, v = self._statistics(values, valid)
        y = (values - m) * (v + self.eps).rsqrt() * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _statistics(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance over all valid positions, which also update the moving averages."""
        axes = tuple(range(x.dim() - 1))
        weights = torch.ones_like(x[..., :1])
        if valid is not None:
            weights = weights * valid.unsqueeze(-1)
        weights = weights / weights.sum()
        m = (weights * x).sum(axes)
        v = (weights * (x - m).square()).sum(axes)
        with torch.no_grad():
            self.running_mean.lerp_(m.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(v.to(self.running_var.dtype), self.momentum)
        return m, v


class RMSNorm(nn.Module):
    r"""y = x / sqrt(mean(x^2) + eps) * g      (Zhang & Sennrich 2019)"""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    @property
    def gain(self) -> Tensor:
        """The gain g."""
        return self.weight

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The normalized vectors; computed in float32, even under autocast."""
        values = x if x.dtype == torch.float64 else x.float()
        weight = self.gain.to(values.dtype)  # the kernel needs both in one dtype
        return F.rms_norm(values, weight.shape, weight, self.eps).to(x.dtype)


class RMSNormPlusOne(RMSNorm):
    r"""y = x / sqrt(mean(x^2) + eps) * (1 + g)      (Gemma)

    g is initialized to 0, so weight decay pulls the gain to 1.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
        nn.init.zeros_(self.weight)

    @property
    def gain(self) -> Tensor:
        """1 + g."""
        return 1 + self.weight


NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer": LayerNorm,
    "layer_std": LayerNormStd,
    "batch": BatchNorm,
    "rms": RMSNorm,
    "rms_plus_one": RMSNormPlusOne,
}


Norm = Callable[[Tensor], Tensor]


def bind_padding_mask(
    norm: nn.Module | None, valid: Bool[Tensor, "batch time"] | None
) -> Norm | None:
    """`norm` as a function of x; a BatchNorm excludes positions that are not `valid`."""
    return partial(norm, valid=valid) if isinstance(norm, BatchNorm) else norm
