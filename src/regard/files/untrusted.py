"""Read untrusted files: regular files only, size limits, JSON, vocabularies of tokenizers.

A file of unknown origin must not block the process, exhaust its memory or crash native code.
"""

import io
import json
import os
import reprlib
import stat
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import CheckpointError

JSONObject = dict[str, Any]
MAX_FILE_BYTES = 100_000_000  # of a file read into memory; Gemma's tokenizer.json has 33 million
MAX_JSON_VALUES = 4_000_000  # Gemma's tokenizer.json has 2 million
MAX_REPLACEMENT = 64  # characters that a normalizer may produce from one; NFKC: 18
# Exceptions of numpy and zipfile for corrupted .npz archives. TokenError, SyntaxError and
# RecursionError are raised because numpy parses the header of an array as Python.
ARCHIVE_ERRORS = (
    *(OSError, ValueError, EOFError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(MemoryError, RuntimeError, SyntaxError, tokenize.TokenError),
    *(struct.error, zlib.error, zipfile.BadZipFile),
)
# O_NONBLOCK: opening a FIFO without a writer must not block. O_BINARY: Windows must not convert
# line ends.
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular_file(path: Path, max_bytes: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading; refuse pipes, devices, folders and files that are too large.

    The checks use the opened descriptor, so the file cannot be replaced in between.
    """
    descriptor = os.open(path, OPEN_FLAGS)
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "it is not a regular file"
    elif max_bytes is not None and status.st_size > max_bytes:
        problem = f"it has {status.st_size:,} bytes, and the limit is {max_bytes:,}"
    if problem is not None:
        os.close(descriptor)
        raise CheckpointError(f"cannot read {path}: {problem}")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """The content of a regular file of at most `MAX_FILE_BYTES`."""
    with open_regular_file(path, MAX_FILE_BYTES) as file:
        return file.read()


def read_text(path: Path) -> str:
    """The content of a UTF-8 file of at most `MAX_FILE_BYTES`, with line ends converted to LF."""
    with io.TextIOWrapper(open_regular_file(path, MAX_FILE_BYTES), encoding="utf-8") as file:
        return file.read()


def parse_json(
    text: str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Parse JSON; raise ValueError if it has too many values or is nested too deeply.

    A value may take two characters in the text and sixty bytes in memory, so the number of
    values is estimated before parsing. `object_pairs_hook` is that of `json.loads`.
    """
    values = sum(map(text.count, ",[{"))
    if values > MAX_JSON_VALUES:
        raise ValueError(f"it has about {values:,} values, and the limit is {MAX_JSON_VALUES:,}")
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that refuses duplicate keys: parsers differ in which they keep."""
    table = dict(pairs)
    if len(table) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"a JSON object has the same key twice: {quote(key, 40)}")
    return table


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; every failure is a CheckpointError."""
    try:
        table = parse_json(read_text(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is corrupted or not JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is corrupted: it is not a JSON object")
    return table


def path_exists(path: Path) -> bool:
    """Whether the path exists; a string that cannot be a path is a CheckpointError."""
    try:
        return path.exists()
    except OSError as error:
        raise CheckpointError(f"cannot access {quote(str(path))}: {error.strerror}") from None


def quote(value: object, max_length: int = 100) -> str:
    """A value from an untrusted file for an error message: ASCII, escaped, of bounded length.

    >>> quote("one" * 100, 20)
    "'oneoneone…neoneone'"
    """
    text = ascii(value)
    half = max_length // 2
    return text if len(text) <= max_length else f"{text[:half]}…{text[1 - half :]}"


@contextmanager
def as_checkpoint_error(message: str) -> Iterator[None]:
    """Convert any exception raised inside to a CheckpointError that begins with `message`.

    That includes panics of Rust code: PanicException is not a subclass of Exception and cannot be
    imported, so it is recognized by its name.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{message}: {error}") from error


def check_vocab_ids(ids: Collection[Any]) -> None:
    """Raise ValueError for an id far above the vocabulary size.

    Hugging Face tokenizers allocates an entry for every id up to the largest.
    """
    max_id = max((id for id in ids if isinstance(id, int)), default=0)
    if max_id >= 4 * len(ids) + 10_000:
        raise ValueError(f"id {reprlib.repr(max_id)} is far above the number of tokens")


def check_charsmap(data: bytes) -> int:
    """Raise ValueError if SentencePiece's `precompiled_charsmap` has an offset out of range.

    The charsmap consists of the size of a double-array trie, the trie (uint32 units, each of which
    may lead to 256 others), and the replacement texts to which its leaves point. Returns the length
    of the longest replacement, which is limited to `MAX_REPLACEMENT`.
    """
    size = int.from_bytes(data[:4], "little")
    if size % 4 or not 4 <= size <= len(data) - 4:
        raise ValueError("precompiled_charsmap is truncated")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    texts = data[4 + size :]
    longest = max(map(len, texts.decode().split("\0")))
    if longest > MAX_REPLACEMENT:
        raise ValueError(
            f"precompiled_charsmap replaces one character with {longest} characters, and the limit "
            f"is {MAX_REPLACEMENT}"
        )
    is_node = units < 1 << 31  # the others are leaf values
    is_node[0] = True  # the root
    indices, nodes = np.flatnonzero(is_node), units[is_node]
    children = indices ^ ((nodes >> 10) << ((nodes & 1 << 9) >> 6))
    leaves = children[(nodes >> 8) & 1 == 1]
    if (children | 255).max(initial=0) >= len(units):
        raise ValueError("precompiled_charsmap points outside its trie")
    starts = units[leaves] & 0x7FFFFFFF
    if (starts >= max(len(texts), 1)).any():
        raise ValueError("precompiled_charsmap points outside its texts")
    if texts and (np.frombuffer(texts, np.uint8)[starts] & 0xC0 == 0x80).any():
        raise ValueError("precompiled_charsmap points into the middle of a character")
    return max(1, longest)
