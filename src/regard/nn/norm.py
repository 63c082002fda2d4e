"""Normalisation layers: LayerNorm and RMSNorm."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class LayerNorm(nn.Module):
    r"""y = (x - mean(x)) / sqrt(var(x) + eps) * g + b      (Ba et al. 2016)"""

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The normalised vectors; computed in float32, also under autocast."""
        normed = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(x.dtype)  # autocast gives float32


class RMSNorm(nn.Module):
    r"""y = x / sqrt(mean(x^2) + eps) * g      (Zhang & Sennrich 2019)"""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    @property
    def scale(self) -> Tensor:
        """The gain g."""
        return self.weight

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The normalised vectors; computed in float32, also under autocast."""
        wide = x if x.dtype == torch.float64 else x.float()
        weight = self.scale.to(wide.dtype)  # the kernel needs both in one dtype
        return F.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)


class RMSNormPlusOne(RMSNorm):
    r"""y = x / sqrt(mean(x^2) + eps) * (1 + g)      (Gemma)

    g is initialised to 0, so weight decay pulls the gain to 1.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
        nn.init.zeros_(self.weight)

    @property
    def scale(self) -> Tensor:
        """1 + g."""
        return 1 + self.weight


NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "rms_plus_one": RMSNormPlusOne,
}
