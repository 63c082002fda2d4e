"""The Triton kernel of decode attention: one query position per row over the KV cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import (
    RotaryPairs,
    pdl_options,
    permute_columns,
    shared_memory,
    wait_for_previous,
)
from regard.nn.state import KVCache

TILE_BYTES = 1 << 16  # of the keys that a program reads
BUSY_PROGRAMS = 128  # this many programs occupy all multiprocessors without splitting the keys
BUSY_TILE, STAGES = 128, 3  # keys per iteration and pipeline stages, if so
MAX_GROUPS = 1 << 16  # the most key heads of all rows together


@triton.jit
def _attention_kernel(
    q,
    partner,
    frequency_of,
    sine_sign,
    cos,
    sin,
    keys,
    values,
    lengths,
    out,
    partials,
    stats,
    counters,
    scale,
    window,
    capacity,
    stride,
    frequencies,
    splits,
    tiles,
    PACKED_QKV: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
    MANY_TILES: tl.constexpr,
    TILE: tl.constexpr,
    PERMUTE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One key head, its group of query heads, one split of the keys; the last program sums up.

    Only the newest key may still be missing, so the first tile is loaded before the wait. With
    PACKED_QKV, q holds unrotated q, k and v: q and k are rotated here, k and v are stored.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = row * (HEADS // GROUP) + head
    query, d, s = (
        tl.arange(0, BLOCK_QUERIES),
        tl.arange(0, HEAD),
        split * tiles * TILE + tl.arange(0, TILE),
    )
    head_offset = (head * GROUP + query)[:, None] * HEAD
    offset = row * HEADS * HEAD + head_offset + d[None, :]
    out_offset = (
        row * HEADS * HEAD + permute_columns(head_offset + d[None, :]) if PERMUTE else offset
    )
    real = (query < GROUP)[:, None]
    position = tl.load(lengths + row)
    owns_position = position // (TILE * tiles) == split
    keys += group * capacity * HEAD
    values += group * capacity * HEAD
    seen = ((s < position) & (s > position - window))[:, None]
    k = tl.load(keys + s[:, None] * HEAD + d[None, :], mask=seen, other=0.0)
    v = tl.load(values + s[:, None] * HEAD + d[None, :], mask=seen, other=0.0)
    if PACKED_QKV:
        partner_column, frequency = tl.load(partner + d), tl.load(frequency_of + d)
        c = tl.load(cos + position * frequencies + frequency, mask=frequency >= 0, other=1.0)
        signed_sin = tl.load(
            sin + position * frequencies + frequency, mask=frequency >= 0, other=0.0
        ) * tl.load(sine_sign + d)
    wait_for_previous(PDL)
    dtype = keys.dtype.element_ty
    if PACKED_QKV:
        q += row * stride
        queries = (
            tl.load(q + head_offset + d[None, :], mask=real, other=0.0).to(tl.float32) * c[None, :]
        )
        partners = tl.load(q + head_offset + partner_column[None, :], mask=real, other=0.0).to(
            tl.float32
        )
        queries = (queries + partners * signed_sin[None, :]).to(dtype)
        q += (HEADS + head) * HEAD
        new_k = (
            tl.load(q + d).to(tl.float32) * c
            + tl.load(q + partner_column).to(tl.float32) * signed_sin
        )
        new_v = tl.load(q + (HEADS // GROUP) * HEAD + d)
        new_k, new_v = new_k.to(dtype), new_v.to(dtype)
        tl.store(keys + position * HEAD + d, new_k, mask=owns_position)
        tl.store(values + position * HEAD + d, new_v, mask=owns_position)
        new_k, new_v = new_k.to(tl.float32), new_v.to(tl.float32)
    else:
        queries = tl.load(q + offset, mask=real, other=0.0).to(dtype)
        new_k = tl.load(keys + position * HEAD + d).to(tl.float32)
        new_v = tl.load(values + position * HEAD + d).to(tl.float32)
    score = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    score = tl.where(tl.trans(seen), score, -float("inf"))
    new_score = tl.sum(queries.to(tl.float32) * new_k[None, :], 1) * scale
    new_score = tl.where(owns_position, new_score, -float("inf"))
    running_max = tl.maximum(tl.maximum(tl.max(score, 1), new_score), -1e30)  # finite, to subtract
    weights = tl.exp(score - running_max[:, None])
    new_weight = tl.exp(new_score - running_max)
    total = tl.sum(weights, 1) + new_weight
    accumulated = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    accumulated += new_weight[:, None] * new_v[None, :]
    if MANY_TILES:
        for tile in range(1, tl.minimum(tiles, tl.cdiv(position, TILE) - split * tiles)):
            tile_positions = s + tile * TILE
            seen = ((tile_positions < position) & (tile_positions > position - window))[:, None]
            k = tl.load(keys + tile_positions[:, None] * HEAD + d[None, :], mask=seen, other=0.0)
            v = tl.load(values + tile_positions[:, None] * HEAD + d[None, :], mask=seen, other=0.0)
            score = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
            score = tl.where(tl.trans(seen), score, -float("inf"))
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
            mask=real,
        )
    else:
        partial = (group * splits + split) * BLOCK_QUERIES + query
        tl.store(partials + partial[:, None] * HEAD + d[None, :], accumulated)
        tl.store(stats + 2 * partial, running_max)
        tl.store(stats + 2 * partial + 1, total)
        tl.debug_barrier()  # all of this split is written before it is counted
        if tl.atomic_add(counters + group, 1) == splits - 1:
            tl.store(counters + group, 0)
            running_max = tl.full((BLOCK_QUERIES,), -1e30, tl.float32)
            total = tl.zeros((BLOCK_QUERIES,), tl.float32)
            accumulated = tl.zeros((BLOCK_QUERIES, HEAD), tl.float32)
            for other_split in range(splits):
                partial = (group * splits + other_split) * BLOCK_QUERIES + query
                split_max = tl.load(stats + 2 * partial, volatile=True)
                new_max = tl.maximum(running_max, split_max)
                rescale, split_scale = tl.exp(running_max - new_max), tl.exp(split_max - new_max)
                total = total * rescale + split_scale * tl.load(
                    stats + 2 * partial + 1, volatile=True
                )
                split_values = tl.load(
                    partials + partial[:, None] * HEAD + d[None, :], volatile=True
                )
                accumulated = accumulated * rescale[:, None] + split_scale[:, None] * split_values
                running_max = new_max
            tl.store(
                out + out_offset,
                (accumulated / total[:, None]).to(out.dtype.element_ty),
                mask=real,
            )


def attend(
    q: Tensor,
    cache: KVCache,
    lengths: Tensor,
    scale: float,
    window: int | None,
    counters: Tensor,
    rotation: tuple[RotaryPairs, tuple[Tensor, ...]] | None = None,
    permute: bool = False,
) -> Tensor:
    """Attention of one query position per row over its KV cache, its own key included.

    With `rotation`, q holds unrotated q, k and v of a packed projection; they are rotated and
    stored too. With `permute`, the columns of the result are in the order of `permute_columns`.
    """
    rows, kv_heads, capacity, head_dim = cache.keys.shape
    heads = q.shape[1] // head_dim - (0 if rotation is None else 2 * kv_heads)
    group = heads // kv_heads
    # 16 is the smallest size of a tensor core matmul
    block_queries = max(16, triton.next_power_of_2(group))
    busy = rows * kv_heads >= BUSY_PROGRAMS  # small tiles then leave room for other programs
    tile = BUSY_TILE if busy else TILE_BYTES // (cache.keys.itemsize * head_dim)
    tile = min(triton.next_power_of_2(max(capacity, 16)), tile)
    tiles_loaded = 4 if busy else 2  # of keys and values at once
    shared_bytes = shared_memory(q) - (1 << 14) - block_queries * head_dim * cache.keys.itemsize
    while tile > 16 and tiles_loaded * tile * head_dim * cache.keys.itemsize > shared_bytes:
        tile //= 2
    tiles = triton.cdiv(capacity, tile) if busy else 1
    splits = triton.cdiv(capacity, tile * tiles)
    out = q.new_empty(rows, heads * head_dim)
    num_partials = rows * kv_heads * splits * block_queries
    partials = torch.empty(num_partials, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(num_partials, 2, dtype=torch.float32, device=q.device)
    pairs, tables = (None, (None, None)) if rotation is None else rotation
    _attention_kernel[(rows, kv_heads, splits)](
        q,
        pairs and pairs.partner,
        pairs and pairs.frequencies,
        pairs and pairs.signs,
        *tables,
        cache.keys,
        cache.values,
        lengths,
        out,
        partials,
        stats,
        counters,
        scale,
        capacity if window is None else window,
        capacity,
        q.shape[1],
        0 if tables[0] is None else tables[0].shape[1],
        splits,
        tiles,
        PACKED_QKV=rotation is not None,
        HEADS=heads,
        GROUP=group,
        HEAD=head_dim,
        BLOCK_QUERIES=block_queries,
        SINGLE_SPLIT=splits == 1,
        MANY_TILES=tiles > 1,
        TILE=tile,
        PERMUTE=permute,
        num_warps=8 if tile * head_dim > 8192 else 4,
        num_stages=STAGES,
        **pdl_options(),
    )
    return out
