"""Evaluations of a run: what they cost, how many there are, and the one at its end."""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import nn

from regard import pipelines
from regard.config import RunConfig, TrainConfig, kind_of
from regard.pipelines.base import EvalData, TrainingData
from regard.tasks import TASKS
from regard.training.setup.device import autocast

TIMED_SECONDS = 0.25  # an evaluation that takes at least this long is timed


SHARE = 0.1  # of the cost of a run, at most, for its evaluations while training
EVALUATIONS = 10  # after the start, at most
MAX_TARGETS = 200_000  # of an evaluation while training
LEAST_STEPS = 8  # an evaluation has at least the targets of so many steps
BACKWARD = 2  # cost of a backward pass, in forward passes


def with_best_metric(config: RunConfig) -> RunConfig:
    """The settings with `train.best` of the task, where it is not set."""
    task = TASKS.get(kind_of(config.task)[0])
    if config.train.best is not None or task is None:
        return config
    return replace(config, train=replace(config.train, best=task.best_metric))


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """When a run is evaluated, and on how many validation targets."""

    every: int  # steps
    at_start: bool  # also before the first step
    limit: int | None  # targets; None: all
    cost: float  # of an evaluation, in steps


def plan_evaluations(settings: TrainConfig, data: TrainingData) -> EvaluationPlan:
    """Ten evaluations and one at the start, which together cost at most a tenth of the run.

    The cost is counted in targets: a step reads each three times (forward, and backward for twice
    that), an evaluation context / stride times. Where ten evaluations of 200,000 targets are too
    many, they get fewer targets, but no fewer than 8 steps have; then there are fewer of them, at
    least one at the start and one at the end. `train.evaluate_every` and `train.evaluate_tokens`
    are kept where they are set.
    """
    steps, every = settings.steps, settings.evaluate_every
    step_targets = settings.accumulate * data.task.limit_count(data.batch(0))
    reads = 1 if data.stride is None else data.model.context / data.stride
    budget = SHARE * (1 + BACKWARD) * steps * step_targets / reads
    counts = [EVALUATIONS, 5, 2, 1] if every is None else [-(-steps // every)]
    limit = settings.evaluate_tokens
    if limit is None:
        evaluations = counts[0] + (every is None)
        fitting = max(int(budget / evaluations), LEAST_STEPS * step_targets)
        limit = min(MAX_TARGETS, fitting)
    targets = data.targets(limit)
    count = next((n for n in counts if (n + 1) * targets <= budget), counts[-1])
    every = -(-steps // count) if every is None else every
    cost = targets * reads / ((1 + BACKWARD) * step_targets)
    at_start = settings.evaluate_every is None
    limit = None if targets == data.validation_targets else limit
    return EvaluationPlan(every, at_start, limit, cost)


@dataclass(frozen=True, slots=True)
class EvaluationTime:
    """How long evaluations of a run take on this machine."""

    seconds_per_target: float
    sample_seconds: float  # of the sample output that an evaluation while training shows
    targets: int  # of all validation data

    def seconds(self, limit: int | None = None) -> float:
        """The seconds of the metrics of all validation data, or of `limit` of its targets."""
        targets = self.targets if limit is None else min(limit, self.targets)
        return targets * self.seconds_per_target


def time_evaluation(
    data: EvalData, model: nn.Module, device: torch.device, settings: TrainConfig
) -> EvaluationTime:
    """Time evaluations of more and more targets, until one takes a quarter of a second."""
    context: AbstractContextManager[object] = autocast(settings, device)()

    def seconds(limit: int) -> float:
        started = time.perf_counter()
        pipelines.validation_metrics(data, model, device, limit)
        return time.perf_counter() - started

    training = model.training
    with context:
        limit = min(data.validation_targets, max(1, data.validation_targets // 256))
        seconds(limit)  # warm-up
        elapsed = seconds(limit)
        while elapsed < TIMED_SECONDS and limit < data.validation_targets:
            limit = min(2 * limit, data.validation_targets)
            elapsed = seconds(limit)
        started = time.perf_counter()
        pipelines.sample(data, model, settings.seed)
        sample_seconds = time.perf_counter() - started
    model.train(training)
    return EvaluationTime(elapsed / limit, sample_seconds, data.validation_targets)
