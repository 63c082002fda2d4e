"""The engine thread: it steps the engines of all models, and nothing else runs in it."""

import logging
import threading
import time
from collections.abc import Callable

import torch

from regard.errors import RegardError
from regard.serve.engine import BatchEngine
from regard.serve.request import Event, Request

STALL_SECONDS = 2.0  # seconds that a step may take, beside four times the slowest one so far
logger = logging.getLogger(__name__)


class EngineStopped(RegardError):
    """The engine thread has ended, so that nothing is generated any more."""


class Worker:
    """Runs the steps of several engines in one thread, in turns.

    `deliver` gets the events of each step, in the engine thread; it must not block.
    """

    def __init__(self, deliver: Callable[[list[Event]], None]) -> None:
        self.deliver = deliver
        self.engines: dict[str, BatchEngine] = {}
        self.error: BaseException | None = None  # what ended the thread
        self.slowest = 0.0  # seconds of the slowest step
        self._began: float | None = None  # when the current step began; None: idle or a first step
        self._threads: int | None = None  # to set; torch.set_num_threads is per thread
        self._wake, self._stopping = threading.Event(), False
        self._lock = threading.Lock()  # of the table of engines
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
        """Step this engine too, from now on with so many CPU threads."""
        with self._lock:
            self.engines[name] = engine
            self._threads = threads

    def remove(self, name: str) -> None:
        """Step this engine no more."""
        with self._lock:
            self.engines.pop(name, None)

    def submit(self, name: str, request: Request) -> None:
        """Queue a request at an engine."""
        if problem := self.problem():
            raise EngineStopped(problem)
        self.engines[name].submit(request)
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """Evict the sequences of a request before the next step."""
        request.cancelled = True
        self._wake.set()

    def problem(self) -> str | None:
        """Why nothing is generated: the thread has ended, or its step takes too long."""
        if self.error is not None:
            return f"the engine has failed: {type(self.error).__name__}: {self.error}"
        if not self._thread.is_alive():
            return "the engine thread is not running"
        began = self._began
        limit = STALL_SECONDS + 4 * self.slowest
        if began is not None and time.monotonic() - began > limit:
            return f"the engine has not finished a step for {limit:.1f} seconds"
        return None

    @property
    def busy(self) -> bool:
        """Whether any engine has something to do."""
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
                for engine in busy:
                    began = time.monotonic()  # a first step may compile; it has no limit
                    self._began = began if engine.counters.steps else None
                    events = engine.step()
                    self.slowest = max(self.slowest, time.monotonic() - began)
                    self._began = None
                    if events:
                        self.deliver(events)
                if not busy:
                    self._wake.wait(timeout=1.0)
        except BaseException as error:
            logger.exception("the engine thread has ended")
            self.error = error
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        """Tell every request that it will not be answered."""
        failure = EngineStopped(f"the engine has failed: {type(error).__name__}: {error}")
        events = [
            Event(request, index, finish_reason="error", error=failure)
            for engine in self.engines.values()
            for request in engine.requests()
            for index in range(request.n)
        ]
        self.deliver(events)
