"""Relative position encodings: biases added to the attention scores."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.nn.position.base import Position


def alibi_slopes(heads: int) -> Float[Tensor, " heads"]:
    r"""m_h = 2^(-8h / heads) for a power of two; else those of the power below, then every other
    of the power above, as published with the paper.
    """
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    slopes += [2 ** (-4 * h / below) for h in range(1, 2 * below, 2)]
    return torch.tensor(slopes[:heads], device="cpu")  # with values on the meta device, too


class ALiBi(Position):
    r"""score_ij += -m_h |i - j|,   m_h = 2^(-8h / heads)      (Press et al. 2022)"""

    slope: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slope", alibi_slopes(heads), persistent=False)

    def bias(
        self, query_positions: Int[Tensor, "#batch time"], key_positions: Int[Tensor, "#batch seen"]
    ) -> Float[Tensor, "#batch heads time seen"]:
        """-slope_h |i - j|"""
        distance = (
            query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
        ).abs()  # (batch, time, seen)
        return -self.slope.view(-1, 1, 1) * distance.unsqueeze(1)


class T5(Position):
    r"""score_ij += b_{h, bucket(j - i)}, one table for all layers (Raffel et al. 2020).

    Half of the buckets hold one distance each; the others grow logarithmically up to `reach`;
    all larger distances share the last. A bidirectional model has half of the buckets for the
    past and half for the future.
    """

    def __init__(self, heads: int, causal: bool, buckets: int = 32, reach: int = 128) -> None:
        super().__init__()
        if buckets < 4 or reach <= buckets:
            raise ShapeError(f"t5: buckets={buckets} must be at least 4, and reach={reach} more")
        self.causal, self.buckets, self.reach = causal, buckets, reach
        self.table = nn.Embedding(buckets, heads)

    def bucket(self, distance: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """The bucket of key position minus query position."""
        buckets, offset = self.buckets, torch.zeros_like(distance)
        if self.causal:
            distance = (-distance).clamp_min(0)
        else:
            buckets //= 2
            offset = buckets * (distance > 0)
            distance = distance.abs()
        exact = buckets // 2
        ratio = (distance.clamp_min(1) / exact).log() / math.log(self.reach / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp_max(buckets - 1)
        return offset + torch.where(distance < exact, distance, far)

    def bias(
        self, query_positions: Int[Tensor, "#batch time"], key_positions: Int[Tensor, "#batch seen"]
    ) -> Float[Tensor, "#batch heads time seen"]:
        """The learned bias of each bucket, per head."""
        distance = key_positions.unsqueeze(-2) - query_positions.unsqueeze(-1)
        learned: Tensor = self.table(self.bucket(distance))  # (batch, time, seen, heads)
        return learned.permute(0, 3, 1, 2)
