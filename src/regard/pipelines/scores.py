"""Texts, or pairs of texts, with a number each: regression."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from regard.config import Choice, RunConfig, make
from regard.data.batch import Batch, RegressionBatch
from regard.data.columns import Roles
from regard.data.scores import ScoredText, from_table
from regard.data.tables import Table
from regard.generate import Search
from regard.models.build import config_table, resolve
from regard.models.presets import ModelConfig
from regard.pipelines.base import (
    EvalData,
    Progress,
    TrainedModel,
    TrainingData,
    validation_metrics,
    with_task_options,
)
from regard.pipelines.batching import (
    describe_data,
    describe_truncated,
    encoded_text_loader,
    seeded_batches,
    sequential_batches,
)
from regard.pipelines.by_length import MetricsByLength, metrics_by_length
from regard.pipelines.encoded_texts import EncodedTexts
from regard.pipelines.labels import SAMPLE_TEXTS, LabelsPipeline, add_head, input_parts
from regard.tasks import TASKS, TextRegression
from regard.tasks.text_regression import Numbers
from regard.text import Tokenizer

BASELINE = "training mean"  # the mean of the training numbers, predicted for every text


class ScoresPipeline(LabelsPipeline):
    """Texts with a number each, in batches of similar length."""

    name: ClassVar[str] = "scores"
    data_description: ClassVar[str] = (
        "texts and their numbers: two columns of a table (data.text=… data.label=…)"
    )

    def from_table(self, table: Table, roles: Roles) -> ScoredText:
        """The texts of a table and their numbers."""
        return from_table(table, roles)

    def defaults(self, data: Any, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """The defaults of labelled texts, with task=text_regression."""
        return {**super().defaults(data, task, gpu=gpu), "task": "text_regression"}

    def smallest_model(self, config: RunConfig) -> ModelConfig:
        """With a head of one output."""
        return add_head(config.model, regression_task(config.task), classes=1, vocab_size=1)

    def preview(
        self, config: RunConfig, train: Any, validation: Any, tokenizers: Tokenizer | None
    ) -> dict[str, str]:
        """Empty: numbers are not classes."""
        return {}

    def training_data(
        self,
        config: RunConfig,
        train: Any,
        validation: Any,
        tokenizers: Tokenizer,
        progress: Progress | None,
    ) -> TrainingData:
        """Batches of texts of similar length, in random order."""
        numbers = np.array(train.numbers())
        derived = {"mean": float(numbers.mean()), "std": float(numbers.std()) or 1.0}
        derived |= {"paired": True} if train.is_paired else {}
        choice = with_task_options(config.task, derived)
        task = regression_task(choice)
        model = add_head(config.model, task, classes=1, vocab_size=tokenizers.vocab_size)
        config = replace(config, task=choice, model=config_table(model))
        data = self.evaluation_data(config, validation, tokenizers)
        texts = EncodedTexts.encode(task, train, tokenizers, model)
        loader = encoded_text_loader(config, model, texts.store)
        seed, collate = config.train.seed, partial(texts.collate, task)
        description = [
            *describe_data(train, validation, tokenizers),
            f"numbers    {numbers.min():g} to {numbers.max():g}, mean {task.mean:.4g}, "
            f"standard deviation {task.std:.4g}",
            *describe_truncated(texts.truncated, data.too_long, model.context),
        ]
        return TrainingData(
            **vars(data),
            batch=seeded_batches(seed, loader, collate),
            example_ids=loader.example_ids,
            all_batches=lambda: sequential_batches(seed, loader, collate),
            description=description,
            baselines=lambda: {BASELINE: _mean_baseline(task, validation)},
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Any,
        tokenizers: Tokenizer,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation texts, shortest first."""
        task, model = regression_task(config.task), resolve(config.model)
        texts = EncodedTexts.encode(task, data, tokenizers, model)
        loader = encoded_text_loader(config, model, texts.store)

        def validation_batches(limit: int | None) -> Iterator[Batch]:
            collate = partial(texts.collate, task)
            return sequential_batches(config.train.seed, loader, collate, limit)

        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=validation_batches,
            validation_data=data,
            validation_size=len(data),
            validation_targets=len(data),
            too_long=texts.truncated,
        )

    def evaluate(
        self,
        data: EvalData,
        model: nn.Module,
        device: torch.device,
        *,
        search: Search,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """All metrics, and those of the mean of the training numbers as prediction."""
        baseline = _mean_baseline(cast(TextRegression, data.task), data.validation_data)
        return {
            **validation_metrics(data, model, device, None, progress),
            **{f"{BASELINE}: {name}": value for name, value in baseline.items()},
        }

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The predicted and the true numbers of a few validation texts."""
        task, tokenizer = cast(TextRegression, data.task), cast(Tokenizer, data.tokenizers)
        rows = data.validation_data.rows[:SAMPLE_TEXTS]
        predicted = predict_numbers(model, task, tokenizer, [parts for parts, _ in rows])
        return "\n".join(
            f"{' | '.join(parts)}\n→ {number:.4g}\n= {true:.4g}"
            for (parts, (true,)), number in zip(rows, predicted, strict=True)
        )

    def evaluate_by_length(
        self, data: EvalData, model: nn.Module, *, search: Search
    ) -> MetricsByLength:
        """Errors and correlations for short and for long texts."""
        task, tokenizer = cast(TextRegression, data.task), cast(Tokenizer, data.tokenizers)
        rows = [parts for parts, _ in data.validation_data.rows]
        predicted = np.array(predict_numbers(model, task, tokenizer, rows))
        true: Numbers = np.array(data.validation_data.numbers())
        return metrics_by_length(
            data.validation_data.texts(),
            lambda indices: task.metrics_of_predictions(
                predicted[list(indices)], true[list(indices)]
            ),
        )

    def predict(self, run: TrainedModel, input: Any, *, top: int) -> Any:
        """The number of a text, or of a pair of texts."""
        return self.predict_batch(run, [input], top=top)[0]

    def predict_batch(self, run: TrainedModel, inputs: Sequence[Any], *, top: int) -> list[Any]:
        """The numbers of several texts, in batches of similar length."""
        task, tokenizer = regression_task(run.config.task), cast(Tokenizer, run.tokenizers)
        texts = [item if isinstance(item, tuple) else str(item) for item in inputs]
        rows = input_parts(texts, paired=task.paired)
        return cast(list[Any], predict_numbers(run.model, task, tokenizer, rows))


def regression_task(choice: Choice) -> TextRegression:
    """The task of a run on texts with numbers."""
    return cast(TextRegression, make(choice, TASKS, "task"))


@torch.no_grad()
def predict_numbers(
    model: nn.Module, task: TextRegression, tokenizer: Tokenizer, rows: Sequence[tuple[str, ...]]
) -> list[float]:
    """The number of each text, or pair of texts."""
    data = ScoredText("scores", "text", "", [(tuple(row), (0.0,)) for row in rows], ())
    encoded = EncodedTexts.encode(task, data, tokenizer, cast(ModelConfig, model.config))
    numbers = np.empty(len(rows))
    model.eval()
    for indices, batch in encoded.batches_by_length(task, next(model.parameters()).device):
        numbers[indices] = task.predict_numbers(model, cast(RegressionBatch, batch)).cpu()
    return numbers.tolist()


def _mean_baseline(task: TextRegression, data: ScoredText) -> dict[str, float]:
    """The errors of predicting the training mean for every text."""
    true: Numbers = np.array(data.numbers())
    metrics = task.metrics_of_predictions(np.full(len(true), task.mean), true)
    return {name: metrics[name] for name in ("loss", "mse", "mae")}
