"""Tensor functions of attention: masked softmax; splitting, merging and repeating heads."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_softmax(
    scores: Float[Tensor, "*rows seen"], allowed: Bool[Tensor, "*#rows seen"] | None
) -> Float[Tensor, "*rows seen"]:
    r"""Softmax over the last axis, restricted to `allowed`.

        w_j = a_j exp(s_j) / sum_i a_i exp(s_i),      a in {0, 1}

    A row in which nothing is allowed becomes zeros, as in torch's fused kernel. Half precision is
    computed in float32.
    """
    dtype = scores.dtype
    scores = scores if dtype == torch.float64 else scores.float()
    if allowed is None:
        return scores.softmax(-1).to(dtype)
    empty = ~allowed.any(-1, keepdim=True)
    # An empty row is left unmasked inside the softmax: its gradient is then 0, not NaN.
    weights = scores.masked_fill(~(allowed | empty), -torch.inf).softmax(-1)
    return weights.masked_fill(empty, 0.0).to(dtype)


def split_heads(
    x: Float[Tensor, "batch time width"], heads: int
) -> Float[Tensor, "batch heads time head_dim"]:
    """Split the last axis into heads and move them before the time axis."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(
    x: Float[Tensor, "batch heads time head_dim"],
) -> Float[Tensor, "batch time width"]:
    """Concatenate the heads: the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(-2)


def repeat_kv_heads(
    x: Float[Tensor, "batch kv_heads seen head_dim"], heads: int
) -> Float[Tensor, "batch heads seen head_dim"]:
    """Repeat key or value heads for grouped-query attention (GQA): neighbouring queries share one.

    heads 4, kv_heads 2:    q0 q1 q2 q3
                             |/    |/
                            k0    k1
    """
    return x.repeat_interleave(heads // x.shape[1], dim=1)
