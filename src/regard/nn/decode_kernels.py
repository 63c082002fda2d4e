"""Kernels for CUDA, in Triton, that write one token: few, since each costs microseconds to begin.

A layer is five of them: norm, queries, keys, values, turn and store; attention; its output onto
the stream; norm, gate and up; down onto the stream. `models.lean` says the same in plain torch.

Vectors of the stream are float32. Weights are of any float, or int8 with a scale per output.
Each kernel loads all that the one before it does not write, its weights above all, and only then
waits for it (PDL): memory does not rest between two of them. What two before it wrote is there.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from jaxtyping import Int
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from regard.nn.packed import Matrix
from regard.nn.state import KeyValues

TILE = 1 << 16  # bytes of keys that a program looks at
PROGRAMS = 128  # about as many as there are multiprocessors
GROUPS = 1 << 16  # at most so many heads of keys in all rows
EARLY = True  # whether a kernel begins before the one before it ends


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _await(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """From here on, what the kernel before this one wrote may be read."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _vector(x, width, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, WIDE)
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows(weight, rows, inside, width, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some rows of a matrix."""
    columns = tl.arange(0, WIDE)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(weight + at, mask=inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _numbers(x, rows, inside, GIVEN: tl.constexpr, other):  # type: ignore[no-untyped-def]
    """One number for each of some rows; the same for all where they are not given."""
    if GIVEN:
        return tl.load(x + rows, mask=inside, other=0.0).to(tl.float32)
    return tl.full(rows.shape, other, tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _product(w, v):  # type: ignore[no-untyped-def]
    return tl.sum(w.to(tl.float32) * v[None, :], 1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _place(y, n, inside, at, row, q, keys, values, q_width, k_width, capacity, HEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Outputs n of a packed product to where they belong: q, or row `at` of keys or of values."""
    tl.store(q + row * q_width + n, y.to(q.dtype.element_ty), mask=inside & (n < q_width))
    k = n - q_width
    kind = keys.dtype.element_ty
    place = (row * (k_width // HEAD) + k // HEAD) * capacity * HEAD + at * HEAD + k % HEAD
    tl.store(keys + place, y.to(kind), mask=inside & (k >= 0) & (k < k_width))
    place -= (k_width // HEAD) * capacity * HEAD  # of v = k - k_width
    tl.store(values + place, y.to(kind), mask=inside & (k >= k_width))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _angles(p, inside, at, wave, cos, sin, waves):  # type: ignore[no-untyped-def]
    """How far each pair is turned at its position; not at all where it has no wave."""
    which = tl.load(wave + p, mask=inside, other=-1)
    turns = inside & (which >= 0)
    c = tl.load(cos + at * waves + which, mask=turns, other=1.0)
    s = tl.load(sin + at * waves + which, mask=turns, other=0.0)
    return c, s


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _look_up_kernel(  # type: ignore[no-untyped-def]
    x,
    gain,
    weight,
    scale,
    bias,
    first,
    second,
    wave,
    cos,
    sin,
    lengths,
    q,
    keys,
    values,
    pairs,
    width,
    eps,
    waves,
    q_width,
    k_width,
    capacity,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDE: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * SOME + tl.arange(0, SOME)
    inside = p < pairs
    one = tl.load(first + p, mask=inside, other=0)
    two = tl.load(second + p, mask=inside, other=0)
    w_one = _rows(weight, one, inside, width, WIDE)
    w_two = _rows(weight, two, inside, width, WIDE)
    g = _vector(gain, width, WIDE)
    at = tl.load(lengths + row)
    c, s = _angles(p, inside, at, wave, cos, sin, waves)
    scale_one = _numbers(scale, one, inside, SCALED, 1.0)
    scale_two = _numbers(scale, two, inside, SCALED, 1.0)
    bias_one = _numbers(bias, one, inside, BIASED, 0.0)
    bias_two = _numbers(bias, two, inside, BIASED, 0.0)
    _await(EARLY)
    v = _vector(x + row * width, width, WIDE)
    size = tl.rsqrt(tl.sum(v * v) / width + eps)
    a = _product(w_one, v * g) * size * scale_one + bias_one
    b = _product(w_two, v * g) * size * scale_two + bias_two
    a, b = a * c - b * s, b * c + a * s
    _place(a, one, inside, at, row, q, keys, values, q_width, k_width, capacity, HEAD)
    _place(b, two, inside, at, row, q, keys, values, q_width, k_width, capacity, HEAD)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store_kernel(  # type: ignore[no-untyped-def]
    qkv,
    first,
    second,
    wave,
    cos,
    sin,
    lengths,
    q,
    keys,
    values,
    pairs,
    waves,
    q_width,
    k_width,
    capacity,
    HEAD: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * SOME + tl.arange(0, SOME)
    inside = p < pairs
    one = tl.load(first + p, mask=inside, other=0)
    two = tl.load(second + p, mask=inside, other=0)
    at = tl.load(lengths + row)
    c, s = _angles(p, inside, at, wave, cos, sin, waves)
    _await(EARLY)
    qkv += row * 2 * pairs
    a = tl.load(qkv + one, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + two, mask=inside, other=0.0).to(tl.float32)
    a, b = a * c - b * s, b * c + a * s
    _place(a, one, inside, at, row, q, keys, values, q_width, k_width, capacity, HEAD)
    _place(b, two, inside, at, row, q, keys, values, q_width, k_width, capacity, HEAD)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend_kernel(  # type: ignore[no-untyped-def]
    q,
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
    splits,
    tiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    MANY: tl.constexpr,
    ALONE: tl.constexpr,
    SEVERAL: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of keys, its group of queries, one share of the keys; who is last adds up.

    All keys but the newest were there before, and so the first tile is loaded before the wait.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = row * (HEADS // GROUP) + head
    own, d, s = tl.arange(0, MANY), tl.arange(0, HEAD), split * tiles * TILE + tl.arange(0, TILE)
    place = (row * HEADS + head * GROUP + own)[:, None] * HEAD + d[None, :]
    real = (own < GROUP)[:, None]
    newest = tl.load(lengths + row)
    mine = newest // (TILE * tiles) == split
    keys += group * capacity * HEAD
    values += group * capacity * HEAD
    old = ((s < newest) & (s > newest - window))[:, None]
    k = tl.load(keys + s[:, None] * HEAD + d[None, :], mask=old, other=0.0)
    v = tl.load(values + s[:, None] * HEAD + d[None, :], mask=old, other=0.0)
    _await(EARLY)
    asked = tl.load(q + place, mask=real, other=0.0).to(keys.dtype.element_ty)
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
        tl.store(out + place, (found / total[:, None]).to(out.dtype.element_ty), mask=real)
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
            for other in range(splits):
                part = (group * splits + other) * MANY + own
                peak = tl.load(sums + 2 * part, volatile=True)
                higher = tl.maximum(most, peak)
                fade, grow = tl.exp(most - higher), tl.exp(peak - higher)
                total = total * fade + grow * tl.load(sums + 2 * part + 1, volatile=True)
                piece = tl.load(parts + part[:, None] * HEAD + d[None, :], volatile=True)
                found = found * fade[:, None] + grow[:, None] * piece
                most = higher
            tl.store(out + place, (found / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _bent(x, BEND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of a feed-forward layer, by its name in `nn.ffn`."""
    if BEND == "silu":
        x = x * tl.sigmoid(x)
    elif BEND == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif BEND == "gelu":
        x = 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
    elif BEND == "relu":
        x = tl.maximum(x, 0.0)
    elif BEND == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _project_kernel(  # type: ignore[no-untyped-def]
    x,
    gain,
    weight,
    scale,
    bias,
    stream,
    out,
    outputs,
    width,
    eps,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    BEND: tl.constexpr,
    WIDE: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out = stream + f(W n(x) + b), or, gated, f(W n(x)) times what the second half of W gives."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * SOME + tl.arange(0, SOME)
    inside = n < outputs
    w = _rows(weight, n, inside, width, WIDE)
    scales = _numbers(scale, n, inside, SCALED, 1.0)
    biases = _numbers(bias, n, inside, BIASED, 0.0)
    before = tl.zeros((SOME,), tl.float32)
    if ADDED:
        before = tl.load(stream + row * outputs + n, mask=inside, other=0.0)
    if GATED:
        w_up = _rows(weight, n + outputs, inside, width, WIDE)
        scales_up = _numbers(scale, n + outputs, inside, SCALED, 1.0)
        biases_up = _numbers(bias, n + outputs, inside, BIASED, 0.0)
    if NORM:
        g = _vector(gain, width, WIDE)
    _await(EARLY)
    v = _vector(x + row * width, width, WIDE)
    if NORM:
        scales *= tl.rsqrt(tl.sum(v * v) / width + eps)
        if GATED:
            scales_up *= tl.rsqrt(tl.sum(v * v) / width + eps)
        v *= g
    y = _bent(_product(w, v) * scales + biases, BEND)
    if GATED:
        y *= _product(w_up, v) * scales_up + biases_up
    tl.store(out + row * outputs + n, (before + y).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _many_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    scale,
    bias,
    stream,
    out,
    rows,
    outputs,
    width,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    MANY: tl.constexpr,
    SOME: tl.constexpr,
    DEEP: tl.constexpr,
):
    """out = stream + W x + b for many rows, with W in int8."""
    m = tl.program_id(0) * MANY + tl.arange(0, MANY)
    n = tl.program_id(1) * SOME + tl.arange(0, SOME)
    row, one = (m < rows)[:, None], (n < outputs)[:, None]
    y = tl.zeros((MANY, SOME), tl.float32)
    for start in range(0, width, DEEP):
        k = start + tl.arange(0, DEEP)
        inside = (k < width)[None, :]
        a = tl.load(x + m[:, None] * width + k[None, :], mask=row & inside, other=0.0)
        b = tl.load(weight + n[:, None] * width + k[None, :], mask=one & inside, other=0)
        y = tl.dot(a, tl.trans(b.to(a.dtype)), y, input_precision="ieee")
    y *= _numbers(scale, n, n < outputs, True, 1.0)[None, :]
    y += _numbers(bias, n, n < outputs, BIASED, 0.0)[None, :]
    at, real = m[:, None] * outputs + n[None, :], row & tl.trans(one)
    if ADDED:
        y += tl.load(stream + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _norm_kernel(x, gain, out, width, eps, WIDE: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDE)
    g = _vector(gain, width, WIDE)
    _await(EARLY)
    v = _vector(x + row * width, width, WIDE)
    v *= tl.rsqrt(tl.sum(v * v) / width + eps) * g
    tl.store(out + row * width + columns, v.to(out.dtype.element_ty), mask=columns < width)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate_kernel(  # type: ignore[no-untyped-def]
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
    _await(EARLY)
    y = _bent(tl.load(both + n, mask=n < width, other=0.0).to(tl.float32), BEND)
    if GATED:
        y *= tl.load(both + width + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, y.to(out.dtype.element_ty), mask=n < width)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _draw_kernel(logits, keys, used, ids, vocab, SOME: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `generate.chain.draw`, with the numbers of `generate.context.Generators`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    count = tl.load(used + row)
    mixed = tl.load(keys + row) + count * -7046029254386353131
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    u = ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
    most = -float("inf")
    for start in range(0, vocab, SOME):
        n = start + tl.arange(0, SOME)
        most = tl.maximum(most, tl.max(tl.load(logits + n, mask=n < vocab, other=-float("inf"))))
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, SOME):
        n = start + tl.arange(0, SOME)
        x = tl.load(logits + n, mask=n < vocab, other=-float("inf"))
        total += tl.sum(tl.exp(x - most).to(tl.float64))
    aim, reached = u * total, tl.full((), 0.0, tl.float64)
    found, last = vocab, 0  # the first to pass the aim; the last that could
    for start in range(0, vocab, SOME):
        n = start + tl.arange(0, SOME)
        x = tl.load(logits + n, mask=n < vocab, other=-float("inf"))
        share = tl.exp(x - most).to(tl.float64)
        passed = (reached + tl.cumsum(share, 0) > aim) & (share > 0)
        found = tl.minimum(found, tl.min(tl.where(passed, n, vocab)))
        last = tl.maximum(last, tl.max(tl.where(share > 0, n, 0)))
        reached += tl.sum(share)
    tl.store(ids + row, tl.minimum(found, last).to(tl.int64))
    tl.store(used + row, count + 1)


class Bend(NamedTuple):
    """The activation after a product, by its name in `nn.ffn`, and whether it gates another."""

    name: str = ""
    gated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """Which outputs of the packed product are turned together, and by which of the waves.

    Outputs that are not turned are paired too, without a wave (-1).
    """

    first: Int[Tensor, " pairs"]
    second: Int[Tensor, " pairs"]
    wave: Int[Tensor, " pairs"]

    @classmethod
    def of(
        cls,
        heads: int,
        kv_heads: int,
        head_dim: int,
        waves: int,
        interleaved: bool,
        device: torch.device,
    ) -> "Pairing":
        """The pairs of `heads` queries, then of as many keys and values as `kv_heads`."""
        turned, rest = torch.arange(waves), torch.arange(head_dim // 2 - waves)
        one = 2 * turned if interleaved else turned
        two = one + 1 if interleaved else turned + waves
        first = torch.cat([one, 2 * waves + rest])
        second = torch.cat([two, 2 * waves + rest + len(rest)])
        wave = torch.cat([turned, torch.full_like(rest, -1)])
        start = head_dim * torch.arange(heads + 2 * kv_heads).unsqueeze(1)
        waves_of = wave.repeat(heads + 2 * kv_heads, 1)
        waves_of[heads + kv_heads :] = -1
        parts = (start + first, start + second, waves_of)
        return cls(*(part.flatten().to(device, torch.int32) for part in parts))


def look_up(
    x: Tensor,
    gain: Tensor,
    eps: float,
    matrix: Matrix,
    pairing: Pairing,
    waves: tuple[Tensor, ...],
    state: KeyValues,
    lengths: Tensor,
) -> Tensor:
    """Norm, queries, keys and values; turned; keys and values stored; the queries come back."""
    rows, width = x.shape
    q_width, k_width = _widths(matrix, state)
    q = torch.empty(rows, q_width, dtype=torch.float32, device=x.device)
    shape = _shape(width, 2)
    _look_up_kernel[(rows, triton.cdiv(len(pairing.first), shape["SOME"]))](
        x,
        gain,
        matrix.weight,
        matrix.scale,
        matrix.bias,
        pairing.first,
        pairing.second,
        pairing.wave,
        *waves,
        lengths,
        q,
        state.keys,
        state.values,
        len(pairing.first),
        width,
        eps,
        waves[0].shape[1],
        q_width,
        k_width,
        state.keys.shape[2],
        SCALED=matrix.scale is not None,
        BIASED=matrix.bias is not None,
        HEAD=state.keys.shape[3],
        **shape,
        **_early(),
    )
    return q


def turn_and_store(
    qkv: Tensor,
    pairing: Pairing,
    waves: tuple[Tensor, ...],
    state: KeyValues,
    lengths: Tensor,
) -> Tensor:
    """The end of `look_up`, for queries, keys and values that a plain product gave."""
    rows, pairs = len(qkv), len(pairing.first)
    k_width = state.keys.shape[1] * state.keys.shape[3]
    q_width = qkv.shape[1] - 2 * k_width
    q = torch.empty(rows, q_width, dtype=qkv.dtype, device=qkv.device)
    _store_kernel[(rows, triton.cdiv(pairs, 512))](
        qkv,
        pairing.first,
        pairing.second,
        pairing.wave,
        *waves,
        lengths,
        q,
        state.keys,
        state.values,
        pairs,
        waves[0].shape[1],
        q_width,
        k_width,
        state.keys.shape[2],
        HEAD=state.keys.shape[3],
        SOME=512,
        **_early(),
    )
    return q


def attend(
    q: Tensor,
    state: KeyValues,
    lengths: Tensor,
    scale: float,
    window: int | None,
    arrived: Tensor,
) -> Tensor:
    """What each query finds among the keys up to its row's length, its own included."""
    rows, kv_heads, capacity, head_dim = state.keys.shape
    heads = q.shape[1] // head_dim
    group = heads // kv_heads
    many = max(16, triton.next_power_of_2(group))  # the smallest product the cores do
    tile = TILE // (state.keys.itemsize * head_dim)
    tile = min(triton.next_power_of_2(max(capacity, 16)), tile)
    tiles = 1
    if rows * kv_heads >= PROGRAMS:  # enough to do at once: small steps leave room for others
        tile, tiles = min(tile, 64), triton.cdiv(capacity, min(tile, 64))
    splits = triton.cdiv(capacity, tile * tiles)
    out = torch.empty_like(q)
    shares = rows * kv_heads * splits * many
    parts = torch.empty(shares, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(shares, 2, dtype=torch.float32, device=q.device)
    _attend_kernel[(rows, kv_heads, splits)](
        q,
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
        splits,
        tiles,
        HEADS=heads,
        GROUP=group,
        HEAD=head_dim,
        MANY=many,
        ALONE=splits == 1,
        SEVERAL=tiles > 1,
        TILE=tile,
        num_warps=8 if tile * head_dim > 8192 else 4,
        **_early(),
    )
    return out


def project(
    x: Tensor,
    matrix: Matrix,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    stream: Tensor | None = None,
    bend: Bend = Bend(),  # noqa: B008 -- a frozen value
) -> Tensor:
    """A product with what stands before and after it: a norm; a bend, a gate, the stream."""
    rows, width = x.shape
    outputs = len(matrix.weight) // (1 + bend.gated)
    out = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    shape = _shape(width, 1 + bend.gated)
    _project_kernel[(rows, triton.cdiv(outputs, shape["SOME"]))](
        x,
        gain,
        matrix.weight,
        matrix.scale,
        matrix.bias,
        stream,
        out,
        outputs,
        width,
        eps,
        NORM=gain is not None,
        SCALED=matrix.scale is not None,
        BIASED=matrix.bias is not None,
        ADDED=stream is not None,
        GATED=bend.gated,
        BEND=bend.name,
        **shape,
        **_early(),
    )
    return out


def gate(both: Tensor, bend: Bend) -> Tensor:
    """The bend and the gate of `project`, for what a plain product gave."""
    rows, width = len(both), both.shape[1] // (1 + bend.gated)
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    grid = (rows, triton.cdiv(width, 1024))
    _gate_kernel[grid](both, out, width, GATED=bend.gated, BEND=bend.name, SOME=1024, **_early())
    return out


def product(x: Tensor, matrix: Matrix, stream: Tensor | None = None) -> Tensor:
    """W x + b for many rows, on top of the stream where there is one, which it may use up."""
    if matrix.scale is None:
        if stream is None or matrix.bias is not None:
            return matrix(x) if stream is None else matrix.onto(stream, x)
        return stream.addmm_(x, matrix.weight.t())
    (rows, width), outputs = x.shape, len(matrix.weight)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    many = min(64, max(16, triton.next_power_of_2(rows)))
    some = 16 if outputs < 4096 else 64
    _many_kernel[(triton.cdiv(rows, many), triton.cdiv(outputs, some))](
        x,
        matrix.weight,
        matrix.scale,
        matrix.bias,
        stream,
        out,
        rows,
        outputs,
        width,
        BIASED=matrix.bias is not None,
        ADDED=stream is not None,
        MANY=many,
        SOME=some,
        DEEP=128,
        num_stages=4,
    )
    return out


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row."""
    rows, width = x.shape
    out, wide = torch.empty_like(x), triton.next_power_of_2(width)
    _norm_kernel[(rows,)](x, gain, out, width, eps, WIDE=wide, num_warps=8, **_early())
    return out


def draw(logits: Tensor, keys: Tensor, used: Tensor) -> Tensor:
    """One token per row from softmax(logits), by the next random number of each row."""
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.long, device=logits.device)
    logits = logits.contiguous()
    _draw_kernel[(rows,)](logits, keys, used, ids, vocab, SOME=4096, num_warps=8)
    return ids


def _widths(matrix: Matrix, state: KeyValues) -> tuple[int, int]:
    keys = state.keys.shape[1] * state.keys.shape[3]
    return len(matrix.weight) - 2 * keys, keys


def _shape(width: int, together: int) -> dict[str, int]:
    """How many outputs a program makes of `width` inputs, so that it holds enough to be busy."""
    wide = triton.next_power_of_2(width)
    held, warps = (1 << 13, 4) if together == 2 else (1 << 15, 8)  # the fastest on an H200
    return {"WIDE": wide, "SOME": max(1, held // (wide * together)), "num_warps": warps}


def _early() -> dict[str, bool]:
    return {"EARLY": EARLY, "launch_pdl": EARLY}
