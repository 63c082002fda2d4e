"""Write safetensors files tensor by tensor, in any order, without holding a model in memory."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from regard.errors import CheckpointError
from regard.files.safetensors import TensorEntry, as_bytes, make_header

MAX_SHARD_BYTES = 5_000_000_000

TensorSpec = tuple[torch.dtype, torch.Size]


class SafetensorsWriter:
    """Writes files whose headers are known in advance; tensors are added one at a time.

    A context manager: leaving it without an error syncs the files to disk and checks that every
    tensor was written.
    """

    def __init__(
        self,
        files: Mapping[Path, Mapping[str, TensorSpec]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self._headers: dict[Path, bytes] = {}
        metadata = {"format": "pt", **(metadata or {})}  # transformers requires the format
        for path, specs in files.items():
            self._headers[path], offsets = make_header(specs, metadata)
            self.entries |= {
                name: TensorEntry(path, dtype, shape, offsets[name])
                for name, (dtype, shape) in specs.items()
            }
        self._unwritten = set(self.entries)

    def __enter__(self) -> Self:
        self._descriptors: dict[Path, int] = {}
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for descriptor in self._descriptors.values() if exc_type is None else ():
                os.fsync(descriptor)
        finally:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
        if exc_type is None and self._unwritten:
            raise CheckpointError(f"tensor {min(self._unwritten)} was never written")

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor that is in memory."""
        entry = self.entries[name]
        assert (tensor.dtype, tensor.shape) == (entry.dtype, entry.shape), name
        self.write_chunks(name, [as_bytes(tensor.contiguous())])

    def write_chunks(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write a tensor whose bytes arrive in chunks."""
        entry = self.entries[name]
        offset = entry.start
        descriptor = self._open(entry.path)
        for chunk in chunks:
            offset = _write_at(descriptor, chunk, offset)
        assert offset == entry.start + entry.size, name
        self._unwritten.remove(name)

    def _open(self, path: Path) -> int:
        """Return the file descriptor of a file; the first call creates it and writes its header."""
        if path not in self._descriptors:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._descriptors[path] = os.open(path, flags, 0o666)  # minus the umask
            _write_at(self._descriptors[path], memoryview(self._headers[path]), 0)
        return self._descriptors[path]


def split_into_shards(
    folder: Path, specs: Mapping[str, TensorSpec], limit: int | None = None
) -> dict[Path, dict[str, TensorSpec]]:
    """Distribute tensors, in order, over files of at most `limit` bytes (or one larger tensor)."""
    limit = MAX_SHARD_BYTES if limit is None else limit
    shards: list[dict[str, TensorSpec]] = [{}]
    shard_bytes = 0
    for name, (dtype, shape) in specs.items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and shard_bytes + size > limit:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = (dtype, shape)
        shard_bytes += size
    if len(shards) == 1:
        return {folder / "model.safetensors": shards[0]}
    count = len(shards)
    return {
        folder / f"model-{number:05}-of-{count:05}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def write_index(folder: Path, entries: Mapping[str, TensorEntry]) -> None:
    """Write model.safetensors.index.json, which maps each tensor to its shard."""
    index = {
        "metadata": {"total_size": sum(entry.size for entry in entries.values())},
        "weight_map": {name: entry.path.name for name, entry in entries.items()},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_at(descriptor: int, content: memoryview, offset: int) -> int:
    """Write all of `content` at `offset`; returns the offset after it."""
    while len(content):
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
    return offset
