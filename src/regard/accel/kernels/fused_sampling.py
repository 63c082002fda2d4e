"""The Triton kernel of the last samplers of a chain and of the sampling itself."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels import MAX_RANKED
from regard.accel.kernels.common import pdl_options, uniform, wait_for_previous
from regard.accel.kernels.ranking import rank_logits

SIGMA_OF_ROW = "top_n_sigma_of_row"  # the operation whose threshold needs all logits of a row


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
    failure_lengths,
    sampled,
    scratch,
    vocab,
    OPS: tl.constexpr,
    HAS_MIN_KEEP: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    MAX_RANKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Apply the samplers to the ranked tokens, and sample in the order of ids.

    `settings` has three values per sampler: two settings, then its `min_keep`. `scratch` is a
    buffer through which the threads of a program exchange values.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    scratch += row * 2 * MAX_RANKED
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
    key, random_count = tl.load(keys + row), tl.load(counters + row)
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
                keep = _is_in_top(x, remaining, rank, tl.load(sampler_settings).to(tl.int32))
            elif OPS[n] == "exact_top_k":
                keep = rank <= tl.load(sampler_settings).to(tl.int32)
            elif OPS[n] == "top_p":
                cumulative = tl.cumsum(weight, 0)
                mass_before = cumulative - weight
                p = tl.load(sampler_settings).to(tl.float32)
                keep = (mass_before < p * tl.max(cumulative)) | (mass_before == 0.0)
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
                    scratch,
                    HAS_MIN_KEEP[n],
                    MAX_RANKED,
                )
            elif OPS[n] == "xtc":
                applies = uniform(key, random_count) < tl.load(sampler_settings)
                threshold = tl.where(applies, tl.load(sampler_settings + 1), 2.0).to(tl.float32)
                keep = ~_xtc_removes(remaining, weight, index, threshold, MAX_RANKED)
                random_count += 1
            if HAS_MIN_KEEP[n] and OPS[n] != "typical":
                keep |= _is_in_top(x, remaining, rank, tl.load(sampler_settings + 2).to(tl.int32))
            remaining &= keep
            weight = tl.where(remaining, weight, 0.0)

    tl.debug_barrier()  # a sampler may have read `scratch`
    tl.store(scratch + id_rank, weight)
    tl.debug_barrier()
    weight_by_id = tl.load(scratch + index).to(tl.float64)
    cumulative = tl.cumsum(weight_by_id, 0)
    exceeds = (cumulative > uniform(key, random_count) * tl.max(cumulative)) & (weight_by_id > 0)
    first = tl.min(tl.where(exceeds, index, MAX_RANKED))
    sampled_rank = tl.minimum(first, tl.max(tl.where(weight_by_id > 0, index, 0)))
    sampled_id = tl.sum(tl.where(id_rank == sampled_rank, token, 0))
    tl.store(sampled + row, tl.where(finite, sampled_id, vocab - 1).to(tl.int64))
    tl.store(counters + row, random_count + 1)
    length = tl.load(lengths + row)
    failure_length = tl.minimum(tl.load(failure_lengths + row), length)
    tl.store(failure_lengths + row, failure_length, mask=~finite)


@triton.jit
def _is_in_top(x, remaining, rank, count):
    """Whether a token is among the first `count` of the remaining ones, or ties with the last."""
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
    scratch,
    HAS_MIN_KEEP: tl.constexpr,
    MAX_RANKED: tl.constexpr,
):
    """As `generate.samplers.truncation.Typical`; removed tokens have weight 0."""
    total = tl.sum(weight)
    below = top - x
    surprisal = below + tl.log(total)
    expected = tl.sum(tl.where(remaining, weight * below, 0.0)) / total + tl.log(total)
    mirror = 2 * expected - surprisal
    tl.debug_barrier()  # another sampler may have read `scratch`
    tl.store(scratch + index, surprisal)
    tl.store(scratch + MAX_RANKED + index, tl.cumsum(weight, 0))
    tl.debug_barrier()
    smallest, largest = tl.minimum(surprisal, mirror), tl.maximum(surprisal, mirror)
    first, end = tl.zeros((MAX_RANKED,), tl.int32), tl.zeros((MAX_RANKED,), tl.int32)
    step = MAX_RANKED
    while step > 0:
        value = tl.load(
            scratch + first + step - 1, mask=first + step <= MAX_RANKED, other=float("inf")
        )
        first += tl.where((first + step <= MAX_RANKED) & (value <= smallest), step, 0)
        value = tl.load(scratch + end + step - 1, mask=end + step <= MAX_RANKED, other=float("inf"))
        end += tl.where((end + step <= MAX_RANKED) & (value < largest), step, 0)
        step //= 2
    mass_nearer = tl.load(scratch + MAX_RANKED + end - 1, mask=end > 0, other=0.0)
    mass_nearer -= tl.load(scratch + MAX_RANKED + first - 1, mask=first > 0, other=0.0)
    distance = tl.where(remaining, tl.abs(surprisal - expected), float("inf"))
    nearest = distance <= tl.min(distance)
    if HAS_MIN_KEEP:
        nearest = _is_in_smallest(distance, tl.load(sampler_settings + 2).to(tl.int32))
    return (mass_nearer < tl.load(sampler_settings).to(tl.float32) * total) | nearest


@triton.jit
def _is_in_smallest(x, k):
    """Whether a non-negative float is one of the k smallest, or ties with the largest of these."""
    bits = x.to(tl.int32, bitcast=True)
    low, high = -1, 0x7F800000  # inf
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((bits <= middle).to(tl.int32)) >= k
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return bits <= high


@triton.jit
def _xtc_removes(remaining, weight, index, threshold, MAX_RANKED: tl.constexpr):
    """Whether `generate.samplers.truncation.XTC` removes a token: all likely tokens but one."""
    probability = weight / tl.sum(weight)
    above = remaining & (probability >= threshold)
    smallest = tl.min(tl.where(above, probability, float("inf")))
    return above & (index != tl.min(tl.where(above & (probability == smallest), index, MAX_RANKED)))


def sample(
    logits: Float[Tensor, "rows vocab"],
    ops: tuple[str, ...],
    has_gaps: tuple[bool, ...],
    has_min_keep: tuple[bool, ...],
    settings: Float[Tensor, "any 3"],
    keys: Int[Tensor, " rows"],
    counters: Int[Tensor, " rows"],
    lengths: Int[Tensor, " rows"],
    failure_lengths: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """Sample one token per row by the samplers of `generate.fused_chain.FusedTail`.

    At most `MAX_RANKED` tokens are ranked: of those that tie with the k-th, the ones with the
    lowest ids. `has_gaps`: for each sampler, whether an earlier one may have removed a token and
    kept a less likely one. `failure_lengths` is updated as by `sampling.sample_token`.
    """
    rows, vocab = logits.shape
    ranked = rank_logits(logits, settings, MAX_RANKED, with_sigma=ops[0] == SIGMA_OF_ROW)
    scratch = torch.empty(rows, 2, MAX_RANKED, device=logits.device)
    sampled = torch.empty(rows, dtype=torch.long, device=logits.device)
    _samplers_kernel[(rows,)](
        *ranked,
        settings,
        keys,
        counters,
        lengths,
        failure_lengths,
        sampled,
        scratch,
        vocab,
        OPS=ops,
        HAS_MIN_KEEP=has_min_keep,
        HAS_GAPS=has_gaps,
        MAX_RANKED=MAX_RANKED,
        num_warps=8,
        **pdl_options(),
    )
    return sampled
