"""Continuous bag of words (CBOW, word2vec): predict each word from the words around it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.data.batch import TextBatch
from regard.nn.loss import IGNORE_INDEX
from regard.tasks.base import Task, check_label_smoothing
from regard.tasks.masked import prediction_metrics


@dataclass(frozen=True, kw_only=True)
class CBOWTask(Task):
    r"""Continuous bag of words (CBOW): predict every word from the words around it.

        loss = - sum_t log P(id_t | the words around it),     or that of negative sampling

    Every word of a row is the centre word once. Mikolov et al. 2013.
    """

    data_kind: ClassVar[str] = "text"
    evaluates_beginning: ClassVar[bool] = True
    target_name: ClassVar[str] = "words"
    architectures: ClassVar[tuple[str, ...]] = ("cbow",)
    methods: ClassVar[tuple[str, ...]] = ("neighbours",)
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "accuracy")
    label_smoothing: float = 0.0  # probability that is spread over all tokens

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)

    def collate(
        self, examples: tuple[np.ndarray, np.ndarray], generator: torch.Generator
    ) -> TextBatch:
        """Blocks of ids; the target of every position is its id."""
        ids, next_ids = map(torch.from_numpy, examples)
        return TextBatch(ids, ids.masked_fill(next_ids == IGNORE_INDEX, IGNORE_INDEX))

    def loss(self, model: nn.Module, batch: TextBatch) -> Float[Tensor, ""]:
        """The loss of the head, summed over the words."""
        label_smoothing = self.label_smoothing if model.training else 0.0
        hidden = _hidden(model, batch)
        return model.head.loss(hidden, batch.targets, label_smoothing=label_smoothing)  # type: ignore[operator, union-attr]

    def count(self, batch: TextBatch) -> Int[Tensor, ""]:
        """How many words are predicted."""
        return (batch.targets != IGNORE_INDEX).sum()

    def metrics(self, model: nn.Module, batches: Iterable[TextBatch]) -> dict[str, float]:
        """Nats per word, perplexity and accuracy, and `unigram_metrics`."""
        return prediction_metrics(
            model, (_select_scored(_hidden(model, batch), batch.targets) for batch in batches)
        )


def _hidden(model: Any, batch: TextBatch) -> Float[Tensor, "batch time dim"]:
    x: Tensor = model(batch.ids, lengths=(batch.targets != IGNORE_INDEX).sum(1))
    return x


def _select_scored(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return x[targets != IGNORE_INDEX], targets[targets != IGNORE_INDEX]
