"""Terminal output: results go to stdout, progress and messages to stderr; plain text in pipes."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from regard import api
from regard.api.formatting import format_duration as format_duration
from regard.api.formatting import format_number as format_number
from regard.api.formatting import format_size as format_size
from regard.api.formatting import is_interactive as is_interactive
from regard.api.formatting import strip_control as strip_control
from regard.api.formatting import terminal_width as terminal_width
from regard.api.formatting import to_json
from regard.errors import CheckpointError, ConfigError, DataError, reject_options
from regard.files.atomic import atomic_file


class CommonOptions:
    """The options that all commands have, --quiet and --debug."""

    quiet: bool = False
    debug: bool = False


common_options = CommonOptions()


def print_status(text: str = "") -> None:
    """Print a message to stderr, unless --quiet was given."""
    if not common_options.quiet:
        print(text, file=sys.stderr, flush=True)


def warn_unknown(unknown: Sequence[str]) -> None:
    """Warn about the parts of a text that are not in the vocabulary."""
    if unknown:
        excerpt = ", ".join(repr(part) for part in dict.fromkeys(unknown[:5]))
        more = " …" if len(unknown) > 5 else ""
        print_status(f"not in the run's vocabulary, read as unknown tokens: {excerpt}{more}")


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """A context in which an interactive terminal shows a spinner."""
    if common_options.quiet or not is_interactive(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(strip_control(text), "dim"), spinner="dots"):
        yield


def print_json(value: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Print one JSON object, or a list of them, on one line; infinities and NaN become null."""
    print(to_json(value))


def text_for(stream: TextIO, text: str) -> str:
    """A text for a stream: without control characters for a terminal, unchanged for others."""
    return strip_control(text) if stream.isatty() else text


ASCII_SUBSTITUTES = str.maketrans(
    "░▒▓█·│├└─◀•…×→␣⏎⇥∅", ",oO@.|++-<*~x>_/>0"
)  # ASCII for maps and trees


def replace_unencodable(text: str, stream: TextIO) -> str:
    """A figure as text, in ASCII characters if the encoding of the stream has no others.

    >>> import io
    >>> replace_unencodable("a ░▒▓█ 0.04", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    'a ,oO@ 0.04'
    """
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return text.translate(ASCII_SUBSTITUTES).replace("√", "sqrt ")
    return text


def dim(text: str, stream: TextIO) -> str:
    """Dimmed text, on an interactive terminal."""
    return f"\x1b[2m{text}\x1b[0m" if text and is_interactive(stream) else text


def bold(text: str, stream: TextIO) -> str:
    """Bold text, on an interactive terminal."""
    return f"\x1b[1m{text}\x1b[0m" if is_interactive(stream) else text


def align_columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with aligned columns, those in `right` right-aligned.

    >>> align_columns([("loss", "1.5"), ("perplexity", "4.48")], right=[1])
    ['loss         1.5', 'perplexity  4.48']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(size) if index in right else cell.ljust(size)
            for index, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_value(value: Any) -> str:
    """The value of a setting as text.

    >>> format_value({"kind": "rotary", "base": 500.0}), format_value(True), format_value(None)
    ('rotary, base 500', 'yes', '-')
    """
    if isinstance(value, Mapping):
        options = [f"{key} {format_value(item)}" for key, item in value.items() if key != "kind"]
        return ", ".join([str(value.get("kind", "")), *options])
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value)) or "-"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_section(title: str, lines: Sequence[str]) -> None:
    """Print a title, and lines indented under it."""
    print(f"\n{bold(title, sys.stdout)}")
    for line in lines:
        print(f"  {line}".rstrip())


def stdin_lines() -> Iterator[str]:
    """The lines of stdin, without their line breaks."""
    try:
        for line, content in enumerate(sys.stdin.buffer, 1):
            try:
                yield content.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(f"stdin, line {line} is not UTF-8: byte {error.start}") from None
    except OSError as error:
        raise DataError(f"cannot read stdin: {error.strerror}") from None


def check_output_file(
    path: Path | None, force: bool, suffixes: Sequence[str] | None = None
) -> None:
    """Raise if the file of --out cannot be written, or exists and --force is not given.

    The suffix must be one of `suffixes`, by default those of figures. Without --out, --force is
    refused.
    """
    if path is None:
        reject_options(
            "--force overwrites the file of --out, which is not given", {"--force": force}
        )
        return
    suffixes = api.FIGURE_SUFFIXES if suffixes is None else suffixes
    if path.suffix not in suffixes:
        raise ConfigError(f"--out {path}: the suffix must be {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise CheckpointError(f"cannot write {path}: the folder {path.parent} is read-only")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; --force overwrites it")


def write_file(path: Path, content: bytes) -> None:
    """Write a file completely or not at all; an error is a `CheckpointError`."""
    with atomic_file(path, sync=False) as temporary:
        temporary.write_bytes(content)
