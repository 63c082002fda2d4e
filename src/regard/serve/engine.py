"""Continuous batching: sequences of many requests join and leave the batch between steps."""

from collections import Counter, abc, deque
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import accumulate, groupby
from typing import Any, cast

import torch
from torch import Tensor

from regard.accel.packed_decoder import PackedDecoder
from regard.errors import ConfigError, RegardError
from regard.generate.chain import NOT_FAILED, Chain, failure_lengths
from regard.generate.decode import check_prompts
from regard.generate.sampling_state import RowGenerators, SamplingState
from regard.models.base import Language, State, is_prefix_lm
from regard.serve.prefill import Prefiller
from regard.serve.prefill_graphs import make_prefill_graphs
from regard.serve.prefix_cache import PrefixCache
from regard.serve.request import Event, FinishReason, Request, TokenLogprobs
from regard.serve.rows import GraphRows, KVRows, make_rows, to_device
from regard.serve.sampling import SampledTokens, concatenate_sampling_states, sample_rows
from regard.serve.sequences import Counters, Prefill, Sequence

MiB = 2**20


class QueueFull(RegardError):
    """The queue of waiting requests is full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits of an engine."""

    max_sequences: int = 64  # at most this many are decoded together
    max_queue: int = 64  # requests that may wait for a row; more are refused
    prefill_chunk: int | None = None  # prompt tokens per chunk; 256, on a GPU 4,096
    kv_memory: int | None = None  # MiB of KV cache; 1,024, on a GPU 40 % of the free memory
    prefix_memory: int = 256  # MiB of KV cache of earlier prompts
    time_slice: int = 256  # tokens after which a sequence is preempted if a request waits


@dataclass(frozen=True, slots=True, eq=False)
class _InFlightStep:
    """A step that the device computes while the host processes the tokens of the previous step."""

    sequences: list[Sequence]
    ids: Tensor
    host: Tensor  # the ids of each row, and the lengths at which rows have failed
    event: Any  # the CUDA event after the copy to the host; None on a CPU


class BatchEngine:
    """Generates the sequences of many requests with one model.

    `step` admits requests, then decodes one token of every sequence, then prefills a chunk of the
    waiting prompts. `submit` and `Request.cancelled` may be used from any thread, everything else
    only from the thread that calls `step`.

    A sequence does not depend on the others, up to rounding of its logits: it is what
    `generate.generate` returns for its prompt, samplers and seed.
    """

    def __init__(
        self,
        language: Language,
        config: EngineConfig | None = None,
        *,
        stop: abc.Sequence[int] = (),
        capture: bool | None = None,
    ) -> None:
        self.language, self.config = language, config or EngineConfig()
        if isinstance(language, PackedDecoder):
            language.frozen = True  # nothing writes to the weights of a served model
        self.stop = tuple(sorted(stop))  # end-of-sequence ids, for samplers
        on_gpu = language.device.type == "cuda"
        budget = (self.config.kv_memory or 1024) * MiB
        if on_gpu and self.config.kv_memory is None:
            budget = int(0.4 * torch.cuda.mem_get_info(language.device)[0])
        with torch.inference_mode():
            self.rows = make_rows(language, budget, self.config.max_sequences, capture=capture)
        self.prefix_cache = None
        self.is_prefix_lm = is_prefix_lm(language)
        if isinstance(self.rows, KVRows) and self.config.prefix_memory and not self.is_prefix_lm:
            self.prefix_cache = PrefixCache(self.config.prefix_memory * MiB)
        chunk = self.config.prefill_chunk or (4096 if on_gpu else 256)
        self.prefiller = Prefiller(
            language,
            chunk if on_gpu else min(64, chunk),
            chunk,
            self.prefix_cache,
            uses_graph_rows=isinstance(self.rows, GraphRows),
            graphs=make_prefill_graphs(language, self.rows),
            is_prefix_lm=self.is_prefix_lm,
            join=self._join,
            fail=self._fail,
        )
        self.max_rows = self.config.max_sequences
        # the sequences that have not ended, in the order of their requests; other threads read it
        self.unfinished: dict[Sequence, None] = {}
        self.inbox: deque[Prefill] = deque()  # submitted by other threads
        self.waiting: deque[Prefill] = deque()
        self.sequences: list[Sequence] = []  # one per row
        self.chain = Chain()
        self.sampling: SamplingState | None = None
        self.last_ids: Tensor = torch.empty(0, dtype=torch.long)  # of each row
        self.events: list[Event] = []
        self.counters = Counters()
        self.in_flight: list[_InFlightStep] = []  # the oldest first

    def submit(self, request: Request) -> None:
        """Queue a request; raise `QueueFull` if too many wait, `RegardError` if it is invalid."""
        check_prompts([request.prompt], request.max_new_tokens, None)
        if request.n > self.config.max_sequences:
            raise RegardError(
                f"n={request.n} must be at most {self.config.max_sequences}, the number of "
                "sequences that are decoded together"
            )
        if self._count_waiting(request.n) > self.config.max_queue:
            raise QueueFull(
                f"the queue is full (at most {self.config.max_queue} waiting); try again later"
            )
        if self.is_prefix_lm and request.prompt_logprobs is not None:
            raise ConfigError(
                "echo: a prefix LM (model.prefix=true) does not predict its prompt, so the prompt "
                "has no log-probabilities; leave out echo or logprobs"
            )
        limit = self.language.context or len(request.prompt)
        window = request.prompt[-limit:]
        sequences = [Sequence(request, i, list(window), len(window)) for i in range(request.n)]
        self.counters.requests += 1
        self.unfinished.update(dict.fromkeys(sequences))
        self.inbox.append(Prefill(sequences, list(sequences[0].window)))

    def _count_waiting(self, new_sequences: int) -> int:
        """The number of requests without rows if one of `new_sequences` sequences is added."""
        rows_of = Counter(sequence.request for sequence in list(self.unfinished))
        totals = accumulate((*rows_of.values(), new_sequences))
        return sum(total > self.max_rows for total in totals)

    def totals(self) -> dict[str, int]:
        """All counters by name; they only grow."""
        prefix_cache = self.prefix_cache
        return {
            **asdict(self.counters),
            "prefix_lookup_tokens": 0 if prefix_cache is None else prefix_cache.lookups,
            "prefix_hit_tokens": 0 if prefix_cache is None else prefix_cache.hits,
        }

    def requests(self) -> list[Request]:
        """The requests that are not answered yet."""
        return list(dict.fromkeys(sequence.request for sequence in list(self.unfinished)))

    @property
    def busy(self) -> bool:
        """Whether any request waits, is prefilled or is decoded."""
        return bool(self.unfinished)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Decode one token of every sequence and prefill a chunk; return the new events."""
        while self.inbox:
            self.waiting.append(self.inbox.popleft())
        self._remove_cancelled()
        self._admit()
        if self.sequences:
            self._decode()
        self.prefiller.step(len(self.sequences))
        if not self.busy:
            self.max_rows = self.config.max_sequences  # it was lowered if memory was short
        self.counters.prompt_tokens = self.prefiller.tokens
        self.counters.steps += 1
        events, self.events = self.events, []
        return events

    def run(self, requests: abc.Iterable[Request]) -> list[list[list[int]]]:
        """Run requests to their end; return the new ids of each continuation of each request."""
        continuations: dict[Request, list[list[int]]] = {}
        for request in requests:
            continuations[request] = [[] for _ in range(request.n)]
            self.submit(request)
        while self.busy:
            for event in self.step():
                if event.error is not None:
                    raise event.error
                if event.token is not None:
                    continuations[event.request][event.index].append(event.token)
        return list(continuations.values())

    def _admit(self) -> None:
        """Admit waiting requests while there is room for their sequences."""
        while self.waiting:
            prefill = self.waiting[0]
            rows = len(self.sequences) + sum(len(other.sequences) for other in self.prefiller.queue)
            rows += len(prefill.sequences)
            max_length = prefill.max_length(self.language.context)
            prompt_tokens = self.prefiller.prompt_tokens + len(prefill.ids)
            if rows > self.max_rows or not self.rows.fits(rows, max_length, prompt_tokens):
                if rows > len(prefill.sequences):
                    self._preempt_longest()
                    return
                error = RegardError(
                    f"n={len(prefill.sequences)} sequences of up to {max_length} tokens do not fit "
                    "into the KV cache; ask for fewer"
                )
                for sequence in self.waiting.popleft().sequences:
                    self._finish(sequence, "error", error)
                continue
            self.prefiller.queue.append(self.waiting.popleft())

    def _preempt_longest(self) -> None:
        """Preempt the sequence that has run longest, if its time slice is over."""
        self._process_in_flight()
        ages = [sequence.tokens_since_prefill for sequence in self.sequences]
        if ages and max(ages) >= self.config.time_slice and not self.prefiller.queue:
            self.counters.preempted += 1
            self._requeue([ages.index(max(ages))], self.waiting)

    def _requeue(self, rows: abc.Sequence[int], queue: deque[Prefill]) -> None:
        """Remove sequences from the batch; they will be prefilled again from their ids."""
        assert self.sampling is not None
        for row in rows:
            sequence = self.sequences[row]
            sampling = self.sampling.select(to_device([row], self.last_ids.device))
            queue.append(Prefill([sequence], list(sequence.window), sampling))
        self._keep([row for row in range(len(self.sequences)) if row not in set(rows)])

    def _join(self, group: list[Prefill], logits: Tensor, state: State | None) -> None:
        """Add the sequences of prefilled prompts to the batch, and sample their first token."""
        sequences = [sequence for prefill in group for sequence in prefill.sequences]
        rows = [row for row, prefill in enumerate(group) for _ in prefill.sequences]
        lengths = [len(sequence.window) for sequence in sequences]
        max_length = max(prefill.max_length(self.language.context) for prefill in group)
        if state is None:  # a CUDA graph has prefilled them in the rows
            cast(GraphRows, self.rows).append(lengths, max_length)
        else:
            self.rows.join(state, rows, lengths, max_length)
        try:
            sampling = reduce(concatenate_sampling_states, self._sampling_states(group))
            if rows != list(range(len(group))):
                logits = logits[to_device(rows, logits.device)]
            chain = self._merge_chains(sequences)
            overlaps = self._can_overlap(sequences, lengths)
            if overlaps:
                step = self._launch(sequences, chain, logits, sampling)
            else:
                sampled = sample_rows(sequences, chain, logits, sampling)
        except Exception:
            self.rows.keep(range(len(self.sequences)))
            raise
        for sequence in sequences:
            sequence.tokens_since_prefill = 0
        self.sequences = self.sequences + sequences
        new_ids = step.ids if overlaps else sampled.ids
        if self.sampling is None:
            self.sampling, self.last_ids = sampling, new_ids
        else:
            self.sampling = concatenate_sampling_states(self.sampling, sampling)
            self.last_ids = torch.cat([self.last_ids, new_ids])
        self.chain = self._merge_chains(self.sequences)
        if overlaps:
            self.in_flight.append(step)
        else:
            self._process_sampled(sequences, sampled)

    def _fail(self, prefill: Prefill, error: Exception) -> None:
        """Queue a prefill again if memory ran out while sequences were running; else fail it."""
        if isinstance(error, torch.OutOfMemoryError) and self.sequences:
            self.max_rows = len(self.sequences)
            self.waiting.append(replace(prefill, state=None, prefilled=0))
            return
        for sequence in prefill.sequences:
            self._finish(sequence, "error", error)

    def _sampling_states(self, group: list[Prefill]) -> list[SamplingState]:
        """The states of the sequences, in their order; those of new ones are made together."""
        states = []
        for is_new, prefills in groupby(group, key=lambda prefill: prefill.sampling is None):
            if is_new:
                states.append(
                    self._new_sampling_state(
                        [sequence for prefill in prefills for sequence in prefill.sequences]
                    )
                )
            else:  # copies, since sampling may fail
                saved = [cast(SamplingState, prefill.sampling) for prefill in prefills]
                states += [state.select(torch.arange(len(state.lengths))) for state in saved]
        return states

    def _new_sampling_state(self, sequences: list[Sequence]) -> SamplingState:
        sampling = SamplingState.from_prompts(
            [sequence.request.prompt for sequence in sequences],
            max(sequence.request.max_new_tokens for sequence in sequences) + 1,  # a step in flight
            seed=[sequence.request.seed + sequence.index for sequence in sequences],
            stop=self.stop,
        )
        device = self.language.device
        generators = RowGenerators(
            to_device(sampling.generators.keys, device),
            to_device(sampling.generators.counters, device),
        )
        sampling = SamplingState(
            to_device(sampling.history, device),
            to_device(sampling.lengths, device),
            to_device(sampling.prompt_lengths, device),
            generators,
            sampling.stop,
        )
        # Creates the state now: `concatenate_sampling_states` would fill it with 0, not with
        # NOT_FAILED.
        failure_lengths(sampling)
        return sampling

    def _decode(self) -> None:
        """Decode one token of every sequence.

        On a GPU, the next step is launched before the tokens of the last one are processed
        (asynchronous scheduling), so that the device does not wait for the host.
        """
        assert self.sampling is not None
        rows = self.rows
        overlaps = isinstance(rows, GraphRows) and self._can_overlap(self.sequences, rows.lengths)
        if self.in_flight and not overlaps:
            self._process_in_flight()
            return
        sampling, has_stepped = self.sampling, False
        lengths, counters = sampling.lengths.clone(), sampling.generators.counters.clone()
        state = {key: tensor.clone() for key, tensor in sampling.row_states.items()}
        try:
            logits = self.rows.step(self.last_ids)
            has_stepped = True
            if overlaps:
                launched = self._launch(self.sequences, self.chain, logits, self.sampling)
                self.last_ids = launched.ids
                self._process_in_flight()
                self.in_flight = [launched]
                return
            sampled = sample_rows(self.sequences, self.chain, logits, self.sampling)
        except torch.OutOfMemoryError as error:
            sampling.lengths, sampling.generators.counters = lengths, counters
            sampling.row_states = state
            self._process_in_flight()
            if len(self.sequences) < 2:
                self._fail_all(error)
            else:  # fewer rows from now on
                self.max_rows = max(1, len(self.sequences) // 2)
                # after the step, the KV cache of every row has one token more than its sequence
                first = 0 if has_stepped else self.max_rows
                self._requeue(range(first, len(self.sequences)), self.waiting)
            return
        except torch.AcceleratorError:  # a sticky error: all later calls on the device fail
            raise
        except Exception as error:
            self._fail_all(error)
            return
        self.last_ids = sampled.ids
        self._process_sampled(self.sequences, sampled)

    def _process_sampled(self, sequences: list[Sequence], sampled: SampledTokens) -> None:
        """Append the sampled tokens; remove sequences that have ended or filled the context."""
        alive, full = self._append(sequences, sampled)
        ended = {
            id(sequence)
            for sequence, is_alive in zip(sequences, alive, strict=True)
            if not is_alive
        }
        full_sequences = [sequences[row] for row in full]
        if ended:
            self._keep(
                [row for row, sequence in enumerate(self.sequences) if id(sequence) not in ended]
            )
        if full_sequences:
            rows = [
                row for row, sequence in enumerate(self.sequences) if sequence in full_sequences
            ]
            self._requeue(rows, self.prefiller.queue)

    def _can_overlap(self, sequences: list[Sequence], lengths: list[int]) -> bool:
        """Whether the next step may be launched before the tokens of the last one are known."""
        limit = self.language.context
        return isinstance(self.rows, GraphRows) and not any(
            sequence.request.constraints
            or sequence.request.logprobs is not None
            or length + 2 >= cast(int, limit)
            for sequence, length in zip(sequences, lengths, strict=True)
        )

    def _launch(
        self, sequences: list[Sequence], chain: Chain, logits: Tensor, sampling: SamplingState
    ) -> "_InFlightStep":
        """Sample on the device, and start to copy the tokens to the host."""
        ids = chain.sample(logits, sampling, use_kernel=True)
        sampling.append(ids)
        ids_and_failures = torch.stack([ids, sampling.row_states["failed"]])
        if not ids_and_failures.is_cuda:
            return _InFlightStep(list(sequences), ids, ids_and_failures, None)
        host = torch.empty_like(ids_and_failures, device="cpu", pin_memory=True)
        host.copy_(ids_and_failures, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _InFlightStep(list(sequences), ids, host, event)

    def _process_in_flight(self) -> None:
        """Process the tokens of the steps in flight; wait for the device."""
        pending, self.in_flight = self.in_flight, []
        for step in pending:
            if step.event is not None:
                step.event.synchronize()
            ids, failed = step.host.tolist()
            current = {id(sequence) for sequence in self.sequences}
            sequences: list[Sequence] = []
            tokens: list[int | None] = []
            errors: dict[int, RegardError] = {}
            for sequence, token, length in zip(step.sequences, ids, failed, strict=True):
                if id(sequence) not in current:
                    continue  # it has been removed since
                if length != NOT_FAILED:
                    errors[len(sequences)] = RegardError("no token is left to sample")
                sequences.append(sequence)
                tokens.append(token if length == NOT_FAILED else None)
            self._process_sampled(
                sequences, SampledTokens(step.ids, tokens, [None] * len(sequences), errors)
            )

    def _append(
        self, sequences: list[Sequence], sampled: SampledTokens
    ) -> tuple[list[bool], list[int]]:
        """Append the sampled tokens to the sequences.

        Return whether each sequence is still alive, and the rows of sequences that have filled the
        context: their older half is dropped, and the newer half must be prefilled again.
        """
        alive, full, limit = [], [], self.language.context
        for row, sequence in enumerate(sequences):
            token = sampled.tokens[row]
            if token is None:
                self._finish(sequence, "error", sampled.errors[row])
            is_alive = token is not None and self._append_token(
                sequence, token, sampled.logprobs[row]
            )
            if is_alive and limit is not None and len(sequence.window) > limit:
                if sequence.request.source is None:
                    del sequence.window[: -max(1, limit // 2)]
                    sequence.prefix_length = len(sequence.window)
                    full.append(row)
                else:  # the target of a translation is not truncated and continued
                    self._finish(sequence, "length")
                    is_alive = False
            alive.append(is_alive)
        return alive, full

    def _append_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        request = sequence.request
        if token in request.stop:
            self._finish(sequence, "stop")
            return False
        if request.constraints:
            try:
                request.constraints[sequence.index].append(token)
            except RegardError as error:
                self._finish(sequence, "error", error)
                return False
        sequence.window.append(token)
        sequence.new_tokens += 1
        sequence.tokens_since_prefill += 1
        self.counters.generation_tokens += 1
        self.events.append(Event(request, sequence.index, token, logprobs))
        if sequence.new_tokens == request.max_new_tokens:
            self._finish(sequence, "length")
            return False
        return True

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: Exception | None = None
    ) -> None:
        if reason == "cancelled":
            self.counters.cancelled += 1
        elif reason == "error":
            self.counters.failed += 1
        else:
            self.counters.finished += 1
        self.unfinished.pop(sequence, None)
        self.events.append(
            Event(sequence.request, sequence.index, finish_reason=reason, error=error)
        )

    def _fail_all(self, error: Exception) -> None:
        """Fail every sequence; the engine continues with the next requests."""
        self.in_flight = []
        for sequence in self.sequences:
            self._finish(sequence, "error", error)
        self._keep([])

    def _remove_cancelled(self) -> None:
        for queue in (self.waiting, self.prefiller.queue):
            cancelled_prefills = [
                prefill for prefill in queue if all(map(_is_cancelled, prefill.sequences))
            ]
            for prefill in cancelled_prefills:
                queue.remove(prefill)
                for sequence in prefill.sequences:
                    self._finish(sequence, _reason_of_removal(sequence))
        cancelled = list(map(_is_cancelled, self.sequences))
        if any(cancelled):
            for sequence, is_cancelled in zip(self.sequences, cancelled, strict=True):
                if is_cancelled:
                    self._finish(sequence, _reason_of_removal(sequence))
            self._keep([row for row, is_cancelled in enumerate(cancelled) if not is_cancelled])

    def _keep(self, rows: list[int]) -> None:
        """Keep these rows; rows from the end move into the places of removed ones."""
        kept, order = set(rows), list(range(len(rows)))
        movable = [row for row in rows if row >= len(rows)]
        for row in order:
            if row not in kept:
                order[row] = movable.pop()
        self.rows.keep(order)
        self.sequences = [self.sequences[row] for row in order]
        if not order:
            self.sampling = None
            return
        assert self.sampling is not None
        index = to_device(order, self.last_ids.device)
        self.sampling, self.last_ids = self.sampling.select(index), self.last_ids[index]
        self.chain = self._merge_chains(self.sequences)

    def _merge_chains(self, sequences: list[Sequence]) -> Chain:
        """One chain that applies to each row the samplers of its request."""
        first = sequences[0].request.chain
        if all(sequence.request.chain is first for sequence in sequences):
            return first
        return Chain.per_row(
            [sequence.request.chain for sequence in sequences], self.language.device
        )


def _is_cancelled(sequence: Sequence) -> bool:
    return sequence.request.cancelled or sequence.index in sequence.request.ended


def _reason_of_removal(sequence: Sequence) -> FinishReason:
    """ "stop" if a stop string has ended the continuation, even if its request is cancelled."""
    return "stop" if sequence.index in sequence.request.ended else "cancelled"
