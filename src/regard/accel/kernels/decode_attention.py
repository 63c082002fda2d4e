"""The kernel of attention for one token per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import Pairing, early, shared_memory, shuffled, wait
from regard.nn.state import KVCache

TILE = 1 << 16  # bytes of keys that a program looks at
PROGRAMS = 128  # about as many as there are multiprocessors
SMALL, STAGES = 128, 3  # keys of a step, and steps loaded ahead, where there is enough to do
GROUPS = 1 << 16  # at most so many heads of keys in all rows


@triton.jit
def _attend_kernel(
    q,
    other,
    wave,
    sign,
    cos,
    sin,
    keys,
    values,
    lengths,
    out,
    parts,
    sums,
    arrived,
    scale,
    window,
    capacity,
    stride,
    waves,
    splits,
    tiles,
    RAW: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    MANY: tl.constexpr,
    ALONE: tl.constexpr,
    SEVERAL: tl.constexpr,
    TILE: tl.constexpr,
    SHUFFLED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of keys, its group of queries, one share of the keys; who is last adds up.

    All keys but the newest were there before, and so the first tile is loaded before the wait.
    Of RAW queries, which keys and values follow, the newest are turned and stored here.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = row * (HEADS // GROUP) + head
    own, d, s = tl.arange(0, MANY), tl.arange(0, HEAD), split * tiles * TILE + tl.arange(0, TILE)
    mate = (head * GROUP + own)[:, None] * HEAD
    place = row * HEADS * HEAD + mate + d[None, :]
    to = row * HEADS * HEAD + shuffled(mate + d[None, :]) if SHUFFLED else place
    real = (own < GROUP)[:, None]
    newest = tl.load(lengths + row)
    mine = newest // (TILE * tiles) == split
    keys += group * capacity * HEAD
    values += group * capacity * HEAD
    old = ((s < newest) & (s > newest - window))[:, None]
    k = tl.load(keys + s[:, None] * HEAD + d[None, :], mask=old, other=0.0)
    v = tl.load(values + s[:, None] * HEAD + d[None, :], mask=old, other=0.0)
    if RAW:
        swap, which = tl.load(other + d), tl.load(wave + d)
        c = tl.load(cos + newest * waves + which, mask=which >= 0, other=1.0)
        turn = tl.load(sin + newest * waves + which, mask=which >= 0, other=0.0) * tl.load(sign + d)
    wait(EARLY)
    kind = keys.dtype.element_ty
    if RAW:
        q += row * stride
        asked = tl.load(q + mate + d[None, :], mask=real, other=0.0).to(tl.float32) * c[None, :]
        swapped = tl.load(q + mate + swap[None, :], mask=real, other=0.0).to(tl.float32)
        asked = (asked + swapped * turn[None, :]).to(kind)
        q += (HEADS + head) * HEAD
        new_k = tl.load(q + d).to(tl.float32) * c + tl.load(q + swap).to(tl.float32) * turn
        new_v = tl.load(q + (HEADS // GROUP) * HEAD + d)
        new_k, new_v = new_k.to(kind), new_v.to(kind)
        tl.store(keys + newest * HEAD + d, new_k, mask=mine)
        tl.store(values + newest * HEAD + d, new_v, mask=mine)
        new_k, new_v = new_k.to(tl.float32), new_v.to(tl.float32)
    else:
        asked = tl.load(q + place, mask=real, other=0.0).to(kind)
        new_k = tl.load(keys + newest * HEAD + d).to(tl.float32)
        new_v = tl.load(values + newest * HEAD + d).to(tl.float32)
    score = tl.dot(asked, tl.trans(k), input_precision="ieee") * scale
    score = tl.where(tl.trans(old), score, -float("inf"))
    new_score = tl.sum(asked.to(tl.float32) * new_k[None, :], 1) * scale
    new_score = tl.where(mine, new_score, -float("inf"))
    most = tl.maximum(tl.maximum(tl.max(score, 1), new_score), -1e30)  # finite, to subtract
    share = tl.exp(score - most[:, None])
    new_share = tl.exp(new_score - most)
    total = tl.sum(share, 1) + new_share
    found = tl.dot(share.to(v.dtype), v, input_precision="ieee")
    found += new_share[:, None] * new_v[None, :]
    if SEVERAL:
        for tile in range(1, tl.minimum(tiles, tl.cdiv(newest, TILE) - split * tiles)):
            here = s + tile * TILE
            old = ((here < newest) & (here > newest - window))[:, None]
            k = tl.load(keys + here[:, None] * HEAD + d[None, :], mask=old, other=0.0)
            v = tl.load(values + here[:, None] * HEAD + d[None, :], mask=old, other=0.0)
            score = tl.dot(asked, tl.trans(k), input_precision="ieee") * scale
            score = tl.where(tl.trans(old), score, -float("inf"))
            higher = tl.maximum(most, tl.max(score, 1))
            share, fade = tl.exp(score - higher[:, None]), tl.exp(most - higher)
            total = total * fade + tl.sum(share, 1)
            found = found * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
            most = higher
    if ALONE:
        tl.store(out + to, (found / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        part = (group * splits + split) * MANY + own
        tl.store(parts + part[:, None] * HEAD + d[None, :], found)
        tl.store(sums + 2 * part, most)
        tl.store(sums + 2 * part + 1, total)
        tl.debug_barrier()  # all of this share is written before it counts as arrived
        if tl.atomic_add(arrived + group, 1) == splits - 1:
            tl.store(arrived + group, 0)
            most = tl.full((MANY,), -1e30, tl.float32)
            total = tl.zeros((MANY,), tl.float32)
            found = tl.zeros((MANY, HEAD), tl.float32)
            for each in range(splits):
                part = (group * splits + each) * MANY + own
                peak = tl.load(sums + 2 * part, volatile=True)
                higher = tl.maximum(most, peak)
                fade, grow = tl.exp(most - higher), tl.exp(peak - higher)
                total = total * fade + grow * tl.load(sums + 2 * part + 1, volatile=True)
                piece = tl.load(parts + part[:, None] * HEAD + d[None, :], volatile=True)
                found = found * fade[:, None] + grow[:, None] * piece
                most = higher
            tl.store(out + to, (found / total[:, None]).to(out.dtype.element_ty), mask=real)


def attend(
    q: Tensor,
    state: KVCache,
    lengths: Tensor,
    scale: float,
    window: int | None,
    arrived: Tensor,
    raw: tuple[Pairing, tuple[Tensor, ...]] | None = None,
    shuffle: bool = False,
) -> Tensor:
    """What each query finds among the keys up to its row's length, its own included.

    With `raw`, how they are turned, the queries come with the keys and values of their rows, as
    a packed product gave them; those are turned and stored too. With `shuffle`, what is found
    lies in the order of `common.shuffled`.
    """
    rows, kv_heads, capacity, head_dim = state.keys.shape
    heads = q.shape[1] // head_dim - (0 if raw is None else 2 * kv_heads)
    group = heads // kv_heads
    many = max(16, triton.next_power_of_2(group))  # the smallest product the cores do
    busy = rows * kv_heads >= PROGRAMS  # then small steps, which leave room for others
    tile = SMALL if busy else TILE // (state.keys.itemsize * head_dim)
    tile = min(triton.next_power_of_2(max(capacity, 16)), tile)
    loaded = 4 if busy else 2  # tiles of keys and values at once
    room = shared_memory(q) - (1 << 14) - many * head_dim * state.keys.itemsize
    while tile > 16 and loaded * tile * head_dim * state.keys.itemsize > room:
        tile //= 2
    tiles = triton.cdiv(capacity, tile) if busy else 1
    splits = triton.cdiv(capacity, tile * tiles)
    out = q.new_empty(rows, heads * head_dim)
    shares = rows * kv_heads * splits * many
    parts = torch.empty(shares, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(shares, 2, dtype=torch.float32, device=q.device)
    pairing, turns = (None, (None, None)) if raw is None else raw
    _attend_kernel[(rows, kv_heads, splits)](
        q,
        pairing and pairing.other,
        pairing and pairing.waves,
        pairing and pairing.signs,
        *turns,
        state.keys,
        state.values,
        lengths,
        out,
        parts,
        sums,
        arrived,
        scale,
        capacity if window is None else window,
        capacity,
        q.shape[1],
        0 if turns[0] is None else turns[0].shape[1],
        splits,
        tiles,
        RAW=raw is not None,
        HEADS=heads,
        GROUP=group,
        HEAD=head_dim,
        MANY=many,
        ALONE=splits == 1,
        SEVERAL=tiles > 1,
        TILE=tile,
        SHUFFLED=shuffle,
        num_warps=8 if tile * head_dim > 8192 else 4,
        num_stages=STAGES,
        **early(),
    )
    return out
