"""The engine thread: it steps the engines of all models, and nothing else runs in it."""

import logging
import threading
import time
from collections.abc import Callable

import torch

from regard.errors import RegardError
from regard.serve.engine import BatchEngine
from regard.serve.request import Event, Request

# a step hangs after this, or after 4 times the slowest of the last steps if that is longer
STALL_SECONDS = 1.5
RECENT_STEPS = 1000  # at least; one slow step does not raise the limit for ever
FIRST_SECONDS = 600.0  # the same for the first step of a model, which may compile kernels
logger = logging.getLogger(__name__)


class EngineStopped(RegardError):
    """The engine thread has ended, or hangs; no request can be answered."""


class Worker:
    """Runs the steps of several engines in one thread, in turn.

    `deliver` is called with the events of each step, in the engine thread; it must not block.
    """

    def __init__(self, deliver: Callable[[list[Event]], None]) -> None:
        self.deliver = deliver
        self.engines: dict[str, BatchEngine] = {}
        self.error: BaseException | None = None  # that ended the thread
        self.slowest = 0.0  # seconds of the slowest recent step
        self._slowest_next, self._steps_next = 0.0, 0  # of the steps since `slowest` was replaced
        self._began: float | None = None  # when the current step began; None: idle
        self._limit = 0.0  # seconds that the current step may take
        self._threads: int | None = None  # CPU threads to set in the engine thread
        self._wake, self._stopping = threading.Event(), False
        self._lock = threading.Lock()  # of `engines`
        self._thread = threading.Thread(target=self._run, name="regard-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=STALL_SECONDS)

    def add(self, name: str, engine: BatchEngine, threads: int) -> None:
        """Add an engine; from now on, steps use `threads` CPU threads."""
        with self._lock:
            self.engines[name] = engine
            self._threads = threads

    def remove(self, name: str) -> None:
        """Remove an engine."""
        with self._lock:
            self.engines.pop(name, None)

    def submit(self, name: str, request: Request) -> None:
        """Submit a request to an engine."""
        if problem := self.problem():
            raise EngineStopped(problem)
        self.engines[name].submit(request)
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """Evict the sequences of a request before the next step."""
        request.cancelled = True
        self._wake.set()

    def problem(self) -> str | None:
        """Why nothing is generated (the thread has ended, or a step hangs); None if it works."""
        if self.error is not None:
            return f"the engine has failed: {type(self.error).__name__}: {self.error}"
        if not self._thread.is_alive():
            return "the engine thread is not running"
        began, limit = self._began, self._limit
        if began is not None and time.monotonic() - began > limit:
            return f"the engine has not finished a step for {limit:.1f} seconds"
        return None

    @property
    def busy(self) -> bool:
        """Whether any engine is busy."""
        return any(engine.busy for engine in list(self.engines.values()))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                with self._lock:
                    busy = [engine for engine in self.engines.values() if engine.busy]
                    threads, self._threads = self._threads, None
                if threads is not None:
                    torch.set_num_threads(threads)
                idle = not busy
                while busy:
                    self._step(busy.pop(0))  # no variable keeps an engine that is unloaded
                if idle:
                    self._wake.wait(timeout=1.0)
        except BaseException as error:
            logger.exception("the engine thread has ended")
            self.error = error
            self._fail_all(error)

    def _step(self, engine: BatchEngine) -> None:
        is_first = not engine.counters.steps
        self._limit = FIRST_SECONDS if is_first else max(STALL_SECONDS, 4 * self.slowest)
        self._began = began = time.monotonic()
        events = engine.step()
        seconds = time.monotonic() - began
        self._began = None
        self._record(seconds / 4 if is_first else seconds)  # the first may have compiled kernels
        if events:
            self.deliver(events)

    def _record(self, seconds: float) -> None:
        """Include a step in `slowest`, which forgets steps after one to two `RECENT_STEPS`."""
        self.slowest = max(self.slowest, seconds)
        self._slowest_next, self._steps_next = (
            max(self._slowest_next, seconds),
            self._steps_next + 1,
        )
        if self._steps_next == RECENT_STEPS:
            self.slowest, self._slowest_next, self._steps_next = self._slowest_next, 0.0, 0

    def _fail_all(self, error: BaseException) -> None:
        """Send an error event to every open request."""
        failure = EngineStopped(f"the engine has failed: {type(error).__name__}: {error}")
        events = [
            Event(request, index, finish_reason="error", error=failure)
            for engine in self.engines.values()
            for request in engine.requests()
            for index in range(request.n)
        ]
        self.deliver(events)
