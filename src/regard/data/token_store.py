"""Token ids on disk, memory-mapped: written once per text and tokenizer, then only opened.

A store is an entry of the cache (`files.cache`). Ids are uint16 where the vocabulary allows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from regard.data.pairs import Pairs
from regard.data.text import Text
from regard.errors import DataError
from regard.files.cache import cache_key, cached_folder

T = TypeVar("T")
_PIECE = 1 << 16  # bytes of text that become tokens in one go, …
_PIECES = 32  # … and how many at once, for a tokenizer that works on several cores
_ROWS = 4096  # pairs at once


class Tokenizer(Protocol):
    """What a store asks of a tokenizer."""

    @property
    def size(self) -> int:
        """How many ids there are."""

    @property
    def kind(self) -> str:
        """Its key in `text.TOKENIZERS`."""

    @property
    def stop_id(self) -> int:
        """What ends a document."""

    def encode_batch(self, texts: list[str], /) -> list[list[int]]:
        """The ids of several texts, on several cores if it can."""

    def encode_array(self, text: str, /) -> NDArray[np.uint32]:
        """The ids of one text, without a Python number for each."""

    def fingerprint(self) -> str:
        """A hash of everything its ids depend on."""


@dataclass(frozen=True, slots=True)
class TokenStore:
    """A text as one long array of ids, and how many bytes of text they stand for."""

    tokens: NDArray[Any] = field(repr=False)
    bytes: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PairStore:
    """Pairs as ids, without start or stop: row i of a side is ids[offsets[i] : offsets[i + 1]]."""

    source_ids: NDArray[Any] = field(repr=False)
    source_offsets: NDArray[np.int64] = field(repr=False)
    target_ids: NDArray[Any] = field(repr=False)
    target_offsets: NDArray[np.int64] = field(repr=False)
    fingerprint: str

    def __len__(self) -> int:
        return len(self.source_offsets) - 1

    def source(self, row: int) -> NDArray[Any]:
        """The ids of the source sentence of a row."""
        return self.source_ids[self.source_offsets[row] : self.source_offsets[row + 1]]

    def target(self, row: int) -> NDArray[Any]:
        """The ids of the target sentence of a row."""
        return self.target_ids[self.target_offsets[row] : self.target_offsets[row + 1]]

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        """How many ids each source has."""
        return np.diff(self.source_offsets)

    @property
    def target_lengths(self) -> NDArray[np.int64]:
        """How many ids each target has."""
        return np.diff(self.target_offsets)


def text_store(
    text: Text,
    tokenizer: Tokenizer,
    *,
    separator: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenStore:
    """The ids of a text, from the cache if they were made before.

    Where there are several documents, each is followed by the ids `separator` (by default the
    tokenizer's `stop_id`). `progress` is called with the bytes done and the bytes in all.
    """
    given = [] if separator is None else ["-".join(map(str, separator))]
    key = cache_key("text", text.fingerprint(), tokenizer.fingerprint(), *given)

    def write(folder: Path) -> dict[str, Any]:
        return {"bytes": _write_text(folder / "tokens.bin", text, tokenizer, separator, progress)}

    folder, index = cached_folder("tokens", key, write)
    tokens = _map(folder / "tokens.bin", _dtype(tokenizer))
    return TokenStore(tokens, index["bytes"], key)


def pair_store(pairs: Pairs, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> PairStore:
    """The ids of both sides of all pairs, from the cache if they were made before."""
    tokenizers = {"source": source_tokenizer, "target": target_tokenizer}
    key = cache_key(
        "pairs", pairs.fingerprint(), *(each.fingerprint() for each in tokenizers.values())
    )
    folder, _ = cached_folder("tokens", key, lambda folder: _write_pairs(folder, pairs, tokenizers))
    source, target = (
        (_map(folder / f"{side}.bin", _dtype(each)), _map(folder / f"{side}-offsets.bin", np.int64))
        for side, each in tokenizers.items()
    )
    return PairStore(*source, *target, key)


def _write_text(
    path: Path,
    text: Text,
    tokenizer: Tokenizer,
    separator: Sequence[int] | None,
    progress: Callable[[int, int], None] | None,
) -> int:
    dtype, size, total = _dtype(tokenizer), 0, text.size
    separated = len(text.documents) > 1
    with path.open("wb") as file:
        for pieces in _batches(text.chunks(_PIECE), _PIECES):
            texts = [piece for piece, _ in pieces]
            for ids, (piece, ends) in zip(_encode(tokenizer, texts), pieces, strict=True):
                file.write(np.asarray(ids, dtype).tobytes())
                if separated and ends:
                    last = [tokenizer.stop_id] if separator is None else separator
                    file.write(np.asarray(last, dtype).tobytes())
                size += len(piece.encode())
            if progress is not None:
                progress(min(size, total), total)  # folding case may change the number of bytes
        if not file.tell():
            raise DataError(f"{text.name} gives no tokens at all")
    return size


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Sequence[Sequence[int] | NDArray[np.uint32]]:
    if tokenizer.kind == "char":
        return [tokenizer.encode_array(text) for text in texts]
    return tokenizer.encode_batch(texts)


def _write_pairs(folder: Path, pairs: Pairs, tokenizers: dict[str, Tokenizer]) -> dict[str, Any]:
    ends = dict.fromkeys(tokenizers, 0)
    files = {side: (folder / f"{side}.bin").open("wb") for side in tokenizers}
    offsets = {side: (folder / f"{side}-offsets.bin").open("wb") for side in tokenizers}
    try:
        for file in offsets.values():
            file.write(np.zeros(1, np.int64).tobytes())
        for rows in _batches(pairs.rows(), _ROWS):
            for (side, tokenizer), sentences in zip(
                tokenizers.items(), zip(*rows, strict=True), strict=True
            ):
                encoded = tokenizer.encode_batch(list(sentences))
                lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
                flat = [each for ids in encoded for each in ids]
                files[side].write(np.asarray(flat, _dtype(tokenizer)).tobytes())
                offsets[side].write((ends[side] + np.cumsum(lengths)).tobytes())
                ends[side] += len(flat)
    finally:
        for file in (*files.values(), *offsets.values()):
            file.close()
    return {}


def _map(path: Path, dtype: Any) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _dtype(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if tokenizer.size <= 1 << 16 else np.uint32


def _batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(islice(items, size)):
        yield batch
