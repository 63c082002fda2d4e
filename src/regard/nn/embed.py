"""From ids to vectors."""

import math
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor, nn


class Embedding(nn.Module):
    r"""x_t = s E[id_t], E learned; s = sqrt(dim) in the 2017 Transformer, else 1."""

    def __init__(self, vocab_size: int, dim: int, *, scaled: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, dim)
        self.scale = math.sqrt(dim) if scaled else 1.0

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time dim"]:
        """The vectors."""
        x: Tensor = self.token(ids)
        return x if self.scale == 1.0 else x * self.scale

    if TYPE_CHECKING:
        __call__ = forward
