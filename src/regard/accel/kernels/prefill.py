"""Triton kernels between matmuls: norms and rotation of q and k, KV cache, RMSNorm, activation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.accel.kernels.common import (
    FFNActivation,
    activate,
    load_vector,
    pdl_options,
    wait_for_previous,
)
from regard.accel.kernels.decode_attention import AttentionOptions
from regard.accel.packed import FusedNormLinear
from regard.nn.state import KVCache


@triton.jit
def _rotate_and_cache_kernel(
    qkv,
    partner,
    column_frequency_index,
    sine_sign,
    cos,
    sin,
    q_gain,
    k_gain,
    positions,
    rows,
    q,
    keys,
    values,
    time,
    num_frequencies,
    capacity,
    eps,
    CONCATENATED: tl.constexpr,
    QK_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OUTPUTS: tl.constexpr,  # number of heads that are returned
    BLOCK_HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize and rotate some heads of one token's q and k; store k and v in the KV cache."""
    token = tl.program_id(0).to(tl.int64)
    if CONCATENATED:
        row = tl.load(rows + token)
        is_stored = row >= 0
        row = tl.maximum(row, 0)
        position = tl.load(positions + token)
    else:
        row = token // time
        is_stored = row >= 0
        position = tl.load(positions + row) + token % time
    column, h = (
        tl.arange(0, BLOCK_HEAD_DIM),
        (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None],
    )
    valid = column < HEAD_DIM
    partner_column = tl.load(partner + column, mask=valid, other=0)
    frequency_index = tl.load(column_frequency_index + column, mask=valid, other=-1)
    c = tl.load(
        cos + position * num_frequencies + frequency_index, mask=frequency_index >= 0, other=1.0
    )
    s = tl.load(
        sin + position * num_frequencies + frequency_index, mask=frequency_index >= 0, other=0.0
    )
    s *= tl.load(sine_sign + column, mask=valid, other=0)
    if QK_NORM:
        is_query = h < HEADS
        g = tl.load(q_gain + column, mask=valid, other=0.0)[None, :]
        partner_g = tl.load(q_gain + partner_column, mask=valid, other=0.0)[None, :]
        g = tl.where(is_query, g, tl.load(k_gain + column, mask=valid, other=0.0)[None, :])
        k_partner_g = tl.load(k_gain + partner_column, mask=valid, other=0.0)[None, :]
        partner_g = tl.where(is_query, partner_g, k_partner_g)
    wait_for_previous(PDL)
    qkv += token * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    inside = (h < HEADS + 2 * KV_HEADS) & valid[None, :]
    x = tl.load(qkv + h * HEAD_DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(qkv + h * HEAD_DIM + partner_column[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = x * c[None, :] + y * s[None, :]
    if QK_NORM:
        inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        rotated = (x * g * c[None, :] + y * partner_g * s[None, :]) * inverse_rms
    y = tl.where(h < HEADS + KV_HEADS, rotated, x)
    q += token * OUTPUTS * HEAD_DIM
    is_output = (h < OUTPUTS) & valid[None, :]
    tl.store(q + h * HEAD_DIM + column[None, :], y.to(q.dtype.element_ty), mask=is_output)
    dtype = keys.dtype.element_ty
    k, v = h - HEADS, h - HEADS - KV_HEADS
    offset = row * KV_HEADS * capacity * HEAD_DIM + position * HEAD_DIM + column[None, :]
    is_key = (k >= 0) & (k < KV_HEADS) & valid[None, :] & is_stored
    tl.store(keys + offset + k * capacity * HEAD_DIM, y.to(dtype), mask=is_key)
    tl.store(
        values + offset + v * capacity * HEAD_DIM, y.to(dtype), mask=(v >= 0) & inside & is_stored
    )


@triton.jit
def _rms_norm_kernel(x, gain, out, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """RMSNorm of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    g = load_vector(gain, 0, width, BLOCK)
    wait_for_previous(PDL)
    v = load_vector(x + row * width, 0, width, BLOCK)
    v *= tl.rsqrt(tl.sum(v * v) / width + eps) * g
    tl.store(out + row * width + columns, v.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _activation_kernel(
    gate_up,
    out,
    width,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """f(gate_up) of a block of one row; GATED: f(gate) times up."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up += row * width * (2 if GATED else 1)
    wait_for_previous(PDL)
    y = activate(tl.load(gate_up + n, mask=n < width, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        y *= tl.load(gate_up + width + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, y.to(out.dtype.element_ty), mask=n < width)


def rotate_and_cache(
    qkv: Tensor,
    time: int,
    options: AttentionOptions,
    cache: KVCache,
    positions: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """Normalize and rotate q and k of `time` tokens per row; `positions` is that of the first one.

    k and v are stored in the KV cache; q is returned. With `rows`, the tokens are of concatenated
    sequences: `rows` and `positions` hold the row and the position of each token, a token of row -1
    is not stored, and both q and k are returned.
    """
    assert options.rotary is not None
    (pairs, tables), gains = options.rotary, options.qk_gains or (None, None)
    _, kv_heads, capacity, head_dim = cache.keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    outputs = heads if rows is None else heads + kv_heads
    q = qkv.new_empty(len(qkv), outputs * head_dim)
    block_head_dim = triton.next_power_of_2(head_dim)
    block = max(1, (1024 if time > 1 else 256) // block_head_dim)
    _rotate_and_cache_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, block))](
        qkv,
        pairs.partner,
        pairs.column_frequency_index,
        pairs.signs,
        *tables,
        *gains,
        positions,
        rows,
        q,
        cache.keys,
        cache.values,
        time,
        tables[0].shape[1],
        capacity,
        options.qk_eps,
        CONCATENATED=rows is not None,
        QK_NORM=options.qk_gains is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        OUTPUTS=outputs,
        BLOCK_HEAD_DIM=block_head_dim,
        BLOCK=block,
        **pdl_options(),
    )
    return q


def rms_norm(x: Tensor, norm_linear: FusedNormLinear) -> Tensor:
    """The RMSNorm of `norm_linear`, without its linear layer, of each row."""
    rows, width = x.shape
    out, block = torch.empty_like(x), triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x, norm_linear.gain, out, width, norm_linear.eps, BLOCK=block, num_warps=8, **pdl_options()
    )
    return out


def apply_activation(gate_up: Tensor, activation: FFNActivation) -> Tensor:
    """Apply the activation, and the gate, to the output of a matmul."""
    rows, width = len(gate_up), gate_up.shape[1] // (1 + activation.gated)
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, 1024))
    _activation_kernel[grid](
        gate_up,
        out,
        width,
        GATED=activation.gated,
        ACTIVATION=activation.name,
        BLOCK=1024,
        **pdl_options(),
    )
    return out
