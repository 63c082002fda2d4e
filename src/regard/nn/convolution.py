"""Dilated causal convolutions with a gate (WaveNet)."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.hook_point import CarryHookPoint


class CausalConvolution(nn.Module):
    r"""A gated, dilated, causal convolution.

        (W * x)_t = sum_k W_k x_{t - k dilation} + b,      k = 0 ... kernel_size - 1
        y_t       = V (tanh(W_f * x)_t * sigmoid(W_g * x)_t) + c

    With dilations 1, 2, 4, ... each layer doubles the receptive field. As in the paper's figure,
    y goes into both the residual and the skip connection.
    van den Oord et al. 2016.
    """

    def __init__(self, dim: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.left_context = (kernel_size - 1) * dilation  # inputs before the first output
        self.filter = nn.Conv1d(dim, dim, kernel_size, dilation=dilation)  # W_f
        self.gate = nn.Conv1d(dim, dim, kernel_size, dilation=dilation)  # W_g
        self.out = nn.Linear(dim, dim)  # V, c
        self.carry_hook = CarryHookPoint()

    def forward(self, x: Float[Tensor, "batch seen dim"]) -> Float[Tensor, "batch time dim"]:
        """y at the positions of x from `left_context` on; those before are inputs only."""
        channels_first = x.transpose(1, 2)
        gated = self.filter(channels_first).tanh() * self.gate(channels_first).sigmoid()
        return self.out(gated.transpose(1, 2))

    if TYPE_CHECKING:
        __call__ = forward


def slice_rows(
    x: Float[Tensor, "rows seen dim"], begin: Int[Tensor, " rows"], size: int
) -> Float[Tensor, "rows time dim"]:
    """`size` vectors of each row, starting at the row's index in `begin`."""
    rows = torch.arange(len(x), device=x.device).unsqueeze(1)
    return x[rows, begin.unsqueeze(1) + torch.arange(size, device=x.device)]
