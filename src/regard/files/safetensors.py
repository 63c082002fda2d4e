"""Safetensors files, read and written a tensor at a time, and trusted in nothing.

A file is eight bytes with the length n of the header, n bytes of JSON, and the numbers:

    { name: { dtype, shape, data_offsets: [begin, end] }, … }

Every name, size and offset is checked before the first number is read. Numbers are read by
position, straight to where they are wanted; no file is ever held in memory whole.
"""

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from regard.errors import CheckpointError
from regard.files.untrusted import open_file, parse_json, read_text

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
PICKLES = (".bin", ".pt", ".pth", ".ckpt")  # how the files of weights end that are not read
MOST_AXES = 8  # of a tensor
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
        self._handles: dict[Path, int] = {}
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
        path, at = entry.path, entry.start + done
        try:
            if path not in self._handles:
                self._handles[path] = os.open(path, os.O_RDONLY)
            while len(target):
                piece = target[: 1 << 30]  # the system reads no more at once
                got = os.preadv(self._handles[path], [piece], at)
                if not got:
                    raise CheckpointError(f"{path} became shorter while it was read")
                target, at = target[got:], at + got
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor that lies in one piece."""
    return memoryview(tensor.detach().flatten().view(torch.uint8).numpy().data)


def read_header(path: Path) -> dict[str, Entry]:
    """What a safetensors file says it holds, if all of it can be true."""
    table, begin, size = _header(path)
    table.pop("__metadata__", None)
    entries = {name: _entry(path, name, facts, begin) for name, facts in table.items()}
    end = begin
    for name, entry in sorted(entries.items(), key=lambda each: (each[1].start, each[1].size)):
        if entry.start != end:
            what = "overlaps another" if entry.start < end else "leaves a gap before it"
            raise _damaged(path, f"tensor {quoted(name)} {what}")
        end += entry.size
    if end != size:
        raise _damaged(path, f"it has {size:,} bytes and should have {end:,}")
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """What a safetensors file says besides: words for words, and nothing where there are none."""
    table = _header(path)[0].get("__metadata__", {})
    pairs = table.items() if isinstance(table, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header of a safetensors file, where it ends, and how long the file is."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if length > min(size - 8, LONGEST_HEADER):
                raise _damaged(path, f"a header of {length:,} bytes in a file of {size:,}")
            table = parse_json(file.read(length).decode(), _unique)
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
    return table, 8 + length, size


def open_tensors(folder: Path) -> Tensors:
    """The tensors of a folder: of model.safetensors, or of all shards that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return Tensors(read_header(single))
    if index.exists():
        return Tensors(_shards(folder, index))
    if pickles := sorted(path for path in folder.glob("*") if path.suffix in PICKLES):
        raise pickled(pickles[0])
    raise CheckpointError(f"no weights in {folder}: there is no model.safetensors")


def pickled(path: Path) -> CheckpointError:
    """What to say of a file of pickled weights."""
    return CheckpointError(
        f"{path} is a pickle, which can run any code and is not read;\n{conversion(path.parent)}"
    )


def conversion(folder: Path, name: str | None = None) -> str:
    """How to make safetensors of the pickles in a folder, or of this name on the hub."""
    try:
        named = read_json(folder / "config.json").get("architectures")
    except CheckpointError:
        named = None
    first = named[0] if isinstance(named, list) and named else None
    model = first if isinstance(first, str) and first.isidentifier() else "AutoModel"
    convert = f'.from_pretrained({(name or str(folder))!r}).save_pretrained("NEW")'
    return (
        "convert it where you trust it, and import NEW:\n"
        f"  from transformers import AutoTokenizer, {model}\n"
        f"  {model}{convert}\n"
        f"  AutoTokenizer{convert}"
    )


def find_single_file(path: Path, pattern: str, wanted: Callable[[Path], bool]) -> Path | None:
    """The one file that is `wanted`: `path` itself, or what lies in it by this name."""
    if not exists(path):
        return None
    candidates = sorted(path.glob(pattern)) if path.is_dir() else [path]
    found = [each for each in candidates if each.is_file() and wanted(each)]
    if len(found) > 1:
        listed = ", ".join(each.name for each in found)
        raise CheckpointError(f"{path} holds several models of one kind; name one: {listed}")
    return found[0] if found else None


def exists(path: Path) -> bool:
    """Whether there is something at a path, which may not even be one."""
    try:
        return path.exists()
    except OSError as error:
        raise CheckpointError(f"cannot look at {quoted(str(path))}: {error.strerror}") from None


def quoted(value: object, most: int = 100) -> str:
    """Something that stands in somebody else's file, fit for a terminal: plain and not too long.

    >>> quoted("one" * 100, 20)
    "'oneoneone…neoneone'"
    """
    text = ascii(value)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


def read_json(path: Path) -> dict[str, Any]:
    """A table from a JSON file that somebody else wrote."""
    try:
        table = parse_json(read_text(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds no table")
    return table


def is_beside(name: Any) -> bool:
    """Whether an index may name this: a safetensors file in its own folder."""
    beside = isinstance(name, str) and Path(name).name == name and "\\" not in name
    return beside and name.endswith(".safetensors")


def _shards(folder: Path, index: Path) -> dict[str, Entry]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    for shard in places.values():
        if not is_beside(shard):
            raise CheckpointError(f"{index} names {quoted(shard)}, which is no file beside it")
    entries: dict[str, Entry] = {}
    for shard in dict.fromkeys(places.values()):
        for name, entry in read_header(folder / shard).items():
            if name in entries:
                raise CheckpointError(f"{folder}: two shards hold a tensor {quoted(name)}")
            entries[name] = entry
    if missing := [name for name in places if name not in entries]:
        raise CheckpointError(f"{index} promises {quoted(missing[0])}, which no shard holds")
    return entries


def _entry(path: Path, name: str, facts: Any, begin: int) -> Entry:
    try:
        dtype, shape = facts["dtype"], facts["shape"]
        first, last = facts["data_offsets"]
    except (KeyError, TypeError, ValueError):
        what = f"tensor {quoted(name)} lacks dtype, shape or data_offsets"
        raise _damaged(path, what) from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {quoted(name)} has dtype {quoted(dtype)}; known: {', '.join(DTYPES)}"
        )
    offsets = f"offsets {quoted(first)}, {quoted(last)}"
    whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, first))
    # As if an empty axis had one number: the library computes with the others all the same.
    if not whole or len(shape) > MOST_AXES or math.prod(n or 1 for n in shape) >= 1 << 59:
        raise _damaged(path, f"tensor {quoted(name)} has shape {quoted(shape)}, {offsets}")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if type(last) is not int or last - first != size:
        raise _damaged(path, f"tensor {quoted(name)} needs {size:,} bytes, {offsets}")
    return Entry(path, DTYPES[dtype], torch.Size(shape), begin + first)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands in it twice")
    return table


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or not a safetensors file: {why}")
