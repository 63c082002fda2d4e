"""Positions that are vectors added to the embeddings."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.nn.position.base import Position


class Sinusoidal(Position):
    r"""Waves of falling frequency.

        p_{t,2i} = sin(t / base^(2i/d)),   p_{t,2i+1} = cos(t / base^(2i/d))

    so that p_{t+k} = M_k p_t for a matrix that does not depend on t (Vaswani et al. 2017).
    """

    def __init__(self, dim: int, base: float = 10_000.0, each_layer: bool = False) -> None:
        super().__init__()
        if dim % 2:
            raise ShapeError(f"sinusoidal positions need an even width, not dim={dim}")
        self.dim, self.base, self.each_layer = dim, base, each_layer

    def embed(self, at: Int[Tensor, "#batch time"]) -> Float[Tensor, "#batch time dim"]:
        """The waves at these positions."""
        pairs = torch.arange(0, self.dim, 2, device=at.device)
        angle = at.unsqueeze(-1) * self.base ** (-pairs / self.dim)  # (batch, time, dim / 2)
        return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


class Learned(Position):
    """One learned vector for each position up to `context` (Gehring et al. 2017; GPT, BERT)."""

    def __init__(self, dim: int, context: int, each_layer: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(context, dim)
        self.each_layer = each_layer

    def embed(self, at: Int[Tensor, "#batch time"]) -> Float[Tensor, "#batch time dim"]:
        """The vectors of these positions."""
        return self.table(at)
