"""From the events of the engine thread to deltas of text in the event loop of the server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from regard.generate.decode import IncrementalText
from regard.generate.stop_strings import StoppedText
from regard.serve.models import ServedModel
from regard.serve.request import Event, FinishReason, Request, TokenScore
from regard.serve.worker import Worker


@dataclass(slots=True)
class Delta:
    """What a continuation has got since the last delta: text, tokens, its end."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Continuation:
    """A complete continuation."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.scores += delta.scores
        self.finish_reason = delta.finish_reason or self.finish_reason

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens."""
        scores = [score.logprob for score in self.scores]
        return sum(scores) / len(scores) if scores else 0.0


class AsyncEngine:
    """Submits requests to the engine thread, and yields its events to the coroutines that wait."""

    def __init__(self) -> None:
        self.worker = Worker(self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[Request, asyncio.Queue[Event]] = {}

    def start(self) -> None:
        """Start the engine thread; its events go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.worker.start()

    def __len__(self) -> int:
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

        If the reader leaves, the request is cancelled.
        """
        queue = self._queues[request]
        texts = [
            (IncrementalText(model.tokenizer, request.prompt), StoppedText(stop_strings))
            for _ in range(request.n)
        ]
        unfinished = set(range(request.n))
        try:
            while unfinished:
                events = [await queue.get()]
                while not queue.empty():  # under load, several tokens make one delta
                    events.append(queue.get_nowait())
                deltas: dict[int, Delta] = {}
                for event in events:
                    if event.error is not None:
                        raise event.error
                    if event.index not in unfinished:
                        continue
                    delta = deltas.setdefault(event.index, Delta(event.index))
                    text, stopped = texts[event.index]
                    if event.token is not None:
                        delta.tokens.append(event.token)
                        delta.text += stopped.append(text.append(event.token))
                        if event.score is not None:
                            delta.scores.append(event.score)
                    else:
                        delta.text += stopped.append(text.end())
                        delta.text += "" if stopped.stopped else stopped.end()
                        delta.finish_reason = event.finish_reason
                    if stopped.stopped:
                        request.ended.add(event.index)
                        delta.finish_reason = "stop"
                    if delta.finish_reason:
                        unfinished.discard(event.index)
                for delta in deltas.values():
                    yield delta
        finally:
            self.forget(request)

    def forget(self, request: Request) -> None:
        """End a request that nobody reads any more."""
        self._queues.pop(request, None)
        self.worker.cancel(request)

    async def complete(
        self, model: ServedModel, request: Request, stop_strings: Sequence[str]
    ) -> list[Continuation]:
        """The continuations of a submitted request, when all are complete."""
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
