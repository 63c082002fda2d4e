"""The end of a chain as one kernel: what is cut and reshaped behind a top-k, and the draw."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.nn.kernels.draw import _key, _number

MOST = 1024  # tokens that can be ranked
GROUPS = 2048  # of tokens, of which the largest are looked at
DEEP = 8  # tokens of each that are read at once
WARPS = 16


@triton.jit
def _tail_kernel(
    logits,
    numbers,
    keys,
    used,
    lengths,
    failed,
    ids,
    kept,
    sums,
    stride,
    vocab,
    OPS: tl.constexpr,
    KEEPS: tl.constexpr,
    HOLES: tl.constexpr,
    GROUPS: tl.constexpr,
    DEEP: tl.constexpr,
    MOST: tl.constexpr,
):
    """Find the k largest, rank them, go through the stages and draw.

    `numbers` are three of each stage: its settings, then its `min_keep`.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    kept += row * MOST
    sums += row * 2 * MOST
    SPREAD: tl.constexpr = OPS[0] == "near"
    k = tl.load(numbers + 3 * SPREAD).to(tl.int32)

    # the largest of each group: as many tokens are at least as large as k of them
    group = tl.arange(0, GROUPS)
    best = tl.full((GROUPS,), -float("inf"), tl.float32)
    added, there = tl.zeros((GROUPS,), tl.float32), tl.zeros((GROUPS,), tl.int32)
    for start in range(0, vocab, DEEP * GROUPS):
        for deep in tl.static_range(DEEP):
            n = start + deep * GROUPS + group
            x = tl.load(logits + n, mask=n < vocab, other=-float("inf")).to(tl.float32)
            best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
            if SPREAD:
                added += tl.where(x > -float("inf"), x, 0.0)
                there += (x > -float("inf")).to(tl.int32)
    best = tl.where(best == best, best, float("inf"))  # NaN: as bad as inf
    top = tl.max(best)
    low, high, enough = _key(tl.min(best)), _key(top) + 1, GROUPS
    while (high - low > 1) & (enough > MOST * 9 // 16):  # so few groups hardly have MOST tokens
        middle = low + (high - low) // 2
        found = tl.sum((best >= _number(middle)).to(tl.int32))
        enough = tl.where(found >= k, found, enough)
        low, high = tl.where(found >= k, middle, low), tl.where(found >= k, high, middle)
    bar, near = _number(low), -float("inf")
    some, number = best >= bar, tl.zeros((GROUPS,), tl.int32)
    if SPREAD:
        some, count = group >= 0, tl.sum(there).to(tl.float32)
        mean, away = tl.sum(added) / count, tl.zeros((GROUPS,), tl.float32)
    for start in range(0, vocab, DEEP * GROUPS):
        for deep in tl.static_range(DEEP):
            n = start + deep * GROUPS + group
            x = tl.load(logits + n, mask=some & (n < vocab), other=-float("inf")).to(tl.float32)
            number += ((x >= bar) & (x > -float("inf"))).to(tl.int32)
            if SPREAD:
                away += tl.where(x > -float("inf"), (x - mean) * (x - mean), 0.0)
    if SPREAD:
        near = top - tl.load(numbers).to(tl.float32) * tl.sqrt(tl.sum(away) / count)
    left = tl.sum(number)
    if left <= MOST:
        some, place = number > 0, tl.cumsum(number, 0) - number
        for start in range(0, vocab, DEEP * GROUPS):
            for deep in tl.static_range(DEEP):
                n = start + deep * GROUPS + group
                x = tl.load(logits + n, mask=some & (n < vocab), other=-float("inf"))
                x = x.to(tl.float32)
                take = (x >= bar) & (x > -float("inf"))
                tl.store(kept + place, n, mask=take)
                place += take.to(tl.int32)
    else:
        left = _crowd(logits, kept, vocab, k, low, high=_key(top) + 1, GROUPS=GROUPS, MOST=MOST)
    tl.debug_barrier()

    at = tl.arange(0, MOST)
    alive = at < left
    id = tl.load(kept + at, mask=alive, other=0)
    x = tl.load(logits + id, mask=alive, other=0.0).to(tl.float32)
    packed = tl.sort(tl.where(alive, _packed(x, id), 0x7FFFFFFFFFFFFFFF))
    x = tl.where(alive, _number(~(packed >> 32)), -float("inf"))
    id = (packed & 0xFFFFFFFF).to(tl.int32)
    weight = tl.where(alive, tl.exp(x - top), 0.0)
    key, taken = tl.load(keys + row), tl.load(used + row)
    for n in tl.static_range(len(OPS)):
        own = numbers + 3 * n
        if OPS[n] == "temperature":
            cold = tl.load(own).to(tl.float32)
            x, top = x * cold, top * cold
            weight = tl.where(alive, tl.exp(x - top), 0.0)
        else:
            keep = alive
            place = tl.cumsum(alive.to(tl.int32), 0) if HOLES[n] else at + 1
            if OPS[n] == "near":
                keep = x >= near
            elif OPS[n] == "top_n_sigma":
                keep = _near(x, alive, tl.load(own).to(tl.float32))
            elif OPS[n] == "top_k":
                keep = _first(x, alive, place, tl.load(own).to(tl.int32))
            elif OPS[n] == "exact_top_k":
                keep = place <= tl.load(own).to(tl.int32)
            elif OPS[n] == "top_p":
                reached = tl.cumsum(weight, 0)
                before = reached - weight
                share = tl.load(own).to(tl.float32)
                keep = (before < share * tl.max(reached)) | (before == 0.0)
            elif OPS[n] == "min_p":
                largest = tl.max(weight) if HOLES[n] else 1.0
                keep = weight >= tl.load(own).to(tl.float32) * largest
            elif OPS[n] == "typical":
                keep = _typical(x, alive, weight, top, at, own, sums, KEEPS[n], MOST)
            elif OPS[n] == "xtc":
                act = _uniform(key, taken) < tl.load(own)
                threshold = tl.where(act, tl.load(own + 1), 2.0).to(tl.float32)
                keep = ~_choices(alive, weight, at, threshold)
                taken += 1
            if KEEPS[n] and OPS[n] != "typical":
                keep |= _first(x, alive, place, tl.load(own + 2).to(tl.int32))
            alive &= keep
            weight = tl.where(alive, weight, 0.0)

    # the draw goes by id
    order = tl.sort(tl.where(alive, id * MOST + at, 0x7FFFFFFF))
    share = tl.gather(weight, order & (MOST - 1), 0).to(tl.float64)
    share = tl.where(order < 0x7FFFFFFF, share, 0.0)
    reached = tl.cumsum(share, 0)
    passed = (reached > _uniform(key, taken) * tl.max(reached)) & (share > 0)
    drawn = tl.min(tl.where(passed, order, 0x7FFFFFFF))
    drawn = tl.minimum(drawn, tl.max(tl.where(share > 0, order, 0))) // MOST
    whole = top - top == 0  # NaN where it is not finite
    tl.store(ids + row, tl.where(whole, drawn, vocab - 1).to(tl.int64))
    tl.store(used + row, taken + 1)
    length = tl.load(lengths + row)
    tl.store(failed + row, tl.minimum(tl.load(failed + row), length), mask=~whole)


@triton.jit
def _packed(x, id):
    """A logit and its id as a number: large logits first, then low ids."""
    x = tl.where(x == 0, 0.0, x)  # there is a -0 too
    return (~_key(x) << 32) | id.to(tl.int64)


@triton.jit
def _crowd(logits, kept, vocab, k, low, high, GROUPS: tl.constexpr, MOST: tl.constexpr):
    """Keep those above the k-th largest, and of its ties the first, as many as there is room for.

    For rows in which the bar was too low, since many tokens are equal or large ones stand together.
    """
    group = tl.arange(0, GROUPS)
    while high - low > 1:
        middle = low + (high - low) // 2
        many = tl.zeros((GROUPS,), tl.int32)
        for start in range(0, vocab, GROUPS):
            n = start + group
            x = tl.load(logits + n, mask=n < vocab, other=-float("inf")).to(tl.float32)
            many += (x >= _number(middle)).to(tl.int32)
        found = tl.sum(many)
        low, high = tl.where(found >= k, middle, low), tl.where(found >= k, high, middle)
    least = _number(low)
    many = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, vocab, GROUPS):
        n = start + group
        x = tl.load(logits + n, mask=n < vocab, other=-float("inf")).to(tl.float32)
        many += (x > least).to(tl.int32)
    room, left, ties = MOST - tl.sum(many), 0, 0
    for start in range(0, vocab, GROUPS):
        n = start + group
        x = tl.load(logits + n, mask=n < vocab, other=-float("inf")).to(tl.float32)
        tie = (x == least).to(tl.int32)
        take = (x > least) | ((x == least) & (ties + tl.cumsum(tie, 0) <= room))
        place = left + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(kept + place, n, mask=take)
        left, ties = left + tl.sum(take.to(tl.int32)), ties + tl.sum(tie)
    return left


@triton.jit
def _first(x, alive, place, count):
    """Which are among the first so many of those that are left, or tie with the last of them."""
    return x >= tl.min(tl.where(alive & (place <= count), x, float("inf")))


@triton.jit
def _near(x, alive, n):
    """As `generate.truncate.TopNSigma`."""
    count = tl.sum(alive.to(tl.int32)).to(tl.float32)
    away = x - tl.sum(tl.where(alive, x, 0.0)) / count
    sigma = tl.sqrt(tl.sum(tl.where(alive, away * away, 0.0)) / count)
    return x >= tl.max(tl.where(alive, x, -float("inf"))) - n * sigma


@triton.jit
def _typical(x, alive, weight, top, at, own, sums, KEEPS: tl.constexpr, MOST: tl.constexpr):
    """As `generate.truncate.Typical`; tokens that were removed weigh nothing."""
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
    if KEEPS:
        last = tl.minimum(tl.load(own + 2).to(tl.int32), MOST) - 1
        nearest = tl.min(tl.where(at == last, tl.sort(distance), float("inf")))
    else:
        nearest = tl.min(distance)
    return (nearer < tl.load(own).to(tl.float32) * total) | (distance <= nearest)


@triton.jit
def _choices(alive, weight, at, threshold):
    """Which are likely enough for `generate.truncate.XTC`, but for the least likely of them."""
    share = weight / tl.sum(weight)
    likely = alive & (share >= threshold)
    packed = (share.to(tl.int32, bitcast=True).to(tl.int64) << 32) | at
    return likely & (packed != tl.min(tl.where(likely, packed, 0x7FFFFFFFFFFFFFFF)))


@triton.jit
def _uniform(key, count):
    """A number of `generate.context.Generators`."""
    mixed = key + count * -7046029254386353131
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


def tail(
    logits: Float[Tensor, "rows vocab"],
    ops: tuple[str, ...],
    holes: tuple[bool, ...],
    keeps: tuple[bool, ...],
    numbers: Float[Tensor, "stages 3"],
    keys: Int[Tensor, " rows"],
    used: Int[Tensor, " rows"],
    lengths: Int[Tensor, " rows"],
    failed: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """One token per row, by what `generate.tail.Tail` says.

    No more than `MOST` tokens are ranked: of more that tie with the k-th, those with the lowest
    ids. A row with nothing to draw from is noted in `failed`, as by `draw`.
    """
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.long, device=logits.device)
    kept = torch.empty(rows, MOST, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, 2, MOST, device=logits.device)
    _tail_kernel[(rows,)](
        logits,
        numbers,
        keys,
        used,
        lengths,
        failed,
        ids,
        kept,
        sums,
        logits.stride(0),
        vocab,
        OPS=ops,
        KEEPS=keeps,
        HOLES=holes,
        GROUPS=GROUPS,
        DEEP=DEEP,
        MOST=MOST,
        num_warps=WARPS,
    )
    return ids
