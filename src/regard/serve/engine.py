"""Continuous batching: rows of many requests are decoded together, and join and leave any time."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.errors import ConfigError, RegardError
from regard.generate.chain import NOT_FAILED, Chain, at_least_float32, failure_lengths
from regard.generate.decode import check_prompts, pad_prompts
from regard.generate.sampler_context import RowGenerators, SamplerContext
from regard.models.base import Language, State
from regard.nn.state import Source, TransformerState
from regard.serve.prefix_cache import PrefixCache
from regard.serve.request import Event, FinishReason, Request, TokenScore
from regard.serve.rows import GraphRows, KVRows, make_rows

MiB = 2**20
CHUNK_SECONDS = 0.25  # that all rows wait for a chunk of a prompt
PATIENCE = 16  # decode steps that a prompt waits for others, on a GPU


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


@dataclass(eq=False, slots=True)
class _Text:
    """One continuation that is being generated."""

    request: Request
    index: int
    window: list[int]  # the ids that the model has read, and the newest
    count: int = 0  # new tokens
    since: int = 0  # new tokens since it got its row


@dataclass(eq=False, slots=True)
class _Prefill:
    """A prompt that is being read, for one or several continuations of it."""

    texts: list[_Text]
    ids: list[int]
    context: SamplerContext | None = None  # of a text that continues
    state: State | None = None
    read: int = 0

    @property
    def request(self) -> Request:
        return self.texts[0].request


@dataclass(frozen=True, slots=True, eq=False)
class _Sampled:
    """The next id of each row."""

    ids: Tensor
    tokens: list[int | None]  # None: the row has failed
    scores: list[TokenScore | None]


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """A step that the device computes while the host handles the one before."""

    texts: list[_Text]
    host: Tensor  # the ids of each row, and the lengths at which rows have failed
    event: Any  # when the copy to the host is complete; None on a CPU


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    preempted: int = 0


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
        self.stop = tuple(sorted(stop))  # what samplers see as the ids that end a text
        on_gpu = language.device.type == "cuda"
        budget = (self.config.kv_memory or 1024) * MiB
        if on_gpu and self.config.kv_memory is None:
            budget = int(0.4 * torch.cuda.mem_get_info(language.device)[0])
        self.max_chunk = self.config.chunk or (4096 if on_gpu else 256)
        self.chunk = self.max_chunk if on_gpu else min(64, self.max_chunk)
        with torch.inference_mode():
            self.rows = make_rows(language, budget, self.config.rows, capture=capture)
        self.prefixes = None
        if isinstance(self.rows, KVRows) and self.config.prefix_memory:
            self.prefixes = PrefixCache(self.config.prefix_memory * MiB)
        self.max_rows = self.config.rows
        self.inbox: deque[_Prefill] = deque()  # from other threads
        self.waiting: deque[_Prefill] = deque()
        self.prefilling: deque[_Prefill] = deque()
        self.texts: list[_Text] = []  # of the rows
        self.chain = Chain()
        self.context: SamplerContext | None = None
        self.last: Tensor = torch.empty(0, dtype=torch.long)
        self.events: list[Event] = []
        self.counters = Counters()
        self.ahead: _Ahead | None = None  # the step that the device computes
        self.steps_waited = 0  # since prompts could have been read

    def submit(self, request: Request) -> None:
        """Queue a request; `QueueFull` if too many wait, an error if it cannot be answered."""
        check_prompts([request.prompt], request.tokens, None)
        if request.n > self.config.rows:
            raise RegardError(f"n={request.n} must be at most {self.config.rows}, the rows")
        if len(self.inbox) + len(self.waiting) >= self.config.queue:
            raise QueueFull(f"{self.config.queue} requests wait already; try again later")
        limit = self.language.context or len(request.prompt)
        texts = [_Text(request, i, list(request.prompt[-limit:])) for i in range(request.n)]
        self.counters.requests += 1
        self.inbox.append(_Prefill(texts, list(texts[0].window)))

    def requests(self) -> list[Request]:
        """The requests that are not answered yet."""
        jobs = [*self.inbox, *self.waiting, *self.prefilling]
        texts = [*(text for job in jobs for text in job.texts), *self.texts]
        return list(dict.fromkeys(text.request for text in texts))

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.texts or self.prefilling or self.waiting or self.inbox)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Decode one token of every row and read a chunk of prompts; return what is new."""
        while self.inbox:
            self.waiting.append(self.inbox.popleft())
        self._leave_cancelled()
        self._admit()
        if self.texts:
            self._decode()
        if self.prefilling and self._reads_now():
            self._prefill()
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
            rows = len(self.texts) + sum(len(other.texts) for other in self.prefilling)
            rows += len(job.texts)
            if rows > self.max_rows or not self.rows.fits(rows, self._need(job)):
                if rows > len(job.texts):
                    self._preempt_longest()
                    return
                error = RegardError(
                    f"n={len(job.texts)} texts of up to {self._need(job)} tokens do not fit into "
                    "the KV cache; ask for fewer"
                )
                for text in self.waiting.popleft().texts:
                    self._finish(text, "error", error)
                continue
            self.prefilling.append(self.waiting.popleft())

    def _need(self, job: _Prefill) -> int:
        """The most ids that the rows of a job will hold."""
        left = job.request.tokens - job.texts[0].count
        need = len(job.ids) + left - 1
        return max(1, need if self.language.context is None else min(need, self.language.context))

    def _preempt_longest(self) -> None:
        """Let a text wait that has had its turn, so that a long one does not hold up short ones."""
        self._read_ahead()
        turns = [text.since for text in self.texts]
        if turns and max(turns) >= self.config.turn and not self.prefilling:
            self.counters.preempted += 1
            self._requeue([turns.index(max(turns))], self.waiting)

    def _requeue(self, rows: Sequence[int], queue: "deque[_Prefill]") -> None:
        """Take texts out of their rows; they will be read again from their ids."""
        assert self.context is not None
        for row in rows:
            text = self.texts[row]
            context = self.context.select(torch.tensor([row], device=self.last.device))
            queue.append(_Prefill([text], list(text.window), context))
        self._keep([row for row in range(len(self.texts)) if row not in set(rows)])

    def _reads_now(self) -> bool:
        """Whether to read prompts in this step.

        On a GPU, reading one short prompt takes as long as reading several, and all rows wait for
        it: a prompt waits up to `PATIENCE` steps for others.
        """
        waited = self.steps_waited
        few = len(self.prefilling) * 12 < len(self.texts)
        begun = any(job.state is not None for job in self.prefilling)
        if isinstance(self.rows, GraphRows) and few and not begun and waited < PATIENCE:
            self.steps_waited += 1
            return False
        self.steps_waited = 0
        return True

    def _prefill(self) -> None:
        """Read the next chunk: of one long prompt, or several short prompts together.

        Long prompts take turns, so that short ones need not wait for the end of a long one.
        """
        job = self.prefilling.popleft()
        group = [job]
        if job.state is None and self._is_short(job, self.chunk):
            longest = len(job.ids)
            for other in list(self.prefilling):
                longest = max(longest, len(other.ids))
                if longest * (len(group) + 1) > self.chunk:
                    break
                if other.state is None and self._is_short(other, self.chunk):
                    group.append(other)
                    self.prefilling.remove(other)
        began = time.perf_counter()
        try:
            if len(group) > 1 or self._is_short(job, self.chunk):
                self._read_together(group)
            else:
                self._read_chunk(job)
        except Exception as error:
            self._fail(group, error)
        seconds = time.perf_counter() - began
        if seconds > 2 * CHUNK_SECONDS and self.chunk > 16:  # a large model on a slow machine
            self.chunk //= 2
        elif seconds < CHUNK_SECONDS:
            self.chunk = min(2 * self.chunk, self.max_chunk)

    def _is_short(self, job: _Prefill, chunk: int) -> bool:
        return job.state is None and len(job.ids) <= chunk and job.request.prompt_logprobs is None

    def _fail(self, group: list[_Prefill], error: Exception) -> None:
        """Several prompts together: try each alone. One: its request has failed."""
        if len(group) > 1:
            for job in group:
                job.state, job.read = None, 0
                try:
                    self._read_together([job])
                except Exception as own:
                    self._fail([job], own)
            return
        for text in group[0].texts:
            self._finish(text, "error", error)

    def _start(self, group: list[_Prefill]) -> tuple[State, list[int]]:
        """The state before the prompts are read, with what is known of them; how much is known."""
        capacity = max(len(job.ids) for job in group)
        source = None
        if group[0].request.source is not None:
            sources = [list(cast(Sequence[int], job.request.source)) for job in group]
            source = Source(*pad_prompts(sources, self.language.device))
            capacity = max(self._need(job) for job in group)
        state = self.language.start(len(group), capacity, source)
        known = [0] * len(group)
        if self.prefixes is not None and group[0].request.prompt_logprobs is None:
            state = cast(TransformerState, state)
            for row, job in enumerate(group):
                known[row] = self.prefixes.load(job.ids, state, row)
            if any(known):
                lengths = torch.tensor(known, device=state.lengths.device)
                state = replace(state, lengths=lengths, max_length=max(known), equal_lengths=False)
        return state, known

    def _read_together(self, group: list[_Prefill]) -> None:
        state, known = self._start(group)
        rows = [job.ids[length:] for job, length in zip(group, known, strict=True)]
        ids, counts = pad_prompts(rows, state.lengths.device)
        ragged = min(map(len, rows)) < ids.shape[1]
        if ragged and max(known) + ids.shape[1] > max(len(job.ids) for job in group):
            # a short rest after a long known beginning would be padded beyond the capacity
            for job in group:
                try:
                    self._read_together([job])
                except Exception as error:
                    self._fail([job], error)
            return
        logits, state = self.language.step(ids, state, counts=counts if ragged else None)
        self.counters.prompt_tokens += sum(map(len, rows))
        self._join(group, logits[:, -1], state)

    def _read_chunk(self, job: _Prefill) -> None:
        if job.state is None:
            job.state, (job.read,) = self._start([job])
        ids = job.ids[job.read : job.read + self.chunk]
        scored = job.request.prompt_logprobs is not None
        tensor = torch.tensor([ids], device=job.state.lengths.device)
        logits, job.state = self.language.step(tensor, job.state, all_logits=scored)
        self.counters.prompt_tokens += len(ids)
        job.read += len(ids)
        if scored and job.texts[0].count == 0:
            following = job.ids[job.read - len(ids) + 1 : job.read + 1]
            if following:
                scores = score_tokens(
                    logits[0, : len(following)], following, cast(int, job.request.prompt_logprobs)
                )
                job.request.prompt_scores += scores
        if job.read < len(job.ids):
            self.prefilling.append(job)
        else:
            self._join([job], logits[:, -1], job.state)

    def _join(self, group: list[_Prefill], logits: Tensor, state: State) -> None:
        """Sample the first token of the texts whose prompts were read, and give them rows."""
        if self.prefixes is not None:
            for row, job in enumerate(group):
                self.prefixes.save(job.ids, cast(TransformerState, state), row)
        texts = [text for job in group for text in job.texts]
        rows = [row for row, job in enumerate(group) for _ in job.texts]
        context = reduce(join_contexts, [job.context or self._context(job) for job in group])
        logits = logits[torch.tensor(rows, device=logits.device)]
        sampled = self._sample(texts, self._merge(texts), logits, context)
        alive, full = self._append(texts, sampled)
        for row in full:
            own = context.select(torch.tensor([row], device=logits.device))
            self.prefilling.append(_Prefill([texts[row]], list(texts[row].window), own))
        joining = [row for row in range(len(texts)) if alive[row] and row not in full]
        if not joining:
            return
        lengths = [len(texts[row].window) - 1 for row in joining]
        need = max(self._need(job) for job in group)
        self.rows.join(state, [rows[row] for row in joining], lengths, need)
        index = torch.tensor(joining, device=logits.device)
        context, last = context.select(index), sampled.ids[index]
        for row in joining:
            texts[row].since = 0
        self.texts += [texts[row] for row in joining]
        if self.context is None:
            self.context, self.last = context, last
        else:
            self.context = join_contexts(self.context, context)
            self.last = torch.cat([self.last, last])
        self.chain = self._merge(self.texts)

    def _context(self, job: _Prefill) -> SamplerContext:
        request = job.request
        context = SamplerContext.from_prompts(
            [request.prompt] * request.n,
            request.tokens + 1,  # one more for a step that runs ahead of the end
            seed=[request.seed + text.index for text in job.texts],
            stop=self.stop,
            device=self.language.device,
        )
        failure_lengths(context)  # its initial value is not 0, which `join_contexts` would fill in
        return context

    # decoding

    def _decode(self) -> None:
        """Decode one token of every row.

        On a GPU, the next step is started before the tokens of the last one are read, so that
        the device does not wait for the host.
        """
        assert self.context is not None
        runs_ahead = self._can_run_ahead()
        if self.ahead is not None and not runs_ahead:
            self._read_ahead()
            return
        context, has_read = self.context, False
        lengths, used = context.lengths.clone(), context.generators.used.clone()
        state = {key: tensor.clone() for key, tensor in context.state.items()}
        try:
            logits = self.rows.step(self.last)
            has_read = True
            if runs_ahead:
                started = self._start_ahead(logits)
                self._read_ahead()
                self.ahead = started
                return
            sampled = self._sample(self.texts, self.chain, logits, self.context)
        except torch.OutOfMemoryError as error:
            context.lengths, context.generators.used, context.state = lengths, used, state
            self._read_ahead()
            if len(self.texts) < 2:
                self._drop_all(error)
            else:  # fewer rows from now on
                self.max_rows = max(1, len(self.texts) // 2)
                first = 0 if has_read else self.max_rows  # the KV cache is ahead of the texts
                self._requeue(range(first, len(self.texts)), self.waiting)
            return
        except Exception as error:
            self._drop_all(error)
            return
        self.last = sampled.ids
        self._settle(self.texts, sampled)

    def _settle(self, texts: list[_Text], sampled: "_Sampled") -> None:
        """Append the sampled tokens; texts that have ended or filled the context leave."""
        alive, full = self._append(texts, sampled)
        gone = {id(text) for text, goes_on in zip(texts, alive, strict=True) if not goes_on}
        again = [texts[row] for row in full]
        if gone:
            self._keep([row for row, text in enumerate(self.texts) if id(text) not in gone])
        if again:
            rows = [row for row, text in enumerate(self.texts) if text in again]
            self._requeue(rows, self.prefilling)

    # running ahead

    def _can_run_ahead(self) -> bool:
        """Whether the tokens of the next step may be read after the step that follows it."""
        rows, limit = self.rows, self.language.context
        return isinstance(rows, GraphRows) and not any(
            text.request.constraints
            or text.request.logprobs is not None
            or length + 2 >= cast(int, limit)
            for text, length in zip(self.texts, rows.lengths, strict=True)
        )

    def _start_ahead(self, logits: Tensor) -> "_Ahead":
        """Sample on the device, and start to copy the tokens to the host."""
        assert self.context is not None
        ids = self.chain.sample(logits, self.context, draw_kernel=True)
        self.context.append(ids)
        self.last = ids
        both = torch.stack([ids, self.context.state["failed"]])
        if not both.is_cuda:
            return _Ahead(list(self.texts), both, None)
        host = torch.empty_like(both, device="cpu", pin_memory=True)
        host.copy_(both, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Ahead(list(self.texts), host, event)

    def _read_ahead(self) -> None:
        """Read the tokens of the step that was started before; wait for the device."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return
        if ahead.event is not None:
            ahead.event.synchronize()
        ids, failed = ahead.host.tolist()
        current = {id(text) for text in self.texts}
        texts, tokens = [], []
        for text, token, length in zip(ahead.texts, ids, failed, strict=True):
            if id(text) not in current:
                continue  # it has left since
            if length != NOT_FAILED:
                self._finish(text, "error", RegardError("no token is left to draw"))
            texts.append(text)
            tokens.append(token if length == NOT_FAILED else None)
        self._settle(texts, _Sampled(self.last, tokens, [None] * len(texts)))

    def _sample(
        self, texts: list[_Text], chain: Chain, logits: Tensor, context: SamplerContext
    ) -> "_Sampled":
        """Sample the next id of each text; one that has no token left fails alone."""
        allowed = logits
        if any(text.request.constraints for text in texts):
            allowed = at_least_float32(logits).clone()
            for row, text in enumerate(texts):
                if text.request.constraints:
                    allowed[row] = text.request.constraints[text.index].mask(allowed[row])
        ids = chain.sample(allowed, context, draw_kernel=True)
        tokens: list[int | None] = ids.tolist()
        for row, length in enumerate(context.state["failed"].tolist()):
            if length != NOT_FAILED:
                cause = chain.failure_cause(allowed[row : row + 1], context, row, length)
                context.state["failed"][row] = NOT_FAILED
                error = RegardError(f"no token is left to draw: {cause}")
                self._finish(texts[row], "error", error)
                tokens[row] = None
        context.append(ids)
        scores: list[TokenScore | None] = [None] * len(texts)
        scored = [row for row, text in enumerate(texts) if text.request.logprobs is not None]
        if scored:
            most = max(cast(int, texts[row].request.logprobs) for row in scored)
            chosen = ids[scored].tolist()
            for row, score in zip(scored, score_tokens(logits[scored], chosen, most), strict=True):
                scores[row] = score
        return _Sampled(ids, tokens, scores)

    def _append(self, texts: list[_Text], sampled: "_Sampled") -> tuple[list[bool], list[int]]:
        """Append the sampled tokens to the texts.

        Return which texts go on, and those of them that have filled the context: they have
        dropped the older half, and the rest must be read again.
        """
        alive, full, limit = [], [], self.language.context
        for row, text in enumerate(texts):
            token = sampled.tokens[row]
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

    def _append_token(self, text: _Text, token: int, score: TokenScore | None) -> bool:
        request = text.request
        if token in request.stop:
            self._finish(text, "stop")
            return False
        text.window.append(token)
        text.count += 1
        text.since += 1
        self.counters.tokens += 1
        if request.constraints:
            request.constraints[text.index].append(token)
        self.events.append(Event(request, text.index, token, score))
        if text.count == request.tokens:
            self._finish(text, "length")
            return False
        return True

    # leaving

    def _finish(self, text: _Text, reason: FinishReason, error: Exception | None = None) -> None:
        if reason == "cancelled":
            self.counters.cancelled += 1
        elif reason == "error":
            self.counters.failed += 1
        else:
            self.counters.finished += 1
        self.events.append(Event(text.request, text.index, finish=reason, error=error))

    def _drop_all(self, error: Exception) -> None:
        """Every row has failed; the engine goes on with the next requests."""
        self.ahead = None
        for text in self.texts:
            self._finish(text, "error", error)
        self._keep([])

    def _leave_cancelled(self) -> None:
        for queue in (self.waiting, self.prefilling):
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
            self.context = None
            return
        assert self.context is not None
        index = torch.tensor(order, device=self.last.device)
        self.context, self.last = self.context.select(index), self.last[index]
        self.chain = self._merge(self.texts)

    def _merge(self, texts: list[_Text]) -> Chain:
        first = texts[0].request.chain
        if all(text.request.chain is first for text in texts):
            return first
        return Chain.per_row([text.request.chain for text in texts], self.language.device)


def _is_cancelled(text: _Text) -> bool:
    return text.request.cancelled or text.index in text.request.ended


def join_contexts(first: SamplerContext, second: SamplerContext) -> SamplerContext:
    """Two contexts as one, with the rows of the first before those of the second.

    Where only one has the state of a sampler, the other's rows do not use that sampler.
    """
    width = max(first.history.shape[1], second.history.shape[1])
    history = torch.cat(
        [pad(part.history, (0, width - part.history.shape[1])) for part in (first, second)]
    )
    state = {}
    for key in first.state.keys() | second.state.keys():
        like = first.state.get(key, second.state.get(key))
        assert like is not None
        state[key] = torch.cat(
            [
                part.state.get(key, like.new_zeros(len(part.lengths), *like.shape[1:]))
                for part in (first, second)
            ]
        )
    return SamplerContext(
        history,
        torch.cat([first.lengths, second.lengths]),
        torch.cat([first.prompt_lengths, second.prompt_lengths]),
        RowGenerators(
            torch.cat([first.generators.keys, second.generators.keys]),
            torch.cat([first.generators.used, second.generators.used]),
        ),
        first.stop,
        state,
        first.constants,
    )


def score_tokens(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """The log-probability of a token in each row of logits, and the `top` likeliest."""
    log_probs = at_least_float32(logits).log_softmax(-1)
    index = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    chosen = log_probs.gather(1, index).squeeze(1).tolist()
    if not top:
        return [TokenScore(*pair) for pair in zip(tokens, chosen, strict=True)]
    best = log_probs.topk(min(top, log_probs.shape[1]))
    return [
        TokenScore(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(
            tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
