"""Read untrusted safetensors files, one tensor at a time, and write safetensors files.

A file is eight bytes with the length n of the header, n bytes of JSON, and the tensor data:

    { name: { dtype, shape, data_offsets: [begin, end] }, … }

Every name, size and offset is validated before any data is read. Data is read with `preadv`
directly into the destination, so a file is never held in memory as a whole.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from regard.errors import CheckpointError
from regard.files.untrusted import (
    open_regular_file,
    parse_json,
    path_exists,
    quote,
    read_json,
    refuse_duplicates,
)

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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# the order in which the safetensors library writes dtypes
WRITE_ORDER = ["I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL"]
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MAX_DIMS = 8  # dimensions of a tensor
MAX_HEADER_BYTES = 100_000_000  # a model of a trillion parameters has a header of a few MB
CHUNK = 1 << 23  # bytes per read


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is stored."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int  # byte offset in the file

    @property
    def size(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorReader:
    """The tensors of one or several files, by name; a context manager that keeps files open."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self.entries = dict(entries)

    def __enter__(self) -> Self:
        self._descriptors: dict[Path, int] = {}
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read(self, name: str) -> Tensor:
        """Read one tensor into newly allocated memory."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self._fill(entry, 0, as_bytes(tensor))
        return tensor

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The data of a tensor in chunks of `CHUNK` bytes; all chunks share one buffer."""
        entry = self.entries[name]
        buffer = np.empty(min(CHUNK, entry.size), np.uint8)
        for offset in range(0, entry.size, CHUNK):
            chunk = memoryview(buffer.data)[: min(CHUNK, entry.size - offset)]
            self._fill(entry, offset, chunk)
            yield chunk

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes."""
        first, second = self.entries[name], self.entries[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        chunks = zip(self.chunks(name), self.chunks(other), strict=True)
        return all(a == b for a, b in chunks)

    def _fill(self, entry: TensorEntry, skip: int, destination: memoryview) -> None:
        """Fill `destination` with the data of `entry` from byte `skip` on."""
        path, offset = entry.path, entry.start + skip
        try:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            while len(destination):
                part = destination[: 1 << 30]  # Linux reads at most 2 GiB per call
                count = os.preadv(self._descriptors[path], [part], offset)
                if not count:
                    raise CheckpointError(f"{path} became shorter while it was read")
                destination, offset = destination[count:], offset + count
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.detach().flatten().view(torch.uint8).numpy().data)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read and validate the header: every entry must fit, without gaps or overlaps."""
    table, data_start, size = _parse_header(path)
    table.pop("__metadata__", None)
    entries = {name: _parse_entry(path, name, info, data_start) for name, info in table.items()}
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != end:
            problem = "overlaps another" if entry.start < end else "leaves a gap before it"
            raise _corruption_error(path, f"tensor {quote(name)} {problem}")
        end += entry.size
    if end != size:
        raise _corruption_error(path, f"it has {size:,} bytes and should have {end:,}")
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """The string entries of a safetensors file's `__metadata__`."""
    table = _parse_header(path)[0].get("__metadata__", {})
    pairs = table.items() if isinstance(table, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _parse_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header of a safetensors file, the offset of its data, and the size of the file."""
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                problem = f"it has {size} bytes, and the length of the header alone takes 8"
                raise _corruption_error(path, problem)
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise _corruption_error(path, f"a header of {length:,} bytes in a file of {size:,}")
            table = parse_json(file.read(length).decode(), refuse_duplicates)
    except FileNotFoundError:
        raise CheckpointError(f"no weights at {path}") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise _corruption_error(path, f"the header is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise _corruption_error(path, "the header is not a JSON object")
    return table, 8 + length, size


def make_header(
    specs: Mapping[str, tuple[torch.dtype, torch.Size]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, in this order, and the offset of each tensor."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets, begin = {}, 0
    for name, (dtype, shape) in specs.items():
        offsets[name] = begin
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # align the data to 8 bytes
    content = len(text).to_bytes(8, "little") + text
    return content, {name: len(content) + offset for name, offset in offsets.items()}


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write CPU tensors to an open file: the bytes that `safetensors.torch.save_file` writes.

    `save_file` takes a path, not a file, and orders several entries of metadata at random; here
    their order is kept.
    """

    def sort_key(name: str) -> tuple[int, str]:  # larger dtypes first: every tensor is aligned
        return WRITE_ORDER.index(DTYPE_NAMES[tensors[name].dtype]), name

    names = sorted(tensors, key=sort_key)
    specs = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
    file.write(make_header(specs, metadata)[0])
    for name in names:
        file.write(as_bytes(tensors[name].contiguous()))


def open_tensors(folder: Path) -> TensorReader:
    """The tensors of model.safetensors in a folder, or of the shards that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return TensorReader(read_header(single))
    if index.exists():
        return TensorReader(_read_shards(folder, index))
    if pickles := sorted(path for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES):
        raise pickle_error(pickles[0])
    raise CheckpointError(f"no weights in {folder}: there is no model.safetensors")


def pickle_error(path: Path) -> CheckpointError:
    """The error for pickled weights, with instructions for converting them."""
    return CheckpointError(
        f"{path} is a pickle, which can execute arbitrary code and is not read;\n"
        f"{conversion_hint(path.parent)}"
    )


def conversion_hint(folder: Path, name: str | None = None) -> str:
    """How to convert the pickles in a folder, or of the repository `name`, to safetensors."""
    try:
        architectures = read_json(folder / "config.json").get("architectures")
    except CheckpointError:
        architectures = None
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    model = first if isinstance(first, str) and first.isidentifier() else "AutoModel"
    convert = f'.from_pretrained({(name or str(folder))!r}).save_pretrained("NEW")'
    return (
        "if you trust it, convert it to safetensors, and import NEW:\n"
        f"  from transformers import AutoTokenizer, {model}\n"
        f"  {model}{convert}\n"
        f"  AutoTokenizer{convert}"
    )


def find_single_file(path: Path, pattern: str, matches: Callable[[Path], bool]) -> Path | None:
    """The only file for which `matches` is true; None if there is none.

    It is `path` itself, or a file in the folder `path` whose name matches the glob `pattern`.
    """
    if not path_exists(path):
        return None
    candidates = sorted(path.glob(pattern)) if path.is_dir() else [path]
    files = [file for file in candidates if file.is_file() and matches(file)]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(
            f"{path} has several models of one format; give the path of one: {names}"
        )
    return files[0] if files else None


def is_shard_name(name: Any) -> bool:
    """Whether an index may name this shard: a safetensors file in the folder of the index."""
    in_folder = isinstance(name, str) and Path(name).name == name and "\\" not in name
    return in_folder and name.endswith(".safetensors")


def _read_shards(folder: Path, index: Path) -> dict[str, TensorEntry]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for shard in weight_map.values():
        if not is_shard_name(shard):
            raise CheckpointError(
                f"{index} names {quote(shard)}, which is not a safetensors file in its folder"
            )
    entries: dict[str, TensorEntry] = {}
    for shard in dict.fromkeys(weight_map.values()):
        for name, entry in read_header(folder / shard).items():
            if name in entries:
                raise CheckpointError(f"{folder}: two shards have a tensor {quote(name)}")
            entries[name] = entry
    if missing := [name for name in weight_map if name not in entries]:
        raise CheckpointError(f"{index} lists {quote(missing[0])}, which is in no shard")
    return entries


def _parse_entry(path: Path, name: str, info: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape = info["dtype"], info["shape"]
        begin, end = info["data_offsets"]
    except (KeyError, TypeError, ValueError):
        problem = f"tensor {quote(name)} lacks dtype, shape or data_offsets"
        raise _corruption_error(path, problem) from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {quote(name)} has dtype {quote(dtype)}; known: {', '.join(DTYPES)}"
        )
    offsets = f"offsets {quote(begin)}, {quote(end)}"
    valid = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, begin))
    # A size of 0 counts as 1: torch computes strides from the other sizes, which may overflow.
    if not valid or len(shape) > MAX_DIMS or math.prod(n or 1 for n in shape) >= 1 << 59:
        raise _corruption_error(path, f"tensor {quote(name)} has shape {quote(shape)}, {offsets}")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if type(end) is not int or end - begin != size:
        raise _corruption_error(path, f"tensor {quote(name)} needs {size:,} bytes, {offsets}")
    return TensorEntry(path, DTYPES[dtype], torch.Size(shape), data_start + begin)


def _corruption_error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} is corrupted or not a safetensors file: {problem}")
