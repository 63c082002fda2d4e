"""Batches: dataclasses of tensors with all inputs, masks and targets of one step."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from regard.nn.state import ImageSource, Source

T = TypeVar("T")


class Batch:
    """A dataclass whose fields are tensors, None, or dataclasses of tensors."""

    __slots__ = ()

    def to(self: T, device: torch.device | str) -> T:
        """A copy on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class TextBatch(Batch):
    """Token ids, and the next tokens as targets; -1 is ignored.

    In training every position has a target. In an evaluation with sliding windows, only the last
    positions of a window have one: those that the previous window has not scored.
    """

    ids: Int[Tensor, "batch time"]
    targets: Int[Tensor, "batch scored"]
    # Scheduled sampling: where the model reads its own prediction instead of `ids`.
    use_prediction: Bool[Tensor, "batch time"] | None = None
    prefix_lengths: Int[Tensor, " batch"] | None = None  # of a prefix LM


@dataclass(frozen=True, slots=True)
class DialogueBatch(Batch):
    """Rows of packed dialogues, and the next token where it belongs to a response, else -1."""

    ids: Int[Tensor, "batch time"]
    targets: Int[Tensor, "batch time"]
    documents: Int[Tensor, "batch time"]  # index of the dialogue in the row, from 1; 0 is padding
    positions: Int[Tensor, "batch time"]  # in the dialogue
    prefix_lengths: Int[Tensor, " batch"]  # number of tokens before the first response of the row


@dataclass(frozen=True, slots=True)
class ContrastiveBatch(Batch):
    """Pairs of texts with the same meaning, right-padded."""

    first: Source
    second: Source


@dataclass(frozen=True, slots=True)
class PairBatch(Batch):
    """Source sentences, shifted target sentences (teacher forcing), and the next target tokens."""

    source: Source
    ids: Int[Tensor, "batch time"]
    targets: Int[Tensor, "batch time"]
    # Scheduled sampling: where the model reads its own prediction instead of `ids`.
    use_prediction: Bool[Tensor, "batch time"] | None = None


@dataclass(frozen=True, slots=True)
class CaptionBatch(Batch):
    """Normalized images, shifted captions (teacher forcing), and the next tokens."""

    source: ImageSource
    ids: Int[Tensor, "batch time"]
    targets: Int[Tensor, "batch time"]
    # Scheduled sampling: where the model reads its own prediction instead of `ids`.
    use_prediction: Bool[Tensor, "batch time"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedBatch(Batch):
    """Rows of text with masked tokens, and the original tokens as targets; -1 is ignored.

    The number of `masked_positions` per row is fixed, so shapes never change.
    """

    ids: Int[Tensor, "batch time"]
    # Index of the document in the row, from 1; 0 is padding. None if the text is one document and
    # no row has padding: then the model needs no mask.
    documents: Int[Tensor, "batch time"] | None
    positions: Int[Tensor, "batch time"]  # in the document
    masked_positions: Int[Tensor, "batch masked"]
    targets: Int[Tensor, "batch masked"]
    segments: Int[Tensor, "batch time"] | None = None  # of pairs: 0 in A, 1 in B
    next_sentence_targets: Int[Tensor, " batch"] | None = None  # of pairs: 0 if B follows A, else 1

    def valid_count(self) -> int:
        """How many ids are not padding."""
        return self.ids.numel() if self.documents is None else int((self.documents > 0).sum())


@dataclass(frozen=True, slots=True)
class ImageBatch(Batch):
    """Normalized images and their classes."""

    images: Float[Tensor, "batch channels height width"]
    targets: Int[Tensor, " batch"]


@dataclass(frozen=True, slots=True)
class LabelBatch(Batch):
    """Right-padded texts and their classes."""

    ids: Int[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]
    targets: Int[Tensor, " batch"]
    segments: Int[Tensor, "batch time"] | None = None  # of pairs of texts: 0 in A, 1 in B


@dataclass(frozen=True, slots=True)
class RegressionBatch(Batch):
    """Right-padded texts and their target numbers."""

    ids: Int[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]
    targets: Float[Tensor, " batch"]
    segments: Int[Tensor, "batch time"] | None = None  # of pairs of texts: 0 in A, 1 in B


@dataclass(frozen=True, slots=True)
class TagBatch(Batch):
    """Right-padded texts, and the class of each word at its first or last token (`Tag.token`).

    A target of -1 is ignored.
    """

    ids: Int[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]
    targets: Int[Tensor, "batch time"]
    word_bytes: UInt8[Tensor, "batch time bytes"] | None = None  # of the word of each token


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBatch(Batch):
    """Right-padded windows of a question and a context, and where the answer starts and ends."""

    ids: Int[Tensor, "batch time"]
    lengths: Int[Tensor, " batch"]
    context: Int[Tensor, "batch 2"]  # position of the first context token, and one past the last
    targets: Int[Tensor, "batch 2"]  # the first and the last token of the answer
    window_indices: Int[Tensor, " batch"]
    segments: Int[Tensor, "batch time"] | None = None  # 0 in the question, 1 in the context


@dataclass(frozen=True, slots=True)
class SeriesBatch(Batch):
    """Whole series, one per row, for models fitted without gradients."""

    series: Float[Tensor, "batch time"]


@dataclass(frozen=True, slots=True)
class WindowBatch(Batch):
    """Windows of a series, and the rows after them."""

    series: Float[Tensor, "batch time input_dim"]
    targets: Float[Tensor, "batch horizon variables"]


@dataclass(frozen=True, slots=True)
class StrokeBatch(Batch):
    """Right-padded drawings: the inputs of a model, and the next points (dx, dy, lift)."""

    inputs: Float[Tensor, "batch time input_dim"]
    targets: Float[Tensor, "batch time 3"]
    lengths: Int[Tensor, " batch"]
    text: Source | None = None  # the characters that each drawing shows

    @property
    def mask(self) -> Bool[Tensor, "batch time"]:
        """True at the points that are scored: all but padding."""
        time = torch.arange(self.targets.shape[1], device=self.lengths.device)
        return time < self.lengths.unsqueeze(1)


def map_tensors(batch: T, function: Callable[[Tensor], Tensor]) -> T:
    """A copy of the batch with `function` applied to every tensor."""

    def apply(value: Any) -> Any:
        if value is None:
            return None
        return function(value) if isinstance(value, Tensor) else map_tensors(value, function)

    names = [field.name for field in fields(batch)]  # type: ignore[arg-type]
    return replace(batch, **{name: apply(getattr(batch, name)) for name in names})  # type: ignore[type-var]


def tensors(batch: Batch) -> list[Tensor]:
    """All tensors of a batch, in the order of its fields."""
    all_tensors: list[Tensor] = []
    map_tensors(batch, lambda tensor: all_tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return all_tensors


def pin_memory(batch: Batch) -> Batch:
    """A copy of the batch in pinned memory, from which a GPU can copy asynchronously."""
    return map_tensors(batch, Tensor.pin_memory)
