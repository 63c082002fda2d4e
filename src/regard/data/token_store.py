"""Token ids on disk, memory-mapped: written once per text and tokenizer, then only opened.

A store is an entry of the cache (`files.cache`), which verifies it when it is opened. Ids are
uint16 where the vocabulary allows; none is outside the vocabulary.
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
_CHUNK_BYTES = 1 << 16  # of text per call of the tokenizer
_CHUNKS = 32  # encoded together, on several cores
_ROWS = 4096  # pairs encoded together


class Tokenizer(Protocol):
    """The part of a tokenizer that a store needs."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def kind(self) -> str:
        """Its key in `text.TOKENIZERS`."""

    @property
    def eos_id(self) -> int:
        """End of a document."""

    def encode_batch(self, texts: list[str], /) -> list[list[int]]:
        """The ids of several texts, if possible on several cores."""

    def encode_array(self, text: str, /) -> NDArray[np.uint32]:
        """The ids of one text as an array."""

    def fingerprint(self) -> str:
        """A hash of everything that its ids depend on."""


@dataclass(frozen=True, slots=True)
class TokenStore:
    """A text as one array of ids, and the number of bytes that it encodes."""

    tokens: NDArray[Any] = field(repr=False)
    bytes: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PairStore:
    """Pairs as ids, without BOS and EOS; row i of a side is ids[offsets[i] : offsets[i + 1]]."""

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
        """Number of ids of each source."""
        return np.diff(self.source_offsets)

    @property
    def target_lengths(self) -> NDArray[np.int64]:
        """Number of ids of each target."""
        return np.diff(self.target_offsets)


def text_store(
    text: Text,
    tokenizer: Tokenizer,
    *,
    separator: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenStore:
    """The ids of a text, from the cache if it has them.

    If there are several documents, each is followed by the ids `separator` (by default the
    tokenizer's `eos_id`). `progress` is called with the bytes encoded so far and in total.
    """
    key_parts = [] if separator is None else ["-".join(map(str, separator))]
    key = cache_key("text", text.fingerprint(), tokenizer.fingerprint(), *key_parts)

    def write(folder: Path) -> dict[str, Any]:
        return {"bytes": _write_text(folder / "tokens.bin", text, tokenizer, separator, progress)}

    def check(folder: Path) -> str | None:
        return _check_ids(folder / "tokens.bin", tokenizer)

    folder, index = cached_folder("tokens", key, write, check)
    tokens = _memory_map(folder / "tokens.bin", _dtype(tokenizer))
    return TokenStore(tokens, index["bytes"], key)


def pair_store(pairs: Pairs, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer) -> PairStore:
    """The ids of both sides of all pairs, from the cache if it has them."""
    tokenizers = {"source": source_tokenizer, "target": target_tokenizer}
    key = cache_key(
        "pairs",
        pairs.fingerprint(),
        *(tokenizer.fingerprint() for tokenizer in tokenizers.values()),
    )

    def write(folder: Path) -> dict[str, Any]:
        return _write_pairs(folder, pairs, tokenizers)

    def check(folder: Path) -> str | None:
        problems = (
            _check_ids(folder / f"{side}.bin", tokenizer) for side, tokenizer in tokenizers.items()
        )
        return next((problem for problem in problems if problem is not None), None)

    folder, _ = cached_folder("tokens", key, write, check)
    source, target = (
        (
            _memory_map(folder / f"{side}.bin", _dtype(tokenizer)),
            _memory_map(folder / f"{side}-offsets.bin", np.int64),
        )
        for side, tokenizer in tokenizers.items()
    )
    return PairStore(*source, *target, key)


def _write_text(
    path: Path,
    text: Text,
    tokenizer: Tokenizer,
    separator: Sequence[int] | None,
    progress: Callable[[int, int], None] | None,
) -> int:
    size, total = 0, text.size
    has_separators = len(text.documents) > 1
    with path.open("wb") as file:
        for chunks in _batches(text.chunks(_CHUNK_BYTES), _CHUNKS):
            texts = [chunk for chunk, _ in chunks]
            for ids, (chunk, ends) in zip(_encode(tokenizer, texts), chunks, strict=True):
                file.write(_to_bytes(ids, tokenizer))
                if has_separators and ends:
                    separator_ids = [tokenizer.eos_id] if separator is None else separator
                    file.write(_to_bytes(separator_ids, tokenizer))
                size += len(chunk.encode())
            if progress is not None:
                progress(min(size, total), total)  # lower case may have more bytes
        if not file.tell():
            raise DataError(f"{text.name} gives no tokens")
    return size


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Sequence[Sequence[int] | NDArray[np.uint32]]:
    if tokenizer.kind == "char":
        return [tokenizer.encode_array(text) for text in texts]
    return tokenizer.encode_batch(texts)


def _write_pairs(folder: Path, pairs: Pairs, tokenizers: dict[str, Tokenizer]) -> dict[str, Any]:
    end_offsets = dict.fromkeys(tokenizers, 0)
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
                flat = [id for ids in encoded for id in ids]
                files[side].write(_to_bytes(flat, tokenizer))
                offsets[side].write((end_offsets[side] + np.cumsum(lengths)).tobytes())
                end_offsets[side] += len(flat)
    finally:
        for file in (*files.values(), *offsets.values()):
            file.close()
    return {}


def _to_bytes(ids: Sequence[int] | NDArray[np.uint32], tokenizer: Tokenizer) -> bytes:
    """The bytes of ids as they are stored; raise if an id is outside the vocabulary."""
    array = np.asarray(ids, np.int64)
    if array.size and not 0 <= array.min() <= array.max() < tokenizer.vocab_size:
        invalid_id = array[(array < 0) | (array >= tokenizer.vocab_size)][0]
        raise DataError(
            f"the {tokenizer.kind} tokenizer gives the id {invalid_id}, and its vocabulary has "
            f"{tokenizer.vocab_size} ids; its files do not belong together: train or import the "
            "tokenizer again"
        )
    return array.astype(_dtype(tokenizer)).tobytes()


def _check_ids(path: Path, tokenizer: Tokenizer) -> str | None:
    """A message if a file has an id outside the vocabulary, else None."""
    largest = int(_memory_map(path, _dtype(tokenizer)).max(initial=0))
    if largest < tokenizer.vocab_size:
        return None
    return f"{path} has the id {largest}, and the vocabulary {tokenizer.vocab_size} ids"


def _memory_map(path: Path, dtype: Any) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _dtype(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


def _batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(islice(items, size)):
        yield batch
