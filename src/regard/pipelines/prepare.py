"""From settings to batches: open and check the data of a run, and call its pipeline."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from regard.config import Choice, RunConfig, kind_of, make, merge
from regard.errors import ConfigError, unknown
from regard.models.presets import ModelConfig
from regard.pipelines.all_pipelines import PIPELINES
from regard.pipelines.base import Data, EvalData, Pipeline, Progress, Tokenizers, TrainingData
from regard.pipelines.detect import data_fingerprint, open_split
from regard.tasks import TASKS
from regard.text import PairTokenizers
from regard.text.pair_tokenizers import JOINT, SOURCE, TARGET


def prepare_training(
    config: RunConfig,
    tokenizers: Tokenizers | None = None,
    progress: Progress | None = None,
    *,
    is_new: bool = True,
) -> TrainingData:
    """Training and validation batches of a run; tokenizers are trained unless given.

    `is_new` is that of `open_split`. For a new run, tokenizers that do not fit are an error.
    """
    training, validation = open_split(config, is_new=is_new)
    check_compatible(config, training, tokenizers)
    pipeline = PIPELINES[training.kind]
    if tokenizers is None:
        tokenizers = pipeline.train_tokenizers(config, training, validation, progress)
    if is_new:
        pipeline.check_tokenizers(config, tokenizers)
    data = pipeline.training_data(config, training, validation, tokenizers, progress)
    return replace(data, fingerprint=data_fingerprint(training, validation))


def prepare_evaluation(
    config: RunConfig,
    data: Any,
    tokenizers: Tokenizers | None,
    progress: Progress | None = None,
) -> EvalData:
    """The task of a trained run and its batches, from validation data alone."""
    return PIPELINES[data.kind].evaluation_data(config, data, tokenizers, progress)


def pipeline_of(config: RunConfig) -> Pipeline:
    """The pipeline of the data that a run's task learns from."""
    return _pipeline_of_task(kind_of(config.task)[0])


def _pipeline_of_task(task: str) -> Pipeline:
    if task not in TASKS:
        raise ConfigError(unknown("task", task, TASKS))
    data_kind = TASKS[task].data_kind
    if data_kind not in PIPELINES:
        raise ConfigError(f"task={task!r}: {unknown('kind of data', data_kind, PIPELINES)}")
    return PIPELINES[data_kind]


def sample(data: EvalData, model: nn.Module, seed: int) -> str:
    """Sample output of a model, shown at each evaluation."""
    model.eval()
    return PIPELINES[data.task.data_kind].sample(data, model, seed)


def default_settings(
    data: Data, location: dict[str, Any], *, gpu: bool, task: Choice = "causal"
) -> dict[str, Any]:
    """Default settings for this data; they are printed and saved like other settings.

    `location` has the settings that locate the data: `path`, or `source` and `target`. Columns of a
    table that are inferred from its cells are saved too.
    """
    location = {**getattr(data, "columns", {}), **location}
    return merge(PIPELINES[data.kind].defaults(data, task, gpu=gpu), {"data": location})


def smallest_model(config: RunConfig) -> ModelConfig:
    """The model with the smallest vocabulary and head, for checks before the data is read."""
    return pipeline_of(config).smallest_model(config)


def check_data_kind(task: str, data: Data) -> None:
    """Raise `ConfigError` if the task learns from another kind of data."""
    pipeline = _pipeline_of_task(task)
    if pipeline.name != data.kind:
        tasks = ", ".join(
            name for name, task_class in TASKS.items() if task_class.data_kind == data.kind
        )
        raise ConfigError(
            f"task={task!r} learns from {pipeline.name}, and {data.name} holds {data.kind};\n"
            f"it needs {pipeline.data_description}\ntasks for {data.kind}: {tasks}"
        )


def check_compatible(config: RunConfig, data: Data, tokenizers: Tokenizers | None) -> None:
    """Raise `ConfigError` if data, task, model and tokenizers are not compatible."""
    kind = kind_of(config.task)[0]
    pipeline = pipeline_of(config)
    metric_names = ("last", *TASKS[kind].metric_names)
    if config.train.best_metric is not None and config.train.best_metric not in metric_names:
        raise ConfigError(
            f"train.best_metric={config.train.best_metric!r} is not a metric of task={kind!r}; "
            f"choose among {', '.join(metric_names)}"
        )
    check_data_kind(kind, data)
    expected = pipeline.tokenizer_type
    if tokenizers is not None and not (expected and isinstance(tokenizers, expected)):
        trained_on = "pairs" if isinstance(tokenizers, PairTokenizers) else "text"
        raise ConfigError(
            f"train.start={config.train.start} was trained on {trained_on}; "
            f"{data.name} holds {data.kind}"
        )
    check_task(config)


def check_task(config: RunConfig) -> None:
    """Raise `ConfigError` if the task does not fit the model or the settings; needs no data."""
    kind = kind_of(config.task)[0]
    model = smallest_model(config)
    task = make(config.task, TASKS, "task")
    if config.train.evaluate_stride is not None and not task.uses_evaluation_stride:
        raise ConfigError(
            f"train.evaluate_stride is for the windows of a language model; task={kind!r} has none"
        )
    try:
        task.check_model(model)
    except ConfigError as error:
        raise ConfigError(f"task={kind!r}: {error}") from None


def tokenizer_fingerprint(tokenizers: Tokenizers | None) -> str:
    """A hash of everything that the ids of a run depend on; "none" for data without text."""
    if tokenizers is None:
        return "none"
    if isinstance(tokenizers, PairTokenizers):
        return f"{tokenizers.source.fingerprint()} {tokenizers.target.fingerprint()}"
    return tokenizers.fingerprint()


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the file of a tokenizer."""
    return any((folder / name).exists() for name in (JOINT, SOURCE, TARGET))


def load_tokenizers(folder: Path, config: RunConfig) -> Tokenizers | None:
    """The tokenizers of a run folder; a task that is not in TASKS (imported runs) reads text."""
    task = TASKS.get(kind_of(config.task)[0])
    return PIPELINES["text" if task is None else task.data_kind].load_tokenizers(folder)


def save_tokenizers(tokenizers: Tokenizers | None, folder: Path) -> None:
    """Write the files that `load_tokenizers` reads."""
    if isinstance(tokenizers, PairTokenizers):
        tokenizers.save(folder)
    elif tokenizers is not None:
        tokenizers.save(folder / JOINT)
