"""Being asked to stop: finish the step, save, and only then end."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

ASKING = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)  # Windows has the first two
]


class Interrupts:
    """Inside a `with`, the first signal is noted in `received`; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there Python allows it
            self._before = {
                each: signal.signal(each, self._note)
                for each in ASKING
                if signal.getsignal(each) != signal.SIG_IGN  # `nohup` and `&` mean it
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 75 (try again later) for a scheduler's signal."""
        return 130 if self.received == signal.SIGINT else 75

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
