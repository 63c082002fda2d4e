"""The feed-forward network of a block: two or three linear layers at each position."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    r"""y = f(x W_up + b) W_down + c,   f = ReLU (2017), GELU x Φ(x), its tanh form (GPT-2) …"""

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
        """Project up, apply the activation, project down."""
        hidden = self.activation(self.up(x))
        return self.down(F.dropout(hidden, self.dropout, self.training))

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
        """Project up, multiply by the activated gate, project down."""
        hidden = self.up(x) * self.activation(self.gate(x))
        return self.down(F.dropout(hidden, self.dropout, self.training))


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021)."""
    return torch.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh u), u = sqrt(2/π) (x + 0.044715 x³): GPT-2's GELU."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "relu2": squared_relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
}
GATES: dict[str, Activation] = {
    "reglu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": ACTIVATIONS["gelu_tanh"],  # T5 v1.1, Gemma
}
FFNS: dict[str, Callable[..., FeedForward]] = {
    **{name: partial(FeedForward, activation=f) for name, f in ACTIVATIONS.items()},
    **{name: partial(GatedFeedForward, activation=f) for name, f in GATES.items()},
}
