"""Relative position encodings: biases added to the attention scores."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.nn.position.base import Position


def alibi_slopes(heads: int) -> Float[Tensor, " heads"]:
    r"""The slope of each head: m_h = 2^(-8h / heads) if `heads` is a power of two.

    Otherwise the slopes of the next smaller power of two, then every second slope of the next
    larger one, as in the authors' code.
    """
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * h / below) for h in range(1, below + 1)]
    slopes += [2 ** (-4 * h / below) for h in range(1, 2 * below, 2)]
    return torch.tensor(slopes[:heads], device="cpu")  # also under the meta device: it needs values


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

    Half of the buckets hold one distance each; the others grow logarithmically up to
    `max_distance`; all larger distances share the last. A bidirectional model has half of the
    buckets for the past and half for the future.
    """

    def __init__(
        self, heads: int, causal: bool, buckets: int = 32, max_distance: int = 128
    ) -> None:
        super().__init__()
        if buckets < 4 or max_distance <= buckets:
            raise ShapeError(
                f"position 't5': buckets={buckets} must be at least 4, and "
                f"max_distance={max_distance} must be more than buckets"
            )
        self.causal, self.buckets, self.max_distance = causal, buckets, max_distance
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
        ratio = (distance.clamp_min(1) / exact).log() / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp_max(buckets - 1)
        return offset + torch.where(distance < exact, distance, far)

    def bias(
        self, query_positions: Int[Tensor, "#batch time"], key_positions: Int[Tensor, "#batch seen"]
    ) -> Float[Tensor, "#batch heads time seen"]:
        """The learned bias of each bucket, per head."""
        distance = key_positions.unsqueeze(-2) - query_positions.unsqueeze(-1)
        learned: Tensor = self.table(self.bucket(distance))  # (batch, time, seen, heads)
        return learned.permute(0, 3, 1, 2)
