"""The fingerprint of a model, which detects changes of the model after it was packed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.accel.description import MODULE_ATTRIBUTES
from regard.accel.kernels import can_run_kernels
from regard.accel.packed import BLOCKED_ELEMENTS

SUM_WORDS = 32  # 8-byte words per sum
HASH_CHUNK = 1 << 14  # sums per hash


@dataclass(frozen=True, slots=True, eq=False)
class _Contents:
    """Values that represent the contents of some tensors."""

    names: list[str]
    sizes: list[int]  # values of each tensor
    read: Callable[[], Tensor]  # the current values of all tensors
    saved: Tensor

    @classmethod
    def of(
        cls, tensors: list[tuple[Tensor, str]], parts: Callable[[], list[Tensor]]
    ) -> "_Contents":
        """Contents whose values are concatenated from those of each tensor."""
        saved = parts()
        names, sizes = [name for _, name in tensors], [len(part) for part in saved]
        return cls(names, sizes, lambda: torch.cat(parts()), torch.cat(saved))

    def changed_name(self, current: Tensor) -> str:
        """The name of the first tensor whose values differ."""
        parts = zip(
            self.names, self.saved.split(self.sizes), current.split(self.sizes), strict=True
        )
        return next(name for name, a, b in parts if not torch.equal(a, b))


class ModelFingerprint:
    """The values and tensors of a model, to detect that one of them has changed.

    Compares attributes, storage addresses and version counters, a few comparisons per tensor. A
    write through `tensor.data` does not change the version counter, so tensors of up to
    `copied_elements` elements, which a decoder copies, are also compared by content: small ones
    byte by byte, large ones by hashes. Larger tensors are shared with the decoder, which sees such
    a write as the model does.

    On a GPU, one kernel hashes all large tensors that are contiguous (`kernels.fingerprint`). It
    misses a change with a probability of at most 2^-32, and never one of a single value of up to
    4 bytes. Other hashes are of sums, each of the 8-byte words of 256 bytes: they miss a change
    that keeps these sums, such as a permutation of words, and one that changes them by multiples of
    2^v with a probability of up to 2^(v - 63). v is 63 for the signs of odd columns of float32: an
    even number of them is missed. They find every change of a single value.
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
        # The memory of contiguous tensors is read without them: `find_change` first compares their
        # addresses and these shapes.
        self.layouts = [(t, t.shape, t.stride(), n) for t, n in copied_tensors if t.is_contiguous()]
        self.contents = list(_contents(copied_tensors))

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
        for tensor, shape, stride, name in self.layouts:
            if tensor.shape != shape or tensor.stride() != stride:
                return name
        all_values = [group.read() for group in self.contents]
        for group, values in zip(self.contents, all_values, strict=True):
            if not torch.equal(group.saved, values):  # one synchronization on a GPU
                return group.changed_name(values)
        return None


def _contents(tensors: list[tuple[Tensor, str]]) -> Iterator[_Contents]:
    """The bytes of small tensors and the hashes of large ones."""
    small = [(t, n) for t, n in tensors if t.numel() < BLOCKED_ELEMENTS]
    large = [(t, n) for t, n in tensors if t.numel() >= BLOCKED_ELEMENTS]
    by_kernel = [(t, n) for t, n in large if t.is_contiguous() and can_run_kernels(t)]
    names = {name for _, name in by_kernel}
    others = [(t, n) for t, n in large if n not in names]
    if small:
        views = [_bytes(t) if t.is_contiguous() else None for t, _ in small]
        yield _Contents.of(
            small,
            lambda: [_bytes(t) if v is None else v for (t, _), v in zip(small, views, strict=True)],
        )
    if by_kernel:  # all on the current GPU
        from regard.accel.kernels.fingerprint import ContentHashes

        hashes = ContentHashes([t for t, _ in by_kernel])
        yield _Contents([n for _, n in by_kernel], hashes.sizes, hashes, hashes())
    if others:
        yield _Contents.of(others, lambda: [_hash(t) for t, _ in others])


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: a view if it is contiguous, else a copy."""
    return tensor.detach().flatten().view(torch.uint8)


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
