"""What a training step is given: tensors only, every mask and target already made."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.nn.state import Source

T = TypeVar("T")


class _Tensors:
    """A dataclass of tensors, and of others like it."""

    __slots__ = ()

    def to(self: T, device: torch.device | str) -> T:
        """The same on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class TextBatch(_Tensors):
    """Blocks of text and what follows each token; a target of -1 is not scored."""

    ids: Int[Tensor, "batch time"]
    targets: Int[Tensor, "batch time"]
    use_prediction: Bool[Tensor, "batch time"] | None = None  # scheduled sampling


@dataclass(frozen=True, slots=True)
class PairBatch(_Tensors):
    """Source sentences, shifted target sentences, and what each target token is followed by."""

    source: Source
    ids: Int[Tensor, "batch time"]
    targets: Int[Tensor, "batch time"]
    use_prediction: Bool[Tensor, "batch time"] | None = None  # scheduled sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedBatch(_Tensors):
    """Rows of text in which some tokens are hidden, and what stood there; -1 is not scored.

    The number of `masked_positions` per row is fixed, so shapes never change.
    """

    ids: Int[Tensor, "batch time"]
    documents: Int[Tensor, "batch time"]  # which one of its row a token is of; 0 is padding
    positions: Int[Tensor, "batch time"]  # counted in each document from 0
    masked_positions: Int[Tensor, "batch masked"]
    targets: Int[Tensor, "batch masked"]
    segments: Int[Tensor, "batch time"] | None = None  # of pairs: 0 in A, 1 in B, …
    next_sentence_targets: Int[Tensor, " batch"] | None = None  # 0: B follows A


@dataclass(frozen=True, slots=True)
class ImageBatch(_Tensors):
    """Images as a model reads them, and the class of each."""

    images: Float[Tensor, "batch channels height width"]
    targets: Int[Tensor, " batch"]


@dataclass(frozen=True, slots=True)
class LabelBatch(_Tensors):
    """Right-padded texts, and the class of each."""

    ids: Int[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]
    targets: Int[Tensor, " batch"]


@dataclass(frozen=True, slots=True)
class TagBatch(_Tensors):
    """Right-padded texts, and the class of each word at its last token; -1 is not scored."""

    ids: Int[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]
    targets: Int[Tensor, "batch time"]


@dataclass(frozen=True, slots=True)
class SeriesBatch(_Tensors):
    """Series of numbers; each number is what the ones before it are to foretell."""

    series: Float[Tensor, "batch time"]

    @property
    def targets(self) -> Float[Tensor, "batch time"]:
        """What is foretold: the same numbers."""
        return self.series


Batch = TextBatch | PairBatch | MaskedBatch | ImageBatch | LabelBatch | TagBatch | SeriesBatch


def map_tensors(batch: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same with every tensor changed."""

    def changed(value: Any) -> Any:
        if value is None:
            return None
        return change(value) if isinstance(value, Tensor) else map_tensors(value, change)

    names = [field.name for field in fields(batch)]  # type: ignore[arg-type]
    return replace(batch, **{name: changed(getattr(batch, name)) for name in names})  # type: ignore[type-var]


def tensors(batch: Batch) -> list[Tensor]:
    """All that a batch holds, in order."""
    found: list[Tensor] = []
    map_tensors(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def pin_memory(batch: Batch) -> Batch:
    """The same in memory from which a GPU can copy while it computes."""
    return map_tensors(batch, Tensor.pin_memory)
