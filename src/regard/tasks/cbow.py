"""Learning word vectors: predict each word from those around it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.data.batch import TextBatch
from regard.nn.head import IGNORED
from regard.tasks.base import Learns, check_label_smoothing
from regard.tasks.masked import guessed


@dataclass(frozen=True, kw_only=True)
class CBOWTask:
    r"""- sum_t log P(id_t | the words around it), or what stands for it with negative sampling.

    Every word of a row is the middle one once. Mikolov et al. 2013.
    """

    learns: ClassVar[Learns] = "text"
    verb: ClassVar[str] = "neighbours"
    measures: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "accuracy")
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)

    def collate(
        self, examples: tuple[np.ndarray, np.ndarray], generator: torch.Generator
    ) -> TextBatch:
        """Blocks of ids, each of which is its own target."""
        ids, following = (torch.from_numpy(each) for each in examples)
        return TextBatch(ids, ids.masked_fill(following == IGNORED, IGNORED))

    def loss(self, model: nn.Module, batch: TextBatch) -> Float[Tensor, ""]:
        """Summed over the words."""
        smoothing = self.label_smoothing if model.training else 0.0
        return model.head.loss(_read(model, batch), batch.targets, smoothing=smoothing)  # type: ignore[operator, union-attr]

    def count(self, batch: TextBatch) -> Int[Tensor, ""]:
        """How many words are predicted."""
        return (batch.targets != IGNORED).sum()

    def metrics(self, model: nn.Module, batches: Iterable[TextBatch]) -> dict[str, float]:
        """Nats per word and the share guessed right, and the same without looking."""
        return guessed(model, (_scored(_read(model, batch), batch.targets) for batch in batches))


def _read(model: Any, batch: TextBatch) -> Float[Tensor, "batch time dim"]:
    x: Tensor = model(batch.ids, lengths=(batch.targets != IGNORED).sum(1))
    return x


def _scored(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return x[targets != IGNORED], targets[targets != IGNORED]
