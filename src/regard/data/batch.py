"""What a training step is given: tensors only, every mask and target already made."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
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


Batch = TextBatch | PairBatch


def pinned(batch: Batch) -> Batch:
    """The same in memory from which a GPU can copy while it computes."""
    if isinstance(batch, TextBatch):
        return TextBatch(batch.ids.pin_memory(), batch.targets.pin_memory())
    source = Source(batch.source.ids.pin_memory(), batch.source.lengths.pin_memory())
    return PairBatch(source, batch.ids.pin_memory(), batch.targets.pin_memory())
