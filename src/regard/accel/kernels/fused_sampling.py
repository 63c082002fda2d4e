"""Kernels that end a chain: the largest logits in their order, then stages behind a top-k, draw."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels.common import early, number_of, ranking, uniform, wait

MOST = 1024  # tokens that can be ranked
GROUPS = 2048  # of tokens, of which the largest are looked at
DEEP = 8  # tokens of each that are read at once
SOME = 256  # tokens that are ranked at once,
OTHERS = 32  # by so many others at once


@triton.jit(do_not_specialize=["stride", "vocab"])  # made once for all vocabularies
def _select_kernel(
    logits,
    numbers,
    count,
    values,
    ids,
    about,
    stride,
    vocab,
    SPREAD: tl.constexpr,
    GROUPS: tl.constexpr,
    DEEP: tl.constexpr,
    MOST: tl.constexpr,
    SOME: tl.constexpr,
    OTHERS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rank the k largest logits, and a few more.

    `values` are logits as they were found, then ranked; `ids` likewise, then the place of each
    ranked one among all of them by id. `about` says the largest and, with `SPREAD`, where
    `top_n_sigma` puts its bar.
    """
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    count += row
    values += row * 2 * MOST
    ids += row * 3 * MOST
    about += row * 2
    k = tl.load(numbers + 3 * SPREAD).to(tl.int32)

    # the largest of each group: as many tokens are at least as large as k of them
    every = tl.arange(0, GROUPS) >= 0
    best = tl.full((GROUPS,), -float("inf"), tl.float32)
    added, there = tl.zeros((GROUPS,), tl.float32), tl.zeros((GROUPS,), tl.int32)
    for start in range(0, vocab, DEEP * GROUPS):
        _, x = _tile(logits, start, vocab, every, DEEP, GROUPS)
        best = tl.maximum(best, tl.max(x, 1))
        if SPREAD:
            added += tl.sum(tl.where(x > -float("inf"), x, 0.0), 1)
            there += tl.sum((x > -float("inf")).to(tl.int32), 1)
    top = tl.max(best)
    low, high, enough = ranking(tl.min(best)), ranking(top) + 1, GROUPS
    while (high - low > 1) & (enough > MOST * 9 // 16):  # so few groups hardly have MOST tokens
        middle = low + (high - low) // 2
        found = tl.sum((best >= number_of(middle)).to(tl.int32))
        enough = tl.where(found >= k, found, enough)
        low, high = tl.where(found >= k, middle, low), tl.where(found >= k, high, middle)
    bar = number_of(low)
    some, alive, mean = best >= bar, 1.0, 0.0
    if SPREAD:
        alive = tl.sum(there).to(tl.float32)
        some, mean = every, tl.sum(added) / alive
    left, away = _collect(
        logits, vocab, some, bar, vocab, values, ids, mean, SPREAD, DEEP // 2, GROUPS, MOST
    )
    if left > MOST:
        bar, behind = _crowd(logits, vocab, every, k, low, ranking(top) + 1, DEEP, GROUPS, MOST)
        tl.debug_barrier()  # too many have been written there
        left, _ = _collect(
            logits, vocab, every, bar, behind, values, ids, 0.0, False, DEEP // 2, GROUPS, MOST
        )
    tl.store(count, left)
    tl.store(about, top)
    if SPREAD:
        n = tl.load(numbers).to(tl.float32)
        tl.store(about + 1, top - n * tl.sqrt(tl.sum(away) / alive))
    tl.debug_barrier()

    for start in range(0, left, SOME):
        at = start + tl.arange(0, SOME)
        x = tl.load(values + at, mask=at < left, other=0.0)
        id = tl.load(ids + at, mask=at < left, other=0)
        rank = tl.zeros((OTHERS, SOME), tl.int32)
        place = tl.zeros((OTHERS, SOME), tl.int32)
        for first in range(0, left, OTHERS):
            other = first + tl.arange(0, OTHERS)
            its = tl.load(values + other, mask=other < left, other=-float("inf"))[:, None]
            before = tl.load(ids + other, mask=other < left, other=vocab)[:, None] < id[None, :]
            rank += ((its > x[None, :]) | ((its == x[None, :]) & before)).to(tl.int32)
            place += before.to(tl.int32)
        rank, place = tl.sum(rank, 0), tl.sum(place, 0)
        tl.store(values + MOST + rank, x, mask=at < left)
        tl.store(ids + MOST + rank, id, mask=at < left)
        tl.store(ids + 2 * MOST + rank, place, mask=at < left)


@triton.jit
def _tile(logits, start, vocab, some, DEEP: tl.constexpr, GROUPS: tl.constexpr):
    """The next of some groups, by id and logit; a NaN is as bad as inf."""
    n = start + tl.arange(0, GROUPS)[:, None] + tl.arange(0, DEEP)[None, :] * GROUPS
    x = tl.load(logits + n, mask=(n < vocab) & some[:, None], other=-float("inf")).to(tl.float32)
    return n, tl.where(x == x, x, float("inf"))


@triton.jit
def _collect(
    logits,
    vocab,
    some,
    bar,
    behind,
    values,
    ids,
    mean,
    SPREAD: tl.constexpr,
    DEEP: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Write down what lies above the bar, or on it with an id before `behind`, in any order.

    All are counted, also those for which there is no room. With `SPREAD`, also how far logits
    lie from their mean, squared.
    """
    left, away = 0, tl.zeros((GROUPS,), tl.float32)
    for start in range(0, vocab, DEEP * GROUPS):
        n, x = _tile(logits, start, vocab, some, DEEP, GROUPS)
        real = x > -float("inf")
        if SPREAD:
            away += tl.sum(tl.where(real, (x - mean) * (x - mean), 0.0), 1)
        take = real & ((x > bar) | ((x == bar) & (n < behind)))
        one = take.to(tl.int32)
        number = tl.sum(one, 1)
        place = left + (tl.cumsum(number, 0) - number)[:, None] + tl.cumsum(one, 1) - 1
        left += tl.sum(number)
        take &= place < MOST
        tl.store(values + place, x, mask=take)
        tl.store(ids + place, n, mask=take)
    return left, away


@triton.jit
def _crowd(
    logits,
    vocab,
    every,
    k,
    low,
    high,
    DEEP: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
):
    """The k-th largest logit, and the id from which on its ties find no room.

    For rows in which a bar was too low, since many tokens are equal or large ones stand together.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        found = _counted(logits, vocab, every, number_of(middle), vocab, DEEP, GROUPS)
        low, high = tl.where(found >= k, middle, low), tl.where(found >= k, high, middle)
    bar = number_of(low)
    behind, beyond = 0, vocab + 1
    while beyond - behind > 1:
        middle = behind + (beyond - behind) // 2
        fits = _counted(logits, vocab, every, bar, middle, DEEP, GROUPS) <= MOST
        behind, beyond = tl.where(fits, middle, behind), tl.where(fits, beyond, middle)
    return bar, behind


@triton.jit
def _counted(logits, vocab, every, bar, behind, DEEP: tl.constexpr, GROUPS: tl.constexpr):
    """How many `_collect` would find."""
    many = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, vocab, DEEP * GROUPS):
        n, x = _tile(logits, start, vocab, every, DEEP, GROUPS)
        take = (x > -float("inf")) & ((x > bar) | ((x == bar) & (n < behind)))
        many += tl.sum(take.to(tl.int32), 1)
    return tl.sum(many)


@triton.jit(do_not_specialize=["vocab"])
def _stages_kernel(
    count,
    values,
    ids,
    about,
    numbers,
    keys,
    used,
    lengths,
    failed,
    drawn,
    sums,
    vocab,
    OPS: tl.constexpr,
    KEEPS: tl.constexpr,
    HOLES: tl.constexpr,
    MOST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Go through the stages with ranked tokens, and draw by id.

    `numbers` are three of each stage: its settings, then its `min_keep`.
    """
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    sums += row * 2 * MOST
    at = tl.arange(0, MOST)
    alive = at < tl.load(count + row)
    x = tl.load(values + row * 2 * MOST + MOST + at, mask=alive, other=-float("inf"))
    id = tl.load(ids + row * 3 * MOST + MOST + at, mask=alive, other=0)
    place = tl.load(ids + row * 3 * MOST + 2 * MOST + at, mask=alive, other=0)
    place = tl.where(alive, place, at)
    top = tl.load(about + row * 2)
    whole = top - top == 0  # NaN where it is not finite
    weight = tl.where(alive, tl.exp(x - top), 0.0)
    key, taken = tl.load(keys + row), tl.load(used + row)
    for n in tl.static_range(len(OPS)):
        own = numbers + 3 * n
        if OPS[n] == "temperature":
            cold = tl.load(own).to(tl.float32)
            if HOLES[n]:
                top = tl.max(tl.where(alive, x, -float("inf")))
            # multiplied last: a product minus a product may be rounded once only, and not be 0
            weight = tl.where(alive, tl.exp((x - top) * cold), 0.0)
            x, top = x * cold, top * cold
        else:
            keep = alive
            rank = tl.cumsum(alive.to(tl.int32), 0) if HOLES[n] else at + 1
            if OPS[n] == "near":
                keep = x >= tl.load(about + row * 2 + 1)
            elif OPS[n] == "top_n_sigma":
                keep = _near(x, alive, tl.load(own).to(tl.float32))
            elif OPS[n] == "top_k":
                keep = _first(x, alive, rank, tl.load(own).to(tl.int32))
            elif OPS[n] == "exact_top_k":
                keep = rank <= tl.load(own).to(tl.int32)
            elif OPS[n] == "top_p":
                reached = tl.cumsum(weight, 0)
                before = reached - weight
                share = tl.load(own).to(tl.float32)
                keep = (before < share * tl.max(reached)) | (before == 0.0)
            elif OPS[n] == "min_p":
                keep = weight >= tl.load(own).to(tl.float32) * tl.max(weight)
            elif OPS[n] == "typical":
                keep = _typical(x, alive, weight, top, at, own, sums, KEEPS[n], MOST)
            elif OPS[n] == "xtc":
                act = uniform(key, taken) < tl.load(own)
                threshold = tl.where(act, tl.load(own + 1), 2.0).to(tl.float32)
                keep = ~_choices(alive, weight, at, threshold, MOST)
                taken += 1
            if KEEPS[n] and OPS[n] != "typical":
                keep |= _first(x, alive, rank, tl.load(own + 2).to(tl.int32))
            alive &= keep
            weight = tl.where(alive, weight, 0.0)

    tl.debug_barrier()  # a stage may have read there
    tl.store(sums + place, weight)
    tl.debug_barrier()
    share = tl.load(sums + at).to(tl.float64)
    reached = tl.cumsum(share, 0)
    passed = (reached > uniform(key, taken) * tl.max(reached)) & (share > 0)
    first = tl.min(tl.where(passed, at, MOST))
    here = tl.minimum(first, tl.max(tl.where(share > 0, at, 0)))
    chosen = tl.sum(tl.where(place == here, id, 0))
    tl.store(drawn + row, tl.where(whole, chosen, vocab - 1).to(tl.int64))
    tl.store(used + row, taken + 1)
    length = tl.load(lengths + row)
    tl.store(failed + row, tl.minimum(tl.load(failed + row), length), mask=~whole)


@triton.jit
def _first(x, alive, rank, count):
    """Which are among the first so many of those that are left, or tie with the last of them."""
    return x >= tl.min(tl.where(alive & (rank <= count), x, float("inf")))


@triton.jit
def _near(x, alive, n):
    """As `generate.samplers.truncation.TopNSigma`."""
    count = tl.sum(alive.to(tl.int32)).to(tl.float32)
    away = x - tl.sum(tl.where(alive, x, 0.0)) / count
    sigma = tl.sqrt(tl.sum(tl.where(alive, away * away, 0.0)) / count)
    return x >= tl.max(tl.where(alive, x, -float("inf"))) - n * sigma


@triton.jit
def _typical(x, alive, weight, top, at, own, sums, KEEPS: tl.constexpr, MOST: tl.constexpr):
    """As `generate.samplers.truncation.Typical`; tokens that were removed weigh nothing."""
    total = tl.sum(weight)
    below = top - x
    surprise = below + tl.log(total)
    expected = tl.sum(tl.where(alive, weight * below, 0.0)) / total + tl.log(total)
    mirror = 2 * expected - surprise
    tl.debug_barrier()  # another stage may have read there
    tl.store(sums + at, surprise)
    tl.store(sums + MOST + at, tl.cumsum(weight, 0))
    tl.debug_barrier()
    least, largest = tl.minimum(surprise, mirror), tl.maximum(surprise, mirror)
    first, behind = tl.zeros((MOST,), tl.int32), tl.zeros((MOST,), tl.int32)
    step = MOST
    while step > 0:
        there = tl.load(sums + first + step - 1, mask=first + step <= MOST, other=float("inf"))
        first += tl.where((first + step <= MOST) & (there <= least), step, 0)
        there = tl.load(sums + behind + step - 1, mask=behind + step <= MOST, other=float("inf"))
        behind += tl.where((behind + step <= MOST) & (there < largest), step, 0)
        step //= 2
    nearer = tl.load(sums + MOST + behind - 1, mask=behind > 0, other=0.0)
    nearer -= tl.load(sums + MOST + first - 1, mask=first > 0, other=0.0)
    distance = tl.where(alive, tl.abs(surprise - expected), float("inf"))
    nearest = distance <= tl.min(distance)
    if KEEPS:
        nearest = _smallest(distance, tl.load(own + 2).to(tl.int32))
    return (nearer < tl.load(own).to(tl.float32) * total) | nearest


@triton.jit
def _smallest(x, k):
    """Which are the k smallest of numbers that are not negative, or tie with the last of them."""
    bits = x.to(tl.int32, bitcast=True)
    low, high = -1, 0x7F800000  # inf
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((bits <= middle).to(tl.int32)) >= k
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return bits <= high


@triton.jit
def _choices(alive, weight, at, threshold, MOST: tl.constexpr):
    """Which are likely enough for `generate.samplers.truncation.XTC`, but for the least likely of them."""
    share = weight / tl.sum(weight)
    likely = alive & (share >= threshold)
    least = tl.min(tl.where(likely, share, float("inf")))
    return likely & (at != tl.min(tl.where(likely & (share == least), at, MOST)))


def tail(
    logits: Float[Tensor, "rows vocab"],
    ops: tuple[str, ...],
    holes: tuple[bool, ...],
    keeps: tuple[bool, ...],
    numbers: Float[Tensor, "any 3"],
    keys: Int[Tensor, " rows"],
    used: Int[Tensor, " rows"],
    lengths: Int[Tensor, " rows"],
    failed: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """One token per row, by what `generate.fused_chain.FusedTail` says.

    No more than `MOST` tokens are ranked: of more that tie with the k-th, those with the lowest
    ids. A row with nothing to draw from is noted in `failed`, as by `draw`.
    """
    rows, vocab = logits.shape
    count = torch.empty(rows, dtype=torch.int32, device=logits.device)
    ids = torch.empty(rows, 3, MOST, dtype=torch.int32, device=logits.device)
    values, sums = torch.empty(2, rows, 2, MOST, device=logits.device)
    about = torch.empty(rows, 2, device=logits.device)
    drawn = torch.empty(rows, dtype=torch.long, device=logits.device)
    _select_kernel[(rows,)](
        logits,
        numbers,
        count,
        values,
        ids,
        about,
        logits.stride(0),
        vocab,
        SPREAD=ops[0] == "near",
        GROUPS=GROUPS,
        DEEP=DEEP,
        MOST=MOST,
        SOME=SOME,
        OTHERS=OTHERS,
        num_warps=16,
        **early(),
    )
    _stages_kernel[(rows,)](
        count,
        values,
        ids,
        about,
        numbers,
        keys,
        used,
        lengths,
        failed,
        drawn,
        sums,
        vocab,
        OPS=ops,
        KEEPS=keeps,
        HOLES=holes,
        MOST=MOST,
        num_warps=8,
        **early(),
    )
    return drawn
