"""Triton kernels of prefill, between its matmuls: rotation and KV cache, RMSNorm, activation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import (
    Activation,
    RotaryPairs,
    activate,
    load_vector,
    pdl_options,
    wait_for_previous,
)
from regard.accel.packed import NormedLinear
from regard.nn.state import KVCache


@triton.jit
def _store_kernel(
    qkv,
    partner,
    frequency_of,
    sine_sign,
    cos,
    sin,
    q,
    keys,
    values,
    time,
    frequencies,
    capacity,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, position = token // time, token % time
    column, h = tl.arange(0, HEAD), (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    partner_column, frequency = tl.load(partner + column), tl.load(frequency_of + column)
    c = tl.load(cos + position * frequencies + frequency, mask=frequency >= 0, other=1.0)
    s = tl.load(sin + position * frequencies + frequency, mask=frequency >= 0, other=0.0) * tl.load(
        sine_sign + column
    )
    wait_for_previous(PDL)
    qkv += token * (HEADS + 2 * KV_HEADS) * HEAD
    inside = h < HEADS + 2 * KV_HEADS
    x = tl.load(qkv + h * HEAD + column[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(qkv + h * HEAD + partner_column[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.where(h < HEADS + KV_HEADS, x * c[None, :] + y * s[None, :], x)
    q += token * HEADS * HEAD
    tl.store(q + h * HEAD + column[None, :], y.to(q.dtype.element_ty), mask=h < HEADS)
    dtype = keys.dtype.element_ty
    k, v = h - HEADS, h - HEADS - KV_HEADS
    offset = row * KV_HEADS * capacity * HEAD + position * HEAD + column[None, :]
    tl.store(keys + offset + k * capacity * HEAD, y.to(dtype), mask=(k >= 0) & (k < KV_HEADS))
    tl.store(values + offset + v * capacity * HEAD, y.to(dtype), mask=(v >= 0) & inside)


@triton.jit
def _norm_kernel(x, gain, out, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    g = load_vector(gain, 0, width, BLOCK)
    wait_for_previous(PDL)
    v = load_vector(x + row * width, 0, width, BLOCK)
    v *= tl.rsqrt(tl.sum(v * v) / width + eps) * g
    tl.store(out + row * width + columns, v.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _gate_kernel(
    gate_up,
    out,
    width,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up += row * width * (2 if GATED else 1)
    wait_for_previous(PDL)
    y = activate(tl.load(gate_up + n, mask=n < width, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        y *= tl.load(gate_up + width + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, y.to(out.dtype.element_ty), mask=n < width)


def rotate_and_cache(
    qkv: Tensor, time: int, pairs: RotaryPairs, rotations: tuple[Tensor, ...], cache: KVCache
) -> Tensor:
    """Rotate q and k of a prompt, store k and v in the KV cache; return the rotated q."""
    _, kv_heads, capacity, head_dim = cache.keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = qkv.new_empty(len(qkv), heads * head_dim)
    block = max(1, 1024 // head_dim)
    _store_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, block))](
        qkv,
        pairs.partner,
        pairs.frequencies,
        pairs.signs,
        *rotations,
        q,
        cache.keys,
        cache.values,
        time,
        rotations[0].shape[1],
        capacity,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD=head_dim,
        BLOCK=block,
        **pdl_options(),
    )
    return q


def rms_norm(x: Tensor, normed: NormedLinear) -> Tensor:
    """RMSNorm of each row, before a linear layer."""
    rows, width = x.shape
    out, block = torch.empty_like(x), triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        x, normed.gain, out, width, normed.eps, BLOCK=block, num_warps=8, **pdl_options()
    )
    return out


def apply_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Apply the activation, and the gate, to the output of a matmul."""
    rows, width = len(gate_up), gate_up.shape[1] // (1 + activation.gated)
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, 1024))
    _gate_kernel[grid](
        gate_up,
        out,
        width,
        GATED=activation.gated,
        ACTIVATION=activation.name,
        BLOCK=1024,
        **pdl_options(),
    )
    return out
