"""Multi-head attention and its masks: causal, prefix, sliding window, padding, documents."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.config import Choice, make
from regard.errors import ShapeError
from regard.nn.hook_point import HookPoint, add_hook_points
from regard.nn.position import Position, Rotation
from regard.nn.score import SCORES, Disentangled
from regard.nn.state import KVCache


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A conjunction of rules; query i may attend to key j if all of them allow it.

        causal       j <= i
        prefix       … or j < prefix: attention within the prefix is bidirectional
        window       |i - j| < window
        lengths      j < length of the row: the rest is padding
        documents    i and j lie in the same document of a packed row

    Masks combine with `&`. Positions are absolute, so decoding with a KV cache is no special case.
    """

    is_causal: bool = False
    prefix_lengths: Int[Tensor, " batch"] | None = None
    window_size: int | None = None
    key_lengths: Int[Tensor, " batch"] | None = None
    document_ids: Int[Tensor, "batch seen"] | None = None

    @classmethod
    def none(cls) -> "Mask":
        """Full attention."""
        return cls()

    @classmethod
    def causal(cls) -> "Mask":
        """No attention to later positions."""
        return cls(is_causal=True)

    @classmethod
    def prefix(cls, lengths: Int[Tensor, " batch"]) -> "Mask":
        """Causal, but bidirectional within the first `lengths` tokens of each row."""
        return cls(is_causal=True, prefix_lengths=lengths)

    @classmethod
    def window(cls, window_size: int) -> "Mask":
        """A sliding window: keys less than `window_size` positions away, on either side."""
        if window_size < 1:
            raise ShapeError(f"window={window_size} must be at least 1: a token attends to itself")
        return cls(window_size=window_size)

    @classmethod
    def lengths(cls, lengths: Int[Tensor, " batch"]) -> "Mask":
        """Only the first `lengths` keys of each row are valid."""
        return cls(key_lengths=lengths)

    @classmethod
    def documents(cls, ids: Int[Tensor, "batch seen"]) -> "Mask":
        """Attention within each document, where several documents are packed into one row."""
        return cls(document_ids=ids)

    def __and__(self, other: "Mask") -> "Mask":
        if self.is_causal and other.is_causal:  # a plain causal mask is one with prefix 0
            both = (self.prefix_lengths, other.prefix_lengths)
            prefix_lengths = None if any(p is None for p in both) else torch.minimum(*both)  # type: ignore[arg-type]
        else:
            prefix_lengths = self.prefix_lengths if self.is_causal else other.prefix_lengths
        windows = [w for w in (self.window_size, other.window_size) if w is not None]
        lengths = [n for n in (self.key_lengths, other.key_lengths) if n is not None]
        if self.document_ids is not None and other.document_ids is not None:
            raise ShapeError(
                "two document masks cannot be combined; number all documents in one mask"
            )
        return Mask(
            is_causal=self.is_causal or other.is_causal,
            prefix_lengths=prefix_lengths,
            window_size=min(windows, default=None),
            key_lengths=torch.minimum(*lengths) if len(lengths) == 2 else next(iter(lengths), None),
            document_ids=other.document_ids if self.document_ids is None else self.document_ids,
        )

    @property
    def only_causal(self) -> bool:
        """Whether the `is_causal` flag of torch's fused kernel is enough."""
        return self.is_causal and self.prefix_lengths is None and self._no_other_rule

    @property
    def only_causal_window(self) -> bool:
        """Whether the mask is causal with a sliding window, and nothing else."""
        others = (self.prefix_lengths, self.key_lengths, self.document_ids)
        return self.is_causal and self.window_size is not None and all(x is None for x in others)

    @property
    def allows_all(self) -> bool:
        """Whether there is no rule."""
        return not self.is_causal and self._no_other_rule

    @property
    def _no_other_rule(self) -> bool:
        return self.window_size is None and self.key_lengths is None and self.document_ids is None

    def valid(self, positions: Int[Tensor, "#batch time"]) -> Bool[Tensor, "batch time"] | None:
        """True at the positions that are not padding; None if no lengths are set."""
        return None if self.key_lengths is None else positions < self.key_lengths.unsqueeze(1)

    def dense(
        self, query_positions: Int[Tensor, "#batch time"], key_positions: Int[Tensor, "#batch seen"]
    ) -> Bool[Tensor, "#batch 1 #time seen"] | None:
        """The mask as one boolean tensor, True = may attend; None if there is no rule."""
        i = query_positions.unsqueeze(-1)  # (batch, time, 1)
        j = key_positions.unsqueeze(-2)  # (batch, 1, seen)
        rules = []
        if self.is_causal:
            causal = j <= i
            if self.prefix_lengths is not None:
                causal = causal | (j < self.prefix_lengths.view(-1, 1, 1))
            rules.append(causal)
        if self.window_size is not None:
            rules.append((i - j).abs() < self.window_size)
        if self.key_lengths is not None:
            rules.append(j < self.key_lengths.view(-1, 1, 1))
        if self.document_ids is not None:
            # indexed by column: positions may restart at 0 in each document
            key_documents = self.document_ids[:, : key_positions.shape[1]]
            first_query = key_documents.shape[1] - query_positions.shape[1]
            query_documents = key_documents[:, first_query:]
            rules.append(query_documents.unsqueeze(-1) == key_documents.unsqueeze(-2))
        if not rules:
            return None
        allowed = rules[0]
        for rule in rules[1:]:
            allowed = allowed & rule
        return allowed.unsqueeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The inputs of attention other than x: mask, positions, biases and rotations.

    Made once per forward pass for all layers with the same sliding window, or without one.
    With `causal`, the fused kernel's causal mode is enough; otherwise `allowed` and `bias` are
    dense, and `bias` is -inf wherever `allowed` is False.
    """

    mask: Mask
    query_positions: Int[Tensor, "#batch time"]
    key_positions: Int[Tensor, "#batch seen"]
    causal: bool = False
    allowed: Bool[Tensor, "#batch 1 #time seen"] | None = None
    bias: Float[Tensor, "#batch heads time seen"] | None = None
    rotation: Rotation | None = None
    position_embedding: Float[Tensor, "#batch time dim"] | None = None  # added to every layer's x
    # relative position embeddings, which `Disentangled` reads
    relative_embeddings: Float[Tensor, "distances dim"] | None = None
    # added to q, k and v of every layer
    head_position_embedding: Float[Tensor, "#batch time head_dim"] | None = None

    @classmethod
    def of(
        cls,
        mask: Mask,
        query_positions: Int[Tensor, "#batch time"],
        key_positions: Int[Tensor, "#batch seen"] | None = None,
        position: Position | None = None,
        relative_embeddings: Float[Tensor, "distances dim"] | None = None,
    ) -> "AttentionInputs":
        """The inputs for queries and keys at these positions.

        Without `key_positions` the keys have the positions of the queries: self-attention without
        earlier keys in a KV cache.
        """
        same_positions = key_positions is None
        key_positions = query_positions if key_positions is None else key_positions
        position = Position() if position is None else position
        bias = position.bias(query_positions, key_positions)
        causal = same_positions and mask.only_causal and bias is None
        allowed = None if causal else mask.dense(query_positions, key_positions)
        if bias is not None and allowed is not None:
            bias = bias.masked_fill(~allowed, -torch.inf)
        position_embedding = position.embed(query_positions) if position.each_layer else None
        return cls(
            mask,
            query_positions,
            key_positions,
            causal,
            allowed,
            bias,
            position.rotation(query_positions),
            None if position.after_projection else position_embedding,
            relative_embeddings,
            position_embedding if position.after_projection else None,
        )

    @property
    def valid(self) -> Bool[Tensor, "batch time"] | None:
        """True at the queries that are not padding; None if no lengths are set."""
        return self.mask.valid(self.query_positions)

    def dense(self) -> Bool[Tensor, "#batch 1 #time seen"] | None:
        """The mask as a boolean tensor, even where the `causal` flag replaces it."""
        if self.causal:
            return self.mask.dense(self.query_positions, self.key_positions)
        return self.allowed


class Attention(nn.Module):
    r"""Multi-head attention of `x` over `memory`, or over `x` itself without one.

        head_i = softmax(score(x Q_i, m K_i) | allowed) m V_i,     y = [head_1 ... head_h] O

    With `kv_heads < heads`, neighbouring query heads share one key and value head: grouped-query
    attention (GQA), and with kv_heads=1 multi-query attention (MQA). `qk_norm` normalizes each
    query and each key (Qwen 3). With positions P in every layer, Q = (x + P) W, or with
    `after_projection` Q = x W + P; K and V likewise. The hook points see q, k, v and the output of
    each head; `explain` recomputes the weights from q and k, so the fused kernel also runs while
    attention is observed.
    """

    q_hook: HookPoint
    k_hook: HookPoint
    v_hook: HookPoint
    heads_hook: HookPoint

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
        if not self.score.key_bias:
            self.key.register_parameter("bias", None)
        names = ("q_hook", "k_hook", "v_hook", "heads_hook")
        add_hook_points(self, **{name: HookPoint() for name in names})

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
        if inputs.position_embedding is not None:
            x = x + inputs.position_embedding.to(x.dtype)
        if memory is None and memory_kv is None and self._uses_fused_qkv():
            q, k, v = self._fused_qkv(x)
        else:
            q = split_heads(self.query(x), self.heads)  # (batch, heads, time, head_dim)
            if memory_kv is None:
                memory_kv = self.keys_values(x if memory is None else memory)
            k, v = memory_kv
        if self.q_norm is not None:
            q = self.q_norm(q)
        if inputs.rotation is not None:
            q, k = inputs.rotation.apply(q), inputs.rotation.apply(k)
        if inputs.head_position_embedding is not None:
            p = inputs.head_position_embedding.to(q.dtype).unsqueeze(1)  # the same for every head
            q, k, v = q + p, k + p, v + p
        if state is not None:
            cached = state.write(k, v, inputs.query_positions, inputs.key_positions.shape[1])
            if not inputs.causal:  # if causal, the cache was empty: k and v are all of it
                k, v = cached
        q, k, v = self.q_hook(q), self.k_hook(k), self.v_hook(v)
        y = self._fused(q, k, v, inputs) if self.score.fused else self._explicit(q, k, v, inputs)
        return self.out(merge_heads(self.heads_hook(y)))

    def keys_values(self, memory: Float[Tensor, "batch seen dim"]) -> tuple[Tensor, Tensor]:
        """The keys and values of `memory`: (batch, kv_heads, seen, head_dim)."""
        k = split_heads(self.key(memory), self.kv_heads)
        return self._normalize_keys(k), split_heads(self.value(memory), self.kv_heads)

    def _normalize_keys(self, k: Tensor) -> Tensor:
        return k if self.k_norm is None else self.k_norm(k)

    @property
    def can_fuse_qkv(self) -> bool:
        """Whether one matmul can compute q, k and v: the projections are plain, without LoRA."""
        return all(type(layer) is nn.Linear for layer in (self.query, self.key, self.value))

    def _uses_fused_qkv(self) -> bool:
        """Only in training: in decoding, concatenating would copy the weights for every token."""
        return self.training and self.can_fuse_qkv

    def _fused_qkv(
        self, x: Tensor, linear: Callable[..., Tensor] = F.linear
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project `x` to q, k and v with one matmul on the concatenated weights."""
        weights = [layer.weight for layer in (self.query, self.key, self.value)]
        return self.split_qkv(linear(x, torch.cat(weights), self.qkv_bias()))

    def qkv_bias(self) -> Float[Tensor, " width"] | None:
        """The concatenated biases of q, k and v; zeros for k if only the keys have none."""
        bias = None
        if self.query.bias is not None:
            k_bias = self.key.bias
            k_bias = self.query.bias.new_zeros(len(self.key.weight)) if k_bias is None else k_bias
            bias = torch.cat([self.query.bias, k_bias, self.value.bias])
        return bias

    def split_qkv(self, qkv: Float[Tensor, "batch time width"]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, split into heads, from the output of one matmul; keys are normalized."""
        widths = [layer.out_features for layer in (self.query, self.key, self.value)]
        q, k, v = qkv.split(widths, dim=-1)
        return (
            split_heads(q, self.heads),
            self._normalize_keys(split_heads(k, self.kv_heads)),
            split_heads(v, self.kv_heads),
        )

    def weights(
        self,
        q: Float[Tensor, "batch heads time head_dim"],
        k: Float[Tensor, "batch kv_heads seen head_dim"],
        inputs: AttentionInputs,
    ) -> Float[Tensor, "batch heads time seen"]:
        """The attention weights, by the formula; q and k may hold a subset of the heads."""
        k = repeat_kv_heads(self.score.prepare(k), q.shape[1])
        relative = self._project_relative(inputs)
        scores = self.score(q, k, inputs.query_positions, inputs.key_positions, *relative)
        if inputs.bias is not None:
            bias = inputs.bias
            if inputs.allowed is not None:  # no -inf: `masked_softmax` applies the mask
                bias = bias.masked_fill(~inputs.allowed, 0)
            scores = scores + bias
        return masked_softmax(scores, inputs.dense())

    def _project_relative(self, inputs: AttentionInputs) -> tuple[Tensor, ...]:
        """Q r and K r of the relative position embeddings: (1, heads, distances, head_dim) each."""
        if inputs.relative_embeddings is None:
            return ()
        r = inputs.relative_embeddings.unsqueeze(0)
        if isinstance(self.score, Disentangled) and self.score.positions is not None:
            return tuple(
                split_heads(layer(r), self.heads) for layer in self.score.positions.values()
            )
        k = repeat_kv_heads(split_heads(self.key(r), self.kv_heads), self.heads)
        return split_heads(self.query(r), self.heads), k

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """The attention output step by step, for scores that no fused kernel computes."""
        weights = F.dropout(self.weights(q, k, inputs), self.dropout, self.training)
        return weights @ repeat_kv_heads(v, self.heads)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """The attention output by torch's fused kernel, for scaled dot products."""
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


def masked_softmax(
    scores: Float[Tensor, "*rows seen"], allowed: Bool[Tensor, "*#rows seen"] | None
) -> Float[Tensor, "*rows seen"]:
    r"""Softmax over the last axis, restricted to `allowed`.

        w_j = a_j exp(s_j) / sum_i a_i exp(s_i),      a in {0, 1}

    A row in which nothing is allowed becomes zeros, as in torch's fused kernel. The softmax of
    half-precision scores is computed in float32.
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
    """Repeat key or value heads for grouped-query attention (GQA).

    Neighbouring query heads share one:

    heads 4, kv_heads 2:    q0 q1 q2 q3
                             |/    |/
                            k0    k1
    """
    return x.repeat_interleave(heads // x.shape[1], dim=1)
