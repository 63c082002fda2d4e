"""What others made, opened with no trust in it: files, vocabularies, a library's Rust code."""

import binascii
import io
import json
import os
import reprlib
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from regard.errors import CheckpointError

LARGEST = 100_000_000  # bytes of a file that is read whole; the vocabulary of Gemma has 33 million
MOST_VALUES = 4_000_000  # in a JSON file; the tokenizer of Gemma has 2 million
# Not waiting for the writer of a pipe; where there are no such pipes, not changing line ends.
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
PROBE = "a B 1.\n\U0010fffd"  # a text whose last character no vocabulary knows


def open_file(path: Path, largest: int | None = None) -> io.BufferedReader:
    """A file to read; a pipe or a device, which may never end, is refused unread."""
    handle = os.open(path, FLAGS)
    facts = os.fstat(handle)
    problem = None
    if not stat.S_ISREG(facts.st_mode):
        problem = "it is no plain file"
    elif largest is not None and facts.st_size > largest:
        problem = f"it has {facts.st_size:,} bytes, and may have {largest:,}"
    if problem is not None:
        os.close(handle)
        raise CheckpointError(f"cannot read {path}: {problem}")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path) -> bytes:
    """All of a file."""
    with open_file(path, LARGEST) as file:
        return file.read()


def read_text(path: Path) -> str:
    """All of a text file, its lines ending in a line feed alone."""
    with io.TextIOWrapper(open_file(path, LARGEST), encoding="utf-8") as file:
        return file.read()


def parse_json(text: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """What a JSON text says; one with too much in it, or too deep, is a ValueError.

    A value takes two characters here and sixty bytes in memory, so it is counted first.
    """
    values = sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise ValueError(f"it holds about {values:,} values, and may hold {MOST_VALUES:,}")
    try:
        return json.loads(text, object_pairs_hook=hook)
    except RecursionError:
        raise ValueError("its tables stand too deep in each other") from None


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Whatever the library raises becomes an error of ours that begins with `what`.

    A panic of its Rust code is no Exception, and its class can only be told by name.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {error}") from error


def probe(library: tokenizers.Tokenizer) -> None:
    """Encode and decode a text, so that what cannot be done shows before it is needed."""
    library.decode(library.encode(PROBE, add_special_tokens=False).ids)


def check_tokenizer(table: Any) -> None:
    """Refuse a `tokenizer.json` that the library would come to grief over."""
    if not isinstance(table, dict):
        raise ValueError("it holds no table")
    model, added = table.get("model"), table.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    more = [each.get("id") for each in added or () if isinstance(each, dict)]
    check_ids([*ids, *more, *range(len(vocab) if isinstance(vocab, list) else 0)])
    for charsmap in _charsmaps(table.get("normalizer")):
        if not isinstance(charsmap, str):
            raise ValueError("the map of characters is no text")
        check_charsmap(binascii.a2b_base64(charsmap, strict_mode=True))


def check_ids(ids: Collection[Any]) -> None:
    """Refuse an id far above the number of tokens: the library keeps a list of all gaps."""
    highest = max((id for id in ids if isinstance(id, int)), default=0)
    if highest >= 4 * len(ids) + 10_000:
        raise ValueError(f"id {reprlib.repr(highest)} is far above the number of tokens")


def check_charsmap(data: bytes) -> None:
    """A double array, each of whose units may lead 256 places on, and the texts it points into."""
    size = int.from_bytes(data[:4], "little")
    if size % 4 or not 4 <= size <= len(data) - 4:
        raise ValueError("the map of characters is cut off")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    texts = data[4 + size :]
    texts.decode()
    follows = units < 1 << 31  # the others are ends, save for the first unit, where all begins
    follows[0] = True
    places, inner = np.flatnonzero(follows), units[follows]
    reach = places ^ ((inner >> 10) << ((inner & 1 << 9) >> 6))
    leaves = reach[(inner >> 8) & 1 == 1]
    if (reach | 255).max(initial=0) >= len(units):
        raise ValueError("the map of characters leads outside itself")
    starts = units[leaves] & 0x7FFFFFFF
    if (starts >= max(len(texts), 1)).any():
        raise ValueError("the map of characters leads outside its texts")
    if texts and (np.frombuffer(texts, np.uint8)[starts] & 0xC0 == 0x80).any():
        raise ValueError("the map of characters leads into the middle of a character")


def _charsmaps(normalizer: Any) -> Iterator[Any]:
    """Those of a normalizer and of all that it is made of."""
    if isinstance(normalizer, dict):
        if normalizer.get("type") == "Precompiled":
            yield normalizer.get("precompiled_charsmap")
        yield from _charsmaps(list(normalizer.values()))
    elif isinstance(normalizer, list):
        for each in normalizer:
            yield from _charsmaps(each)
