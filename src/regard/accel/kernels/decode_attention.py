"""The Triton kernel of decode attention: one query position per row over the KV cache."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import (
    RotaryPairs,
    pdl_options,
    permute_columns,
    shared_memory,
    soft_cap,
    wait_for_previous,
)
from regard.nn.state import KVCache

TILE_BYTES = 1 << 16  # bytes of keys in a tile that is the only one of its program
FULL_OCCUPANCY_PROGRAMS = 128  # programs that occupy the multiprocessors of an H200
PIPELINED_TILE, STAGES = 128, 3  # keys per iteration of a loop over tiles, and its pipeline stages
MAX_KV_HEADS = 1 << 16  # maximum number of KV heads, summed over all rows


@triton.jit
def _normalize(x, gain, partner_gain, partners, head_dim, eps):
    """RMSNorm of each row of q or k, and of the RoPE partners of its columns: the same RMS."""
    inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / head_dim + eps)[:, None]
    return x * inverse_rms * gain[None, :], partners * inverse_rms * partner_gain[None, :]


@triton.jit
def _scores(
    queries, k, allowed, distance, slopes, scale, cap, HAS_CAP: tl.constexpr, ALIBI: tl.constexpr
):
    """The scores of keys at these distances; -inf for masked keys."""
    score = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    if HAS_CAP:
        score = soft_cap(score, cap)
    if ALIBI:
        score -= slopes[:, None] * distance[None, :].to(tl.float32)
    return tl.where(allowed[None, :], score, -float("inf"))


@triton.jit
def _attention_kernel(
    qkv,
    partner,
    column_frequency_index,
    sine_sign,
    cos,
    sin,
    q_gain,
    k_gain,
    slope,
    keys,
    values,
    lengths,
    out,
    partials,
    stats,
    counters,
    scale,
    cap,
    eps,
    window,
    capacity,
    num_frequencies,
    splits,
    tiles,
    PACKED_QKV: tl.constexpr,
    ROTARY: tl.constexpr,
    QK_NORM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEAD_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    MANY_TILES: tl.constexpr,
    TILE: tl.constexpr,
    PERMUTE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One KV head, its group of query heads, one split of the keys (split-KV, Flash-Decoding).

    The last program to finish combines the splits.

    All keys but the newest are in the cache, so the first tile is loaded before the wait. With
    PACKED_QKV, `qkv` holds q, k and v of the projection: q and k are normalized and rotated here,
    k and v are stored. Otherwise it holds q alone.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    row_head = row * KV_HEADS + head
    query, d, s = (
        tl.arange(0, BLOCK_QUERIES),
        tl.arange(0, BLOCK_HEAD_DIM),
        split * tiles * TILE + tl.arange(0, TILE),
    )
    in_head = d < HEAD_DIM
    head_offset = (head * GROUP + query)[:, None] * HEAD_DIM
    out_offset = head_offset + d[None, :]
    out_offset = row * HEADS * HEAD_DIM + (permute_columns(out_offset) if PERMUTE else out_offset)
    valid = (query < GROUP)[:, None] & in_head[None, :]
    position = tl.load(lengths + row)
    has_new_key = position // (TILE * tiles) == split
    keys += row_head * capacity * HEAD_DIM
    values += row_head * capacity * HEAD_DIM
    allowed = (s < position) & (s > position - window)
    inside = allowed[:, None] & in_head[None, :]
    k = tl.load(keys + s[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    v = tl.load(values + s[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    partner_column = d
    if PACKED_QKV and ROTARY:
        partner_column = tl.load(partner + d, mask=in_head, other=0)
        frequency_index = tl.load(column_frequency_index + d, mask=in_head, other=-1)
        rotated = frequency_index >= 0
        c = tl.load(cos + position * num_frequencies + frequency_index, mask=rotated, other=1.0)
        signed_sin = tl.load(
            sin + position * num_frequencies + frequency_index, mask=rotated, other=0.0
        )
        signed_sin *= tl.load(sine_sign + d, mask=in_head, other=0)
    slopes = tl.zeros((BLOCK_QUERIES,), tl.float32)
    if ALIBI:
        slopes = tl.load(slope + head * GROUP + query, mask=query < GROUP, other=0.0)
    wait_for_previous(PDL)
    dtype = keys.dtype.element_ty
    if PACKED_QKV:
        qkv += row * (HEADS + 2 * KV_HEADS) * HEAD_DIM
        queries = tl.load(qkv + head_offset + d[None, :], mask=valid, other=0.0).to(tl.float32)
        partners = tl.load(qkv + head_offset + partner_column[None, :], mask=valid, other=0.0)
        partners = partners.to(tl.float32)
        qkv += (HEADS + head) * HEAD_DIM
        new_k = tl.load(qkv + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
        new_partner = tl.load(qkv + partner_column, mask=in_head, other=0.0).to(tl.float32)[None, :]
        new_v = tl.load(qkv + KV_HEADS * HEAD_DIM + d, mask=in_head, other=0.0).to(dtype)
        if QK_NORM:
            g = tl.load(q_gain + d, mask=in_head, other=0.0)
            partner_g = tl.load(q_gain + partner_column, mask=in_head, other=0.0)
            queries, partners = _normalize(queries, g, partner_g, partners, HEAD_DIM, eps)
            g = tl.load(k_gain + d, mask=in_head, other=0.0)
            partner_g = tl.load(k_gain + partner_column, mask=in_head, other=0.0)
            new_k, new_partner = _normalize(new_k, g, partner_g, new_partner, HEAD_DIM, eps)
        if ROTARY:
            queries = queries * c[None, :] + partners * signed_sin[None, :]
            new_k = new_k * c[None, :] + new_partner * signed_sin[None, :]
        queries, new_k = queries.to(dtype), new_k.to(dtype)
        store_mask = in_head & has_new_key
        tl.store(keys + position * HEAD_DIM + d[None, :], new_k, mask=store_mask[None, :])
        tl.store(values + position * HEAD_DIM + d, new_v, mask=store_mask)
        new_v = new_v.to(tl.float32)
    else:
        qkv += row * HEADS * HEAD_DIM
        queries = tl.load(qkv + head_offset + d[None, :], mask=valid, other=0.0).to(dtype)
        new_k = tl.load(keys + position * HEAD_DIM + d, mask=in_head, other=0.0)[None, :]
        new_v = tl.load(values + position * HEAD_DIM + d, mask=in_head, other=0.0).to(tl.float32)
    score = _scores(queries, k, allowed, position - s, slopes, scale, cap, HAS_CAP, ALIBI)
    new_score = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    if HAS_CAP:
        new_score = soft_cap(new_score, cap)
    new_score = tl.where(has_new_key, new_score, -float("inf"))
    running_max = tl.maximum(tl.maximum(tl.max(score, 1), new_score), -1e30)  # finite, to subtract
    weights = tl.exp(score - running_max[:, None])
    new_weight = tl.exp(new_score - running_max)
    total = tl.sum(weights, 1) + new_weight
    accumulated = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    accumulated += new_weight[:, None] * new_v[None, :]
    if MANY_TILES:
        for tile in range(1, tl.minimum(tiles, tl.cdiv(position, TILE) - split * tiles)):
            t = s + tile * TILE
            allowed = (t < position) & (t > position - window)
            inside = allowed[:, None] & in_head[None, :]
            k = tl.load(keys + t[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
            v = tl.load(values + t[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
            score = _scores(queries, k, allowed, position - t, slopes, scale, cap, HAS_CAP, ALIBI)
            new_max = tl.maximum(running_max, tl.max(score, 1))
            weights, rescale = tl.exp(score - new_max[:, None]), tl.exp(running_max - new_max)
            total = total * rescale + tl.sum(weights, 1)
            accumulated = accumulated * rescale[:, None] + tl.dot(
                weights.to(v.dtype), v, input_precision="ieee"
            )
            running_max = new_max
    if SINGLE_SPLIT:
        tl.store(
            out + out_offset,
            (accumulated / total[:, None]).to(out.dtype.element_ty),
            mask=valid,
        )
    else:
        partial = (row_head * splits + split) * BLOCK_QUERIES + query
        tl.store(partials + partial[:, None] * BLOCK_HEAD_DIM + d[None, :], accumulated)
        tl.store(stats + 2 * partial, running_max)
        tl.store(stats + 2 * partial + 1, total)
        tl.debug_barrier()  # all of this split is written before it is counted
        if tl.atomic_add(counters + row_head, 1) == splits - 1:
            tl.store(counters + row_head, 0)
            # ".cg" reads from the L2 cache, where the other programs have written
            first = row_head * splits * BLOCK_QUERIES + query
            running_max = tl.full((BLOCK_QUERIES,), -1e30, tl.float32)
            for other_split in tl.range(splits, loop_unroll_factor=8):
                partial = first + other_split * BLOCK_QUERIES
                split_max = tl.load(stats + 2 * partial, cache_modifier=".cg")
                running_max = tl.maximum(running_max, split_max)
            total = tl.zeros((BLOCK_QUERIES,), tl.float32)
            accumulated = tl.zeros((BLOCK_QUERIES, BLOCK_HEAD_DIM), tl.float32)
            for other_split in tl.range(splits, loop_unroll_factor=8):
                partial = first + other_split * BLOCK_QUERIES
                split_max = tl.load(stats + 2 * partial, cache_modifier=".cg")
                split_scale = tl.exp(split_max - running_max)
                total += split_scale * tl.load(stats + 2 * partial + 1, cache_modifier=".cg")
                split_values = tl.load(
                    partials + partial[:, None] * BLOCK_HEAD_DIM + d[None, :],
                    mask=valid,
                    other=0.0,
                    cache_modifier=".cg",
                )
                accumulated += split_scale[:, None] * split_values
            tl.store(
                out + out_offset,
                (accumulated / total[:, None]).to(out.dtype.element_ty),
                mask=valid,
            )


class AttentionOptions(NamedTuple):
    """The options of the attention of a layer; None for those that it does not use."""

    scale: float
    cap: float | None = None  # of the scores: soft-capping
    window: int | None = None
    rotary: tuple[RotaryPairs, tuple[Tensor, ...]] | None = None  # cos and sin by position
    qk_gains: tuple[Tensor, Tensor] | None = None  # of the RMSNorms of q and k, float32
    qk_eps: float = 0.0
    slopes: Tensor | None = None  # ALiBi, of each query head


def attend(
    qkv: Tensor,
    cache: KVCache,
    lengths: Tensor,
    options: AttentionOptions,
    counters: Tensor,
    *,
    only_q: bool = False,
    permute: bool = False,
) -> Tensor:
    """Attention of one query position per row over its KV cache, including its own key.

    `qkv` is the output of the packed projection; k and v are stored in the cache. With `only_q`, it
    is the rotated q alone, and k and v are in the cache already. With `permute`, the columns of the
    result are in the order of `permute_columns`.
    """
    rows, kv_heads, capacity, head_dim = cache.keys.shape
    heads = qkv.shape[1] // head_dim - (0 if only_q else 2 * kv_heads)
    group, block_head_dim = heads // kv_heads, triton.next_power_of_2(head_dim)
    # 16 is the smallest size of a tensor core matmul
    block_queries = max(16, triton.next_power_of_2(group))
    tile, tiles, splits = _split_keys(qkv, cache, rows * kv_heads, block_queries, block_head_dim)
    out = qkv.new_empty(rows, heads * head_dim)
    num_partials = rows * kv_heads * splits * block_queries
    partials = torch.empty(num_partials, block_head_dim, dtype=torch.float32, device=qkv.device)
    stats = torch.empty(num_partials, 2, dtype=torch.float32, device=qkv.device)
    pairs, tables = (None, (None, None)) if options.rotary is None else options.rotary
    _attention_kernel[(rows, kv_heads, splits)](
        qkv,
        pairs and pairs.partner,
        pairs and pairs.column_frequency_index,
        pairs and pairs.signs,
        *tables,
        *(options.qk_gains or (None, None)),
        options.slopes,
        cache.keys,
        cache.values,
        lengths,
        out,
        partials,
        stats,
        counters,
        options.scale,
        0.0 if options.cap is None else options.cap,
        options.qk_eps,
        capacity if options.window is None else options.window,
        capacity,
        0 if tables[0] is None else tables[0].shape[1],
        splits,
        tiles,
        PACKED_QKV=not only_q,
        ROTARY=options.rotary is not None,
        QK_NORM=options.qk_gains is not None,
        HAS_CAP=options.cap is not None,
        ALIBI=options.slopes is not None,
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_HEAD_DIM=block_head_dim,
        BLOCK_QUERIES=block_queries,
        SINGLE_SPLIT=splits == 1,
        MANY_TILES=tiles > 1,
        TILE=tile,
        PERMUTE=permute,
        num_warps=8 if tile * block_head_dim > 8192 else 4,
        num_stages=STAGES,
        **pdl_options(),
    )
    return out


def _split_keys(
    qkv: Tensor, cache: KVCache, programs: int, block_queries: int, block_head_dim: int
) -> tuple[int, int, int]:
    """The keys of a tile, the tiles of a split, and the splits of the KV cache of a head.

    A short KV cache has splits of one tile, which is loaded before the wait for the previous
    kernel. A long one has as many splits as occupy the GPU, each a pipelined loop over its tiles.
    """
    capacity, itemsize = cache.keys.shape[2], cache.keys.itemsize
    shared_bytes = shared_memory(qkv) - (1 << 14) - block_queries * block_head_dim * itemsize
    max_splits = max(1, FULL_OCCUPANCY_PROGRAMS // programs)
    # a tile of keys and one of values are in shared memory, in the pipelined loop two of each
    for tile, num_buffers in ((TILE_BYTES // (itemsize * block_head_dim), 2), (PIPELINED_TILE, 4)):
        tile = min(triton.next_power_of_2(max(capacity, 16)), tile)
        while tile > 16 and num_buffers * tile * block_head_dim * itemsize > shared_bytes:
            tile //= 2
        splits = triton.cdiv(capacity, tile)
        if splits <= max_splits and programs < FULL_OCCUPANCY_PROGRAMS:
            return tile, 1, splits
    tiles = triton.cdiv(splits, max_splits)
    return tile, tiles, triton.cdiv(splits, tiles)
