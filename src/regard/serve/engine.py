"""Continuous batching: rows of many requests are decoded together, and join and leave any time."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from regard.accel.packed_decoder import PackedDecoder
from regard.errors import ConfigError, RegardError
from regard.generate.chain import NOT_FAILED, Chain, failure_lengths
from regard.generate.decode import check_prompts
from regard.generate.sampling_state import RowGenerators, SamplingState
from regard.models.base import Language, State
from regard.serve.prefix_cache import PrefixCache
from regard.serve.prompt_graphs import make_prompt_graphs
from regard.serve.prompts import PromptReader
from regard.serve.request import Event, FinishReason, Request, TokenScore
from regard.serve.rows import GraphRows, KVRows, make_rows, to_device
from regard.serve.sampling import Sampled, join_sampling_states, sample_rows
from regard.serve.texts import Counters, Prefill, Text

MiB = 2**20


class QueueFull(RegardError):
    """The queue of waiting requests is full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits of an engine."""

    rows: int = 64  # texts that are decoded together
    queue: int = 64  # requests that wait for a row; more are refused
    chunk: int | None = None  # most ids of prompts between two steps; 256, on a GPU 4,096
    kv_memory: int | None = None  # MiB of KV cache; 1,024, on a GPU 40 % of the free memory
    prefix_memory: int = 256  # MiB of KV cache of earlier prompts
    turn: int = 256  # tokens after which a text gives up its row if a request waits


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """Tokens that the device computes while the host handles those before."""

    texts: list[Text]
    ids: Tensor
    host: Tensor  # the ids of each row, and the lengths at which rows have failed
    event: Any  # when the copy to the host is complete; None on a CPU


class BatchEngine:
    """Generates the texts of many requests with one model.

    `step` does one thing at a time: it lets requests in, decodes one token of every row and reads
    a chunk of the waiting prompts. `submit` and `Request.cancelled` may be used from any thread,
    everything else only from the one that calls `step`.

    A text does not depend on the other rows, up to rounding of its logits: it is what
    `generate.generate` returns for its prompt, samplers and seed.
    """

    def __init__(
        self,
        language: Language,
        config: EngineConfig | None = None,
        *,
        stop: Sequence[int] = (),
        capture: bool | None = None,
    ) -> None:
        self.language, self.config = language, config or EngineConfig()
        if getattr(getattr(language, "config", None), "prefix", False):
            raise ConfigError("a prefix LM (model.prefix=true) cannot be served; use generate")
        if isinstance(language, PackedDecoder):
            language.frozen = True  # nothing writes to the weights of a served model
        self.stop = tuple(sorted(stop))  # what samplers see as the ids that end a text
        on_gpu = language.device.type == "cuda"
        budget = (self.config.kv_memory or 1024) * MiB
        if on_gpu and self.config.kv_memory is None:
            budget = int(0.4 * torch.cuda.mem_get_info(language.device)[0])
        with torch.inference_mode():
            self.rows = make_rows(language, budget, self.config.rows, capture=capture)
        self.prefixes = None
        if isinstance(self.rows, KVRows) and self.config.prefix_memory:
            self.prefixes = PrefixCache(self.config.prefix_memory * MiB)
        chunk = self.config.chunk or (4096 if on_gpu else 256)
        self.prompts = PromptReader(
            language,
            chunk if on_gpu else min(64, chunk),
            chunk,
            self.prefixes,
            patient=isinstance(self.rows, GraphRows),
            graphs=make_prompt_graphs(language, self.rows),
            join=self._join,
            fail=self._fail,
        )
        self.max_rows = self.config.rows
        self.inbox: deque[Prefill] = deque()  # from other threads
        self.waiting: deque[Prefill] = deque()
        self.texts: list[Text] = []  # of the rows
        self.chain = Chain()
        self.sampling: SamplingState | None = None
        self.last: Tensor = torch.empty(0, dtype=torch.long)
        self.events: list[Event] = []
        self.counters = Counters()
        self.ahead: list[_Ahead] = []  # what the device computes, the oldest first

    def submit(self, request: Request) -> None:
        """Queue a request; `QueueFull` if too many wait, an error if it cannot be answered."""
        check_prompts([request.prompt], request.tokens, None)
        if request.n > self.config.rows:
            raise RegardError(f"n={request.n} must be at most {self.config.rows}, the rows")
        if len(self.inbox) + len(self.waiting) >= self.config.queue:
            raise QueueFull(f"{self.config.queue} requests wait already; try again later")
        limit = self.language.context or len(request.prompt)
        texts = [Text(request, i, list(request.prompt[-limit:])) for i in range(request.n)]
        self.counters.requests += 1
        self.inbox.append(Prefill(texts, list(texts[0].window)))

    def requests(self) -> list[Request]:
        """The requests that are not answered yet."""
        jobs = [*self.inbox, *self.waiting, *self.prompts.jobs]
        texts = [*(text for job in jobs for text in job.texts), *self.texts]
        return list(dict.fromkeys(text.request for text in texts))

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.texts or self.prompts.jobs or self.waiting or self.inbox)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Decode one token of every row and read a chunk of prompts; return what is new."""
        while self.inbox:
            self.waiting.append(self.inbox.popleft())
        self._leave_cancelled()
        self._admit()
        if self.texts:
            self._decode()
        self.prompts.read(len(self.texts))
        if not self.busy:
            self.max_rows = self.config.rows  # it is lowered where memory is short
        self.counters.prompt_tokens = self.prompts.tokens
        self.counters.steps += 1
        events, self.events = self.events, []
        return events

    def run(self, requests: Iterable[Request]) -> list[list[list[int]]]:
        """Answer requests without a thread: the new ids of each continuation of each."""
        answers: dict[Request, list[list[int]]] = {}
        for request in requests:
            answers[request] = [[] for _ in range(request.n)]
            self.submit(request)
        while self.busy:
            for event in self.step():
                if event.error is not None:
                    raise event.error
                if event.token is not None:
                    answers[event.request][event.index].append(event.token)
        return list(answers.values())

    # joining

    def _admit(self) -> None:
        """Let waiting requests in while there is room for their rows."""
        while self.waiting:
            job = self.waiting[0]
            rows = len(self.texts) + sum(len(other.texts) for other in self.prompts.jobs)
            rows += len(job.texts)
            need, reading = job.need(self.language.context), self.prompts.ids + len(job.ids)
            if rows > self.max_rows or not self.rows.fits(rows, need, reading):
                if rows > len(job.texts):
                    self._preempt_longest()
                    return
                error = RegardError(
                    f"n={len(job.texts)} texts of up to {need} tokens do not fit into "
                    "the KV cache; ask for fewer"
                )
                for text in self.waiting.popleft().texts:
                    self._finish(text, "error", error)
                continue
            self.prompts.jobs.append(self.waiting.popleft())

    def _preempt_longest(self) -> None:
        """Let a text wait that has had its turn, so that a long one does not hold up short ones."""
        self._read_ahead()
        turns = [text.since for text in self.texts]
        if turns and max(turns) >= self.config.turn and not self.prompts.jobs:
            self.counters.preempted += 1
            self._requeue([turns.index(max(turns))], self.waiting)

    def _requeue(self, rows: Sequence[int], queue: deque[Prefill]) -> None:
        """Take texts out of their rows; they will be read again from their ids."""
        assert self.sampling is not None
        for row in rows:
            text = self.texts[row]
            sampling = self.sampling.select(to_device([row], self.last.device))
            queue.append(Prefill([text], list(text.window), sampling))
        self._keep([row for row in range(len(self.texts)) if row not in set(rows)])

    def _join(self, group: list[Prefill], logits: Tensor, state: State | None) -> None:
        """Give rows to the texts whose prompts were read, and sample their first token."""
        texts = [text for job in group for text in job.texts]
        rows = [row for row, job in enumerate(group) for _ in job.texts]
        lengths = [len(text.window) for text in texts]
        need = max(job.need(self.language.context) for job in group)
        if state is None:  # the prompts were read into the rows
            cast(GraphRows, self.rows).append(lengths, need)
        else:
            self.rows.join(state, rows, lengths, need)
        try:
            sampling = reduce(join_sampling_states, self._sampling_states(group))
            if rows != list(range(len(group))):
                logits = logits[to_device(rows, logits.device)]
            chain = self._merge(texts)
            runs_ahead = self._may_run_ahead(texts, lengths)
            if runs_ahead:
                ahead = self._start_ahead(texts, chain, logits, sampling)
            else:
                sampled = sample_rows(texts, chain, logits, sampling)
        except Exception:
            self.rows.keep(range(len(self.texts)))
            raise
        for text in texts:
            text.since = 0
        self.texts = self.texts + texts
        last = ahead.ids if runs_ahead else sampled.ids
        if self.sampling is None:
            self.sampling, self.last = sampling, last
        else:
            self.sampling = join_sampling_states(self.sampling, sampling)
            self.last = torch.cat([self.last, last])
        self.chain = self._merge(self.texts)
        if runs_ahead:
            self.ahead.append(ahead)
        else:
            self._settle(texts, sampled)

    def _fail(self, job: Prefill, error: Exception) -> None:
        """A prompt was not read: without memory for it, it waits until a text has ended."""
        if isinstance(error, torch.OutOfMemoryError) and self.texts:
            self.max_rows = len(self.texts)
            self.waiting.append(replace(job, state=None, read=0))
            return
        for text in job.texts:
            self._finish(text, "error", error)

    def _sampling_states(self, group: list[Prefill]) -> list[SamplingState]:
        """The states of the texts, in their order; those of new texts are made together."""
        states = []
        for is_new, jobs in groupby(group, key=lambda job: job.sampling is None):
            if is_new:
                states.append(
                    self._new_sampling_state([text for job in jobs for text in job.texts])
                )
            else:  # copies, since sampling may fail
                own = [cast(SamplingState, job.sampling) for job in jobs]
                states += [each.select(torch.arange(len(each.lengths))) for each in own]
        return states

    def _new_sampling_state(self, texts: list[Text]) -> SamplingState:
        sampling = SamplingState.from_prompts(
            [text.request.prompt for text in texts],
            max(text.request.tokens for text in texts) + 1,  # for a step ahead of the end
            seed=[text.request.seed + text.index for text in texts],
            stop=self.stop,
        )
        device = self.language.device
        generators = RowGenerators(
            to_device(sampling.generators.keys, device), to_device(sampling.generators.used, device)
        )
        sampling = SamplingState(
            to_device(sampling.history, device),
            to_device(sampling.lengths, device),
            to_device(sampling.prompt_lengths, device),
            generators,
            sampling.stop,
        )
        failure_lengths(
            sampling
        )  # its initial value is not 0, which `join_sampling_states` would fill in
        return sampling

    # decoding

    def _decode(self) -> None:
        """Decode one token of every row.

        On a GPU, the next step is started before the tokens of the last one are read, so that
        the device does not wait for the host.
        """
        assert self.sampling is not None
        runs_ahead = self._can_run_ahead()
        if self.ahead and not runs_ahead:
            self._read_ahead()
            return
        sampling, has_read = self.sampling, False
        lengths, used = sampling.lengths.clone(), sampling.generators.used.clone()
        state = {key: tensor.clone() for key, tensor in sampling.row_states.items()}
        try:
            logits = self.rows.step(self.last)
            has_read = True
            if runs_ahead:
                started = self._start_ahead(self.texts, self.chain, logits, self.sampling)
                self.last = started.ids
                self._read_ahead()
                self.ahead = [started]
                return
            sampled = sample_rows(self.texts, self.chain, logits, self.sampling)
        except torch.OutOfMemoryError as error:
            sampling.lengths, sampling.generators.used, sampling.row_states = lengths, used, state
            self._read_ahead()
            if len(self.texts) < 2:
                self._drop_all(error)
            else:  # fewer rows from now on
                self.max_rows = max(1, len(self.texts) // 2)
                first = 0 if has_read else self.max_rows  # the KV cache is ahead of the texts
                self._requeue(range(first, len(self.texts)), self.waiting)
            return
        except torch.AcceleratorError:  # nothing can be computed on the device any more
            raise
        except Exception as error:
            self._drop_all(error)
            return
        self.last = sampled.ids
        self._settle(self.texts, sampled)

    def _settle(self, texts: list[Text], sampled: Sampled) -> None:
        """Append the sampled tokens; texts that have ended or filled the context leave."""
        alive, full = self._append(texts, sampled)
        gone = {id(text) for text, goes_on in zip(texts, alive, strict=True) if not goes_on}
        again = [texts[row] for row in full]
        if gone:
            self._keep([row for row, text in enumerate(self.texts) if id(text) not in gone])
        if again:
            rows = [row for row, text in enumerate(self.texts) if text in again]
            self._requeue(rows, self.prompts.jobs)

    # running ahead

    def _can_run_ahead(self) -> bool:
        """Whether the tokens of the next step may be read after the step that follows it."""
        rows = self.rows
        return isinstance(rows, GraphRows) and self._may_run_ahead(self.texts, rows.lengths)

    def _may_run_ahead(self, texts: list[Text], lengths: list[int]) -> bool:
        limit = self.language.context
        return isinstance(self.rows, GraphRows) and not any(
            text.request.constraints
            or text.request.logprobs is not None
            or length + 2 >= cast(int, limit)
            for text, length in zip(texts, lengths, strict=True)
        )

    def _start_ahead(
        self, texts: list[Text], chain: Chain, logits: Tensor, sampling: SamplingState
    ) -> "_Ahead":
        """Sample on the device, and start to copy the tokens to the host."""
        ids = chain.sample(logits, sampling, use_kernel=True)
        sampling.append(ids)
        both = torch.stack([ids, sampling.row_states["failed"]])
        if not both.is_cuda:
            return _Ahead(list(texts), ids, both, None)
        host = torch.empty_like(both, device="cpu", pin_memory=True)
        host.copy_(both, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Ahead(list(texts), ids, host, event)

    def _read_ahead(self) -> None:
        """Read the tokens of the steps that were started before; wait for the device."""
        pending, self.ahead = self.ahead, []
        for ahead in pending:
            if ahead.event is not None:
                ahead.event.synchronize()
            ids, failed = ahead.host.tolist()
            current = {id(text) for text in self.texts}
            texts: list[Text] = []
            tokens: list[int | None] = []
            errors: dict[int, RegardError] = {}
            for text, token, length in zip(ahead.texts, ids, failed, strict=True):
                if id(text) not in current:
                    continue  # it has left since
                if length != NOT_FAILED:
                    errors[len(texts)] = RegardError("no token is left to sample")
                texts.append(text)
                tokens.append(token if length == NOT_FAILED else None)
            self._settle(texts, Sampled(ahead.ids, tokens, [None] * len(texts), errors))

    def _append(self, texts: list[Text], sampled: Sampled) -> tuple[list[bool], list[int]]:
        """Append the sampled tokens to the texts.

        Return which texts go on, and those of them that have filled the context: they have
        dropped the older half, and the rest must be read again.
        """
        alive, full, limit = [], [], self.language.context
        for row, text in enumerate(texts):
            token = sampled.tokens[row]
            if token is None:
                self._finish(text, "error", sampled.errors[row])
            goes_on = token is not None and self._append_token(text, token, sampled.scores[row])
            if goes_on and limit is not None and len(text.window) > limit:
                if text.request.source is None:
                    del text.window[: -max(1, limit // 2)]
                    full.append(row)
                else:  # a translation has an end
                    self._finish(text, "length")
                    goes_on = False
            alive.append(goes_on)
        return alive, full

    def _append_token(self, text: Text, token: int, score: TokenScore | None) -> bool:
        request = text.request
        if token in request.stop:
            self._finish(text, "stop")
            return False
        if request.constraints:
            try:
                request.constraints[text.index].append(token)
            except RegardError as error:
                self._finish(text, "error", error)
                return False
        text.window.append(token)
        text.count += 1
        text.since += 1
        self.counters.tokens += 1
        self.events.append(Event(request, text.index, token, score))
        if text.count == request.tokens:
            self._finish(text, "length")
            return False
        return True

    # leaving

    def _finish(self, text: Text, reason: FinishReason, error: Exception | None = None) -> None:
        if reason == "cancelled":
            self.counters.cancelled += 1
        elif reason == "error":
            self.counters.failed += 1
        else:
            self.counters.finished += 1
        self.events.append(Event(text.request, text.index, finish=reason, error=error))

    def _drop_all(self, error: Exception) -> None:
        """Every row has failed; the engine goes on with the next requests."""
        self.ahead = []
        for text in self.texts:
            self._finish(text, "error", error)
        self._keep([])

    def _leave_cancelled(self) -> None:
        for queue in (self.waiting, self.prompts.jobs):
            for job in [job for job in queue if all(map(_is_cancelled, job.texts))]:
                queue.remove(job)
                for text in job.texts:
                    self._finish(text, "cancelled")
        gone = list(map(_is_cancelled, self.texts))
        if any(gone):
            for text, cancelled in zip(self.texts, gone, strict=True):
                if cancelled:
                    self._finish(text, "cancelled")
            self._keep([row for row, cancelled in enumerate(gone) if not cancelled])

    def _keep(self, rows: list[int]) -> None:
        """Keep these rows. The last ones take the places of those that have left."""
        kept, order = set(rows), list(range(len(rows)))
        movable = [row for row in rows if row >= len(rows)]
        for place in order:
            if place not in kept:
                order[place] = movable.pop()
        self.rows.keep(order)
        self.texts = [self.texts[row] for row in order]
        if not order:
            self.sampling = None
            return
        assert self.sampling is not None
        index = to_device(order, self.last.device)
        self.sampling, self.last = self.sampling.select(index), self.last[index]
        self.chain = self._merge(self.texts)

    def _merge(self, texts: list[Text]) -> Chain:
        first = texts[0].request.chain
        if all(text.request.chain is first for text in texts):
            return first
        return Chain.per_row([text.request.chain for text in texts], self.language.device)


def _is_cancelled(text: Text) -> bool:
    return text.request.cancelled or text.index in text.request.ended
