"""Many to one: say which of some classes a text belongs to."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import LabelBatch, TagBatch
from regard.errors import DataError
from regard.nn.loss import IGNORED, cross_entropy
from regard.tasks.base import Learns, check_label_smoothing, class_names

Ids = Sequence[NDArray[np.int64]]
Answers = tuple[NDArray[np.int64], NDArray[np.int64]]  # what is said, what is right


@dataclass(frozen=True, kw_only=True)
class Label:
    r"""P(class | text): cross-entropy of the class, with label smoothing.

    The model reads the whole text; its head reads the class off the last state, or off all.
    """

    learns: ClassVar[Learns] = "labels"
    verb: ClassVar[str] = "predict"
    measures: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "f1")
    head: ClassVar[str] = "classify"
    label_smoothing: float = 0.0
    names: list[str] = field(default_factory=list)  # of the classes; empty: the data's own

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)

    def collate(
        self, examples: tuple[Ids, Ids, int], generator: torch.Generator
    ) -> LabelBatch | TagBatch:
        """Texts, each filled up to a width, and their classes."""
        texts, classes, width = examples
        lengths = torch.tensor([len(each) for each in texts])
        return LabelBatch(padded(texts, width, 0), lengths, torch.tensor([c for (c,) in classes]))

    def logits(self, model: nn.Module, batch: Any) -> Float[Tensor, "batch *time classes"]:
        """What the model says of each class."""
        x = model(batch.ids, lengths=batch.lengths)
        said: Tensor = model.head(x, batch.lengths)  # type: ignore[operator]
        return said

    def loss(self, model: nn.Module, batch: Any) -> Float[Tensor, ""]:
        """Summed cross-entropy; smoothed while training."""
        smoothing = self.label_smoothing if model.training else 0.0
        logits = self.logits(model, batch)
        return cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), smoothing)

    def count(self, batch: Any) -> Int[Tensor, ""]:
        """How many classes are asked for."""
        return (batch.targets != IGNORED).sum()

    @torch.no_grad()
    def right(self, model: nn.Module, batch: Any) -> Float[Tensor, " batch"]:
        """Of each text, the share of its classes that the model says."""
        right = self.logits(model, batch).argmax(-1) == batch.targets  # never where it is -1
        asked = batch.targets != IGNORED
        said, wanted = (each.view(len(right), -1).sum(1) for each in (right, asked))
        return said / wanted.clamp_min(1)

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss in nats, the share of right answers, and F1 averaged over the classes."""
        loss, answers = self.judged(model, batches)
        said = np.concatenate([each for each, _ in answers])
        wanted = np.concatenate([each for _, each in answers])
        accuracy = float((said == wanted).mean())
        return {"loss": loss, "accuracy": accuracy, "f1": macro_f1(said, wanted)}

    def judged(self, model: nn.Module, batches: Iterable[Any]) -> tuple[float, list[Answers]]:
        """The loss per answer; and of each text, what the model says and what is right."""
        training = model.training
        model.eval()
        total = 0.0
        answers: list[Answers] = []
        with torch.no_grad():
            for batch in batches:
                logits = self.logits(model, batch)
                targets = batch.targets
                total += float(cross_entropy(logits.flatten(0, -2), targets.flatten()))
                answers += list(_answers(logits.argmax(-1), targets))
        model.train(training)
        count = sum(len(wanted) for _, wanted in answers)
        if not count:
            raise DataError("nothing to evaluate: the held-out set has no label")
        return total / count, answers

    def named(self, names: Sequence[str]) -> list[str]:
        """The names of the classes: the data's own, or those given for numbers from 0 on."""
        return class_names(self.names, names)


def padded(rows: Ids, width: int, fill: int) -> Int[Tensor, "batch time"]:
    """Rows of different lengths as one table."""
    table = torch.full((len(rows), width), fill)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
    return table


def macro_f1(said: NDArray[np.int64], wanted: NDArray[np.int64]) -> float:
    """The mean over the classes that occur of 2 right / (said + wanted), all counted by class.

    >>> macro_f1(np.array([0, 0, 1]), np.array([0, 1, 1]))
    0.6666666666666666
    """
    classes = max(said.max(), wanted.max()) + 1
    counted = (said[said == wanted], said, wanted)
    right, here, there = (np.bincount(each, minlength=classes) for each in counted)
    total = here + there
    return float((2 * right[total > 0] / total[total > 0]).mean())


def _answers(said: Tensor, targets: Tensor) -> Iterator[Answers]:
    """Row by row, what is said and what is right, where anything is asked for."""
    said, targets = (each.reshape(len(targets), -1).cpu() for each in (said, targets))
    for ours, theirs in zip(said.numpy(), targets.numpy(), strict=True):
        yield ours[theirs != IGNORED], theirs[theirs != IGNORED]
