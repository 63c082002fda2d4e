"""Kernels between the products of a prompt's tokens, each in place of several of torch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import Bend, Pairing, bent, early, vector, wait
from regard.nn.state import KVCache


@triton.jit
def _store_kernel(
    qkv,
    other,
    wave,
    sign,
    cos,
    sin,
    q,
    keys,
    values,
    time,
    waves,
    capacity,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, at = token // time, token % time
    d, h = tl.arange(0, HEAD), (tl.program_id(1) * SOME + tl.arange(0, SOME))[:, None]
    swap, which = tl.load(other + d), tl.load(wave + d)
    c = tl.load(cos + at * waves + which, mask=which >= 0, other=1.0)
    s = tl.load(sin + at * waves + which, mask=which >= 0, other=0.0) * tl.load(sign + d)
    wait(EARLY)
    qkv += token * (HEADS + 2 * KEYS) * HEAD
    inside = h < HEADS + 2 * KEYS
    x = tl.load(qkv + h * HEAD + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(qkv + h * HEAD + swap[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.where(h < HEADS + KEYS, x * c[None, :] + y * s[None, :], x)
    q += token * HEADS * HEAD
    tl.store(q + h * HEAD + d[None, :], y.to(q.dtype.element_ty), mask=h < HEADS)
    kind = keys.dtype.element_ty
    k, v = h - HEADS, h - HEADS - KEYS
    place = row * KEYS * capacity * HEAD + at * HEAD + d[None, :]
    tl.store(keys + place + k * capacity * HEAD, y.to(kind), mask=(k >= 0) & (k < KEYS))
    tl.store(values + place + v * capacity * HEAD, y.to(kind), mask=(v >= 0) & inside)


@triton.jit
def _norm_kernel(x, gain, out, width, eps, WIDE: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDE)
    g = vector(gain, 0, width, WIDE)
    wait(EARLY)
    v = vector(x + row * width, 0, width, WIDE)
    v *= tl.rsqrt(tl.sum(v * v) / width + eps) * g
    tl.store(out + row * width + columns, v.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _gate_kernel(
    both,
    out,
    width,
    GATED: tl.constexpr,
    BEND: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * SOME + tl.arange(0, SOME)
    both += row * width * (2 if GATED else 1)
    wait(EARLY)
    y = bent(tl.load(both + n, mask=n < width, other=0.0).to(tl.float32), BEND)
    if GATED:
        y *= tl.load(both + width + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, y.to(out.dtype.element_ty), mask=n < width)


def turn_and_store(
    qkv: Tensor, time: int, pairing: Pairing, turns: tuple[Tensor, ...], state: KVCache
) -> Tensor:
    """Rotate q and k of a prompt, store k and v in the KV cache; return the rotated q."""
    _, kv_heads, capacity, head_dim = state.keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = qkv.new_empty(len(qkv), heads * head_dim)
    some = max(1, 1024 // head_dim)
    _store_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, some))](
        qkv,
        pairing.other,
        pairing.waves,
        pairing.signs,
        *turns,
        q,
        state.keys,
        state.values,
        time,
        turns[0].shape[1],
        capacity,
        HEADS=heads,
        KEYS=kv_heads,
        HEAD=head_dim,
        SOME=some,
        **early(),
    )
    return q


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row."""
    rows, width = x.shape
    out, wide = torch.empty_like(x), triton.next_power_of_2(width)
    _norm_kernel[(rows,)](x, gain, out, width, eps, WIDE=wide, num_warps=8, **early())
    return out


def gate(both: Tensor, bend: Bend) -> Tensor:
    """The bend and the gate of `project`, for what a plain product gave."""
    rows, width = len(both), both.shape[1] // (1 + bend.gated)
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    grid = (rows, triton.cdiv(width, 1024))
    _gate_kernel[grid](both, out, width, GATED=bend.gated, BEND=bend.name, SOME=1024, **early())
    return out
