"""Attention with masks, ALiBi or soft caps, without computing all T x T scores.

`scaled_dot_product_attention` takes causal masks as a flag, and every other mask or bias as a
dense tensor; it then computes all T x T scores. On CUDA, FlashAttention has sliding windows;
FlexAttention compiles any mask and score into its kernel and skips blocks of keys that no query of
a block may attend to. On a CPU, queries of a sliding window attend block by block to the keys of
two blocks. A window of w then costs T w, not T^2.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.attention import Attention, AttentionInputs, Mask
from regard.nn.block import Stack
from regard.nn.position import ALiBi, Position
from regard.nn.score import Dot

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries and keys per block of FlexAttention
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256  # the largest head_dim of FlashAttention
MIN_WINDOWS = 4  # sequences of at least this many windows are faster in blocks on a CPU


def supports(attention: Attention, position: Position) -> bool:
    """Whether `attend` supports a layer: dot product, no dropout, no score bias but ALiBi's."""
    biased = type(position).bias is not Position.bias
    dot = type(attention.score).forward is Dot.forward
    return dot and not attention.dropout and (not biased or isinstance(position, ALiBi))


def needs_sparse_attention(inputs: AttentionInputs, capped: bool) -> bool:
    """Whether the fused kernel would need a dense mask or bias for these inputs, or cannot run.

    False where the positions do not fill whole blocks, which `attend` needs.
    """
    mask, time = inputs.mask, inputs.query_positions.shape[1]
    sparse = (
        mask.window_size is not None
        or mask.document_ids is not None
        or mask.prefix_lengths is not None
    )
    whole_blocks = time % BLOCK == 0 and inputs.key_positions.shape[1] == time
    return whole_blocks and (sparse or capped or inputs.bias is not None)


def attend(
    attention: Attention,
    slopes: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: AttentionInputs,
) -> Tensor:
    """Self-attention by the formula of `Attention`, as one kernel; `slopes` are ALiBi's."""
    mask, cap = inputs.mask, attention.score.cap
    plain = mask.only_causal_window and cap is None and slopes is None
    if plain and q.dtype in FLASH_DTYPES and q.shape[-1] <= FLASH_HEAD_DIM:
        assert mask.window_size is not None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        window, scale = mask.window_size, attention.score.scale
        return causal_window_attention(q, k, v, window, scale).transpose(1, 2)

    from torch.nn.attention.flex_attention import flex_attention  # imports the compiler

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[h] * (i - j).abs()
        return score

    blocks = block_mask(mask, inputs.query_positions, inputs.key_positions)
    y: Any = flex_attention(
        q,
        k,
        v,
        score_mod=None if cap is None and slopes is None else score_mod,
        block_mask=None if mask.allows_all else blocks,
        scale=attention.score.scale,
        enable_gqa=attention.kv_heads != attention.heads,
    )
    return y


def causal_window_attention(
    q: Tensor, k: Tensor, v: Tensor, window_size: int, scale: float
) -> Tensor:
    """FlashAttention over a causal window; (batch, time, heads, head_dim), bfloat16 or float16."""
    return _flash_attention(q, k, v, None, q.shape[1], window_size, scale)


def varlen_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    cu_seqlens: Int[Tensor, " cu_seqlens"],
    window: int | None,
    scale: float,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Causal attention within each of several concatenated sequences.

    `cu_seqlens` holds their cumulative lengths, 0 first. On a GPU this is FlashAttention, which
    needs bfloat16 or float16.
    """
    tokens = len(q)
    if q.is_cuda:
        return _flash_attention(q, k, v, cu_seqlens.to(torch.int32), tokens, window, scale)
    positions = torch.arange(tokens).unsqueeze(0)
    mask = Mask.causal() & Mask.documents(torch.searchsorted(cu_seqlens, positions, right=True))
    if window is not None:
        mask = mask & Mask.window(window)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask.dense(positions, positions),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y.squeeze(0).transpose(0, 1)


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    max_length: int,
    window: int | None,
    scale: float,
) -> Tensor:
    y, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_length,
        max_length,
        0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    return y


def attach_window_blocks(model: nn.Module) -> None:
    """Let the sliding-window attention of a model on a CPU skip the keys outside of the window."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    for block in (block for stack in stacks if any(stack.windows) for block in stack.layers):
        attention = block.attention
        if attention.score.fused:
            attention._fused = partial(attend_in_blocks, attention)  # type: ignore[method-assign]


def attend_in_blocks(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs
) -> Tensor:
    """`Attention._fused`, block by block where the mask is a sliding window."""
    if torch.compiler.is_compiling() or not can_use_blocks(inputs):
        return Attention._fused(attention, q, k, v, inputs)
    assert inputs.mask.window_size is not None
    dropout = attention.dropout if attention.training else 0.0
    return causal_window_attention_in_blocks(
        q, k, v, inputs.mask.window_size, scale=attention.score.scale, dropout=dropout
    )


def can_use_blocks(inputs: AttentionInputs) -> bool:
    """Whether `causal_window_attention_in_blocks` supports these inputs and is faster."""
    mask, positions = inputs.mask, inputs.query_positions
    if not mask.only_causal_window or mask.window_size is None or inputs.bias is not None:
        return False
    time = positions.shape[1]
    if time < MIN_WINDOWS * mask.window_size or inputs.key_positions is not positions:
        return False
    return bool((positions.diff(dim=1) == 1).all())  # a window counts positions, not columns


def causal_window_attention_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, window_size: int, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention over the last `window_size` positions; (batch, heads, time, head_dim).

    The queries of a block of `window_size` positions need the keys of their own block and of the
    previous one.
    """
    batch, time = q.shape[0], q.shape[2]
    blocks = -(-time // window_size)
    padding = blocks * window_size - time

    def flatten_blocks(x: Tensor) -> Tensor:  # (batch blocks, heads, positions, head_dim)
        return x.transpose(1, 2).flatten(0, 1)

    def concat_previous(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, window_size, padding)).unflatten(2, (blocks + 1, window_size))
        return flatten_blocks(torch.cat([padded[:, :, :-1], padded[:, :, 1:]], dim=3))

    queries = F.pad(q, (0, 0, 0, padding)).unflatten(2, (blocks, window_size))
    distance = torch.arange(window_size).unsqueeze(1) + window_size - torch.arange(2 * window_size)
    allowed = ((distance >= 0) & (distance < window_size)).repeat(blocks, 1, 1, 1)
    allowed[0, ..., :window_size] = False  # there is no block before the first
    y = F.scaled_dot_product_attention(
        flatten_blocks(queries),
        concat_previous(k),
        concat_previous(v),
        attn_mask=allowed.repeat(batch, 1, 1, 1),
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :time]


def block_mask(mask: Mask, query_positions: Tensor, key_positions: Tensor) -> "BlockMask":
    """A mask as FlexAttention's `BlockMask`, with empty, partial and full blocks.

    The kind of a block follows from the smallest and largest position and document in it. A block
    that is wrongly classified as partial costs time only, since `mask_mod` is evaluated in it.
    """
    from torch.nn.attention.flex_attention import BlockMask

    time, seen = query_positions.shape[1], key_positions.shape[1]
    nonempty, full = _nonempty_and_full_blocks(mask, query_positions, key_positions)
    partial = nonempty & ~full
    documents, prefix_lengths, lengths = mask.document_ids, mask.prefix_lengths, mask.key_lengths
    positions_per_row = query_positions.shape[0] > 1

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b if positions_per_row else 0 * b
        query, key = query_positions[row, i], key_positions[row, j]
        result = key >= 0
        if mask.is_causal:
            causal = key <= query
            result = causal if prefix_lengths is None else causal | (key < prefix_lengths[b])
        if mask.window_size is not None:
            result = result & ((query - key).abs() < mask.window_size)
        if lengths is not None:
            result = result & (key < lengths[b])
        if documents is not None:
            result = result & (documents[b, i] == documents[b, j])
        return result

    return BlockMask.from_kv_blocks(
        *_order_blocks(partial),
        *_order_blocks(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(time, seen),
    )


def _order_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of key blocks for each query block, and their indices, followed by the others."""
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.to(torch.int32).contiguous()


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value in each block."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    return blocks.amin(-1), blocks.amax(-1)


def _nonempty_and_full_blocks(
    mask: Mask, query_positions: Tensor, key_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether some pairs of each block may be allowed, and whether all are."""
    query_low, query_high = (x.unsqueeze(-1) for x in _range(query_positions))
    key_low, key_high = (x.unsqueeze(-2) for x in _range(key_positions))
    shape = torch.broadcast_shapes(query_low.shape, key_low.shape)  # (batch, queries, keys)
    nonempty = full = torch.ones(shape, dtype=torch.bool, device=query_low.device)
    if mask.is_causal:
        causal_nonempty, causal_full = key_low <= query_high, key_high <= query_low
        if mask.prefix_lengths is not None:
            prefix = mask.prefix_lengths.view(-1, 1, 1)
            causal_nonempty = causal_nonempty | (key_low < prefix)
            causal_full = causal_full | (key_high < prefix)
        nonempty, full = nonempty & causal_nonempty, full & causal_full
    if mask.window_size is not None:
        nearest = torch.maximum(query_low - key_high, key_low - query_high)
        farthest = torch.maximum(query_high - key_low, key_high - query_low)
        nonempty, full = (
            nonempty & (nearest < mask.window_size),
            full & (farthest < mask.window_size),
        )
    if mask.key_lengths is not None:
        length = mask.key_lengths.view(-1, 1, 1)
        nonempty, full = nonempty & (key_low < length), full & (key_high < length)
    if mask.document_ids is not None:
        first, last = _range(mask.document_ids)
        nonempty = nonempty & (first.unsqueeze(-1) <= last.unsqueeze(-2))
        nonempty = nonempty & (first.unsqueeze(-2) <= last.unsqueeze(-1))
        full = full & (first.unsqueeze(-1) == last.unsqueeze(-2))
        full = full & (first.unsqueeze(-2) == last.unsqueeze(-1))
    return nonempty.unsqueeze(1), full.unsqueeze(1)
