"""What a training step is given: tensors only, every mask and target already made."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.nn.state import Source


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Blocks of text and what follows each token; a target of -1 is not scored."""

    ids: Int[Tensor, "batch time"]
    targets: Int[Tensor, "batch time"]

    def to(self, device: torch.device | str) -> "TextBatch":
        """The same on another device."""
        return TextBatch(
            self.ids.to(device, non_blocking=True), self.targets.to(device, non_blocking=True)
        )


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Source sentences, shifted target sentences, and what each target token is followed by."""

    source: Source
    ids: Int[Tensor, "batch time"]
    targets: Int[Tensor, "batch time"]

    def to(self, device: torch.device | str) -> "PairBatch":
        """The same on another device."""
        return PairBatch(
            self.source.to(device),
            self.ids.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedBatch:
    """Rows of text in which some tokens are hidden, and what stood there; -1 is not scored.

    There are as many `places` in every row, whatever is hidden in it: shapes never change.
    """

    ids: Int[Tensor, "batch time"]
    documents: Int[Tensor, "batch time"]  # which one of its row a token is of; 0 is padding
    at: Int[Tensor, "batch time"]  # counted in each document from 0
    places: Int[Tensor, "batch masked"]
    targets: Int[Tensor, "batch masked"]
    segments: Int[Tensor, "batch time"] | None = None  # of pairs: 0 in A, 1 in B, …
    follows: Int[Tensor, " batch"] | None = None  # … and 0 where B follows A, 1 where not

    def to(self, device: torch.device | str) -> "MaskedBatch":
        """The same on another device."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> "MaskedBatch":
        """The same with every tensor changed."""
        tensors: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, tensor in tensors.items():
            tensors[name] = None if tensor is None else change(tensor)
        return MaskedBatch(**tensors)


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Images as a model reads them, and the class of each."""

    images: Float[Tensor, "batch channels height width"]
    targets: Int[Tensor, " batch"]

    def to(self, device: torch.device | str) -> "ImageBatch":
        """The same on another device."""
        return ImageBatch(
            self.images.to(device, non_blocking=True), self.targets.to(device, non_blocking=True)
        )


Batch = TextBatch | PairBatch | MaskedBatch | ImageBatch


def pinned(batch: Batch) -> Batch:
    """The same in memory from which a GPU can copy while it computes."""
    if isinstance(batch, TextBatch):
        return TextBatch(batch.ids.pin_memory(), batch.targets.pin_memory())
    if isinstance(batch, ImageBatch):
        return ImageBatch(batch.images.pin_memory(), batch.targets.pin_memory())
    if isinstance(batch, MaskedBatch):
        return batch.each(Tensor.pin_memory)
    source = Source(batch.source.ids.pin_memory(), batch.source.lengths.pin_memory())
    return PairBatch(source, batch.ids.pin_memory(), batch.targets.pin_memory())
