"""The engine thread: it steps the engines of all models, and nothing else runs in it."""

import logging
import threading
import time
from collections.abc import Callable

import torch

from regard.errors import RegardError
from regard.serve.engine import BatchEngine
from regard.serve.request import Event, Request

# A step counts as hanging after this time, or 4 times the slowest recent step if that is longer.
STALL_SECONDS = 1.5
# `slowest` is the maximum over at least this many recent steps, so that a slow step is forgotten
RECENT_STEPS = 1000
# Limits of the first step of a model, which is slower: on a CPU nothing is compiled, on other
# devices kernels may be.
FIRST_STEP_SECONDS_CPU = 60.0
FIRST_STEP_SECONDS = 600.0
logger = logging.getLogger(__name__)


class EngineStopped(RegardError):
    """The engine thread has ended, or hangs; no request can be answered."""


class EngineThread:
    """Runs the steps of several engines in one thread, in turn.

    `deliver` is called with the events of each step, in the engine thread; it must not block.
    """

    def __init__(self, deliver: Callable[[list[Event]], None]) -> None:
        self.deliver = deliver
        self.engines: dict[str, BatchEngine] = {}
        self.error: BaseException | None = None  # that ended the thread
        self.slowest = 0.0  # seconds of the slowest recent step
        self._slowest_next, self._steps_next = 0.0, 0  # of the steps since `slowest` was replaced
        # When the current step began, and the seconds that it may take; None: idle. Other threads
        # read it, so it is one tuple.
        self._current_step: tuple[float, float] | None = None
        self._threads: dict[str, int] = {}  # CPU threads that each engine needs
        self._wake, self._stopping = threading.Event(), False
        self._lock = threading.Lock()  # of `engines` and `_threads`
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
        """Add an engine; steps use the largest number of CPU `threads` of all engines."""
        with self._lock:
            self.engines[name] = engine
            self._threads[name] = threads

    def remove(self, name: str) -> None:
        """Remove an engine."""
        with self._lock:
            self.engines.pop(name, None)
            self._threads.pop(name, None)

    def submit(self, name: str, request: Request) -> None:
        """Submit a request to an engine."""
        if problem := self.problem():
            raise EngineStopped(problem)
        self.engines[name].submit(request)
        if self.error is not None:  # the thread has ended meanwhile, perhaps without this request
            raise EngineStopped(self._failure(self.error))
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """Remove the sequences of a request before the next step."""
        request.cancelled = True
        self._wake.set()

    def problem(self) -> str | None:
        """Why nothing is generated (the thread has ended, or a step hangs); None if it works."""
        if self.error is not None:
            return self._failure(self.error)
        if not self._thread.is_alive():
            return "the engine thread is not running"
        current = self._current_step
        if current is not None:
            start_time, limit = current
            if time.monotonic() - start_time > limit:
                return f"the engine has not finished a step for {limit:.1f} seconds"
        return None

    def _run(self) -> None:
        used_threads = 0
        try:
            while not self._stopping:
                self._wake.clear()
                with self._lock:
                    busy = [engine for engine in self.engines.values() if engine.busy]
                    threads = max(self._threads.values(), default=used_threads)
                if threads != used_threads:  # of this thread: other threads have their own number
                    torch.set_num_threads(threads)
                    used_threads = threads
                idle = not busy
                while busy:
                    # pop: no local variable holds a reference to an unloaded engine
                    self._step(busy.pop(0))
                if idle:
                    self._wake.wait(timeout=1.0)
        except BaseException as error:
            logger.exception("the engine thread has ended")
            self.error = error
            self._fail_all(error)

    def _step(self, engine: BatchEngine) -> None:
        is_first = not engine.counters.steps
        limit = max(STALL_SECONDS, 4 * self.slowest)
        if is_first:
            on_cpu = engine.language.device.type == "cpu"
            limit = max(limit, FIRST_STEP_SECONDS_CPU if on_cpu else FIRST_STEP_SECONDS)
        start_time = time.monotonic()
        self._current_step = start_time, limit
        events = engine.step()
        seconds = time.monotonic() - start_time
        self._current_step = None
        self._record(seconds / 4 if is_first else seconds)  # the first step is slower than others
        if events:
            self.deliver(events)

    def _record(self, seconds: float) -> None:
        """Update `slowest`, the maximum of the last `RECENT_STEPS` to 2 * `RECENT_STEPS` steps."""
        self.slowest = max(self.slowest, seconds)
        self._slowest_next, self._steps_next = (
            max(self._slowest_next, seconds),
            self._steps_next + 1,
        )
        if self._steps_next == RECENT_STEPS:
            self.slowest, self._slowest_next, self._steps_next = self._slowest_next, 0.0, 0

    def _fail_all(self, error: BaseException) -> None:
        """Deliver the events of the step that has failed, then an error to every open request."""
        failure = EngineStopped(self._failure(error))
        with self._lock:
            engines = list(self.engines.values())
        for engine in engines:
            self.deliver(engine.events)
            self.deliver(
                [
                    Event(request, index, finish_reason="error", error=failure)
                    for request in engine.requests()
                    for index in range(request.n)
                ]
            )

    @staticmethod
    def _failure(error: BaseException) -> str:
        return f"the engine has failed: {type(error).__name__}: {error}"
