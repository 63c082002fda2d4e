"""How the command line talks: results to stdout, all else to stderr, and plain where it must be."""

import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from regard.errors import DataError


class Settings:
    """What --quiet and --debug ask for."""

    quiet: bool = False
    debug: bool = False


settings = Settings()


def say(text: str = "") -> None:
    """Talk to the user; not when asked to be quiet."""
    if not settings.quiet:
        print(text, file=sys.stderr, flush=True)


def warn_of(unknown: Sequence[str]) -> None:
    """Say which parts of a text a model cannot read."""
    if unknown:
        few = ", ".join(repr(each) for each in dict.fromkeys(unknown[:5]))
        say(f"read as unknown, since the run has not learned it: {few}{' …' * (len(unknown) > 5)}")


def lively(stream: TextIO) -> bool:
    """Whether a stream is a terminal that may be coloured and drawn upon."""
    unwanted = any(os.environ.get(name) for name in ("NO_COLOR", "CI"))
    return stream.isatty() and not unwanted and os.environ.get("TERM") != "dumb"


@contextmanager
def working(text: str) -> Iterator[None]:
    """Inside, a terminal shows that something is going on."""
    if settings.quiet or not lively(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(harmless(text), "dim"), spinner="dots"):
        yield


def run_worker() -> None:
    """What other ranks than 0 do, whatever the words were: they learn in silence."""
    from regard.training.run import run_worker as events

    for _ in events():
        pass


def width() -> int:
    """How many cells a line of the terminal has."""
    return shutil.get_terminal_size().columns


def print_json(table: Mapping[str, Any]) -> None:
    """One object on one line; numbers that JSON has no words for are null."""
    print(json.dumps(_finite(table), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(text: str, stream: TextIO) -> str:
    """A text as it may be written to a stream: unchanged, but harmless to a terminal."""
    return harmless(text) if stream.isatty() else text


def harmless(text: str) -> str:
    r"""A text without anything that controls a terminal; new lines and tabs stay.

    >>> harmless("a\x1b[2Jb\n")
    'a[2Jb\n'
    """
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c)[0] != "C")


def dim(text: str, stream: TextIO) -> str:
    """A text that stands back, where there are colours."""
    return f"\x1b[2m{text}\x1b[0m" if text and lively(stream) else text


def bold(text: str, stream: TextIO) -> str:
    """A text that stands out, where there are colours."""
    return f"\x1b[1m{text}\x1b[0m" if lively(stream) else text


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with their columns under each other, those in `right` flush right.

    >>> aligned([("loss", "1.5"), ("perplexity", "4.48")], right=[1])
    ['loss         1.5', 'perplexity  4.48']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(size) if number in right else cell.ljust(size)
            for number, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def number(value: float) -> str:
    """A number with as many digits as one wants to read.

    >>> number(1.48213), number(41.2345), number(12345)
    ('1.4821', '41.23', '12,345')
    """
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.2f}"


def how_large(parameters: int, kept: int = 0) -> str:
    """How large a model is; one that is fitted has no parameters, but keeps numbers.

    >>> how_large(124_439_808), how_large(0, kept=3128), how_large(0)
    ('124,439,808 parameters', '3,128 numbers kept', 'fitted to the data')
    """
    if parameters:
        return f"{parameters:,} parameters"
    return f"{kept:,} numbers kept" if kept else "fitted to the data"


def clock(seconds: float) -> str:
    """A length of time.

    >>> clock(72), clock(7384)
    ('1:12', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def stdin_lines() -> Iterator[str]:
    """The lines of stdin, without their ends."""
    for line, content in enumerate(sys.stdin.buffer, 1):
        try:
            yield content.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"stdin, line {line} is not UTF-8: byte {error.start}") from None


def stdin_text() -> str:
    """All of stdin."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"stdin is not UTF-8: byte {error.start}") from None
