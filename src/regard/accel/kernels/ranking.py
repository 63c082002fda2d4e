"""Triton kernels that rank the largest logits of each row."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.accel.kernels.common import (
    from_sort_key,
    pdl_options,
    to_sort_key,
    wait_for_previous,
)

GROUPS = 2048  # groups of tokens, whose maxima are compared first
TOKENS_PER_GROUP = 8  # tokens of a group in a part of the vocabulary
PARTS_BLOCK = 4  # parts of the vocabulary whose group maxima are read at once
MIN_GROUPS = 64  # the threshold of groups is raised until 2 k or this many are above it
RANK_BLOCK = 256  # tokens that are ranked at once
COMPARE_BLOCK = 32  # tokens that each of them is compared with at once


@triton.jit(do_not_specialize=["stride", "vocab"])  # compiled once for all vocabularies
def _group_max_kernel(
    logits,
    part_max,
    part_sums,
    part_counts,
    stride,
    vocab,
    WITH_SIGMA: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS_PER_GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest logit of each group in one part of the vocabulary; sums and counts WITH_SIGMA."""
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tl.arange(0, GROUPS)
    start = part * TOKENS_PER_GROUP * GROUPS
    _, x = _load_tile(logits + row * stride, start, vocab, TOKENS_PER_GROUP, GROUPS)
    out = (row * tl.num_programs(1) + part) * GROUPS + group
    tl.store(part_max + out, tl.max(x, 1))
    if WITH_SIGMA:
        finite = x > -float("inf")
        tl.store(part_sums + out, tl.sum(tl.where(finite, x, 0.0), 1))
        tl.store(part_counts + out, tl.sum(finite.to(tl.int32), 1))


@triton.jit(do_not_specialize=["stride", "vocab", "parts"])
def _select_kernel(
    logits,
    part_max,
    part_sums,
    part_counts,
    settings,
    count,
    values,
    ids,
    row_stats,
    stride,
    vocab,
    parts,
    WITH_SIGMA: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS_PER_GROUP: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    MAX_RANKED: tl.constexpr,
    MIN_GROUPS: tl.constexpr,
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
    group = tl.arange(0, GROUPS)
    group_max = tl.full((GROUPS,), -float("inf"), tl.float32)
    group_sums, group_counts = tl.zeros((GROUPS,), tl.float32), tl.zeros((GROUPS,), tl.int32)
    part_max += row * parts * GROUPS
    for part in tl.range(parts, loop_unroll_factor=4):
        group_max = tl.maximum(group_max, tl.load(part_max + part * GROUPS + group))
    if WITH_SIGMA:
        for part in range(parts):
            offset = (row * parts + part) * GROUPS + group
            group_sums += tl.load(part_sums + offset)
            group_counts += tl.load(part_counts + offset)
    top = tl.max(group_max)
    low, high, groups_above = to_sort_key(tl.min(group_max)), to_sort_key(top) + 1, GROUPS
    # 9/16 MAX_RANKED groups rarely have more than MAX_RANKED tokens above the threshold; fewer
    # take more iterations of this search, and less time to rank
    most_groups = tl.minimum(tl.maximum(2 * k, MIN_GROUPS), MAX_RANKED * 9 // 16)
    while (high - low > 1) & (groups_above > most_groups):
        middle = low + (high - low) // 2
        count_above = tl.sum((group_max >= from_sort_key(middle)).to(tl.int32))
        groups_above = tl.where(count_above >= k, count_above, groups_above)
        low, high = (
            tl.where(count_above >= k, middle, low),
            tl.where(count_above >= k, high, middle),
        )
    threshold_logit = from_sort_key(low)
    remaining_count, mean = 1.0, 0.0
    squared_deviations = tl.zeros((GROUPS,), tl.float32)
    if WITH_SIGMA:
        remaining_count = tl.sum(group_counts).to(tl.float32)
        mean = tl.sum(group_sums) / remaining_count
        num_collected, squared_deviations = _collect(
            logits,
            vocab,
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
    else:
        num_collected = _collect_from_parts(
            logits,
            part_max,
            vocab,
            parts,
            threshold_logit,
            values,
            ids,
            TOKENS_PER_GROUP,
            PARTS_BLOCK,
            GROUPS,
            MAX_RANKED,
        )
    if num_collected > MAX_RANKED:
        threshold_logit, tie_limit = _kth_largest(
            logits,
            vocab,
            k,
            low,
            to_sort_key(top) + 1,
            TOKENS_PER_GROUP,
            GROUPS,
            MAX_RANKED,
        )
        tl.debug_barrier()  # `values` and `ids`, which overflowed, are written again
        num_collected, _ = _collect(
            logits,
            vocab,
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
    tl.store(count, num_collected)
    tl.store(row_stats, top)
    if WITH_SIGMA:
        n = tl.load(settings).to(tl.float32)
        tl.store(row_stats + 1, top - n * tl.sqrt(tl.sum(squared_deviations) / remaining_count))
    tl.debug_barrier()

    for start in range(0, num_collected, RANK_BLOCK):
        index = start + tl.arange(0, RANK_BLOCK)
        x = tl.load(values + index, mask=index < num_collected, other=0.0)
        token = tl.load(ids + index, mask=index < num_collected, other=0)
        rank = tl.zeros((COMPARE_BLOCK, RANK_BLOCK), tl.int32)
        id_rank = tl.zeros((COMPARE_BLOCK, RANK_BLOCK), tl.int32)
        for first in range(0, num_collected, COMPARE_BLOCK):
            other = first + tl.arange(0, COMPARE_BLOCK)
            others = tl.load(values + other, mask=other < num_collected, other=-float("inf"))[
                :, None
            ]
            before = (
                tl.load(ids + other, mask=other < num_collected, other=vocab)[:, None]
                < token[None, :]
            )
            rank += ((others > x[None, :]) | ((others == x[None, :]) & before)).to(tl.int32)
            id_rank += before.to(tl.int32)
        rank, id_rank = tl.sum(rank, 0), tl.sum(id_rank, 0)
        tl.store(values + MAX_RANKED + rank, x, mask=index < num_collected)
        tl.store(ids + MAX_RANKED + rank, token, mask=index < num_collected)
        tl.store(ids + 2 * MAX_RANKED + rank, id_rank, mask=index < num_collected)


@triton.jit
def _load_tile(logits, start, vocab, TOKENS_PER_GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The ids and logits of the tokens from `start` on, a row for each group; NaN becomes inf."""
    n = start + tl.arange(0, GROUPS)[:, None] + tl.arange(0, TOKENS_PER_GROUP)[None, :] * GROUPS
    x = tl.load(logits + n, mask=n < vocab, other=-float("inf")).to(tl.float32)
    return n, tl.where(x == x, x, float("inf"))


@triton.jit
def _load_parts_tile(part_max, first, parts, PARTS_BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """The indices of the parts of the vocabulary from `first` on, and their group maxima."""
    part = first + tl.arange(0, PARTS_BLOCK)[None, :]
    offset = part * GROUPS + tl.arange(0, GROUPS)[:, None]
    return part, tl.load(part_max + offset, mask=part < parts, other=-float("inf"))


@triton.jit
def _slots(selected, begin):
    """An output slot for each selected element, from `begin` on, and the next free slot."""
    ones = selected.to(tl.int32)
    counts = tl.sum(ones, 1)
    slot = begin + (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(ones, 1) - 1
    return slot, begin + tl.sum(counts)


@triton.jit
def _collect_from_parts(
    logits,
    part_max,
    vocab,
    parts,
    threshold_logit,
    values,
    ids,
    TOKENS_PER_GROUP: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    MAX_RANKED: tl.constexpr,
):
    """Collect logits of at least the threshold, unordered, and return their number.

    First the groups whose maximum in a part of the vocabulary reaches the threshold are found, and
    their first token ids are stored after the collected ids; then only their logits are read. With
    too many such groups or logits, the result is larger than MAX_RANKED.
    """
    first_ids, num_groups = ids + MAX_RANKED, 0
    for first in range(0, parts, PARTS_BLOCK):
        part, x = _load_parts_tile(part_max, first, parts, PARTS_BLOCK, GROUPS)
        selected = (x >= threshold_logit) & (x > -float("inf"))
        slot, num_groups = _slots(selected, num_groups)
        first_id = part * TOKENS_PER_GROUP * GROUPS + tl.arange(0, GROUPS)[:, None]
        tl.store(first_ids + slot, first_id, mask=selected & (slot < MAX_RANKED))
    tl.debug_barrier()
    num_collected = 0
    if num_groups > MAX_RANKED:
        num_collected = MAX_RANKED + 1
    else:
        index = tl.arange(0, MAX_RANKED)
        first_id = tl.load(first_ids + index, mask=index < num_groups, other=vocab)
        n = first_id[:, None] + tl.arange(0, TOKENS_PER_GROUP)[None, :] * GROUPS
        x = tl.load(logits + n, mask=n < vocab, other=-float("inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        selected = (x >= threshold_logit) & (x > -float("inf"))
        slot, num_collected = _slots(selected, 0)
        selected &= slot < MAX_RANKED
        tl.store(values + slot, x, mask=selected)
        tl.store(ids + slot, n, mask=selected)
    return num_collected


@triton.jit
def _collect(
    logits,
    vocab,
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

    All are counted, including those beyond MAX_RANKED. WITH_SIGMA also sums the squared deviations
    from the mean.
    """
    num_collected, squared_deviations = 0, tl.zeros((GROUPS,), tl.float32)
    for start in range(0, vocab, TOKENS_PER_GROUP * GROUPS):
        n, x = _load_tile(logits, start, vocab, TOKENS_PER_GROUP, GROUPS)
        remaining = x > -float("inf")
        if WITH_SIGMA:
            squared_deviations += tl.sum(tl.where(remaining, (x - mean) * (x - mean), 0.0), 1)
        selected = remaining & ((x > threshold_logit) | ((x == threshold_logit) & (n < tie_limit)))
        slot, num_collected = _slots(selected, num_collected)
        selected &= slot < MAX_RANKED
        tl.store(values + slot, x, mask=selected)
        tl.store(ids + slot, n, mask=selected)
    return num_collected, squared_deviations


@triton.jit
def _kth_largest(
    logits,
    vocab,
    k,
    low,
    high,
    TOKENS_PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MAX_RANKED: tl.constexpr,
):
    """The k-th largest logit, and the first id whose tie does not fit into MAX_RANKED.

    Used for rows with more than MAX_RANKED logits above the first threshold: many logits are
    equal, or the largest ones are in few groups.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        count_above = _count_collected(
            logits, vocab, from_sort_key(middle), vocab, TOKENS_PER_GROUP, GROUPS
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
            _count_collected(logits, vocab, threshold_logit, middle, TOKENS_PER_GROUP, GROUPS)
            <= MAX_RANKED
        )
        tie_limit, upper = tl.where(fits, middle, tie_limit), tl.where(fits, upper, middle)
    return threshold_logit, tie_limit


@triton.jit
def _count_collected(
    logits,
    vocab,
    threshold_logit,
    tie_limit,
    TOKENS_PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The number of tokens that `_collect` would collect."""
    counts = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, vocab, TOKENS_PER_GROUP * GROUPS):
        n, x = _load_tile(logits, start, vocab, TOKENS_PER_GROUP, GROUPS)
        selected = (x > -float("inf")) & (
            (x > threshold_logit) | ((x == threshold_logit) & (n < tie_limit))
        )
        counts += tl.sum(selected.to(tl.int32), 1)
    return tl.sum(counts)


def rank_logits(
    logits: Float[Tensor, "rows vocab"],
    settings: Float[Tensor, "any 3"],
    max_ranked: int,
    *,
    with_sigma: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rank the k largest logits of each row, and a few more, at most `max_ranked`.

    k is the first setting of the first sampler or, `with_sigma`, of the second one. Returns
    `count`, `values`, `ids` and `row_stats` of `_select_kernel`.
    """
    rows, vocab = logits.shape
    count = torch.empty(rows, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, 2, max_ranked, device=logits.device)
    ids = torch.empty(rows, 3, max_ranked, dtype=torch.int32, device=logits.device)
    row_stats = torch.empty(rows, 2, device=logits.device)
    parts = triton.cdiv(vocab, TOKENS_PER_GROUP * GROUPS)
    part_max, part_sums = torch.empty(2, rows, parts, GROUPS, device=logits.device)
    part_counts = torch.empty(rows, parts, GROUPS, dtype=torch.int32, device=logits.device)
    _group_max_kernel[(rows, parts)](
        logits,
        part_max,
        part_sums,
        part_counts,
        logits.stride(0),
        vocab,
        WITH_SIGMA=with_sigma,
        GROUPS=GROUPS,
        TOKENS_PER_GROUP=TOKENS_PER_GROUP,
        num_warps=8,
        **pdl_options(),
    )
    _select_kernel[(rows,)](
        logits,
        part_max,
        part_sums,
        part_counts,
        settings,
        count,
        values,
        ids,
        row_stats,
        logits.stride(0),
        vocab,
        parts,
        WITH_SIGMA=with_sigma,
        GROUPS=GROUPS,
        TOKENS_PER_GROUP=TOKENS_PER_GROUP,
        PARTS_BLOCK=PARTS_BLOCK,
        MAX_RANKED=max_ranked,
        MIN_GROUPS=MIN_GROUPS,
        RANK_BLOCK=RANK_BLOCK,
        COMPARE_BLOCK=COMPARE_BLOCK,
        num_warps=16,
        **pdl_options(),
    )
    return count, values, ids, row_stats
