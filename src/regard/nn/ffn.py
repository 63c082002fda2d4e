"""The feed-forward part of a block: each position by itself, wide and back."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    r"""y = f(x W_up + b) W_down + c,   f = ReLU (2017), GELU x Φ(x), or its tanh form (GPT-2)."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        activation: Activation,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn_dim, bias=bias)
        self.down = nn.Linear(ffn_dim, dim, bias=bias)
        self.activation, self.dropout = activation, dropout

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Up, bend, down."""
        wide = self.activation(self.up(x))
        return self.down(F.dropout(wide, self.dropout, self.training))

    if TYPE_CHECKING:
        __call__ = forward


class GatedFeedForward(FeedForward):
    r"""y = (x W_up ⊙ f(x W_gate)) W_down,   f = SiLU (SwiGLU) or GELU (GeGLU) (Shazeer 2020)."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        activation: Activation,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, ffn_dim, activation, bias, dropout)
        self.gate = nn.Linear(dim, ffn_dim, bias=bias)

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Up, gated, down."""
        wide = self.up(x) * self.activation(self.gate(x))
        return self.down(F.dropout(wide, self.dropout, self.training))


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021)."""
    return torch.relu(x).square()


gelu_tanh = partial(F.gelu, approximate="tanh")

FFNS: dict[str, Callable[..., FeedForward]] = {
    "relu": partial(FeedForward, activation=F.relu),
    "relu2": partial(FeedForward, activation=squared_relu),
    "gelu": partial(FeedForward, activation=F.gelu),
    "gelu_tanh": partial(FeedForward, activation=gelu_tanh),
    "swiglu": partial(GatedFeedForward, activation=F.silu),
    "geglu": partial(GatedFeedForward, activation=F.gelu),
}
GATED = frozenset({"swiglu", "geglu"})
