"""Attention of a recurrent decoder over the states of an encoder (Bahdanau, Luong)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.config import Choice, make
from regard.errors import ShapeError
from regard.nn.attention import masked_softmax, merge_heads, split_heads
from regard.nn.hook_point import StepHookPoint
from regard.nn.score import SCORES

HardAttention = Literal["straight_through", "reinforce"]


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """The context vectors, the attention weights, and log P of sampled hard attention."""

    context_vectors: Float[Tensor, "batch time dim"]
    weights: Float[Tensor, "batch heads time source"]
    log_prob: Float[Tensor, "batch time"] | None  # None unless positions were sampled


class RecurrentAttention(nn.Module):
    r"""Attention with the state s of a decoder as query over the states h_i of an encoder.

        a_i = softmax_i(score(s, h_i)),      c = sum_i a_i h_i

    Keys and values are the encoder states themselves. With `heads` there are projections, as in
    the Transformer: c = [head_1 ... head_n] O + o, with

        head_j = sum_i softmax_i(score(Q_j s, K_j h_i)) V_j h_i

    `hard` attends to one position only. "straight_through": the position with the largest weight,
    with the gradient of soft attention (straight-through estimator, Bengio et al. 2013).
    "reinforce": a position sampled from the weights in training, otherwise the one with the largest
    weight; its gradient comes from `log_prob` through `reinforce` (Mnih et al. 2014, Xu et al.
    2015).

    Bahdanau et al. 2015, Luong et al. 2015.
    """

    def __init__(
        self,
        dim: int,
        *,
        context: int,
        score: Choice = "additive",
        heads: int | None = None,
        hard: HardAttention | None = None,
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
        self.weights_hook = StepHookPoint()

    def keys_values(self, memory: Float[Tensor, "batch source dim"]) -> tuple[Tensor, Tensor]:
        """The keys, prepared for the score, and the values: (batch, heads, source, head_dim)."""
        k = memory if self.key is None else self.key(memory)
        v = memory if self.value is None else self.value(memory)
        return self.score.prepare(split_heads(k, self.heads)), split_heads(v, self.heads)

    def forward(
        self,
        s: Float[Tensor, "batch time dim"],
        k: Float[Tensor, "batch heads source head_dim"],
        v: Float[Tensor, "batch heads source head_dim"],
        allowed: Bool[Tensor, "batch 1 1 source"],
        *,
        first: int = 0,
        steps: int | None = None,
    ) -> AttentionOutput:
        """Attend with every s to the keys and values of `keys_values`.

        A decoder that attends step by step passes the index of the first s and the number of all
        steps, for the hook point.
        """
        q = split_heads(s if self.query is None else self.query(s), self.heads)
        positions = torch.arange(max(s.shape[1], k.shape[2]), device=s.device).unsqueeze(0)
        scores = self.score(q, k, positions[:, : s.shape[1]], positions[:, : k.shape[2]])
        weights, log_prob = self._select_positions(masked_softmax(scores, allowed))
        if self.weights_hook.has_hooks:
            weights = self.weights_hook(weights, first, steps)
        context_vectors = merge_heads(weights @ v)
        context_vectors = context_vectors if self.out is None else self.out(context_vectors)
        return AttentionOutput(context_vectors, weights, log_prob)

    def _select_positions(self, soft: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights of soft or hard attention, and log P of the sampled positions."""
        if self.hard is None:
            return soft, None
        sampled = self.hard == "reinforce" and self.training
        flat = soft.detach().flatten(0, -2)
        index = flat.multinomial(1) if sampled else flat.argmax(-1, keepdim=True)
        index = index.view(*soft.shape[:-1], 1)
        one_hot = torch.zeros_like(soft).scatter(-1, index, 1.0)
        if self.hard == "straight_through":
            return one_hot + (soft - soft.detach()), None
        return one_hot, soft.gather(-1, index).squeeze(-1).log().sum(1) if sampled else None

    if TYPE_CHECKING:
        __call__ = forward


def reinforce(
    log_prob: Float[Tensor, "batch time"],
    cost: Float[Tensor, "batch time"],
    scored: Bool[Tensor, "batch time"],
) -> Float[Tensor, ""]:
    r"""The REINFORCE surrogate loss: its expected gradient is that of the expected cost.

        sum_t (R_t - b_t) log P(sample_t),      R_t = cost_t + cost_{t+1} + ...

    R_t is the return, the cost from step t on. The baseline b_t is the mean return of the other
    rows, which reduces the variance and adds no bias. Williams 1992.
    """
    returns = cost.masked_fill(~scored, 0.0).flip(1).cumsum(1).flip(1)  # R
    other_returns = returns.sum(0, keepdim=True) - returns
    advantage = returns - other_returns / max(1, len(returns) - 1)
    return (advantage.detach() * log_prob * scored).sum()
