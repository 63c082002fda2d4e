"""The fingerprint of a model, which detects changes of the model after it was packed."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.accel.description import MODULE_ATTRIBUTES
from regard.accel.packed import BLOCKED_ELEMENTS

SUM_WORDS = 32  # 8-byte words per sum
HASH_CHUNK = 1 << 14  # sums per hash


class ModelFingerprint:
    """The values and tensors of a model, to detect that one of them has changed.

    Compares attributes, storage addresses and version counters, a few comparisons per tensor. A
    write through `tensor.data` does not change the version counter, so tensors of up to
    `copied_elements` elements, which a decoder copies, are also compared by content: small ones
    byte by byte, large ones by hashes. A hash misses a change that keeps the sum of the 8-byte
    words of 256 bytes, such as a permutation of them, and any other change with a probability under
    2^-32. Larger tensors are shared with the decoder, which sees such a write as the model does.
    """

    def __init__(self, model: nn.Module, *, copied_elements: int = 0) -> None:
        self.values: list[tuple[Mapping[str, Any], str, Any, str]] = []
        self.tensors: list[tuple[Tensor, int, int, str]] = []
        for prefix, module in model.named_modules():
            attributes = {key: vars(module)[key] for key in vars(module).keys() - MODULE_ATTRIBUTES}
            for members, compared in (
                (vars(module), attributes),
                (module._modules, module._modules),
                (module._parameters, module._parameters),
                (module._buffers, module._buffers),
            ):
                for key, value in compared.items():
                    name = f"{prefix}.{key}".lstrip(".")
                    snapshot = dict(value) if isinstance(value, Mapping) else value
                    self.values.append((members, key, snapshot, name))
                    if isinstance(value, Tensor):
                        self.tensors.append((value, value.data_ptr(), _version(value), name))
        copied_tensors = [(t, n) for t, *_, n in self.tensors if t.numel() <= copied_elements]
        self.small_tensors = [(t, n) for t, n in copied_tensors if t.numel() < BLOCKED_ELEMENTS]
        self.large_tensors = [(t, n) for t, n in copied_tensors if t.numel() >= BLOCKED_ELEMENTS]
        # valid in `find_change`, which compares the addresses before it reads these views
        self.views = [_bytes(t) if t.is_contiguous() else None for t, _ in self.small_tensors]
        self.contents = [_concatenate(parts) for parts in self._contents()]

    def find_change(self, *, contents: bool = True) -> str | None:
        """The name of the first value that has changed; None if none has.

        Without `contents`, writes through `tensor.data` are not detected.
        """
        for members, key, value, name in self.values:
            current = members.get(key)
            if current is not value and (isinstance(value, Tensor) or current != value):
                return name
        for tensor, address, version, name in self.tensors:
            if tensor.data_ptr() != address or _version(tensor) != version:
                return name
        if not contents:
            return None
        for tensors, saved, current_parts in zip(
            (self.small_tensors, self.large_tensors), self.contents, self._contents(), strict=True
        ):
            if not torch.equal(saved, _concatenate(current_parts)):  # one synchronization on a GPU
                saved_parts = saved.split([len(part) for part in current_parts])
                parts = zip(tensors, saved_parts, current_parts, strict=True)
                return next(name for (_, name), a, b in parts if not torch.equal(a, b))
        return None

    def _contents(self) -> tuple[list[Tensor], list[Tensor]]:
        """The bytes of small tensors and the hashes of large ones."""
        small = [
            _bytes(tensor) if view is None else view
            for (tensor, _), view in zip(self.small_tensors, self.views, strict=True)
        ]
        return small, [_hash(tensor) for tensor, _ in self.large_tensors]


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: a view if it is contiguous, else a copy."""
    return tensor.detach().flatten().view(torch.uint8)


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors else torch.empty(0)


def _hash(tensor: Tensor) -> Tensor:
    """Hashes of a tensor: sums of its 8-byte words, times random odd numbers, summed by chunks.

    The first sums read the tensor at memory bandwidth; multiplying every word takes three times as
    long on a CPU.
    """
    data, unit = _bytes(tensor), 8 * SUM_WORDS
    if data.storage_offset() % 8:  # not aligned to words
        data = data.clone()
    multipliers, whole = _multipliers(data.device), len(data) // unit * unit
    sums = data[:whole].view(torch.int64).view(-1, SUM_WORDS).sum(1)
    if whole < len(data):
        last = F.pad(data[whole:], (0, unit + whole - len(data)))
        sums = torch.cat((sums, last.view(torch.int64).sum(0, keepdim=True)))
    whole = len(sums) // HASH_CHUNK * HASH_CHUNK
    hashes = (sums[:whole].view(-1, HASH_CHUNK) * multipliers).sum(1)
    remainder = sums[whole:]
    return torch.cat((hashes, (remainder * multipliers[: len(remainder)]).sum(0, keepdim=True)))


@cache
def _multipliers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (HASH_CHUNK,), generator=generator) | 1).to(device)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
