"""Bytes of activations that the backward pass needs, with and without activation checkpointing."""

from collections.abc import Callable
from typing import Any, cast

from torch import nn

from regard.models.cost.parts import BFLOAT16_BYTES, FLOAT32_BYTES, qkv_widths, stacks
from regard.nn.attention import Attention
from regard.nn.block import ACTIVATIONS, Block, FeedForward, GatedFeedForward, Stack
from regard.nn.norm import RMSNorm
from regard.nn.position import ALiBi, Rotary, T5Bias
from regard.nn.recurrent import RecurrentLayer
from regard.nn.score import Additive, Disentangled, Score, Shaw, TransformerXL

# Values that a score without a fused kernel saves per query-key pair: for each head, and for all
# heads together.
DEFAULT_PAIR_VALUES = (3, 0)
PAIR_VALUES: dict[type[Score], tuple[int, int]] = {
    Shaw: (2, 2),
    TransformerXL: (4, 2),
    Disentangled: (2, 2),
}


def activation_bytes(model: nn.Module, time: int, *, mixed: bool) -> tuple[int, int]:
    """Bytes for a row of `time` tokens: in full, and with activation checkpointing.

    In float32 as eager torch saves them on a CPU; `mixed`: bfloat16 autocast, compiled. The
    residual stream and the norms are float32 in both.
    """
    block_bytes: Callable[..., int] = _mixed_block_bytes if mixed else _block_bytes
    size = BFLOAT16_BYTES if mixed else FLOAT32_BYTES
    outside = inputs = 0
    blocks: list[int] = []
    for stack in stacks(model):
        layers = stack.layers
        dim = layers[0].attention.query.in_features
        norms = _norm_values(stack.embed_norm) + _norm_values(stack.norm)
        outside += time * (FLOAT32_BYTES * norms + size * dim)
        if isinstance(stack.position, ALiBi | T5Bias):  # one bias, or its buckets, for all layers
            per_pair = layers[0].attention.heads if isinstance(stack.position, ALiBi) else 2
            outside += size * time * time * per_pair
        if stack.project is not None:
            outside += size * time * cast(nn.Linear, stack.project).in_features
        inputs += FLOAT32_BYTES * time * dim * len(layers)
        blocks += [
            block_bytes(block, stack, window, time)
            for block, window in zip(layers, stack.windows, strict=True)
        ]
    for cell in model.modules():
        if isinstance(cell, RecurrentLayer):  # the input, the gates and the state
            gates = cell.input.out_features + cell.state_vectors * cell.dim
            outside += size * time * (cell.input.in_features + gates)
    return outside + sum(blocks), outside + inputs + max(blocks, default=0)


def _block_bytes(block: Block, stack: Stack, window: int | None, time: int) -> int:
    """Bytes that one block saves in float32."""
    dim = block.attention.query.in_features
    values = sum(map(_norm_values, _norms(block)))
    values += _branch_inputs(block) * dim + _ffn_values(block.ffn)
    if block.norm_placement.kind == "parallel_norms":  # both norms save the same x
        values -= dim
    values += _attention_values(block.attention, stack, window, time)
    if block.cross is not None:
        values += _attention_values(block.cross, None, time, time)
    return FLOAT32_BYTES * (time * values + sum(qkv_widths(block.attention)) * dim)


def _mixed_block_bytes(block: Block, stack: Stack, window: int | None, time: int) -> int:
    """Bytes that one block saves under bfloat16 autocast, compiled."""
    dim = block.attention.query.in_features
    norms = len([norm for norm in _norms(block) if norm is not None])
    values = _branch_inputs(block) * dim
    for attention, attention_stack, keys in (
        (block.attention, stack, None),  # a kernel computes a window itself
        (block.cross, None, time),
    ):
        if attention is not None:
            values += sum(qkv_widths(attention)) + attention.out.in_features + 2 * attention.heads
            values += _pair_values(attention, attention_stack, keys, time)
            if attention.q_norm is not None:
                values += sum(qkv_widths(attention)[:2])
    if isinstance(block.ffn, FeedForward):
        values += (3 if isinstance(block.ffn, GatedFeedForward) else 2) * block.ffn.up.out_features
    return time * (BFLOAT16_BYTES * values + norms * (FLOAT32_BYTES * dim + 2 * FLOAT32_BYTES))


def _norms(block: Block) -> list[Any]:
    children = block.named_children()
    return [module for name, module in children if "norm" in name]


def _branch_inputs(block: Block) -> int:
    """The number of normalized vectors per token that the branches of a block read."""
    branches = (block.attention_norm, block.cross, block.ffn_norm)
    return sum(branch is not None for branch in branches)


def _norm_values(norm: Any) -> int:
    """Values that a norm saves per vector, without its output."""
    if norm is None:
        return 0
    dim = norm.weight.numel()
    return 2 * dim + 1 if isinstance(norm, RMSNorm) else dim + 2


def _attention_values(
    attention: Attention, stack: Stack | None, window: int | None, time: int
) -> int:
    """Values that attention saves per token, without its input."""
    q_width, k_width, v_width = qkv_widths(attention)
    heads, position = attention.heads, None if stack is None else stack.position
    values = q_width + k_width + v_width + attention.out.in_features + heads
    if attention.q_norm is not None and attention.k_norm is not None:
        values += heads * _norm_values(attention.q_norm)
        values += attention.kv_heads * _norm_values(attention.k_norm)
    if isinstance(position, Rotary):
        values += q_width + k_width
    if attention.q_norm is not None or (isinstance(position, Rotary) and not position.interleaved):
        values += attention.out.in_features  # the heads are strided, so merging them copies
    if type(attention.score) in PAIR_VALUES:
        values += 3 * q_width  # copies of q, k and v
    elif attention.score.fused and isinstance(position, T5Bias):
        values += q_width + k_width  # scaled copies of q and k
    return values + _pair_values(attention, stack, window, time)


def _pair_values(attention: Attention, stack: Stack | None, window: int | None, time: int) -> int:
    """Values that attention saves per query, for all keys: scores, weights, bias, mask."""
    if not attention.score.fused:
        per_head, shared = PAIR_VALUES.get(type(attention.score), DEFAULT_PAIR_VALUES)
        if isinstance(attention.score, Additive):  # tanh(W q + U k), a vector per pair
            per_head += attention.head_dim
        return (per_head * attention.heads + shared) * time
    if stack is not None and isinstance(stack.position, T5Bias):
        return attention.heads * time
    return 0 if window is None else time


def _ffn_values(ffn: Any) -> int:
    """Values that a feed-forward layer saves per token, without its input."""
    if not isinstance(ffn, FeedForward):
        return 0
    if isinstance(ffn, GatedFeedForward):
        return 4 * ffn.up.out_features
    return (1 if ffn.activation is ACTIVATIONS["relu"] else 2) * ffn.up.out_features
