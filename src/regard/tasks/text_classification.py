"""Text classification (many to one)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import LabelBatch, TagBatch
from regard.errors import ConfigError, DataError
from regard.nn.loss import IGNORE_INDEX, cross_entropy
from regard.tasks.base import Task, check_label_smoothing, resolve_class_names
from regard.tasks.metrics import evaluation_mode

Ids = Sequence[NDArray[np.int64]]
PredictedAndTrue = tuple[NDArray[np.int64], NDArray[np.int64]]  # classes of a text


@dataclass(frozen=True, kw_only=True)
class TextClassification(Task):
    r"""P(class | text): cross-entropy of the class, with label smoothing.

    The model reads the whole text, or two texts (`pipelines.text_pairs`), such as a premise and a
    hypothesis; its head reads one hidden state or pools all of them.
    """

    data_kind: ClassVar[str] = "labels"
    target_name: ClassVar[str] = "texts"
    best_metric: ClassVar[str] = "accuracy"
    architectures: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "bag")
    methods: ClassVar[tuple[str, ...]] = ("predict", "evaluate_by_length")
    supports_top: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "f1")
    # kinds of `model.head`, the default first
    heads: ClassVar[tuple[str, ...]] = ("classification",)
    label_smoothing: float = 0.0  # probability that is spread over all classes
    word_dropout: float = 0.0  # in training, probability that a token becomes <unk>
    # names of the classes; empty: those of the data
    class_names: list[str] = field(default_factory=list)
    # in training, factors of the loss of each class, in the order of `class_names`; "balanced":
    # texts / (classes · texts of the class), so that all classes count the same
    class_weights: Literal["balanced"] | list[float] = field(default_factory=list)
    paired: bool = False  # whether a class belongs to two texts, as in the training data

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)
        if not 0 <= self.word_dropout < 1:
            raise ConfigError(
                f"task.word_dropout={self.word_dropout} must be at least 0 and below 1"
            )
        weights = [] if self.class_weights == "balanced" else self.class_weights
        if not all(weight >= 0 for weight in weights):
            raise ConfigError(f"task.class_weights={self.class_weights} must be at least 0")

    def collate(
        self, examples: tuple[Ids, Ids, int], generator: torch.Generator
    ) -> LabelBatch | TagBatch:
        """Texts, padded to a width, and their classes."""
        texts, classes, width = examples
        lengths = torch.tensor([len(text) for text in texts])
        return LabelBatch(pad(texts, width, 0), lengths, torch.tensor([c for (c,) in classes]))

    def drop_words(
        self, batch: Any, unk_id: int, protected_ids: Sequence[int], generator: torch.Generator
    ) -> Any:
        """Replace a fraction `word_dropout` of the tokens by <unk>, except `protected_ids`.

        This trains the embedding of <unk>, which otherwise occurs rarely or never in training
        (Iyyer et al. 2015).
        """
        dropped = torch.rand(batch.ids.shape, generator=generator) < self.word_dropout
        dropped &= ~torch.isin(batch.ids, torch.tensor([*protected_ids], dtype=batch.ids.dtype))
        return replace(batch, ids=batch.ids.masked_fill(dropped, unk_id))

    def logits(self, model: nn.Module, batch: Any) -> Float[Tensor, "batch *time classes"]:
        """The logits of the classes."""
        extra = {} if batch.segments is None else {"segments": batch.segments}
        x = model(batch.ids, lengths=batch.lengths, **extra)
        logits: Tensor = model.head(x, batch.lengths)  # type: ignore[operator]
        return logits

    def loss(self, model: nn.Module, batch: Any) -> Float[Tensor, ""]:
        """Summed cross-entropy, with label smoothing in training."""
        label_smoothing = self.label_smoothing if model.training else 0.0
        logits = self.logits(model, batch)
        targets, weights = batch.targets.flatten(), self.training_weights(model)
        return cross_entropy(logits.flatten(0, -2), targets, label_smoothing, weights)

    def training_weights(self, model: nn.Module) -> list[float]:
        """The weights of the classes while the model trains; empty: all 1."""
        assert self.class_weights != "balanced", "the pipeline computes them from the data"
        return self.class_weights if model.training else []

    def resolve_class_weights(self, classes: Iterable[int], names: Sequence[str]) -> list[float]:
        """The weights of the classes, with "balanced" computed from the training `classes`.

        Raises `ConfigError` if a given list does not have one weight for each of `names`.
        """
        if self.class_weights == "balanced":
            counts = np.bincount(np.fromiter(classes, dtype=np.int64), minlength=len(names))
            weights = counts.sum() / (len(names) * counts.clip(min=1))
            return [float(weight) for weight in weights]
        if self.class_weights and len(self.class_weights) != len(names):
            raise ConfigError(
                f"task.class_weights has {len(self.class_weights)} weights, and there are "
                f"{len(names)} classes: {', '.join(names[:12])}; give one weight for each class"
            )
        return self.class_weights

    def count(self, batch: Any) -> Int[Tensor, ""]:
        """How many texts, or words of a text, are classified."""
        return (batch.targets != IGNORE_INDEX).sum()

    def loss_and_predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The summed loss without label smoothing, and the predicted classes."""
        logits = self.logits(model, batch)
        loss = cross_entropy(logits.flatten(0, -2), batch.targets.flatten())
        return loss, logits.argmax(-1)

    def predictions_and_log_probs(
        self, model: nn.Module, batch: Any
    ) -> tuple[Tensor, Float[Tensor, "batch *time classes"]]:
        """The predicted classes, and the log-probabilities of all classes."""
        logits = self.logits(model, batch)
        return logits.argmax(-1), logits.float().log_softmax(-1)

    @torch.no_grad()
    def accuracy_per_text(self, model: nn.Module, batch: Any) -> Float[Tensor, " batch"]:
        """For each text, the fraction of its classes that the model predicts correctly."""
        _, predicted = self.loss_and_predictions(model, batch)
        correct = predicted == batch.targets  # False where the target is -1
        scored = batch.targets != IGNORE_INDEX
        hits, targets = (mask.view(len(mask), -1).sum(1) for mask in (correct, scored))
        return hits / targets.clamp_min(1)

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss in nats, accuracy, and F1 averaged over the classes."""
        loss, classes = self.predicted_classes(model, batches)
        predicted = np.concatenate([row for row, _ in classes])
        true = np.concatenate([row for _, row in classes])
        accuracy = float((predicted == true).mean())
        return {"loss": loss, "accuracy": accuracy, "f1": macro_f1(predicted, true)}

    def predicted_classes(
        self, model: nn.Module, batches: Iterable[Any]
    ) -> tuple[float, list[PredictedAndTrue]]:
        """The mean loss, and for each text the predicted and the true classes."""
        total = 0.0
        classes: list[PredictedAndTrue] = []
        with evaluation_mode(model):
            for batch in batches:
                loss, predicted = self.loss_and_predictions(model, batch)
                total += float(loss)
                classes += list(_classes_per_text(predicted, batch.targets))
        count = sum(len(true) for _, true in classes)
        if not count:
            raise DataError("nothing to evaluate: the validation data has no label")
        return total / count, classes

    def resolve_class_names(self, dataset_names: Sequence[str]) -> list[str]:
        """The names of the classes: those of the data, or names given for classes 0, 1, 2, …"""
        return resolve_class_names(self.class_names, dataset_names)


def pad(rows: Ids, width: int, value: int) -> Int[Tensor, "batch time"]:
    """Rows of different lengths, right-padded to `width` with `value`."""
    padded = torch.full((len(rows), width), value)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
    return padded


def macro_f1(predicted: NDArray[np.int64], true: NDArray[np.int64]) -> float:
    """F1 = 2 correct / (predicted + true) of each class that occurs, averaged over the classes.

    >>> macro_f1(np.array([0, 0, 1]), np.array([0, 1, 1]))
    0.6666666666666666
    """
    classes = max(predicted.max(), true.max()) + 1
    correct_count, predicted_count, true_count = (
        np.bincount(ids, minlength=classes)
        for ids in (predicted[predicted == true], predicted, true)
    )
    total = predicted_count + true_count
    return float((2 * correct_count[total > 0] / total[total > 0]).mean())


def _classes_per_text(predicted: Tensor, targets: Tensor) -> Iterator[PredictedAndTrue]:
    """Row by row, predicted and true classes at the scored positions."""
    arrays = (tensor.reshape(len(targets), -1).cpu().numpy() for tensor in (predicted, targets))
    for predicted_row, true_row in zip(*arrays, strict=True):
        scored = true_row != IGNORE_INDEX
        yield predicted_row[scored], true_row[scored]
