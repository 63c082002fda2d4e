"""Time series: columns of numbers, some or all of which are forecast."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from regard.config import Choice, RunConfig, make
from regard.data.batch import Batch, SeriesBatch
from regard.data.columns import Roles
from regard.data.loader import RowLoader
from regard.data.series import Series, from_table
from regard.data.table_files import read_table
from regard.data.tables import Table
from regard.errors import ConfigError, DataError
from regard.generate import Search
from regard.models.build import family_of, is_fitted_without_gradients, resolve
from regard.models.presets import ModelConfig
from regard.pipelines.base import (
    EvalData,
    Inputs,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
    validation_metrics,
    with_task_options,
)
from regard.pipelines.batching import rows_per_micro_batch
from regard.pipelines.series_baselines import (
    baseline_settings,
    evaluate_baselines,
    find_seasonal_period,
)
from regard.pipelines.series_forecasts import forecast, values_by_column
from regard.pipelines.series_windows import SeriesWindows
from regard.tasks import TASKS, Forecast

SAMPLE_STEPS = 6
DEFAULT_ROWS = 32  # windows of a step, where train.batch is not set
DEFAULT_CONTEXTS = {"linear": 336}  # rows that a model of this family reads by default
DEFAULT_CONTEXT = 96  # rows that a model of another family reads by default
RECURSIVE_STARTS = 8  # evaluated windows of recursive forecasts per `horizon` rows


class SeriesPipeline(Pipeline):
    """Numeric columns in chronological order; the validation data is the end of the series."""

    name: ClassVar[str] = "series"
    data_description: ClassVar[str] = "columns of numbers"

    def from_table(self, table: Table, roles: Roles) -> Series:
        """The columns of numbers of a table."""
        return from_table(table)

    def defaults(self, data: Series, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """One linear layer, fitted in closed form: few networks beat it on a few thousand rows."""
        return {
            "task": {"kind": "forecast", "horizon": max(1, min(96, len(data) // 40))},
            "model": {"family": "linear"},
        }

    def train_defaults(self, model: Any) -> dict[str, Any]:
        """A number of steps that takes a few minutes on a CPU."""
        return {"steps": 1000, "batch": DEFAULT_ROWS, "schedule": {"kind": "cosine", "warmup": 50}}

    def complete_settings(self, config: RunConfig, data: Series) -> RunConfig:
        """The settings with the columns, the rows that are read and the seasonal period."""
        return _complete_settings(config, data)[0]

    def check_splits(self, config: RunConfig, train: Series, validation: Series) -> None:
        """Raise `DataError` if a split is shorter than a window."""
        task = series_task(_complete_settings(config, train)[0].task)
        for split in (validation, train):
            SeriesWindows.from_series(split, task)

    def preview(
        self, config: RunConfig, train: Series, validation: Series, tokenizers: None
    ) -> dict[str, str]:
        """The columns that are forecast, where none was chosen, and the constant ones."""
        complete, constant = _complete_settings(config, train)
        note = _forecast_note(series_task(config.task), series_task(complete.task))
        return ({"forecast": note} if note else {}) | (
            {"left out": _constant_note(constant)} if constant else {}
        )

    def training_data(
        self,
        config: RunConfig,
        train: Series,
        validation: Series,
        tokenizers: None,
        progress: Progress | None,
    ) -> TrainingData:
        """Random windows of the training series; the whole series for `fit`."""
        settings = config.train
        rows = rows_per_micro_batch(settings, DEFAULT_ROWS, "windows of a series")
        user_task = series_task(config.task)
        config, constant = _complete_settings(config, train)
        task = series_task(config.task)
        note = _forecast_note(user_task, task)
        model = _model(config, task)
        data = self.evaluation_data(config, validation, None)
        without_gradients = is_fitted_without_gradients(_model_family(config))
        training = SeriesWindows.from_series(train, task, double=without_gradients)
        loader = RowLoader(len(training), rows, settings.seed)

        def batch(index: int) -> Batch:
            windows = training.read(loader.examples(index))
            return task.collate((windows, training.context), torch.Generator())

        def whole_series() -> Iterator[Batch]:
            yield SeriesBatch(training.values[:, : len(task.columns)].mT)

        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=loader.example_ids,
            all_batches=whole_series,
            baselines=lambda: evaluate_baselines(
                task, validation, train.values, stride=_evaluation_stride(task, model)
            ),
            baseline_settings=baseline_settings(task, len(train)),
            description=[
                f"data       {train.description}",
                f"validation {validation.description}",
                *_describe_columns(task, constant),
                f"metrics    mse and mae, {task.unit}",
                *([f"forecast   {note}"] if note else []),
            ],
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Series,
        tokenizers: None,
        progress: Progress | None = None,
    ) -> EvalData:
        """All windows of the validation series; `task.column`, `mean` and `std` must be set."""
        task = series_task(config.task)
        model = _model(config, task)
        without_gradients = is_fitted_without_gradients(_model_family(config))
        if task.context is None:  # a run of an earlier version
            task = replace(task, context=model.context)
        windows = SeriesWindows.from_series(
            data, task, stride=_evaluation_stride(task, model), double=without_gradients
        )
        values = len(windows) * task.horizon * len(task.columns)
        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=None,
            model=model,
            validation_batches=lambda limit: windows.batches(task, limit),
            validation_data=data,
            validation_size=len(data),
            validation_targets=values,
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
        """All metrics, the mean absolute error of each column in its unit, and the baselines.

        Baselines that are fitted need the training rows, which data of another file does not have.
        """
        task, series = cast(Forecast, data.task), cast(Series, data.validation_data)
        metrics: dict[str, Any] = validation_metrics(data, model, device, None, progress)
        metrics |= {
            f"mae [{name}]": error for name, error in _column_errors(data, model, device).items()
        }
        training = None if series.history is None else series.history[: series.training_rows]
        stride = _evaluation_stride(task, data.model)
        baselines = evaluate_baselines(task, series, training, stride=stride)
        return metrics | {
            f"{name}: {metric}": value
            for name, values in baselines.items()
            for metric, value in values.items()
        }

    def read_inputs(self, config: RunConfig, path: Path) -> Inputs:
        """Raise `ConfigError`: a series is one input, not several rows."""
        raise ConfigError("a series is forecast as a whole; give its file to `forecast`")

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The forecast after the first half of the validation series, and the actual values."""
        task, series = cast(Forecast, data.task), cast(Series, data.validation_data)
        middle = len(series) // 2
        column = task.columns[0]
        actual = series.column(column)[middle : middle + SAMPLE_STEPS].tolist()
        steps = min(len(actual), task.horizon)
        history = series.values[:middle]
        if series.history is not None:
            history = np.concatenate([series.history, history])
        if len(history) < (task.context or 0):
            return ""
        predicted = forecast(model, task, replace(series, values=history), steps)[:, 0].tolist()
        return "\n".join(
            f"{label} {column} {'  '.join(f'{value:.4g}' for value in row)}"
            for label, row in (("forecast", predicted), ("actual  ", actual[:steps]))
        )

    def predict(self, run: TrainedModel, input: Any, *, top: int) -> Any:
        """The horizon after a series, by column if there are several (`Run.forecast`)."""
        series = from_table(read_table(Path(input)))
        task = series_task(run.config.task)
        return values_by_column(task, forecast(run.model, task, series, task.horizon))


def series_task(choice: Choice) -> Forecast:
    """The task of a run on a series."""
    return cast(Forecast, make(choice, TASKS, "task"))


def _model_family(config: RunConfig) -> str:
    """The family of the model of a run."""
    return family_of(resolve(config.model, vocab_size=1))


def _evaluation_stride(task: Forecast, model: ModelConfig) -> int:
    """Rows between two evaluated windows: 1, or more for recursive forecasts, which are slow.

    The stride and the seasonal period are coprime, so that windows begin in all phases of the
    season; with a stride of 12 hours, they would begin at only two hours of the day.
    """
    if task.is_direct or is_fitted_without_gradients(family_of(model)):
        return 1
    max_stride = max(1, task.horizon // RECURSIVE_STARTS)
    period = task.seasonal_period or 1
    return next(stride for stride in range(max_stride, 0, -1) if math.gcd(stride, period) == 1)


def _derive_settings(config: RunConfig, train: Series) -> tuple[dict[str, Any], list[str]]:
    """The settings of the task that are derived from the training data, and constant columns."""
    task = series_task(config.task)
    names = train.forecast_columns if task.column is None else task.columns
    columns_given = task.column is not None
    if len(train) < 2:
        raise DataError(
            f"{train.first_row_location or train.name}: this is the only training row; "
            "a series needs more"
        )
    # A column is constant if its range is 0: by rounding, the standard deviation of 0.1, 0.1, … is
    # not 0.
    std = np.where(np.ptp(train.values, 0) > 0, train.values.std(0), 0.0)
    constant = [name for name in [*names, *task.covariates] if not std[train.index(name)] > 0]
    if constant and (columns_given or len(constant) == len(names)):
        raise DataError(
            f"{train.path or train.name}: all training values of column {constant[0]!r} are equal; "
            "leave it out of task.column or task.covariates"
        )
    names = [name for name in names if name not in constant]
    column: str | list[str] = names[0] if len(names) == 1 else names
    read_columns = replace(task, column=column).read_columns
    read_indices = train.indices(read_columns)
    scales: dict[str, Any] = {}
    for name, values in (("mean", train.values.mean(0)[read_indices]), ("std", std[read_indices])):
        setting = getattr(task, name)
        count = np.size(values if setting is None else setting)
        if count != len(read_columns):
            raise ConfigError(
                f"task.{name} has {count} numbers, and {len(read_columns)} columns are read: "
                f"{', '.join(read_columns)}"
            )
        if setting is None:
            setting = values.tolist() if len(read_columns) > 1 else float(values[0])
        scales[name] = setting
    if not np.all(np.array(scales["std"]) > 0):
        raise ConfigError(f"task.std={scales['std']} must be above 0")
    family = _model_family(config)
    context = task.context
    if family == "autoregression":
        order = resolve(config.model).context
        if context not in (None, order):
            raise ConfigError(
                f"task.context={context} must equal model.order={order} of an AR model"
            )
        context = order
    if context is None:
        max_context = max(1, len(train) // 4)
        default = DEFAULT_CONTEXTS.get(family, DEFAULT_CONTEXT)
        context = max(task.patch_length, min(default, max_context))
    period = task.seasonal_period or find_seasonal_period(train, train.index(names[0]))
    derived: dict[str, Any] = {"column": column, "context": context, **scales}
    return derived | ({} if period is None else {"seasonal_period": period}), constant


def _complete_settings(config: RunConfig, train: Series) -> tuple[RunConfig, list[str]]:
    """The settings with those derived from the training data, and the constant columns."""
    derived, constant = _derive_settings(config, train)
    config = replace(config, task=with_task_options(config.task, derived))
    sizes = _sizes(_model(config, series_task(config.task)))
    return replace(config, model={**config.model, **sizes}), constant


def _model(config: RunConfig, task: Forecast) -> ModelConfig:
    """The model's configuration, with the sizes that follow from the task."""
    family = _model_family(config)
    if family == "autoregression":
        return resolve(config.model)
    if family == "linear":
        return resolve(config.model, context=task.context, horizon=task.horizon)
    derived = task.model_settings()
    head = config.model.get("head")
    if isinstance(head, dict) and head.get("kind") == "forecast":
        derived["head"] = {**head, **derived["head"]}  # keeps its other options, such as `pool`
    return resolve(config.model, context=task.positions, **derived)


def _sizes(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model that follow from the task, for the settings."""
    names = ("vocab_size", "input_dim", "head", "context", "horizon")
    return {name: getattr(model, name) for name in names if name in model.__dataclass_fields__}


def _forecast_note(user_task: Forecast, task: Forecast) -> str:
    """A note that all of several columns are forecast, if the user has chosen none; else ""."""
    if user_task.column is not None or len(task.columns) == 1:
        return ""
    return f"all {len(task.columns)} columns; task.column=NAME chooses one"


def _describe_columns(task: Forecast, constant: list[str]) -> list[str]:
    mean, std = task.scale
    descriptions = [
        f"{name}, mean {m:.4g}, standard deviation {s:.4g}"
        for name, m, s in zip(task.read_columns, mean, std, strict=True)
    ]
    lines = [f"{'columns' if not n else '':<11}{line}" for n, line in enumerate(descriptions[:8])]
    if len(descriptions) > 8:
        lines.append(f"{'':<11}… {len(descriptions) - 8} more")
    if task.covariates:
        lines.append(f"{'':<11}covariates {', '.join(task.covariates)}")
    if constant:
        lines.append(f"{'left out':<11}{_constant_note(constant)}")
    return lines


def _constant_note(constant: list[str]) -> str:
    return f"{', '.join(constant)}: all training values are equal"


@torch.no_grad()
def _column_errors(data: EvalData, model: nn.Module, device: torch.device) -> dict[str, float]:
    """The mean absolute error of each column in the unit of the column."""
    task = cast(Forecast, data.task)
    _, std = task.scale
    sums, count = torch.zeros(len(task.columns), dtype=torch.float64), 0
    for batch in data.validation_batches(None):
        batch = cast(Any, batch.to(device))
        error = task.rollout(model, batch.series, task.horizon) - batch.targets
        sums += error.abs().double().sum((0, 1)).cpu()
        count += error.shape[0] * error.shape[1]
    means = (sums / count).numpy() * std[: len(task.columns)]
    return dict(zip(task.columns, means.tolist(), strict=True))
