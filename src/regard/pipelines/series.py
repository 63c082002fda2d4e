"""Time series: columns of numbers, some or all of which are forecast."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.config import Choice, RunConfig, make, merge
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
)
from regard.pipelines.batching import rows_per_micro_batch
from regard.pipelines.series_baselines import evaluate_baselines, find_seasonal_period
from regard.tasks import TASKS, Forecast

SAMPLE_STEPS = 6
DEFAULT_ROWS = 32  # windows of a step, where train.batch is not set
EVALUATION_ROWS = 256  # windows of a batch of validation data
DEFAULT_CONTEXTS = {"linear": 336}  # rows that a model of this family reads by default
DEFAULT_CONTEXT = 96  # rows that a model of another family reads by default
RECURSIVE_STARTS = 8  # windows per horizon on which recursive forecasts are evaluated


@dataclass(frozen=True)
class Windows:
    """The scaled rows of a split of a series, and the windows in them."""

    values: Float[Tensor, "time input_dim"]
    context: int
    horizon: int
    starts: NDArray[np.int64]  # of the rows that are read

    @classmethod
    def of(
        cls, series: Series, task: Forecast, *, stride: int = 1, double: bool = False
    ) -> "Windows":
        """All windows whose forecast rows are in the split; those before it may be read."""
        assert task.context is not None
        rows = series.values
        if series.before is not None:
            rows = np.concatenate([series.before[-task.context :], rows])
        size = task.context + task.horizon
        if len(rows) < size:
            raise DataError(
                f"{series.name}: {series.description} with {len(rows):,} rows to read; reading "
                f"{task.context} and forecasting {task.horizon} takes {size};\nadd data, raise "
                "data.validation_fraction, or lower task.horizon or task.context"
            )
        values = task.standardize(rows[:, series.indices(task.read_columns)])
        tensor = torch.from_numpy(values).to(torch.float64 if double else torch.float32)
        return cls(tensor, task.context, task.horizon, np.arange(0, len(rows) - size + 1, stride))

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, chosen: NDArray[np.int64]) -> Float[Tensor, "batch time input_dim"]:
        """Windows by their indices."""
        offsets = np.arange(self.context + self.horizon)
        return self.values[torch.from_numpy(self.starts[chosen][:, None] + offsets)]

    def batches(self, task: Forecast, limit: int | None) -> Iterator[Batch]:
        """All windows, or evenly spaced ones with about `limit` values to forecast."""
        count = len(self)
        chosen = np.arange(count)
        values = self.horizon * len(task.columns)
        if limit is not None and limit < count * values:
            kept = max(1, limit // values)
            chosen = np.arange(kept) * count // kept
        for start in range(0, len(chosen), EVALUATION_ROWS):
            windows = self.read(chosen[start : start + EVALUATION_ROWS])
            yield task.collate((windows, self.context), torch.Generator())


class SeriesPipeline(Pipeline):
    """Numeric columns in chronological order; the validation data is the end of the series."""

    name: ClassVar[str] = "series"
    needs: ClassVar[str] = "columns of numbers"

    def from_table(self, table: Table, roles: Roles) -> Series:
        """The columns of numbers of a table."""
        return from_table(table)

    def defaults(self, data: Series, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """One linear layer, solved in closed form, which is hard to beat on a few thousand rows."""
        return {
            "task": {"kind": "forecast", "horizon": max(1, min(96, len(data) // 40))},
            "model": {"family": "linear"},
        }

    def train_defaults(self, model: Any) -> dict[str, Any]:
        """A few minutes on a CPU."""
        return {"steps": 1000, "batch": DEFAULT_ROWS, "schedule": {"kind": "cosine", "warmup": 50}}

    def fit_settings(self, config: RunConfig, data: Series) -> RunConfig:
        """The settings with the columns, the rows that are read and the seasonal period."""
        return _complete_settings(config, data)[0]

    def check_splits(self, config: RunConfig, train: Series, validation: Series) -> None:
        """Raise `DataError` if a split is shorter than a window."""
        task = series_task(_complete_settings(config, train)[0].task)
        for split in (validation, train):
            Windows.of(split, task)

    def preview(self, config: RunConfig, data: Series) -> dict[str, str]:
        """The columns that are forecast, where none was chosen."""
        task = series_task(_complete_settings(config, data)[0].task)
        note = _forecast_note(config, task)
        return {"forecast": note} if note else {}

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
        given = config
        config, constant = _complete_settings(config, train)
        task = series_task(config.task)
        note = _forecast_note(given, task)
        model = _model(config, task)
        data = self.evaluation_data(config, validation, None)
        without_gradients = is_fitted_without_gradients(_model_family(config))
        training = Windows.of(train, task, double=without_gradients)
        loader = RowLoader(len(training), rows, settings.seed)

        def batch(index: int) -> Batch:
            windows = training.read(loader.examples(index))
            return task.collate((windows, training.context), torch.Generator())

        def whole() -> Iterator[Batch]:
            yield SeriesBatch(training.values[:, : len(task.columns)].mT)

        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=loader.example_ids,
            all_batches=whole,
            baselines=lambda: evaluate_baselines(
                task, validation, train.values, stride=_evaluation_stride(task, model)
            ),
            description=[
                f"data       {train.description}",
                f"validation {validation.description}",
                *_describe_columns(task, constant),
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
        """All windows of the validation series; the task must know columns, mean and std."""
        task = series_task(config.task)
        model = _model(config, task)
        without_gradients = is_fitted_without_gradients(_model_family(config))
        if task.context is None:  # a run of an earlier version
            task = replace(task, context=model.context)
        windows = Windows.of(
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
        training = None if series.before is None else series.before[: series.training_rows]
        stride = _evaluation_stride(task, data.model)
        baselines = evaluate_baselines(task, series, training, stride=stride)
        return metrics | {
            f"{name}: {metric}": value
            for name, values in baselines.items()
            for metric, value in values.items()
        }

    def read_inputs(self, config: RunConfig, path: Path) -> Inputs:
        """A series is one input."""
        raise ConfigError("a series is forecast as a whole; give its file to `forecast`")

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The forecast after the first half of the validation series, and the actual values."""
        task, series = cast(Forecast, data.task), cast(Series, data.validation_data)
        middle = len(series) // 2
        column = task.columns[0]
        actual = series.column(column)[middle : middle + SAMPLE_STEPS].tolist()
        steps = min(len(actual), task.horizon)
        known = series.values[:middle]
        if series.before is not None:
            known = np.concatenate([series.before, known])
        if len(known) < (task.context or 0):
            return ""
        predicted = forecast(model, task, replace(series, values=known), steps)[:, 0].tolist()
        return "\n".join(
            f"{label} {column} {'  '.join(f'{value:.4g}' for value in row)}"
            for label, row in (("forecast", predicted), ("actual  ", actual[:steps]))
        )

    def predict(self, run: TrainedModel, what: Any, *, top: int) -> Any:
        """The horizon after a series, by column if there are several (`Run.forecast`)."""
        series = from_table(read_table(Path(what)))
        task = series_task(run.config.task)
        return by_column(task, forecast(run.model, task, series, task.horizon))


def by_column(task: Forecast, values: NDArray[np.float64]) -> Any:
    """Forecast values as a list; of several columns, as a dict of lists."""
    if len(task.columns) == 1:
        return values[:, 0].tolist()
    return dict(zip(task.columns, values.T.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class ForecastEnd:
    """The end of a validation series, in the column's units: truth and forecasts of one column."""

    column: str
    before: list[float]  # values before the forecast
    truth: list[float]
    forecast: list[float]  # multi-step: from the values before only
    one_step: list[float]  # one step ahead: each from all true values before it


def forecast_end(
    model: nn.Module, task: Forecast, series: Series, column: str | None = None
) -> ForecastEnd:
    """One multi-step forecast of the last `horizon` values of a series, and one-step-ahead ones."""
    rows = series.values
    if series.before is not None:
        rows = np.concatenate([series.before, rows])
    steps = min(task.horizon, len(rows) - (task.context or cast(int, model.context)))
    if steps < 1:
        raise DataError(
            f"{series.name} has {len(rows)} rows, and the model reads {len(rows) - steps}; a "
            "forecast of the last values needs more rows"
        )
    multi_step = forecast(model, task, replace(series, values=rows[:-steps]), steps)
    return _with_one_step_forecasts(
        model, task, replace(series, values=rows), column, steps, multi_step
    )


def forecast_future(
    model: nn.Module, task: Forecast, series: Series, steps: int | None, column: str | None = None
) -> ForecastEnd:
    """A multi-step forecast after a series, and one-step-ahead forecasts of its last values."""
    future = forecast(model, task, series, steps)
    known = min(len(future), len(series) - (task.context or cast(int, model.context)))
    end = _with_one_step_forecasts(model, task, series, column, known, future)
    return replace(end, before=[*end.before, *end.truth], truth=[])


def _with_one_step_forecasts(
    model: nn.Module,
    task: Forecast,
    series: Series,
    column: str | None,
    count: int,
    multi_step: NDArray[np.float64],
) -> ForecastEnd:
    """The last `count` values with one-step-ahead forecasts, and this multi-step forecast."""
    output, context = task.column_index(column), task.context or cast(int, model.context)
    name = task.columns[output]
    values = series.column(name).tolist()
    last = replace(series, values=series.values[-(context + count) :], before=None)
    one_step_task = replace(task, horizon=1, context=context)
    one_step: list[float] = []
    if count:
        windows = Windows.of(last, one_step_task, double=hasattr(model, "fit"))
        read = windows.read(np.arange(len(windows)))[:, :-1].to(_device(model))
        with torch.no_grad():
            one_step = task.unstandardize(task.rollout(model, read, 1)[:, 0])[:, output].tolist()
    before = values[: len(values) - count][-2 * len(multi_step) :]
    return ForecastEnd(
        name, before, values[len(values) - count :], multi_step[:, output].tolist(), one_step
    )


def series_task(choice: Choice) -> Forecast:
    """The task of a run on a series."""
    return cast(Forecast, make(choice, TASKS, "task"))


def forecast(
    model: nn.Module, task: Forecast, series: Series, steps: int | None = None
) -> NDArray[np.float64]:
    """The values after the end of a series, (steps, columns), by default up to the horizon.

    See `Forecast.rollout`.
    """
    steps = task.horizon if steps is None else steps
    if steps < 1:
        raise ConfigError(f"steps={steps} must be at least 1")
    context = task.context or cast(int, model.context)
    if len(series) < context:
        raise DataError(
            f"{series.name} has {len(series)} rows, but the model needs at least {context}"
        )
    model.eval()
    rows = task.standardize(series.values[-context:, series.indices(task.read_columns)])
    dtype = torch.float64 if hasattr(model, "fit") else torch.float32
    window = torch.from_numpy(rows).to(_device(model), dtype)
    with torch.no_grad():
        return task.unstandardize(task.rollout(model, window.unsqueeze(0), steps)[0])


def _model_family(config: RunConfig) -> str:
    """The family of the model of a run."""
    return family_of(resolve(config.model, vocab_size=1))


def _evaluation_stride(task: Forecast, model: ModelConfig) -> int:
    """Rows by which evaluated windows advance; a recursive forecast gets fewer windows."""
    recursive = not (task.is_direct or is_fitted_without_gradients(family_of(model)))
    return max(1, task.horizon // RECURSIVE_STARTS) if recursive else 1


def _device(model: nn.Module) -> torch.device:
    weights = [*model.parameters(), *model.buffers()]
    return weights[0].device


def _derive_settings(config: RunConfig, train: Series) -> tuple[dict[str, Any], list[str]]:
    """The settings of the task that are derived from the training data, and constant columns."""
    task = series_task(config.task)
    names = [*train.column_names] if task.column is None else task.columns
    named = task.column is not None
    std = train.values.std(0)
    constant = [name for name in [*names, *task.covariates] if not std[train.index(name)] > 0]
    if constant and (named or len(constant) == len(names)):
        raise DataError(
            f"{train.name}: all training values of column {constant[0]!r} are equal; choose "
            "another task.column"
        )
    names = [name for name in names if name not in constant]
    column: str | list[str] = names[0] if len(names) == 1 else names
    known = replace(task, column=column)
    read = train.indices(known.read_columns)
    scales: dict[str, Any] = {}
    for name, values in (("mean", train.values.mean(0)[read]), ("std", std[read])):
        given = getattr(task, name)
        count = np.size(values if given is None else given)
        if count != len(read):
            raise ConfigError(
                f"task.{name} has {count} numbers, and {len(read)} columns are read: "
                f"{', '.join(known.read_columns)}"
            )
        if given is None:
            given = values.tolist() if len(read) > 1 else float(values[0])
        scales[name] = given
    if not np.all(np.array(scales["std"]) > 0):
        raise ConfigError(f"task.std={scales['std']} must be above 0")
    family = _model_family(config)
    context = task.context
    if family == "autoregression":
        order = resolve(config.model).context
        if context not in (None, order):
            raise ConfigError(f"task.context={context} must be model.order={order} of an AR model")
        context = order
    if context is None:
        room = max(1, len(train) // 4)
        context = max(task.patch, min(DEFAULT_CONTEXTS.get(family, DEFAULT_CONTEXT), room))
    period = task.seasonal_period or find_seasonal_period(train, train.index(names[0]))
    derived: dict[str, Any] = {"column": column, "context": context, **scales}
    return derived | ({} if period is None else {"seasonal_period": period}), constant


def _complete_settings(config: RunConfig, train: Series) -> tuple[RunConfig, list[str]]:
    """The settings, completed with the derived ones, and the constant columns."""
    derived, constant = _derive_settings(config, train)
    config = replace(config, task=merge({"task": config.task}, {"task": derived})["task"])
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
        derived["head"] = {**head, **derived["head"]}  # with its pool
    return resolve(config.model, context=task.positions, **derived)


def _sizes(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model that follow from the task, for the settings."""
    names = ("vocab_size", "input_dim", "head", "context", "horizon")
    return {name: getattr(model, name) for name in names if name in model.__dataclass_fields__}


def _forecast_note(given: RunConfig, fitted: Forecast) -> str:
    """What is forecast, if the settings name none of several columns."""
    if series_task(given.task).column is not None or len(fitted.columns) == 1:
        return ""
    return f"all {len(fitted.columns)} columns; task.column=NAME chooses one"


def _describe_columns(task: Forecast, constant: list[str]) -> list[str]:
    mean, std = task.scale
    shown = [
        f"{name}, mean {m:.4g}, standard deviation {s:.4g}"
        for name, m, s in zip(task.read_columns, mean, std, strict=True)
    ]
    lines = [f"{'columns' if not n else '':<11}{line}" for n, line in enumerate(shown[:8])]
    if len(shown) > 8:
        lines.append(f"{'':<11}… {len(shown) - 8} more")
    if task.covariates:
        lines.append(f"{'':<11}covariates {', '.join(task.covariates)}")
    if constant:
        lines.append(f"{'left out':<11}{', '.join(constant)}: all training values are equal")
    return lines


@torch.no_grad()
def _column_errors(data: EvalData, model: nn.Module, device: torch.device) -> dict[str, float]:
    """The mean absolute error of each column in its own unit."""
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
