"""Multi-head attention: weighted means of values, with weights from scores of queries and keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.config import Choice, make
from regard.errors import ShapeError
from regard.nn.functional import masked_softmax, merge_heads, repeat_kv_heads, split_heads
from regard.nn.mask import Mask
from regard.nn.position import Position, Rotation
from regard.nn.score import SCORES
from regard.nn.state import KVCache
from regard.nn.tap import Tap


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The inputs of attention other than x: mask, positions, biases and rotations.

    Made once per forward pass and used by every layer. With `causal`, the fused kernel's causal
    mode is enough; otherwise `allowed` and `bias` are dense, and `bias` is -inf wherever `allowed`
    is False.
    """

    mask: Mask
    query_positions: Int[Tensor, "#batch time"]
    key_positions: Int[Tensor, "#batch seen"]
    causal: bool = False
    allowed: Bool[Tensor, "#batch 1 #time seen"] | None = None
    bias: Float[Tensor, "#batch heads time seen"] | None = None
    rotation: Rotation | None = None
    layer_position: Float[Tensor, "#batch time dim"] | None = None  # added to every layer's x

    @classmethod
    def of(
        cls,
        mask: Mask,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"] | None = None,
        position: Position | None = None,
    ) -> "AttentionInputs":
        """For queries at `query_positions` and keys at `key_positions` (None: the same)."""
        self_attention = key_positions is None
        key_positions = query_positions if key_positions is None else key_positions
        position = Position() if position is None else position
        bias = position.bias(query_positions, key_positions)
        causal = self_attention and mask.only_causal and bias is None
        allowed = None if causal else mask.dense(query_positions, key_positions)
        if bias is not None and allowed is not None:
            bias = bias.masked_fill(~allowed, -torch.inf)
        return cls(
            mask,
            query_positions,
            key_positions,
            causal,
            allowed,
            bias,
            position.rotation(query_positions),
            position.embed(query_positions) if position.each_layer else None,
        )

    def dense(self) -> Bool[Tensor, "#batch 1 #time seen"] | None:
        """The mask as a boolean tensor, also if it is only the `causal` flag."""
        if self.causal:
            return self.mask.dense(self.query_positions, self.key_positions)
        return self.allowed


class Attention(nn.Module):
    r"""Multi-head attention of `x` over `memory` (over itself when there is none).

        head_i = softmax(score(x Q_i, m K_i) | allowed) m V_i,     y = [head_1 ... head_h] O

    With `kv_heads < heads`, neighbouring query heads share one key and value head: grouped-query
    attention (GQA); with one for all it is multi-query attention. `qk_norm` normalises each query
    and each key (Qwen 3). The taps see q and k; `explain` recomputes the weights from them, so the
    fused kernel also runs while attention is observed.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,  # width of a value head; None: head_dim
        score: Choice = "scaled_dot",
        qk_norm: Callable[[int], nn.Module] | None = None,
        bias: bool = False,  # of queries, keys and values
        out_bias: bool | None = None,  # None: as `bias`
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if head_dim is None and dim % heads:
            raise ShapeError(f"heads={heads} must divide dim={dim}, or give head_dim")
        if heads % kv_heads:
            raise ShapeError(f"kv_heads={kv_heads} must divide heads={heads}")
        head_dim = dim // heads if head_dim is None else head_dim
        value_dim = head_dim if value_dim is None else value_dim
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.dropout = dropout
        self.query = nn.Linear(dim, heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, kv_heads * value_dim, bias=bias)
        self.out = nn.Linear(heads * value_dim, dim, bias=bias if out_bias is None else out_bias)
        self.q_norm = None if qk_norm is None else qk_norm(head_dim)
        self.k_norm = None if qk_norm is None else qk_norm(head_dim)
        self.score = make(score, SCORES, "score", dim=dim, heads=heads, head_dim=head_dim)
        self.q_tap, self.k_tap = Tap(), Tap()

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        memory: Float[Tensor, "batch seen dim"] | None = None,
        *,
        inputs: AttentionInputs,
        state: KVCache | None = None,
        memory_kv: tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The attention output; `state` is the KV cache, `memory_kv` are precomputed k and v."""
        if inputs.layer_position is not None:
            x = x + inputs.layer_position.to(x.dtype)
        if self.training and memory is None and memory_kv is None:
            q, k, v = self._packed_qkv(x)
        else:
            q = split_heads(self.query(x), self.heads)  # (batch, heads, time, head_dim)
            if memory_kv is None:
                memory_kv = self.keys_values(x if memory is None else memory)
            k, v = memory_kv
        if self.q_norm is not None:
            q = self.q_norm(q)
        if inputs.rotation is not None:
            q, k = inputs.rotation.apply(q), inputs.rotation.apply(k)
        if state is not None:
            cached = state.write(k, v, inputs.query_positions, inputs.key_positions.shape[1])
            if not inputs.causal:  # if causal, the cache was empty: k and v are all of it
                k, v = cached
        q, k = self.q_tap(q), self.k_tap(k)
        y = self._fused(q, k, v, inputs) if self.score.fused else self._explicit(q, k, v, inputs)
        return self.out(merge_heads(y))

    def keys_values(self, memory: Float[Tensor, "batch seen dim"]) -> tuple[Tensor, Tensor]:
        """The keys and values of `memory`: (batch, kv_heads, seen, head_dim)."""
        k = split_heads(self.key(memory), self.kv_heads)
        return self._normalise_keys(k), split_heads(self.value(memory), self.kv_heads)

    def _normalise_keys(self, k: Tensor) -> Tensor:
        return k if self.k_norm is None else self.k_norm(k)

    def _packed_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project `x` to q, k and v with one matmul on the concatenated weights.

        Faster in training. Not used for decoding, where concatenating would copy the weights for
        every token.
        """
        layers = (self.query, self.key, self.value)
        weights = [layer.weight for layer in layers]
        bias = None if self.query.bias is None else torch.cat([layer.bias for layer in layers])
        q, k, v = F.linear(x, torch.cat(weights), bias).split([len(w) for w in weights], dim=-1)
        return (
            split_heads(q, self.heads),
            self._normalise_keys(split_heads(k, self.kv_heads)),
            split_heads(v, self.kv_heads),
        )

    def weights(
        self,
        q: Float[Tensor, "batch heads time head_dim"],
        k: Float[Tensor, "batch kv_heads seen head_dim"],
        inputs: AttentionInputs,
    ) -> Float[Tensor, "batch heads time seen"]:
        """The attention weights, by the formula."""
        k = repeat_kv_heads(self.score.prepare(k), self.heads)
        scores = self.score(q, k, inputs.query_positions, inputs.key_positions)
        if inputs.bias is not None:
            bias = inputs.bias
            if inputs.allowed is not None:  # no -inf: `masked_softmax` applies the mask
                bias = bias.masked_fill(~inputs.allowed, 0)
            scores = scores + bias
        return masked_softmax(scores, inputs.dense())

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """The formula step by step, for scores that no fused kernel computes."""
        weights = F.dropout(self.weights(q, k, inputs), self.dropout, self.training)
        return weights @ repeat_kv_heads(v, self.heads)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """The same by torch's fused kernel, for scaled dot products."""
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=inputs.allowed if inputs.bias is None else inputs.bias.to(q.dtype),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=inputs.causal,
            scale=self.score.scale,
            enable_gqa=self.kv_heads != self.heads,
        )

    if TYPE_CHECKING:
        __call__ = forward
