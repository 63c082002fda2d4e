"""Safetensors files, read and written a tensor at a time, and trusted in nothing.

A file is eight bytes with the length n of the header, n bytes of JSON, and the numbers:

    { name: { dtype, shape, data_offsets: [begin, end] }, … }

Every name, size and offset is checked before the first number is read. Numbers are read by
position, straight to where they are wanted; no file is ever held in memory whole.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from regard.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes; that of a model of a trillion weights has a few million
CHUNK = 1 << 23  # bytes copied at a time


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int  # in the file

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * self.dtype.itemsize


class Tensors:
    """The tensors of one file or of several, by name."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    def __enter__(self) -> Self:
        paths = {entry.path for entry in self.entries.values()}
        self._handles = {path: os.open(path, os.O_RDONLY) for path in paths}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self._fill(entry, 0, as_bytes(tensor))
        return tensor

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Its bytes, a few million at a time, in one piece of memory that is used again."""
        entry = self.entries[name]
        buffer = np.empty(min(CHUNK, entry.size), np.uint8)
        for done in range(0, entry.size, CHUNK):
            part = memoryview(buffer.data)[: min(CHUNK, entry.size - done)]
            self._fill(entry, done, part)
            yield part

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors are the same, byte for byte."""
        one, two = self.entries[name], self.entries[other]
        same = (one.dtype, one.shape) == (two.dtype, two.shape)
        pairs = zip(self.chunks(name), self.chunks(other), strict=True) if same else ()
        return same and all(a == b for a, b in pairs)

    def _fill(self, entry: Entry, done: int, target: memoryview) -> None:
        handle, at = self._handles[entry.path], entry.start + done
        while len(target):
            got = os.preadv(handle, [target[: 1 << 30]], at)  # the system reads no more at once
            if not got:
                raise CheckpointError(f"{entry.path} became shorter while it was read")
            target, at = target[got:], at + got


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor that lies in one piece."""
    return memoryview(tensor.detach().flatten().view(torch.uint8).numpy().data)


def read_header(path: Path) -> dict[str, Entry]:
    """What a safetensors file says it holds, if all of it can be true."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if length > min(size - 8, LONGEST_HEADER):
                raise _damaged(path, f"a header of {length:,} bytes in a file of {size:,}")
            table = json.loads(file.read(length), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise CheckpointError(f"no weights at {path}") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"the header is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise _damaged(path, "the header is no table")
    table.pop("__metadata__", None)
    begin = 8 + length
    entries = {name: _entry(path, name, facts, begin) for name, facts in table.items()}
    end = begin
    for name, entry in sorted(entries.items(), key=lambda each: (each[1].start, each[1].size)):
        if entry.start != end:
            what = "overlaps another" if entry.start < end else "leaves a gap before it"
            raise _damaged(path, f"tensor {name!r} {what}")
        end += entry.size
    if end != size:
        raise _damaged(path, f"it has {size:,} bytes and should have {end:,}")
    return entries


def open_tensors(folder: Path) -> Tensors:
    """The tensors of a folder: of model.safetensors, or of all shards that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return Tensors(read_header(single))
    if index.exists():
        return Tensors(_shards(folder, index))
    if pickles := sorted(folder.glob("*.bin")):
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run any code and is not read;\nconvert it where "
            f"you trust it: transformers.AutoModel.from_pretrained({str(folder)!r})"
            '.save_pretrained("NEW", safe_serialization=True)'
        )
    raise CheckpointError(f"no weights in {folder}: there is no model.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """A table from a JSON file that somebody else wrote."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds no table")
    return table


def _shards(folder: Path, index: Path) -> dict[str, Entry]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    entries: dict[str, Entry] = {}
    for shard in dict.fromkeys(places.values()):
        beside = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not beside or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {shard!r}, which is no file beside it")
        for name, entry in read_header(folder / shard).items():
            if name in entries:
                raise CheckpointError(f"{folder}: two shards hold a tensor {name!r}")
            entries[name] = entry
    if missing := [name for name in places if name not in entries]:
        raise CheckpointError(f"{index} promises {missing[0]!r}, which no shard holds")
    return entries


def _entry(path: Path, name: str, facts: Any, begin: int) -> Entry:
    try:
        dtype, shape = facts["dtype"], facts["shape"]
        first, last = facts["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"tensor {name!r} lacks dtype, shape or data_offsets") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {dtype!r}; known: {', '.join(DTYPES)}"
        )
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, first)):
        raise _damaged(path, f"tensor {name!r} has shape {shape!r}, offsets {first!r}, {last!r}")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if type(last) is not int or last - first != size or size >= 1 << 62:
        raise _damaged(path, f"tensor {name!r} needs {size:,} bytes, not {first!r} to {last!r}")
    return Entry(path, DTYPES[dtype], torch.Size(shape), begin + first)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands in it twice")
    return table


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or not a safetensors file: {why}")
