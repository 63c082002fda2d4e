"""A chain of samplers (logits processors), and the sampling of the next token."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import reduce
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels import can_run_kernels
from regard.errors import ConfigError, RegardError
from regard.generate.fused_chain import FusedTail, supports_fused_tail
from regard.generate.sampler_orders import arrange
from regard.generate.sampler_spec import format_sampler, parse_sampler
from regard.generate.samplers.logits_processor import (
    LogitsProcessor,
    PerRow,
    Sampler,
    as_logits_processor,
    merge_key,
    move_removed_last,
    sort_logits,
    unsort_logits,
)
from regard.generate.samplers.temperature import Temperature
from regard.generate.sampling_state import RowGenerators, SamplingState

DEFAULT_SAMPLERS = ("temperature=0.8", "top_p=0.95")  # where the user names no sampler
SKIP_REMOVED_DEVICES = ("cpu",)  # devices on which removed tokens are not sorted
NOT_FAILED = 2**62  # failure length of a row that has not failed


def sample_token(
    logits: Float[Tensor, "rows vocab"], generators: RowGenerators
) -> Int[Tensor, " rows"]:
    r"""Sample one token per row from softmax(logits) (multinomial), by inversion of the CDF.

        the first v  with  P(0) + ... + P(v)  >  u,      u uniform in [0, 1)

    A removed token adds nothing to the sum, and so is never the first to exceed u.
    """
    u = generators.uniform().unsqueeze(1)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    # float64, so that the sum resolves rare tokens; float32 on Metal, which has no float64
    cumulative = weights.cumsum(-1, dtype=u.dtype)
    u = u * cumulative[:, -1:]
    return torch.searchsorted(cumulative, u, right=True).squeeze(1).clamp_max(logits.shape[1] - 1)


@dataclass(frozen=True, slots=True)
class SamplerTrace:
    """The logits that a sampler received and returned, and the token ids where they are sorted.

    Sorted logits may lack tokens that were removed before.
    """

    sampler: LogitsProcessor
    before: Float[Tensor, "rows remaining"]
    after: Float[Tensor, "rows remaining"]
    sorted_ids: Int[Tensor, "rows remaining"] | None  # None: in token-id order
    vocab_size: int

    def by_id(self, logits: Float[Tensor, "rows remaining"]) -> Float[Tensor, "rows vocab"]:
        """`before` or `after` in token-id order."""
        if self.sorted_ids is None:
            return logits
        return unsort_logits(logits, self.sorted_ids, self.vocab_size)


@dataclass(frozen=True, slots=True)
class Chain:
    """Samplers in the order in which they are applied; then a token is sampled from the softmax.

    The samplers alone are what transformers calls a `LogitsProcessorList`.

    >>> from regard.generate import Temperature, TopK
    >>> Chain((TopK(40), Temperature(0.8)))
    Chain(samplers=(TopK(k=40, exact=False), Temperature(value=0.8)))
    >>> print(Chain((TopK(40), Temperature(0.8))))
    top_k=40 → temperature=0.8 → sample
    """

    samplers: tuple[Sampler, ...] = ()
    active: tuple[LogitsProcessor, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        active = tuple(s for s in map(as_logits_processor, self.samplers) if not s.is_off)
        object.__setattr__(self, "active", active)  # the samplers that are not off
        stateful = [position for position, sampler in enumerate(active) if sampler.stateful]
        # the chains of rows were checked before they were merged
        per_row = any(isinstance(sampler, PerRow) for sampler in active)
        if stateful and stateful != [len(active) - 1] and not per_row:
            raise ConfigError(
                f"{format_sampler(active[stateful[0]])} is stateful: it is updated with the "
                "sampled token, and must be the last sampler and the only stateful one"
            )

    @classmethod
    def per_row(cls, chains: Sequence["Chain"], device: torch.device | str = "cpu") -> "Chain":
        """One chain for a batch whose rows have different chains.

        Samplers of the same kind are merged into one with a setting per row; it does not act on
        rows whose chain lacks it. The order of each row's samplers is kept.
        """
        rows = [list(chain.active) for chain in chains]
        keys: list[Any] = reduce(
            _merge_sequences, [[merge_key(sampler) for sampler in row] for row in rows], []
        )
        samplers = []
        for key in keys:
            column = [row.pop(0) if row and merge_key(row[0]) == key else None for row in rows]
            if any(column):
                samplers.append(_merge_samplers(column, device))
        return cls(tuple(samplers))

    @property
    def greedy(self) -> bool:
        """Whether a `Temperature` is 0, so that the argmax is taken and nothing is sampled."""
        return any(isinstance(sampler, Temperature) and sampler.greedy for sampler in self.samplers)

    @property
    def _argmax_only(self) -> bool:
        """Whether its only sampler is greedy, so that the argmax alone gives the result."""
        return self.greedy and len(self.samplers) == 1 and type(self) is Chain

    @property
    def fused_tail(self) -> FusedTail | None:
        """The last samplers and the multinomial sampling as fused kernels; None if unsupported."""
        return FusedTail.from_samplers(self.active) if type(self) is Chain else None

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may capture `sample`, after one call with the same state."""
        return all(as_logits_processor(sampler).capturable for sampler in self.samplers)

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], sampling: SamplingState
    ) -> Int[Tensor, " rows"]:
        """Sample the next id of each row; raise if a row has no token left."""
        if self._argmax_only:
            greedy_ids = finite_argmax(at_least_float32(logits))
            if greedy_ids is not None:
                return greedy_ids
        ids = self.sample(logits, sampling)
        self.raise_if_failed(sampling, lambda row, length: logits[row : row + 1])
        return ids

    def sample(
        self,
        logits: Float[Tensor, "rows vocab"],
        sampling: SamplingState,
        sample_ids: Callable[[Tensor], Tensor] | None = None,
        *,
        use_kernel: bool = False,
    ) -> Int[Tensor, " rows"]:
        """Sample the next id of each row, without host synchronization.

        Rows without any token left are recorded, and `raise_if_failed` reports them. The id is
        sampled by the first of these that applies:

        1. `sample_ids`, if given: it receives the processed logits and must record failures.
        2. The fused kernels, for the last samplers and `sample_token`, where `fused_tail` exists.
        3. With `use_kernel`, `sample_token` as one kernel, where a GPU can run it.
        4. The argmax of a greedy chain, or `sample_token`.
        """
        record_rng_counts(sampling)
        if sample_ids is None:
            fused = self.fused_tail if supports_fused_tail(logits) else None
            if fused is not None:
                unfused = Chain(self.active[: fused.start])
                processed = unfused.process(logits, sampling) if fused.start else logits
                return fused.sample(processed, sampling, failure_lengths(sampling))
            if use_kernel and not self.greedy and can_run_kernels(sampling.lengths):
                sample_ids = None if self.fused_tail is not None else _sample_kernel(sampling)
        processed, sorted_ids, stateful = at_least_float32(logits), None, []
        skip_samplers = self._argmax_only and sample_ids is None
        for trace in () if skip_samplers else self.run_samplers(logits, sampling):
            processed, sorted_ids = trace.after, trace.sorted_ids
            if trace.sampler.stateful:
                stateful.append(trace)
        if sorted_ids is not None:
            processed = unsort_logits(processed, sorted_ids, logits.shape[1])
        if sample_ids is None:
            record_failures(processed, sampling)
            ids = (
                processed.argmax(-1)
                if self.greedy
                else sample_token(processed, sampling.generators)
            )
        else:
            ids = sample_ids(processed)
        for trace in stateful:
            before, after = trace.by_id(trace.before), trace.by_id(trace.after)
            trace.sampler.update_state(before, after, ids, sampling)
        return ids

    def process(
        self, logits: Float[Tensor, "rows vocab"], sampling: SamplingState
    ) -> Float[Tensor, "rows vocab"]:
        """The logits that are sampled from: after all samplers, removed tokens at -inf."""
        processed, sorted_ids = at_least_float32(logits), None
        for trace in self.run_samplers(logits, sampling):
            processed, sorted_ids = trace.after, trace.sorted_ids
        if sorted_ids is None:
            return processed
        return unsort_logits(processed, sorted_ids, logits.shape[1])

    def run_samplers(
        self, logits: Float[Tensor, "rows vocab"], sampling: SamplingState
    ) -> Iterator[SamplerTrace]:
        """Apply the active samplers; sort when the first one needs sorted logits.

        The logits then stay sorted, since samplers keep the order; where a sampler left gaps,
        removed tokens are moved to the end. Token-id order is restored before a sampler that
        needs it. On a CPU, tokens that were removed before the sort are left out of it.
        """
        logits, sorted_ids, has_gaps = at_least_float32(logits), None, False
        samplers = self.active
        skip_removed = logits.device.type in SKIP_REMOVED_DEVICES
        skip_removed = skip_removed and not any(sampler.needs_full_vocab for sampler in samplers)
        vocab_size = logits.shape[1]
        for sampler in samplers:
            if sampler.needs_ids and sorted_ids is not None:
                logits = unsort_logits(logits, sorted_ids, vocab_size)
                sorted_ids, has_gaps = None, False
            elif sampler.needs_sorted and sorted_ids is None:
                logits, sorted_ids = sort_logits(logits, skip_removed)
            elif sampler.has_sorted_formula and sorted_ids is not None and has_gaps:
                (logits, sorted_ids), has_gaps = move_removed_last(logits, sorted_ids), False
            process = sampler.process if sorted_ids is None else sampler.process_sorted
            before, logits = logits, process(logits, sampling)
            yield SamplerTrace(sampler, before, logits, sorted_ids, vocab_size)
            has_gaps = has_gaps or sampler.may_leave_gaps

    def check_rows(self, rows: int) -> None:
        """Raise if `per_row` made the chain for another number of rows."""
        for sampler in self.samplers:
            if isinstance(sampler, PerRow) and sampler.rows != rows:
                raise ConfigError(
                    f"{sampler.rows} chains for {rows} prompts; give one chain, or one per prompt"
                )

    def raise_if_failed(
        self, sampling: SamplingState, logits_of: Callable[[int, int], Float[Tensor, "rows vocab"]]
    ) -> None:
        """Raise if a row had no token left to sample from, and name the cause.

        `logits_of(row, length)` must return the model's logits when the row had `length` ids.
        Rows that had already ended with a stop id are ignored.
        """
        failed = sampling.row_states.get("failed")
        if failed is None:
            return
        for row, length in enumerate(failed.tolist()):
            if length == NOT_FAILED or _has_stop_id(sampling, row, length):
                continue
            failed.fill_(NOT_FAILED)
            cause = self.failure_cause(logits_of(row, length), sampling, row, length)
            raise RegardError(f"row {row} has no token left to sample: {cause}")

    def failure_cause(self, logits: Tensor, sampling: SamplingState, row: int, length: int) -> str:
        """Why no token was left in a row, found by running its samplers again."""
        best = float(logits.amax())
        if not math.isfinite(best):
            return f"the model's largest logit is {best}"
        rows = torch.tensor([row], device=logits.device)
        chain, replay = self.select(rows), sampling.select(rows)
        # rewind to the random numbers of the failed token; every token uses the same number of them
        counters = replay.row_states["rng_counters"]
        tokens_since = (replay.lengths - length - 1).clamp_min(0)
        per_token = replay.generators.counters - counters
        replay.generators.counters = counters - tokens_since * per_token
        replay.lengths = torch.full_like(replay.lengths, length)
        for trace in Chain.run_samplers(chain, logits, replay):
            if not trace.after.amax().isfinite():
                return f"{format_sampler(trace.sampler)} removed all remaining tokens"
        return "the samplers removed all tokens"

    def select(self, rows: Int[Tensor, " selected"]) -> "Chain":
        """The chain for a subset of the rows."""
        samplers = (s.select(rows) if isinstance(s, PerRow) else s for s in self.samplers)
        return replace(self, samplers=tuple(samplers))

    def specs(self) -> list[str]:
        """The specs from which `parse_chain` makes this chain."""
        return [format_sampler(sampler) for sampler in self.samplers]

    def __str__(self) -> str:
        return " → ".join([*self.specs(), "argmax" if self.greedy else "sample"])


def _sample_kernel(sampling: SamplingState) -> Callable[[Tensor], Tensor]:
    """`sample_token` and `record_failures` as one kernel."""
    from regard.accel.kernels import sampling as kernel

    keys, counters = sampling.generators.keys, sampling.generators.counters
    failed = failure_lengths(sampling)
    return lambda logits: kernel.sample_token(logits, keys, counters, sampling.lengths, failed)


def record_rng_counts(sampling: SamplingState) -> None:
    """Record how many random numbers each row has used, so that the next token can be replayed."""
    counters = sampling.generators.counters
    sampling.row_state("rng_counters", lambda: torch.zeros_like(counters)).copy_(counters)


def failure_lengths(sampling: SamplingState) -> Int[Tensor, " rows"]:
    """How many ids each row had when it first had no token left, or `NOT_FAILED`."""
    return sampling.row_state("failed", lambda: torch.full_like(sampling.lengths, NOT_FAILED))


def record_failures(logits: Float[Tensor, "rows vocab"], sampling: SamplingState) -> None:
    """Record the rows that have no token left, with the number of ids they have."""
    failed = failure_lengths(sampling)
    best = logits.amax(-1)
    # best - best is NaN where best is not finite
    lengths = torch.where(best - best == 0, NOT_FAILED, sampling.lengths)
    torch.minimum(failed, lengths, out=failed)


def _has_stop_id(sampling: SamplingState, row: int, length: int) -> bool:
    """Whether a stop id is among the first `length` ids of a row, after its prompt."""
    completion = sampling.history[row, int(sampling.prompt_lengths[row]) : length].tolist()
    return not set(sampling.stop).isdisjoint(completion)


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in float32; float64 logits stay float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def finite_argmax(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"] | None:
    """The index of the largest logit of each row; None if one of these logits is not finite.

    On a CPU by numpy: with 50,000 logits, its argmax takes 2 us, that of torch 27.
    """
    if logits.device.type != "cpu":
        finite = all(map(math.isfinite, logits.amax(-1).tolist()))
        return logits.argmax(-1) if finite else None
    rows = logits.numpy(force=True)
    ids = rows.argmax(-1)
    finite = np.isfinite(rows[np.arange(len(rows)), ids]).all()
    return torch.from_numpy(ids) if finite else None


def _merge_sequences(first: list[Any], second: list[Any]) -> list[Any]:
    """A common supersequence: a list that contains both lists as subsequences."""
    merged = []
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        merged += first[i:j] if tag == "equal" else first[i:j] + second[k:m]
    return merged


def _merge_samplers(
    column: Sequence[LogitsProcessor | None], device: torch.device | str
) -> LogitsProcessor:
    """The samplers of all rows as one; the sampler itself where all rows have the same."""
    first = column[0]
    if first is not None and all(sampler == first for sampler in column):
        return first
    return PerRow.merge(column, device)


def parse_chain(
    specs: str | Iterable[str] | None = None,
    order: str | None = None,
    token_ids: Callable[[str, str], list[int]] | None = None,
) -> Chain:
    """Make a chain from specs such as `top_p=0.9`, in the order of application.

    The value sets the sampler's first setting; a TOML table sets several. `order` names an entry
    of `SAMPLER_ORDERS` and arranges the samplers as that system does, with its defaults. Without
    `specs` the samplers are `DEFAULT_SAMPLERS`, or the defaults of the `order`. `token_ids` gives
    the ids of a token that a sampler names by its text, as in `ban=["the"]`.

    >>> parse_chain(["temperature=0.7", "top_k=40"])
    Chain(samplers=(Temperature(value=0.7), TopK(k=40, exact=False)))
    >>> parse_chain(["greedy"])
    Chain(samplers=(Temperature(value=0.0),))
    >>> print(parse_chain(["temperature=0.7", "top_k=20"], "llama.cpp"))
    top_k={k=20, exact=true} → top_p=0.95 → min_p=0.05 → temperature=0.7 → sample
    """
    if specs is None:
        specs = DEFAULT_SAMPLERS if order is None else ()
    specs = [specs] if isinstance(specs, str) else specs
    samplers = tuple(parse_sampler(spec.strip(), token_ids) for spec in specs)
    return Chain(samplers if order is None else arrange(samplers, order))
