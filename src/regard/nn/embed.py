"""Token and segment embeddings."""

import math
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError


class Embedding(nn.Module):
    r"""x_t = s E[id_t] + S[segment_t]

    E and S are learned; s = sqrt(dim) in Vaswani et al. 2017 and Gemma, else 1. S is BERT's
    embedding of sentence A or B. If `table_dim` differs from `dim`, a linear layer projects x
    (factorised embedding, OPT 350M).
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        scaled: bool = False,
        segments: int = 0,
        table_dim: int | None = None,
    ) -> None:
        super().__init__()
        width = dim if table_dim is None else table_dim
        self.token = nn.Embedding(vocab_size, width)
        self.segment = nn.Embedding(segments, width) if segments else None
        self.project = None if width == dim else nn.Linear(width, dim, bias=False)
        self.scale = math.sqrt(dim) if scaled else 1.0

    def forward(
        self,
        ids: Int[Tensor, "batch time"],
        segments: Int[Tensor, "batch time"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The embeddings; without `segments` every token belongs to segment 0."""
        x: Tensor = self.token(ids)
        x = x if self.scale == 1.0 else x * self.scale
        if self.segment is not None:
            x = x + (self.segment.weight[0] if segments is None else self.segment(segments))
        elif segments is not None:
            raise ConfigError("segments were given, but the model has none; set model.segments")
        return x if self.project is None else self.project(x)

    if TYPE_CHECKING:
        __call__ = forward
