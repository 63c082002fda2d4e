"""Being asked to stop: finish the step, save, and only then end."""

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

from regard.errors import Stopped
from regard.training.parallel.launch import size

ASKING = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)  # Windows has the first two
]
PATIENCE = 1.0  # seconds in which Python may still hear a second Ctrl-C by itself
Handler = Callable[[int, FrameType | None], None]
Handlers = dict[signal.Signals, Any]


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, a scheduler's signal ends what is not training yet by `Stopped`: nothing is lost.

    Not under `torchrun`, whose signals must also end a process that waits for another.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _let_go_of_terminals()
        name = signal.Signals(number).name
        raise Stopped(f"stopped by {name} while not training; all that was saved is untouched")

    before = {} if size() > 1 else _handle(stop, [each for each in ASKING if each != signal.SIGINT])
    try:
        yield
    finally:
        _restore(before)


class Interrupted(Exception):
    """A signal came where nothing has to be finished."""


class Interrupts:
    """Inside a `with`, the first signal is noted in `received`; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._hasty = False
        self._over = threading.Event()
        self._before: Handlers = {}

    def __enter__(self) -> Self:
        self._before = _handle(self._note, ASKING)
        if self._before:
            self._ear, self._mouth = socket.socketpair()
            self._mouth.setblocking(False)
            self._heard_before = signal.set_wakeup_fd(self._mouth.fileno())
            threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._over.set()
        _restore(self._before)
        if self._before:
            signal.set_wakeup_fd(self._heard_before)
            self._mouth.close()

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 75 (try again later) for a scheduler's signal."""
        return 130 if self.received == signal.SIGINT else 75

    def stopped(self, number: int, step: int, steps: int, folder: Path) -> Stopped:
        """The error that ends a run after signal `number`, which any rank may have received."""
        self.received = signal.Signals(number)
        return Stopped(
            f"stopped by {self.received.name} at step {step:,} of {steps:,}, and saved;\n"
            f"resume with: regard resume {folder}",
            self.exit_code,
        )

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, a signal is noted and raises `Interrupted`, as does one that came before."""
        self._hasty = True
        try:
            if self.received is not None:
                raise Interrupted
            yield
        finally:
            self._hasty = False

    def _listen(self) -> None:
        """End the process at a second Ctrl-C that Python does not hear in a long call of torch."""
        heard = 0
        with self._ear:
            while number := self._ear.recv(1):
                heard += number[0] == signal.SIGINT
                if heard > 1 and not self._over.wait(PATIENCE):
                    if os.isatty(2):
                        os.write(2, b"\x1b[?25h\n")  # a bar of progress hides the cursor
                    os._exit(130)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        _let_go_of_terminals()
        self.received = signal.Signals(number)
        if self._hasty:
            raise Interrupted


def _let_go_of_terminals() -> None:
    """Let what is said to a terminal that hung up go nowhere, or it would fail before the save."""
    for stream in (1, 2):
        with suppress(OSError):  # one that was closed
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


def _handle(handler: Handler, signals: list[signal.Signals]) -> Handlers:
    """Handle signals that are not ignored; what handled them before."""
    if threading.current_thread() is not threading.main_thread():  # only there Python allows it
        return {}
    return {
        each: signal.signal(each, handler)
        for each in signals
        if signal.getsignal(each) != signal.SIG_IGN  # `nohup` and `&` mean it
    }


def _restore(before: Handlers) -> None:
    for each, handler in before.items():
        signal.signal(each, handler)
