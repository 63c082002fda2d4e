"""The path of preparing for series: from columns of numbers to what is fitted and judged."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from regard.config import Choice, RunConfig, make, merge
from regard.data.batch import Batch
from regard.data.series import Series
from regard.errors import DataError
from regard.models.build import resolve
from regard.pipelines.base import EvalData, TrainingData
from regard.tasks import TASKS
from regard.tasks.forecast import Forecast

SHOWN = 6  # numbers that are told at an evaluation


def prepare_series(
    config: RunConfig, train: Series, held: Series, fingerprint: str
) -> TrainingData:
    """Everything a run on a series is fitted to and judged on."""
    task = series_task(config.task)
    numbers = train.column(task.column)
    mean, std = float(numbers.mean()), float(numbers.std())
    if not std > 0:
        raise DataError(f"{train.name}: all numbers are the same; there is nothing to foretell")
    column = task.column or train.column_names[-1]
    facts = {"task": {"column": column, "mean": mean, "std": std}}
    config = replace(config, task=merge({"task": config.task}, facts)["task"])
    exam = examine_series(config, held)

    def batch(number: int) -> Batch:
        return exam.task.collate(train.column(column)[None], torch.Generator())

    return TrainingData(
        **vars(exam),
        batch=batch,
        example_ids=lambda number: [0],
        all_batches=lambda: iter([batch(0)]),
        description=[
            f"data       {train.description}",
            f"held out   {held.description}",
            f"column     {column}, mean {mean:.4g}, deviation {std:.4g}",
        ],
        fingerprint=fingerprint,
    )


def examine_series(config: RunConfig, held: Series) -> EvalData:
    """What a model is judged by; the task must know its column, as that of a run does."""
    task = series_task(config.task)
    numbers = held.column(task.column)[None]

    def validation_batches(limit: int | None) -> Iterator[Batch]:
        yield task.collate(numbers if limit is None else numbers[:, :limit], torch.Generator())

    return EvalData(
        task=task,
        task_choice=config.task,
        tokenizers=None,
        model=resolve(config.model),
        validation_batches=validation_batches,
        validation_data=held,
        validation_size=len(held),
    )


def series_task(choice: Choice) -> Forecast:
    """The task of a run on a series."""
    task = make(choice, TASKS, "task")
    assert isinstance(task, Forecast)
    return task


def forecast(model: nn.Module, task: Forecast, series: Series, steps: int) -> list[float]:
    """The numbers after the end of a series, each made from those before it."""
    seen: int = model.context  # type: ignore[assignment]
    if len(series) < seen:
        raise DataError(f"{series.name} has {len(series)} rows; the model looks at {seen}")
    batch = task.collate(series.column(task.column)[None, -seen:], torch.Generator())
    with torch.no_grad():
        return task.told(model.forecast(batch.series, steps)[0])  # type: ignore[operator]


def sample(exam: EvalData, model: nn.Module) -> str:
    """What the model says comes first after half of the held-out series, and what came."""
    assert isinstance(exam.task, Forecast)
    assert isinstance(exam.validation_data, Series)
    held, middle = exam.validation_data, len(exam.validation_data) // 2
    came = held.column(exam.task.column)[middle : middle + SHOWN].tolist()
    told = forecast(model, exam.task, replace(held, values=held.values[:middle]), len(came))
    return "\n".join(
        f"{name} {'  '.join(f'{each:.4g}' for each in row)}"
        for name, row in (("said", told), ("came", came))
    )
