"""Time series: columns of numbers, one of which is forecast."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

from regard.config import Choice, RunConfig, make, merge
from regard.data.batch import Batch
from regard.data.columns import Roles
from regard.data.series import Series, from_table
from regard.data.tables import Table, read_table
from regard.errors import DataError
from regard.models.build import resolve
from regard.pipelines.base import (
    EvalData,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
)
from regard.tasks import TASKS, Forecast

SAMPLE_STEPS = 6
PREDICTED_STEPS = 24


class SeriesPipeline(Pipeline):
    """Columns of numbers in the order of time; the validation data is the end of the series."""

    name: ClassVar[str] = "series"
    needs: ClassVar[str] = "columns of numbers"

    def from_table(self, table: Table, roles: Roles) -> Series:
        """The columns of numbers of a table."""
        return from_table(table)

    def defaults(self, data: Series, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A linear autoregression."""
        return {
            "task": {"kind": "forecast", "horizon": max(1, min(96, len(data) // 40))},
            "model": {"family": "autoregression", "order": max(1, min(24, len(data) // 20))},
        }

    def training_data(
        self,
        config: RunConfig,
        train: Series,
        validation: Series,
        tokenizers: None,
        progress: Progress | None,
    ) -> TrainingData:
        """The whole training series as one batch, scaled by its mean and standard deviation."""
        task = series_task(config.task)
        values = train.column(task.column)
        mean, std = float(values.mean()), float(values.std())
        if not std > 0:
            raise DataError(
                f"{train.name}: all values of the column are equal; choose another task.column"
            )
        column = task.column or train.column_names[-1]
        facts = {"task": {"column": column, "mean": mean, "std": std}}
        config = replace(config, task=merge({"task": config.task}, facts)["task"])
        data = self.evaluation_data(config, validation, None)

        def batch(number: int) -> Batch:
            return data.task.collate(train.column(column)[None], torch.Generator())

        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=lambda number: [0],
            all_batches=lambda: iter([batch(0)]),
            description=[
                f"data       {train.description}",
                f"validation {validation.description}",
                f"column     {column}, mean {mean:.4g}, standard deviation {std:.4g}",
            ],
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Series,
        tokenizers: None,
        progress: Progress | None = None,
    ) -> EvalData:
        """The whole validation series as one batch; the task must know column, mean and std."""
        task = series_task(config.task)
        values = data.column(task.column)[None]

        def validation_batches(limit: int | None) -> Iterator[Batch]:
            yield task.collate(values if limit is None else values[:, :limit], torch.Generator())

        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=None,
            model=resolve(config.model),
            validation_batches=validation_batches,
            validation_data=data,
            validation_size=len(data),
            validation_targets=len(data),
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The forecast after the first half of the validation series, and the actual values."""
        task, series = cast(Forecast, data.task), data.validation_data
        middle = len(series) // 2
        actual = series.column(task.column)[middle : middle + SAMPLE_STEPS].tolist()
        first_half = replace(series, values=series.values[:middle])
        predicted = forecast(model, task, first_half, len(actual))
        return "\n".join(
            f"{label} {'  '.join(f'{value:.4g}' for value in row)}"
            for label, row in (("forecast", predicted), ("actual  ", actual))
        )

    def predict(self, run: TrainedModel, what: Any, *, top: int) -> list[float]:
        """The next values of a series, 24 of them; `Run.forecast` takes their number."""
        series = from_table(read_table(Path(what)))
        return forecast(run.model, series_task(run.config.task), series, PREDICTED_STEPS)


def forecast_end(
    model: nn.Module, task: Forecast, series: Series
) -> tuple[list[float], list[float], list[float]]:
    """The values before the last `horizon` ones, those, and their forecast from the former."""
    values = series.column(task.column).tolist()
    steps = min(task.horizon, len(values) - cast(int, model.context))
    before = replace(series, values=series.values[:-steps])
    return values[-3 * steps : -steps], values[-steps:], forecast(model, task, before, steps)


def series_task(choice: Choice) -> Forecast:
    """The task of a run on a series."""
    return cast(Forecast, make(choice, TASKS, "task"))


def forecast(model: nn.Module, task: Forecast, series: Series, steps: int) -> list[float]:
    """The values after the end of a series; each forecast is an input of the next."""
    context: int = model.context  # type: ignore[assignment]
    if len(series) < context:
        raise DataError(
            f"{series.name} has {len(series)} rows, but the model needs at least {context}"
        )
    batch = task.collate(series.column(task.column)[None, -context:], torch.Generator())
    with torch.no_grad():
        return task.unscale(model.forecast(batch.series, steps)[0])  # type: ignore[operator]
