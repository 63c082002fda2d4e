"""Safetensors files written a tensor at a time, in any order, for the disk and not for memory."""

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
from regard.files.safetensors import DTYPE_NAMES, Entry, as_bytes

SHARD = 5_000_000_000  # bytes of a file, at most, where a model may have several

Form = tuple[torch.dtype, torch.Size]


class Writer:
    """Files whose headers are known from the beginning, and whose tensors come one by one."""

    def __init__(self, files: Mapping[Path, Mapping[str, Form]]) -> None:
        self.entries: dict[str, Entry] = {}
        self._headers: dict[Path, bytes] = {}
        for path, forms in files.items():
            header, entries = _header(path, forms)
            self._headers[path] = header
            self.entries |= entries
        self._left = set(self.entries)

    def __enter__(self) -> Self:
        self._handles: dict[Path, int] = {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for handle in self._handles.values() if kind is None else ():
                os.fsync(handle)
        finally:
            for handle in self._handles.values():
                os.close(handle)
        if kind is None and self._left:
            raise CheckpointError(f"{min(self._left)} was never written")

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor."""
        entry = self.entries[name]
        assert (tensor.dtype, tensor.shape) == (entry.dtype, entry.shape), name
        self.stream(name, [as_bytes(tensor.contiguous())])

    def stream(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write a tensor whose bytes come in pieces."""
        entry = self.entries[name]
        at = entry.start
        handle = self._handle(entry.path)
        for chunk in chunks:
            at = _write(handle, chunk, at)
        assert at == entry.start + entry.size, name
        self._left.remove(name)

    def _handle(self, path: Path) -> int:
        """An open file, its header written."""
        if path not in self._handles:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._handles[path] = os.open(path, flags, 0o644)
            _write(self._handles[path], memoryview(self._headers[path]), 0)
        return self._handles[path]


def split_into_shards(
    folder: Path, forms: Mapping[str, Form], limit: int | None = None
) -> dict[Path, dict[str, Form]]:
    """Spread tensors over files of at most `limit` bytes (or one larger tensor), in order."""
    limit = SHARD if limit is None else limit
    groups: list[dict[str, Form]] = [{}]
    filled = 0
    for name, (dtype, shape) in forms.items():
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = (dtype, shape)
        filled += size
    if len(groups) == 1:
        return {folder / "model.safetensors": groups[0]}
    count = len(groups)
    return {
        folder / f"model-{number:05}-of-{count:05}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def write_index(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Say which of several files holds which tensor."""
    table = {
        "metadata": {"total_size": sum(entry.size for entry in entries.values())},
        "weight_map": {name: entry.path.name for name, entry in entries.items()},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(table, indent=2) + "\n")


def _header(path: Path, forms: Mapping[str, Form]) -> tuple[bytes, dict[str, Entry]]:
    facts: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    offsets, at = {}, 0
    for name, (dtype, shape) in forms.items():
        offsets[name] = at
        end = at + math.prod(shape) * dtype.itemsize
        facts[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(facts, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # so that the numbers begin at a multiple of 8
    header = len(text).to_bytes(8, "little") + text
    entries = {
        name: Entry(path, dtype, shape, len(header) + offsets[name])
        for name, (dtype, shape) in forms.items()
    }
    return header, entries


def _write(handle: int, content: memoryview, at: int) -> int:
    while len(content):
        done = os.pwrite(handle, content, at)
        content, at = content[done:], at + done
    return at
