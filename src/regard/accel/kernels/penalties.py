"""Kernels that look back at the text and make less likely what was said."""

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

PIECE = 1024  # ids that one program looks at
LAGS = 128  # earlier places that one program compares with the end of the text
STEPS = 16  # ids compared before it asks whether any place still matches


@triton.jit
def _recent(n, history, lengths, prompts, room, width, vocab):
    """The ids of the row that lie `n` places back, newest first, and which of them count."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(lengths + row) - 1 - n
    first = 0
    if prompts is not None:
        first = tl.load(prompts + row)
    real = (n < width) & (at >= first)
    ids = tl.load(history + row * room + at, mask=real, other=0)
    return ids, real & (ids < vocab)


@triton.jit
def _repetition_kernel(
    logits, out, history, lengths, prompts, room, width, vocab, penalty, PIECE: tl.constexpr
):
    """As `generate.penalties.Repetition`; an id said twice gets the same number twice."""
    n = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    ids, real = _recent(n, history, lengths, prompts, room, width, vocab)
    ids += tl.program_id(0).to(tl.int64) * vocab
    x = tl.load(logits + ids, mask=real)
    tl.store(out + ids, tl.where(x > 0, x / penalty, x * penalty), mask=real)


@triton.jit
def _frequency_kernel(
    logits,
    out,
    history,
    lengths,
    prompts,
    room,
    width,
    vocab,
    penalty,
    ONCE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """As `generate.penalties.Frequency`, or, `ONCE`, as `Presence`.

    `out` comes with the logits in it. Each time that an id was said adds 1 to the bits of its
    logit, taken as a whole number; how far they have moved is how often it was said.
    """
    ids, real = _recent(tl.arange(0, WIDE), history, lengths, prompts, room, width, vocab)
    ids += tl.program_id(0).to(tl.int64) * vocab
    x = tl.load(logits + ids, mask=real)
    said = 1.0
    if not ONCE:
        tally = out.to(tl.pointer_type(tl.int32), bitcast=True) + ids
        tl.atomic_add(tally, 1, mask=real, sem="relaxed", scope="cta")
        tl.debug_barrier()  # all have been counted before one is read,
        said = (tl.load(tally, mask=real) - x.to(tl.int32, bitcast=True)).to(tl.float32)
        tl.debug_barrier()  # and read before one is written over
    tl.store(out + ids, x - penalty * said, mask=real)


@triton.jit
def _dry_kernel(
    logits,
    out,
    history,
    lengths,
    breakers,
    room,
    width,
    vocab,
    multiplier,
    base,
    allowed,
    largest,
    LAGS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """As `generate.penalties.DRY`, for some of the earlier places of a row.

    What follows a place loses by how long the place matches; `out` keeps the least that is left.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    newest = history + row * room + length - 1
    text = tl.minimum(length, width).to(tl.int32)
    lag = tl.program_id(1) * LAGS + 1 + tl.arange(0, LAGS)
    matches = lag < text
    following = tl.load(newest - lag + 1, mask=matches, other=0)
    counts = matches & (following < vocab)
    x = tl.load(logits + row * vocab + following, mask=counts)
    if breakers is not None:
        counts = counts & (tl.load(breakers + following, mask=counts, other=1) == 0)
    matched = tl.zeros([LAGS], tl.int32)
    start = 0
    steps = tl.arange(0, STEPS)
    while tl.max(matches.to(tl.int32), 0) > 0:
        j = start + steps
        back = lag[:, None] + j[None, :]
        earlier = tl.load(newest - back, mask=matches[:, None] & (back < text), other=-2)
        own = tl.load(newest - j, mask=j < text, other=-1)
        if breakers is not None:
            inside = (own >= 0) & (own < vocab)
            own = tl.where(tl.load(breakers + own, mask=inside, other=0) != 0, -1, own)
        same = tl.min(tl.where(earlier == own[None, :], STEPS, steps[None, :]), 1)
        matched += tl.where(matches, same, 0)
        matches = matches & (same == STEPS)
        start += STEPS
    rate = tl.log2(tl.full((), base, tl.float32).to(tl.float64))
    growth = tl.exp2(rate * (matched - allowed)).to(tl.float32)
    penalty = tl.minimum(multiplier * growth, largest)
    left = out + row * vocab + following
    tl.atomic_min(left, x - penalty, mask=counts & (matched >= allowed), sem="relaxed")


def repetition(
    logits: Float[Tensor, "rows vocab"],
    history: Int[Tensor, "rows room"],
    lengths: Int[Tensor, " rows"],
    prompts: Int[Tensor, " rows"] | None,
    width: int,
    penalty: float,
) -> Float[Tensor, "rows vocab"]:
    """As `generate.penalties.Repetition` over the last `width` ids, without `prompts` if given."""
    (rows, vocab), room = logits.shape, history.shape[1]
    logits, history = logits.contiguous(), history.contiguous()
    out = logits.clone()
    _repetition_kernel[(rows, triton.cdiv(width, PIECE))](
        logits, out, history, lengths, prompts, room, width, vocab, float(penalty), PIECE=PIECE
    )
    return out


def frequency(
    logits: Float[Tensor, "rows vocab"],
    history: Int[Tensor, "rows room"],
    lengths: Int[Tensor, " rows"],
    prompts: Int[Tensor, " rows"] | None,
    width: int,
    penalty: float,
    *,
    once: bool,
) -> Float[Tensor, "rows vocab"]:
    """As `generate.penalties.Frequency`, or `Presence`, over the last `width` ids."""
    (rows, vocab), room = logits.shape, history.shape[1]
    logits, history = logits.contiguous(), history.contiguous()
    out, wide = logits.clone(), max(PIECE, triton.next_power_of_2(width))
    _frequency_kernel[(rows,)](
        logits,
        out,
        history,
        lengths,
        prompts,
        room,
        width,
        vocab,
        float(penalty),
        ONCE=once,
        WIDE=wide,
        num_warps=wide // 256,
        enable_fp_fusion=False,  # the product is rounded, as in torch
    )
    return out


def dry(
    logits: Float[Tensor, "rows vocab"],
    history: Int[Tensor, "rows room"],
    lengths: Int[Tensor, " rows"],
    breakers: Bool[Tensor, " vocab"] | None,
    width: int,
    multiplier: float,
    base: float,
    allowed: int,
    largest: float,
) -> Float[Tensor, "rows vocab"]:
    """As `generate.penalties.DRY` over the last `width` ids, by penalties up to `largest`."""
    (rows, vocab), room = logits.shape, history.shape[1]
    logits, history = logits.contiguous(), history.contiguous()
    out = logits.clone()
    _dry_kernel[(rows, triton.cdiv(width - 1, LAGS))](
        logits,
        out,
        history,
        lengths,
        breakers,
        room,
        width,
        vocab,
        float(multiplier),
        float(base),
        allowed,
        largest,
        LAGS=LAGS,
        STEPS=STEPS,
    )
    return out
