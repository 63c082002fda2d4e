"""Triton kernels of penalties on tokens that occurred before."""

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 1024  # ids of the history that one program reads
LAGS = 128  # earlier positions that one program compares with the end of the text
STEPS = 16  # ids that are compared before the next check whether any position still matches


@triton.jit
def _recent(n, history, lengths, prompt_lengths, history_capacity, window, vocab):
    """The ids of the row `n` positions back, newest first, and which of them are penalized."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(lengths + row) - 1 - n
    first = 0
    if prompt_lengths is not None:
        first = tl.load(prompt_lengths + row)
    valid = (n < window) & (position >= first)
    ids = tl.load(history + row * history_capacity + position, mask=valid, other=0)
    return ids, valid & (ids < vocab)


@triton.jit
def _repetition_kernel(
    logits,
    out,
    history,
    lengths,
    prompt_lengths,
    history_capacity,
    window,
    vocab,
    penalty,
    BLOCK: tl.constexpr,
):
    """As `generate.samplers.penalties.Repetition`; a repeated id stores the same value."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids, valid = _recent(n, history, lengths, prompt_lengths, history_capacity, window, vocab)
    ids += tl.program_id(0).to(tl.int64) * vocab
    x = tl.load(logits + ids, mask=valid)
    tl.store(out + ids, tl.where(x > 0, x / penalty, x * penalty), mask=valid)


@triton.jit
def _frequency_kernel(
    logits,
    out,
    history,
    lengths,
    prompt_lengths,
    history_capacity,
    window,
    vocab,
    penalty,
    PRESENCE: tl.constexpr,
    BLOCK_HISTORY: tl.constexpr,
):
    """As `generate.samplers.penalties.Frequency`, or, `PRESENCE`, as `Presence`.

    `out` holds the logits. Each occurrence of an id adds 1 to the bits of its logit, taken as an
    integer; the difference from the original bits is the number of occurrences.
    """
    ids, valid = _recent(
        tl.arange(0, BLOCK_HISTORY),
        history,
        lengths,
        prompt_lengths,
        history_capacity,
        window,
        vocab,
    )
    ids += tl.program_id(0).to(tl.int64) * vocab
    x = tl.load(logits + ids, mask=valid)
    occurrences = 1.0
    if not PRESENCE:
        bit_counts = out.to(tl.pointer_type(tl.int32), bitcast=True) + ids
        tl.atomic_add(bit_counts, 1, mask=valid, sem="relaxed", scope="cta")
        tl.debug_barrier()  # all occurrences are added before a count is read
        occurrences = (tl.load(bit_counts, mask=valid) - x.to(tl.int32, bitcast=True)).to(
            tl.float32
        )
        tl.debug_barrier()  # all counts are read before one is overwritten
    tl.store(out + ids, x - penalty * occurrences, mask=valid)


@triton.jit
def _dry_kernel(
    logits,
    out,
    history,
    lengths,
    breakers,
    history_capacity,
    window,
    vocab,
    multiplier,
    base,
    allowed_length,
    max_penalty,
    LAGS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """As `generate.samplers.penalties.DRY`, for a block of earlier positions of a row.

    The token after a position is penalized by the length of the match there; `out` keeps the
    smallest of the penalized logits.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    newest = history + row * history_capacity + length - 1
    text_length = tl.minimum(length, window).to(tl.int32)
    lag = tl.program_id(1) * LAGS + 1 + tl.arange(0, LAGS)
    matches = lag < text_length
    following = tl.load(newest - lag + 1, mask=matches, other=0)
    is_candidate = matches & (following < vocab)
    x = tl.load(logits + row * vocab + following, mask=is_candidate)
    if breakers is not None:
        is_candidate = is_candidate & (
            tl.load(breakers + following, mask=is_candidate, other=1) == 0
        )
    match_length = tl.zeros([LAGS], tl.int32)
    start = 0
    steps = tl.arange(0, STEPS)
    while tl.max(matches.to(tl.int32), 0) > 0:
        j = start + steps
        back = lag[:, None] + j[None, :]
        earlier = tl.load(newest - back, mask=matches[:, None] & (back < text_length), other=-2)
        current = tl.load(newest - j, mask=j < text_length, other=-1)
        if breakers is not None:
            inside = (current >= 0) & (current < vocab)
            current = tl.where(tl.load(breakers + current, mask=inside, other=0) != 0, -1, current)
        common = tl.min(tl.where(earlier == current[None, :], STEPS, steps[None, :]), 1)
        match_length += tl.where(matches, common, 0)
        matches = matches & (common == STEPS)
        start += STEPS
    log2_base = tl.log2(tl.full((), base, tl.float32).to(tl.float64))
    growth = tl.exp2(log2_base * (match_length - allowed_length)).to(tl.float32)
    penalty = tl.minimum(multiplier * growth, max_penalty)
    penalized_logits = out + row * vocab + following
    tl.atomic_min(
        penalized_logits,
        x - penalty,
        mask=is_candidate & (match_length >= allowed_length),
        sem="relaxed",
    )


def repetition(
    logits: Float[Tensor, "rows vocab"],
    history: Int[Tensor, "rows capacity"],
    lengths: Int[Tensor, " rows"],
    prompt_lengths: Int[Tensor, " rows"] | None,
    window: int,
    penalty: float,
) -> Float[Tensor, "rows vocab"]:
    """As `generate.samplers.penalties.Repetition` over the last `window` ids.

    `prompt_lengths`: for each row, the number of its first ids that are not penalized.
    """
    (rows, vocab), history_capacity = logits.shape, history.shape[1]
    logits, history = logits.contiguous(), history.contiguous()
    out = logits.clone()
    _repetition_kernel[(rows, triton.cdiv(window, BLOCK))](
        logits,
        out,
        history,
        lengths,
        prompt_lengths,
        history_capacity,
        window,
        vocab,
        float(penalty),
        BLOCK=BLOCK,
    )
    return out


def frequency(
    logits: Float[Tensor, "rows vocab"],
    history: Int[Tensor, "rows capacity"],
    lengths: Int[Tensor, " rows"],
    prompt_lengths: Int[Tensor, " rows"] | None,
    window: int,
    penalty: float,
    *,
    presence: bool,
) -> Float[Tensor, "rows vocab"]:
    """As `generate.samplers.penalties.Frequency`, or `Presence`, over the last `window` ids."""
    (rows, vocab), history_capacity = logits.shape, history.shape[1]
    logits, history = logits.contiguous(), history.contiguous()
    out, block_history = logits.clone(), max(BLOCK, triton.next_power_of_2(window))
    _frequency_kernel[(rows,)](
        logits,
        out,
        history,
        lengths,
        prompt_lengths,
        history_capacity,
        window,
        vocab,
        float(penalty),
        PRESENCE=presence,
        BLOCK_HISTORY=block_history,
        num_warps=block_history // 256,
        enable_fp_fusion=False,  # the multiplication is rounded, as in torch
    )
    return out


def dry(
    logits: Float[Tensor, "rows vocab"],
    history: Int[Tensor, "rows capacity"],
    lengths: Int[Tensor, " rows"],
    breakers: Bool[Tensor, " vocab"] | None,
    window: int,
    multiplier: float,
    base: float,
    allowed_length: int,
    max_penalty: float,
) -> Float[Tensor, "rows vocab"]:
    """As `generate.samplers.penalties.DRY` over the last `window` ids."""
    (rows, vocab), history_capacity = logits.shape, history.shape[1]
    logits, history = logits.contiguous(), history.contiguous()
    out = logits.clone()
    _dry_kernel[(rows, triton.cdiv(window - 1, LAGS))](
        logits,
        out,
        history,
        lengths,
        breakers,
        history_capacity,
        window,
        vocab,
        float(multiplier),
        float(base),
        allowed_length,
        max_penalty,
        LAGS=LAGS,
        STEPS=STEPS,
    )
    return out
