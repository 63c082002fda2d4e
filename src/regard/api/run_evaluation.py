"""Evaluations of a run, on its own validation data or on other data."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from regard.accel.cpu_memory import keep_freed_memory
from regard.api.generation import translation_search
from regard.config import Choice, kind_of
from regard.errors import CheckpointError, ConfigError, RegardWarning, reject_options
from regard.generate import Search
from regard.pipelines import (
    Data,
    column_settings,
    data_fingerprint,
    open_split,
    open_validation,
    prepare_evaluation,
    validation_metrics,
)
from regard.pipelines.base import EvalData, Progress
from regard.pipelines.by_length import MetricsByLength
from regard.training.storage.evaluation import Evaluation, make_evaluation

if TYPE_CHECKING:
    from regard.api.run import Run


def evaluate_all(
    run: "Run",
    data: Sequence[Choice],
    *,
    search: Search,
    stride: int | None,
    test: bool,
    progress: Progress | None,
) -> Evaluation:
    """Compute all metrics of the task; store those of the run's own validation data."""
    eval_data = _prepare(run, data, stride, progress, test=test)
    metrics = run.pipeline.evaluate(
        eval_data, run.model, run.device, search=search, progress=progress
    )
    evaluation = make_evaluation(eval_data, metrics, None)
    if not data and stride is None and not test:
        _store(run, evaluation)
    return evaluation


def evaluate_logged_metrics(
    run: "Run", stride: int | None, progress: Progress | None
) -> Evaluation:
    """Compute and store the metrics that training logs, on all validation data of the run."""
    eval_data = _prepare(run, (), stride, progress)
    metrics = validation_metrics(eval_data, run.model, run.device, None, progress)
    evaluation = make_evaluation(eval_data, metrics, None)
    if stride is None:
        _store(run, evaluation)
    return evaluation


def evaluation_search(run: "Run", beam: int | None, length_penalty: float | None) -> Search:
    """The search that generates the texts of an evaluation; raise for tasks without any."""
    run._task_class("be evaluated")  # raises for a head that no task supports
    if not run.pipeline.evaluates_with_search:
        reject_options(
            f"a beam is for evaluations of translations and captions; task="
            f"{kind_of(run.config.task)[0]!r} has no search",
            {"beam": beam, "length_penalty": length_penalty},
        )
    return translation_search(None, beam, length_penalty)


def evaluate_by_length(run: "Run", data: Sequence[Choice], search: Search) -> MetricsByLength:
    """The metrics of short and of long texts."""
    eval_data = prepare_evaluation(run.config, validation_data(run, data), run.tokenizers)
    return run.pipeline.evaluate_by_length(eval_data, run.model, search=search)


def validation_data(run: "Run", data: Sequence[Choice] = (), *, test: bool = False) -> Data:
    """The data at the given paths, or else the validation or the test data of the run."""
    config = run.config
    if test and data:
        raise ConfigError("give other data, or `test` for the run's own test split, not both")
    kind = run._task_class("be evaluated").data_kind
    if data:
        other_data: Data = open_validation(
            data, kind, lower=config.data.lower, columns=column_settings(config.data)
        )
        return other_data
    if config.data.path is None and config.data.source is None:
        raise ConfigError(
            "this run has no validation data, because it was imported or merged; give the data to "
            "evaluate on"
        )
    training, validation = open_split(config, is_new=False)
    run.folder.check_data(data_fingerprint(training, validation))
    if not test:
        return cast(Data, validation)
    if getattr(validation, "test", None) is None:
        raise ConfigError(
            "the data of this run has no test split; only a time series with data.split=[…, …, …] "
            "and an archive of strokes with test_ arrays have one; to evaluate other data: regard "
            "evaluate RUN DATA"
        )
    return cast(Data, validation.test)


def _prepare(
    run: "Run",
    data: Sequence[Choice],
    stride: int | None,
    progress: Progress | None,
    *,
    test: bool = False,
) -> EvalData:
    config = run.config
    if stride is not None:
        config = replace(config, train=replace(config.train, evaluate_stride=stride))
    validation = validation_data(run, data, test=test)
    eval_data = prepare_evaluation(config, validation, run.tokenizers, progress)
    if stride is not None and eval_data.stride is None:
        kind = kind_of(config.task)[0]
        raise ConfigError(
            f"a stride is for the windows of a language model; task={kind!r} has none"
        )
    if data and (unknown := eval_data.unknown_tokens):
        warnings.warn(
            f"{unknown:,} of {eval_data.validation_size:,} tokens of this text are not in the "
            "vocabulary of the run; each is predicted as one unknown token, which makes "
            "bits_per_byte too low",
            RegardWarning,
            stacklevel=4,
        )
    if run.device.type == "cpu":
        keep_freed_memory()
    return eval_data


def _store(run: "Run", evaluation: Evaluation) -> None:
    """Store an evaluation in the folder of the run, with the metrics that training logs."""
    logged = run.folder.best_metrics().keys()  # without BLEU, chrF and exact match of translations
    if not logged:  # an imported run, for which no metrics were logged
        return
    metrics = {name: value for name, value in evaluation.metrics.items() if name in logged}
    with suppress(OSError, CheckpointError):  # a folder that cannot be written
        run.folder.save_evaluation(replace(evaluation, metrics=metrics))
