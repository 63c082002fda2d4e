"""Turns the events of the engine thread into text deltas, in the event loop of the server."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from regard.generate.decode import IncrementalDetokenizer
from regard.generate.stop_strings import StopStringFilter
from regard.serve.models import ServedModel
from regard.serve.request import Event, FinishReason, Request, TokenLogprobs
from regard.serve.worker import EngineStopped, EngineThread

MAX_EVENTS = 64  # engine events that are processed at a time
HANG_SECONDS = 10.0  # after which the requests of an engine that hangs fail


@dataclass(slots=True)
class Delta:
    """The text, tokens and finish reason of a continuation since its last delta."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Continuation:
    """A continuation, collected from its deltas."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens; -inf if it has none, so that any other wins."""
        logprobs = [token.logprob for token in self.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else -math.inf


class AsyncEngine:
    """Submits requests to the engine thread, and passes its events to the waiting coroutines."""

    def __init__(self) -> None:
        self.worker = EngineThread(self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[Request, asyncio.Queue[Event]] = {}
        self._watchdog_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the engine thread; its events go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._watchdog_task = asyncio.create_task(self._watchdog())
        self.worker.start()

    def stop(self) -> None:
        """End the engine thread."""
        if self._watchdog_task is not None:
            self._watchdog_task.cancel()
        self.worker.stop()

    async def _watchdog(self) -> None:
        """Fail the open requests of an engine that hangs; they would wait for ever."""
        failing_since: float | None = None
        while True:
            await asyncio.sleep(HANG_SECONDS / 10)
            problem = self.worker.problem()
            if problem is None:
                failing_since = None
                continue
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since >= HANG_SECONDS:
                self._fail(problem)

    def fail_after(self, seconds: float, reason: str) -> None:
        """Fail the requests that are open after this time; called by any thread or signal."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._fail, reason)

    def _fail(self, reason: str) -> None:
        for request, queue in self._queues.items():
            error = EngineStopped(reason)
            queue.put_nowait(Event(request, 0, finish_reason="error", error=error))

    @property
    def open_requests(self) -> int:
        """The number of requests that are not answered yet."""
        return len(self._queues)

    def submit(self, model: ServedModel, request: Request) -> None:
        """Queue a request; `deltas` must be read afterwards."""
        self._queues[request] = asyncio.Queue()
        try:
            self.worker.submit(model.name, request)
        except BaseException:
            del self._queues[request]
            raise

    async def deltas(
        self, model: ServedModel, request: Request, stop_strings: Sequence[str]
    ) -> AsyncIterator[Delta]:
        """The deltas of the continuations of a submitted request, as they are generated.

        If the caller stops iterating, the request is cancelled.
        """
        queue = self._queues[request]
        detokenizers = [
            (
                IncrementalDetokenizer(model.tokenizer, request.prompt),
                StopStringFilter(stop_strings),
            )
            for _ in range(request.n)
        ]
        unfinished = set(range(request.n))
        try:
            while unfinished:
                events = [await queue.get()]
                # under load, or for a slow reader, several tokens make one delta
                while not queue.empty() and len(events) < MAX_EVENTS:
                    events.append(queue.get_nowait())
                deltas: dict[int, Delta] = {}
                for event in events:
                    if event.error is not None:
                        raise event.error
                    if event.index not in unfinished:
                        continue
                    delta = deltas.setdefault(event.index, Delta(event.index))
                    detokenizer, stop_filter = detokenizers[event.index]
                    if event.token is not None:
                        delta.tokens.append(event.token)
                        delta.text += stop_filter.append(detokenizer.append(event.token))
                        if event.logprobs is not None:
                            delta.logprobs.append(event.logprobs)
                    else:
                        delta.text += stop_filter.append(detokenizer.end())
                        delta.text += "" if stop_filter.stopped else stop_filter.end()
                        delta.finish_reason = event.finish_reason
                    if stop_filter.stopped:
                        request.ended.add(event.index)
                        delta.finish_reason = "stop"
                    if delta.finish_reason:
                        unfinished.discard(event.index)
                for delta in deltas.values():
                    yield delta
                if not queue.empty():
                    await asyncio.sleep(0)  # so that other responses can be written
        finally:
            self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Remove the sequences of a request, and drop its further events."""
        self._queues.pop(request, None)
        self.worker.cancel(request)

    async def complete(
        self, model: ServedModel, request: Request, stop_strings: Sequence[str]
    ) -> list[Continuation]:
        """Wait until a submitted request is complete; return its continuations."""
        continuations = [Continuation() for _ in range(request.n)]
        async for delta in self.deltas(model, request, stop_strings):
            continuations[delta.index].add(delta)
        return continuations

    def _deliver(self, events: list[Event]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            queue = self._queues.get(event.request)
            if queue is not None:
                queue.put_nowait(event)
