"""Absolute position encodings: vectors added to the embeddings."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.nn.options import require_positive
from regard.nn.position.base import Position


class Sinusoidal(Position):
    r"""Sinusoids of decreasing frequency.

        p_{t,2i} = sin(t / base^(2i/d)),   p_{t,2i+1} = cos(t / base^(2i/d))

    so that p_{t+k} = M_k p_t for a matrix that does not depend on t (Vaswani et al. 2017).
    With `halves` all sines come before all cosines, as in the authors' code and in Marian.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10_000.0,
        halves: bool = False,
        each_layer: bool = False,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ShapeError(
                f"sinusoidal positions need an even width (dim, or embed_dim), not dim={dim}"
            )
        require_positive("position 'sinusoidal'", base=base)
        self.dim, self.base, self.halves, self.each_layer = dim, base, halves, each_layer

    def embed(self, positions: Int[Tensor, "#batch time"]) -> Float[Tensor, "#batch time dim"]:
        """The sines and cosines at `positions`."""
        pairs = torch.arange(0, self.dim, 2, device=positions.device)
        angle = positions.unsqueeze(-1) * self.base ** (-pairs / self.dim)  # (batch, time, dim / 2)
        parts = (angle.sin(), angle.cos())
        return torch.cat(parts, -1) if self.halves else torch.stack(parts, -1).flatten(-2)


class Learned(Position):
    """One learned vector for each position below `context` (Gehring et al. 2017; GPT, BERT).

    The first `offset` rows of the table are unused: OPT, BART and RoBERTa have two.
    """

    def __init__(self, dim: int, context: int, offset: int = 0, each_layer: bool = False) -> None:
        super().__init__()
        if offset < 0:
            raise ShapeError(f"position 'learned': offset={offset} must be at least 0")
        self.table = nn.Embedding(context + offset, dim)
        self.offset, self.each_layer = offset, each_layer

    def embed(self, positions: Int[Tensor, "#batch time"]) -> Float[Tensor, "#batch time dim"]:
        """The rows of the table at `positions`."""
        return self.table(positions + self.offset if self.offset else positions)
