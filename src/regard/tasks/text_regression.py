"""Regression on texts: a number for each text, or for each pair of texts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import RegressionBatch
from regard.errors import ConfigError, DataError
from regard.tasks.base import Task
from regard.tasks.metrics import evaluation_mode
from regard.tasks.text_classification import Ids, pad

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TextRegression(Task):
    r"""A number y for a text or a pair of texts, such as the similarity of two sentences.

        y = mean + std f(text),      loss = (y - target)^2 / std^2

    f is the model with a head of one output; mean and std are those of the training numbers.
    """

    data_kind: ClassVar[str] = "scores"
    target_name: ClassVar[str] = "texts"
    architectures: ClassVar[tuple[str, ...]] = ("encoder", "decoder", "bag")
    methods: ClassVar[tuple[str, ...]] = ("predict", "evaluate_by_length")
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "mse", "mae", "pearson", "spearman")
    unit: ClassVar[str] = "loss: mse / variance of the training numbers"
    loss_unit: ClassVar[str] = "mean squared error / variance"
    heads: ClassVar[tuple[str, ...]] = ("classification",)
    mean: float = 0.0  # mean of the training numbers
    std: float = 1.0  # standard deviation of the training numbers
    paired: bool = False  # whether a number belongs to two texts, as in the training data

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ConfigError(f"task.std={self.std} must be above 0")

    def collate(
        self, examples: tuple[Ids, Sequence[Numbers], int], generator: torch.Generator
    ) -> RegressionBatch:
        """Texts, padded to a width, and their target numbers."""
        texts, numbers, width = examples
        lengths = torch.tensor([len(text) for text in texts])
        targets = torch.tensor([n for (n,) in numbers], dtype=torch.float32)
        return RegressionBatch(pad(texts, width, 0), lengths, targets)

    def standardized_predictions(
        self, model: nn.Module, batch: RegressionBatch
    ) -> Float[Tensor, " batch"]:
        """f(text) of each text."""
        extra = {} if batch.segments is None else {"segments": batch.segments}
        x = model(batch.ids, lengths=batch.lengths, **extra)
        output: Tensor = model.head(x, batch.lengths)  # type: ignore[operator]
        return output.squeeze(1).float()

    def loss(self, model: nn.Module, batch: RegressionBatch) -> Float[Tensor, ""]:
        """Summed squared errors, divided by the variance of the training numbers."""
        error = self.standardized_predictions(model, batch) - (batch.targets - self.mean) / self.std
        return error.square().sum()

    def count(self, batch: RegressionBatch) -> Int[Tensor, ""]:
        """How many numbers are predicted."""
        return batch.lengths.new_tensor(len(batch.lengths))

    @torch.no_grad()
    def predict_numbers(self, model: nn.Module, batch: RegressionBatch) -> Float[Tensor, " batch"]:
        """The predicted number of each text."""
        return self.mean + self.std * self.standardized_predictions(model, batch)

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """The loss, mean squared and absolute error, and Pearson's and Spearman's correlation."""
        with evaluation_mode(model):
            rows = [(self.predict_numbers(model, batch), batch.targets) for batch in batches]
        if not rows:
            raise DataError("nothing to evaluate: the validation data has no number")
        predicted, true = (
            torch.cat(side).double().cpu().numpy() for side in zip(*rows, strict=True)
        )
        return self.metrics_of_predictions(predicted, true)

    def metrics_of_predictions(self, predicted: Numbers, true: Numbers) -> dict[str, float]:
        """The loss, the errors and the correlations of predictions."""
        metrics = regression_metrics(predicted, true)
        return {"loss": metrics["mse"] / self.std**2, **metrics}


def regression_metrics(predicted: Numbers, true: Numbers) -> dict[str, float]:
    """Errors and correlations of predictions.

    >>> regression_metrics(np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 4.0]))["spearman"]
    1.0
    """
    error = predicted - true
    return {
        "mse": float(np.square(error).mean()),
        "mae": float(np.abs(error).mean()),
        "pearson": correlation(predicted, true),
        "spearman": correlation(ranks(predicted), ranks(true)),
    }


def correlation(a: Numbers, b: Numbers) -> float:
    """Pearson's r; 0 where one side is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:  # the differences from the mean may be rounding errors
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt(np.square(a).sum() * np.square(b).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def ranks(values: Numbers) -> Numbers:
    """The rank of each value from 1 on; equal values have their mean rank.

    >>> ranks(np.array([5.0, 1.0, 5.0]))
    array([2.5, 1. , 2.5])
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last: Numbers = np.cumsum(counts).astype(np.float64)
    mean_ranks: Numbers = (last - (counts - 1) / 2)[inverse]
    return mean_ranks
