"""Signal handling: on a stop signal, a run finishes its step, saves a checkpoint and exits."""

import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from regard.errors import TrainingStopped
from regard.training.parallel.launch import world_size

STOP_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)  # Windows has the first two
]
GRACE_SECONDS = 1.0  # for Python to handle a second Ctrl-C before the process is ended
Handler = Callable[[int, FrameType | None], None]
Handlers = dict[signal.Signals, Any]


@contextmanager
def stoppable() -> Iterator[None]:
    """A context in which a scheduler's signal raises `TrainingStopped`; for work outside training.

    Under `torchrun` it has no effect: a signal must also end a process that waits for another rank.
    """
    signals = [number for number in STOP_SIGNALS if number != signal.SIGINT]
    previous = {} if world_size() > 1 else _install_handler(_RaiseStopped(), signals)
    try:
        yield
    finally:
        _restore_handlers(previous)


class _RaiseStopped:
    """A signal handler that raises `TrainingStopped`.

    Code that catches all exceptions may discard it, as some imports do, so the signal is stored
    too: a run that starts afterwards stops at its first step.
    """

    received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _redirect_lost_terminals()
        self.received = signal.Signals(number)
        raise TrainingStopped(
            f"stopped by {self.received.name} before or after training; saved files are unchanged"
        )


class Interrupted(Exception):
    """A signal arrived inside `Interrupts.raise_on_signal`."""


class Interrupts:
    """In its context, a signal is stored in `received`; a second Ctrl-C ends the process."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._raise = False
        self._exited = threading.Event()
        self._previous_handlers: Handlers = {}

    def __enter__(self) -> Self:
        self._previous_handlers = _install_handler(self._on_signal, STOP_SIGNALS)
        for handler in self._previous_handlers.values():
            if isinstance(handler, _RaiseStopped):
                self.received = self.received or handler.received
        if self._previous_handlers:
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            self._previous_wakeup_fd = signal.set_wakeup_fd(self._sender.fileno())
            threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exited.set()
        _restore_handlers(self._previous_handlers)
        if self._previous_handlers:
            signal.set_wakeup_fd(self._previous_wakeup_fd)
            self._sender.close()

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 75 (EX_TEMPFAIL: try again later) for a scheduler's signal."""
        return 130 if self.received == signal.SIGINT else 75

    def stop_error(self, number: int, step: int, steps: int, folder: Path) -> TrainingStopped:
        """The error that ends a run after signal `number`, which any rank may have received."""
        self.received = signal.Signals(number)
        return TrainingStopped(
            f"stopped by {self.received.name} at step {step:,} of {steps:,}; checkpoint saved;\n"
            f"resume with: regard resume {folder}",
            self.exit_code,
        )

    @contextmanager
    def raise_on_signal(self) -> Iterator[None]:
        """A context in which a signal, even one received earlier, raises `Interrupted`."""
        self._raise = True
        try:
            if self.received is not None:
                raise Interrupted
            yield
        finally:
            self._raise = False

    def _listen(self) -> None:
        """End the process at a second Ctrl-C: Python cannot handle it inside a long torch call."""
        count = 0
        with self._receiver:
            while number := self._receiver.recv(1):
                count += number[0] == signal.SIGINT
                if count > 1 and not self._exited.wait(GRACE_SECONDS):
                    if os.isatty(2):
                        os.write(2, b"\x1b[?25h\n")  # show the cursor, which a progress bar hides
                    os._exit(130)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        _redirect_lost_terminals()
        self.received = signal.Signals(number)
        if self._raise:
            raise Interrupted


def _redirect_lost_terminals() -> None:
    """Redirect output to a closed terminal to /dev/null: writing would fail before the save."""
    for stream in (1, 2):
        with suppress(OSError):  # the stream was closed
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream)
                os.close(null)


def _install_handler(handler: Handler, signals: list[signal.Signals]) -> Handlers:
    """Install a handler for signals that are not ignored; returns the previous handlers."""
    if threading.current_thread() is not threading.main_thread():  # required by `signal`
        return {}
    return {
        number: signal.signal(number, handler)
        for number in signals
        if signal.getsignal(number) != signal.SIG_IGN  # as set by `nohup` and `&`
    }


def _restore_handlers(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
