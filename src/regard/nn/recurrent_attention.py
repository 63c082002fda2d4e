"""A decoder's look at the states of an encoder, before there were layers of attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.config import Choice, make
from regard.errors import ShapeError
from regard.nn.functional import masked_softmax, merge_heads, split_heads
from regard.nn.score import SCORES
from regard.nn.tap import Tap

Hard = Literal["straight", "reinforce"]


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """What a look gives."""

    context: Float[Tensor, "batch time dim"]
    weights: Float[Tensor, "batch heads time source"]
    log_prob: Float[Tensor, "batch time"] | None  # log-probability of the places that were drawn


class RecurrentAttention(nn.Module):
    r"""A look with the state s of a decoder at the states h_i of an encoder.

        a_i = softmax_i(score(s, h_i)),      c = sum_i a_i h_i

    Keys and values are the states themselves. With `heads` there are several looks, each through
    matrices of its own, as in the Transformer: c = [head_1 ... head_n] O + o, with

        head_j = sum_i softmax_i(score(Q_j s, K_j h_i)) V_j h_i

    `hard` looks at one place only. "straight": the one of the largest weight, with the gradient
    of the soft look (straight-through, Bengio et al. 2013). "reinforce": one drawn by the
    weights, of the largest weight when not training; what is differentiated is then the
    `log_prob` of the draw, by `reinforce` (Mnih et al. 2014, Xu et al. 2015).

    Bahdanau et al. 2015, Luong et al. 2015.
    """

    def __init__(
        self,
        dim: int,
        *,
        context: int,
        score: Choice = "additive",
        heads: int | None = None,
        hard: Hard | None = None,
    ) -> None:
        super().__init__()
        if heads is not None and dim % heads:
            raise ShapeError(f"heads={heads} must divide dim={dim}")
        self.dim, self.heads, self.hard = dim, heads or 1, hard
        self.query, self.key, self.value, self.out = (
            None if heads is None else nn.Linear(dim, dim) for _ in range(4)
        )
        self.score = make(
            score, SCORES, "score", head_dim=dim // self.heads, heads=self.heads, context=context
        )
        self.weights_tap = Tap()

    def keys_values(self, memory: Float[Tensor, "batch source dim"]) -> tuple[Tensor, Tensor]:
        """What the states are compared by, and what is found: (batch, heads, source, head_dim)."""
        k = memory if self.key is None else self.key(memory)
        v = memory if self.value is None else self.value(memory)
        return self.score.prepare(split_heads(k, self.heads)), split_heads(v, self.heads)

    def forward(
        self,
        s: Float[Tensor, "batch time dim"],
        k: Float[Tensor, "batch heads source head_dim"],
        v: Float[Tensor, "batch heads source head_dim"],
        allowed: Bool[Tensor, "batch 1 1 source"],
    ) -> AttentionOutput:
        """Look with every s at what `keys_values` gave."""
        q = split_heads(s if self.query is None else self.query(s), self.heads)
        positions = torch.arange(max(s.shape[1], k.shape[2]), device=s.device).unsqueeze(0)
        scores = self.score(q, k, positions[:, : s.shape[1]], positions[:, : k.shape[2]])
        weights, log_prob = self._chosen(masked_softmax(scores, allowed))
        context = merge_heads(weights @ v)
        return AttentionOutput(
            context if self.out is None else self.out(context), weights, log_prob
        )

    def _chosen(self, soft: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights that are used, and the log-probability of each draw if they were drawn."""
        if self.hard is None:
            return soft, None
        drawn = self.hard == "reinforce" and self.training
        flat = soft.detach().flatten(0, -2)
        place = flat.multinomial(1) if drawn else flat.argmax(-1, keepdim=True)
        place = place.view(*soft.shape[:-1], 1)
        one = torch.zeros_like(soft).scatter(-1, place, 1.0)
        if self.hard == "straight":
            return one + (soft - soft.detach()), None
        return one, soft.gather(-1, place).squeeze(-1).log().sum(1) if drawn else None

    if TYPE_CHECKING:
        __call__ = forward


def reinforce(
    log_prob: Float[Tensor, "batch time"],
    cost: Float[Tensor, "batch time"],
    scored: Bool[Tensor, "batch time"],
) -> Float[Tensor, ""]:
    r"""A loss whose gradient, on average over the draws, is that of their expected cost.

        sum_t (R_t - b_t) log P(draw_t),      R_t = cost_t + cost_{t+1} + ...

    A draw answers for what it costs from then on; b_t is what that was on average in the other
    rows, which takes away much of the noise and none of the truth. Williams 1992.
    """
    later = cost.masked_fill(~scored, 0.0).flip(1).cumsum(1).flip(1)  # R
    others = later.sum(0, keepdim=True) - later
    surprise = later - others / max(1, len(later) - 1)
    return (surprise.detach() * log_prob * scored).sum()
