"""The standard streams, where any of them may be closed, full or a pipe without a reader.

Progress and messages that cannot be written to stderr are dropped: the work goes on. A result
that cannot be written to stdout is an error.
"""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from regard.errors import RegardError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Flags with which /dev/null replaces a closed stdin, stdout and stderr: reading stdin and writing
# to stdout fail, stderr drops everything.
_CLOSED_FLAGS = (os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)


def prepare_streams() -> None:
    """Replace stdout by `_Results` and stderr by `_Messages`, unless a caller has replaced them.

    A closed stream gets its descriptor back: otherwise the next file to be opened takes it, and
    whatever a library prints lands in that file.
    """
    for descriptor, flags in enumerate(_CLOSED_FLAGS):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free descriptor, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, raw in (("stdout", _Results(1, "w")), ("stderr", _Messages(2, "w"))):
        stream = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and stream.fileno() < 3):
            if stream is not None:
                stream.flush()
            text = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding="utf-8" if stream is None else stream.encoding,
                errors="replace",  # for characters the terminal cannot show
                line_buffering=name == "stderr" or raw.isatty(),
            )
            setattr(sys, name, text)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


class _Messages(io.FileIO):
    """A file descriptor that drops data that cannot be written."""

    def __init__(self, descriptor: int, mode: str) -> None:
        super().__init__(descriptor, mode, closefd=False)

    def write(self, data: "ReadableBuffer") -> int:
        """Write, or drop."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


class _Results(_Messages):
    """A file descriptor whose first failed write raises; data after it is dropped."""

    failed = False

    def write(self, data: "ReadableBuffer") -> int:
        """Write; raise `BrokenPipeError` for a pipe without a reader, otherwise `RegardError`."""
        if self.failed:
            return memoryview(data).nbytes
        try:
            return io.FileIO.write(self, data)
        except OSError as error:
            self.failed = True
            if isinstance(error, BrokenPipeError):
                raise
            reason = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise RegardError(f"cannot write the result to stdout: {reason}") from None
