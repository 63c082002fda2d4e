"""Triton kernels that end a sampler chain: rank the largest logits, apply samplers, sample."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels.common import (
    from_sort_key,
    pdl_options,
    to_sort_key,
    uniform,
    wait_for_previous,
)

MAX_RANKED = 1024  # tokens that can be ranked per row
GROUPS = 2048  # of tokens; the largest of each group are compared first
TOKENS_PER_GROUP = 8  # read at once
RANK_BLOCK = 256  # tokens that are ranked at once
COMPARE_BLOCK = 32  # tokens that they are compared with at once


@triton.jit(do_not_specialize=["stride", "vocab"])  # compiled once for all vocabularies
def _select_kernel(
    logits,
    settings,
    count,
    values,
    ids,
    row_stats,
    stride,
    vocab,
    WITH_SIGMA: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS_PER_GROUP: tl.constexpr,
    MAX_RANKED: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    COMPARE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank the k largest logits, and a few more.

    `values` holds the collected logits, then the ranked ones; `ids` likewise, then the rank of
    each ranked token by id. `row_stats` holds the largest logit and, WITH_SIGMA, the threshold of
    `top_n_sigma`.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    count += row
    values += row * 2 * MAX_RANKED
    ids += row * 3 * MAX_RANKED
    row_stats += row * 2
    k = tl.load(settings + 3 * WITH_SIGMA).to(tl.int32)

    # at least k tokens are as large as the k-th largest group maximum
    all_groups = tl.arange(0, GROUPS) >= 0
    group_max = tl.full((GROUPS,), -float("inf"), tl.float32)
    group_sums, group_counts = tl.zeros((GROUPS,), tl.float32), tl.zeros((GROUPS,), tl.int32)
    for start in range(0, vocab, TOKENS_PER_GROUP * GROUPS):
        _, x = _tile(logits, start, vocab, all_groups, TOKENS_PER_GROUP, GROUPS)
        group_max = tl.maximum(group_max, tl.max(x, 1))
        if WITH_SIGMA:
            group_sums += tl.sum(tl.where(x > -float("inf"), x, 0.0), 1)
            group_counts += tl.sum((x > -float("inf")).to(tl.int32), 1)
    top = tl.max(group_max)
    low, high, groups_above = to_sort_key(tl.min(group_max)), to_sort_key(top) + 1, GROUPS
    while (high - low > 1) & (
        groups_above > MAX_RANKED * 9 // 16
    ):  # so few groups rarely have MAX_RANKED tokens
        middle = low + (high - low) // 2
        count_above = tl.sum((group_max >= from_sort_key(middle)).to(tl.int32))
        groups_above = tl.where(count_above >= k, count_above, groups_above)
        low, high = (
            tl.where(count_above >= k, middle, low),
            tl.where(count_above >= k, high, middle),
        )
    threshold_logit = from_sort_key(low)
    chosen_groups, remaining_count, mean = group_max >= threshold_logit, 1.0, 0.0
    if WITH_SIGMA:
        remaining_count = tl.sum(group_counts).to(tl.float32)
        chosen_groups, mean = all_groups, tl.sum(group_sums) / remaining_count
    collected, deviations = _collect(
        logits,
        vocab,
        chosen_groups,
        threshold_logit,
        vocab,
        values,
        ids,
        mean,
        WITH_SIGMA,
        TOKENS_PER_GROUP // 2,
        GROUPS,
        MAX_RANKED,
    )
    if collected > MAX_RANKED:
        threshold_logit, tie_limit = _kth_largest(
            logits,
            vocab,
            all_groups,
            k,
            low,
            to_sort_key(top) + 1,
            TOKENS_PER_GROUP,
            GROUPS,
            MAX_RANKED,
        )
        tl.debug_barrier()  # too many were written to `values`
        collected, _ = _collect(
            logits,
            vocab,
            all_groups,
            threshold_logit,
            tie_limit,
            values,
            ids,
            0.0,
            False,
            TOKENS_PER_GROUP // 2,
            GROUPS,
            MAX_RANKED,
        )
    tl.store(count, collected)
    tl.store(row_stats, top)
    if WITH_SIGMA:
        n = tl.load(settings).to(tl.float32)
        tl.store(row_stats + 1, top - n * tl.sqrt(tl.sum(deviations) / remaining_count))
    tl.debug_barrier()

    for start in range(0, collected, RANK_BLOCK):
        index = start + tl.arange(0, RANK_BLOCK)
        x = tl.load(values + index, mask=index < collected, other=0.0)
        token = tl.load(ids + index, mask=index < collected, other=0)
        rank = tl.zeros((COMPARE_BLOCK, RANK_BLOCK), tl.int32)
        id_rank = tl.zeros((COMPARE_BLOCK, RANK_BLOCK), tl.int32)
        for first in range(0, collected, COMPARE_BLOCK):
            other = first + tl.arange(0, COMPARE_BLOCK)
            others = tl.load(values + other, mask=other < collected, other=-float("inf"))[:, None]
            before = (
                tl.load(ids + other, mask=other < collected, other=vocab)[:, None] < token[None, :]
            )
            rank += ((others > x[None, :]) | ((others == x[None, :]) & before)).to(tl.int32)
            id_rank += before.to(tl.int32)
        rank, id_rank = tl.sum(rank, 0), tl.sum(id_rank, 0)
        tl.store(values + MAX_RANKED + rank, x, mask=index < collected)
        tl.store(ids + MAX_RANKED + rank, token, mask=index < collected)
        tl.store(ids + 2 * MAX_RANKED + rank, id_rank, mask=index < collected)


@triton.jit
def _tile(
    logits, start, vocab, chosen_groups, TOKENS_PER_GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """The next tokens of the chosen groups: ids and logits; NaN becomes inf."""
    n = start + tl.arange(0, GROUPS)[:, None] + tl.arange(0, TOKENS_PER_GROUP)[None, :] * GROUPS
    x = tl.load(logits + n, mask=(n < vocab) & chosen_groups[:, None], other=-float("inf")).to(
        tl.float32
    )
    return n, tl.where(x == x, x, float("inf"))


@triton.jit
def _collect(
    logits,
    vocab,
    chosen_groups,
    threshold_logit,
    tie_limit,
    values,
    ids,
    mean,
    WITH_SIGMA: tl.constexpr,
    TOKENS_PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MAX_RANKED: tl.constexpr,
):
    """Collect logits above the threshold, or equal to it with an id below `tie_limit`, unordered.

    All are counted, also those beyond MAX_RANKED. WITH_SIGMA also sums the squared deviations
    from the mean.
    """
    collected, deviations = 0, tl.zeros((GROUPS,), tl.float32)
    for start in range(0, vocab, TOKENS_PER_GROUP * GROUPS):
        n, x = _tile(logits, start, vocab, chosen_groups, TOKENS_PER_GROUP, GROUPS)
        remaining = x > -float("inf")
        if WITH_SIGMA:
            deviations += tl.sum(tl.where(remaining, (x - mean) * (x - mean), 0.0), 1)
        take = remaining & ((x > threshold_logit) | ((x == threshold_logit) & (n < tie_limit)))
        one = take.to(tl.int32)
        number = tl.sum(one, 1)
        id_rank = collected + (tl.cumsum(number, 0) - number)[:, None] + tl.cumsum(one, 1) - 1
        collected += tl.sum(number)
        take &= id_rank < MAX_RANKED
        tl.store(values + id_rank, x, mask=take)
        tl.store(ids + id_rank, n, mask=take)
    return collected, deviations


@triton.jit
def _kth_largest(
    logits,
    vocab,
    all_groups,
    k,
    low,
    high,
    TOKENS_PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MAX_RANKED: tl.constexpr,
):
    """The k-th largest logit, and the id from which on its ties do not fit into MAX_RANKED.

    For rows in which the first threshold was too low: with many equal tokens, or with the largest
    in few groups.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        count_above = _count_collected(
            logits, vocab, all_groups, from_sort_key(middle), vocab, TOKENS_PER_GROUP, GROUPS
        )
        low, high = (
            tl.where(count_above >= k, middle, low),
            tl.where(count_above >= k, high, middle),
        )
    threshold_logit = from_sort_key(low)
    tie_limit, upper = 0, vocab + 1
    while upper - tie_limit > 1:
        middle = tie_limit + (upper - tie_limit) // 2
        fits = (
            _count_collected(
                logits, vocab, all_groups, threshold_logit, middle, TOKENS_PER_GROUP, GROUPS
            )
            <= MAX_RANKED
        )
        tie_limit, upper = tl.where(fits, middle, tie_limit), tl.where(fits, upper, middle)
    return threshold_logit, tie_limit


@triton.jit
def _count_collected(
    logits,
    vocab,
    all_groups,
    threshold_logit,
    tie_limit,
    TOKENS_PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """How many tokens `_collect` would collect."""
    counts = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, vocab, TOKENS_PER_GROUP * GROUPS):
        n, x = _tile(logits, start, vocab, all_groups, TOKENS_PER_GROUP, GROUPS)
        take = (x > -float("inf")) & (
            (x > threshold_logit) | ((x == threshold_logit) & (n < tie_limit))
        )
        counts += tl.sum(take.to(tl.int32), 1)
    return tl.sum(counts)


@triton.jit(do_not_specialize=["vocab"])
def _samplers_kernel(
    count,
    values,
    ids,
    row_stats,
    settings,
    keys,
    counters,
    lengths,
    failed,
    sampled,
    sums,
    vocab,
    OPS: tl.constexpr,
    HAS_MIN_KEEP: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    MAX_RANKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Apply the samplers to the ranked tokens, and sample in the order of ids.

    `settings` has three values per sampler: its options, then its `min_keep`.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    sums += row * 2 * MAX_RANKED
    index = tl.arange(0, MAX_RANKED)
    remaining = index < tl.load(count + row)
    x = tl.load(
        values + row * 2 * MAX_RANKED + MAX_RANKED + index, mask=remaining, other=-float("inf")
    )
    token = tl.load(ids + row * 3 * MAX_RANKED + MAX_RANKED + index, mask=remaining, other=0)
    id_rank = tl.load(ids + row * 3 * MAX_RANKED + 2 * MAX_RANKED + index, mask=remaining, other=0)
    id_rank = tl.where(remaining, id_rank, index)
    top = tl.load(row_stats + row * 2)
    finite = top - top == 0  # inf - inf and NaN - NaN are NaN
    weight = tl.where(remaining, tl.exp(x - top), 0.0)
    key, used_numbers = tl.load(keys + row), tl.load(counters + row)
    for n in tl.static_range(len(OPS)):
        sampler_settings = settings + 3 * n
        if OPS[n] == "temperature":
            inverse_temperature = tl.load(sampler_settings).to(tl.float32)
            if HAS_GAPS[n]:
                top = tl.max(tl.where(remaining, x, -float("inf")))
            # subtract, then multiply: as a fused multiply-add, x * t - top * t may not be 0
            weight = tl.where(remaining, tl.exp((x - top) * inverse_temperature), 0.0)
            x, top = x * inverse_temperature, top * inverse_temperature
        else:
            keep = remaining
            rank = tl.cumsum(remaining.to(tl.int32), 0) if HAS_GAPS[n] else index + 1
            if OPS[n] == "top_n_sigma_of_row":
                keep = x >= tl.load(row_stats + row * 2 + 1)
            elif OPS[n] == "top_n_sigma":
                keep = _top_n_sigma(x, remaining, tl.load(sampler_settings).to(tl.float32))
            elif OPS[n] == "top_k":
                keep = _in_first(x, remaining, rank, tl.load(sampler_settings).to(tl.int32))
            elif OPS[n] == "exact_top_k":
                keep = rank <= tl.load(sampler_settings).to(tl.int32)
            elif OPS[n] == "top_p":
                reached = tl.cumsum(weight, 0)
                before = reached - weight
                p = tl.load(sampler_settings).to(tl.float32)
                keep = (before < p * tl.max(reached)) | (before == 0.0)
            elif OPS[n] == "min_p":
                keep = weight >= tl.load(sampler_settings).to(tl.float32) * tl.max(weight)
            elif OPS[n] == "typical":
                keep = _typical(
                    x,
                    remaining,
                    weight,
                    top,
                    index,
                    sampler_settings,
                    sums,
                    HAS_MIN_KEEP[n],
                    MAX_RANKED,
                )
            elif OPS[n] == "xtc":
                act = uniform(key, used_numbers) < tl.load(sampler_settings)
                threshold = tl.where(act, tl.load(sampler_settings + 1), 2.0).to(tl.float32)
                keep = ~_xtc_removed(remaining, weight, index, threshold, MAX_RANKED)
                used_numbers += 1
            if HAS_MIN_KEEP[n] and OPS[n] != "typical":
                keep |= _in_first(x, remaining, rank, tl.load(sampler_settings + 2).to(tl.int32))
            remaining &= keep
            weight = tl.where(remaining, weight, 0.0)

    tl.debug_barrier()  # a sampler may have read `sums`
    tl.store(sums + id_rank, weight)
    tl.debug_barrier()
    weight_by_id = tl.load(sums + index).to(tl.float64)
    reached = tl.cumsum(weight_by_id, 0)
    passed = (reached > uniform(key, used_numbers) * tl.max(reached)) & (weight_by_id > 0)
    first = tl.min(tl.where(passed, index, MAX_RANKED))
    sampled_rank = tl.minimum(first, tl.max(tl.where(weight_by_id > 0, index, 0)))
    chosen = tl.sum(tl.where(id_rank == sampled_rank, token, 0))
    tl.store(sampled + row, tl.where(finite, chosen, vocab - 1).to(tl.int64))
    tl.store(counters + row, used_numbers + 1)
    length = tl.load(lengths + row)
    tl.store(failed + row, tl.minimum(tl.load(failed + row), length), mask=~finite)


@triton.jit
def _in_first(x, remaining, rank, count):
    """Which of the remaining tokens are among the first `count`, or tie with the last of them."""
    return x >= tl.min(tl.where(remaining & (rank <= count), x, float("inf")))


@triton.jit
def _top_n_sigma(x, remaining, n):
    """As `generate.samplers.truncation.TopNSigma`."""
    count = tl.sum(remaining.to(tl.int32)).to(tl.float32)
    deviations = x - tl.sum(tl.where(remaining, x, 0.0)) / count
    sigma = tl.sqrt(tl.sum(tl.where(remaining, deviations * deviations, 0.0)) / count)
    return x >= tl.max(tl.where(remaining, x, -float("inf"))) - n * sigma


@triton.jit
def _typical(
    x,
    remaining,
    weight,
    top,
    index,
    sampler_settings,
    sums,
    HAS_MIN_KEEP: tl.constexpr,
    MAX_RANKED: tl.constexpr,
):
    """As `generate.samplers.truncation.Typical`; removed tokens have weight 0."""
    total = tl.sum(weight)
    below = top - x
    surprisal = below + tl.log(total)
    expected = tl.sum(tl.where(remaining, weight * below, 0.0)) / total + tl.log(total)
    mirror = 2 * expected - surprisal
    tl.debug_barrier()  # another sampler may have read `sums`
    tl.store(sums + index, surprisal)
    tl.store(sums + MAX_RANKED + index, tl.cumsum(weight, 0))
    tl.debug_barrier()
    smallest, largest = tl.minimum(surprisal, mirror), tl.maximum(surprisal, mirror)
    first, end = tl.zeros((MAX_RANKED,), tl.int32), tl.zeros((MAX_RANKED,), tl.int32)
    step = MAX_RANKED
    while step > 0:
        value = tl.load(
            sums + first + step - 1, mask=first + step <= MAX_RANKED, other=float("inf")
        )
        first += tl.where((first + step <= MAX_RANKED) & (value <= smallest), step, 0)
        value = tl.load(sums + end + step - 1, mask=end + step <= MAX_RANKED, other=float("inf"))
        end += tl.where((end + step <= MAX_RANKED) & (value < largest), step, 0)
        step //= 2
    mass_nearer = tl.load(sums + MAX_RANKED + end - 1, mask=end > 0, other=0.0)
    mass_nearer -= tl.load(sums + MAX_RANKED + first - 1, mask=first > 0, other=0.0)
    distance = tl.where(remaining, tl.abs(surprisal - expected), float("inf"))
    nearest = distance <= tl.min(distance)
    if HAS_MIN_KEEP:
        nearest = _smallest(distance, tl.load(sampler_settings + 2).to(tl.int32))
    return (mass_nearer < tl.load(sampler_settings).to(tl.float32) * total) | nearest


@triton.jit
def _smallest(x, k):
    """Which are the k smallest of non-negative floats, or tie with the last of them."""
    bits = x.to(tl.int32, bitcast=True)
    low, high = -1, 0x7F800000  # inf
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((bits <= middle).to(tl.int32)) >= k
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return bits <= high


@triton.jit
def _xtc_removed(remaining, weight, index, threshold, MAX_RANKED: tl.constexpr):
    """The tokens that `generate.samplers.truncation.XTC` removes: all likely ones but one."""
    probability = weight / tl.sum(weight)
    above = remaining & (probability >= threshold)
    smallest = tl.min(tl.where(above, probability, float("inf")))
    return above & (index != tl.min(tl.where(above & (probability == smallest), index, MAX_RANKED)))


def sample(
    logits: Float[Tensor, "rows vocab"],
    ops: tuple[str, ...],
    gaps: tuple[bool, ...],
    min_keeps: tuple[bool, ...],
    settings: Float[Tensor, "any 3"],
    keys: Int[Tensor, " rows"],
    counters: Int[Tensor, " rows"],
    lengths: Int[Tensor, " rows"],
    failed: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """Sample one token per row by the samplers of `generate.fused_chain.FusedTail`.

    At most `MAX_RANKED` tokens are ranked: of those that tie with the k-th, the ones with the
    lowest ids. A row without a finite logit is recorded in `failed`, as by `sampling.sample_token`.
    """
    rows, vocab = logits.shape
    count = torch.empty(rows, dtype=torch.int32, device=logits.device)
    ids = torch.empty(rows, 3, MAX_RANKED, dtype=torch.int32, device=logits.device)
    values, sums = torch.empty(2, rows, 2, MAX_RANKED, device=logits.device)
    row_stats = torch.empty(rows, 2, device=logits.device)
    sampled = torch.empty(rows, dtype=torch.long, device=logits.device)
    _select_kernel[(rows,)](
        logits,
        settings,
        count,
        values,
        ids,
        row_stats,
        logits.stride(0),
        vocab,
        WITH_SIGMA=ops[0] == "top_n_sigma_of_row",
        GROUPS=GROUPS,
        TOKENS_PER_GROUP=TOKENS_PER_GROUP,
        MAX_RANKED=MAX_RANKED,
        RANK_BLOCK=RANK_BLOCK,
        COMPARE_BLOCK=COMPARE_BLOCK,
        num_warps=16,
        **pdl_options(),
    )
    _samplers_kernel[(rows,)](
        count,
        values,
        ids,
        row_stats,
        settings,
        keys,
        counters,
        lengths,
        failed,
        sampled,
        sums,
        vocab,
        OPS=ops,
        HAS_MIN_KEEP=min_keeps,
        HAS_GAPS=gaps,
        MAX_RANKED=MAX_RANKED,
        num_warps=8,
        **pdl_options(),
    )
    return sampled
