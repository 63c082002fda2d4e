"""Evaluations of a run: what they cost, how many there are, and the one at its end."""

from dataclasses import dataclass, replace

from regard.config import RunConfig, TrainConfig, kind_of
from regard.pipelines.base import TrainingData
from regard.tasks import TASKS

SHARE = 0.1  # of the cost of a run, at most, for its evaluations while training
EVALUATIONS = 10  # after the start, at most
MAX_TARGETS = 200_000  # of an evaluation while training
MIN_STEPS = 8  # an evaluation has at least as many targets as this number of steps
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

    The cost is counted in forward passes of a target: a training step takes 3 (the backward pass
    costs 2), an evaluation context / stride. Where ten evaluations of 200,000 targets are too
    many, they get fewer targets, at least as many as 8 steps have. Where that is still too many,
    there are fewer evaluations, at least one at the start and one at the end.
    `train.evaluate_every` and `train.evaluate_targets` are kept where they are set.
    """
    steps, every = settings.steps, settings.evaluate_every
    step_targets = settings.accumulate * data.task.limit_count(data.batch(0))
    reads = 1 if data.stride is None else data.model.context / data.stride
    budget = SHARE * (1 + BACKWARD) * steps * step_targets / reads
    counts = [EVALUATIONS, 5, 2, 1] if every is None else [-(-steps // every)]
    limit = settings.evaluate_targets
    if limit is None:
        evaluations = counts[0] + (every is None)
        fitting = max(int(budget / evaluations), MIN_STEPS * step_targets)
        limit = min(MAX_TARGETS, fitting)
    targets = data.targets(limit)
    count = next((n for n in counts if (n + 1) * targets <= budget), counts[-1])
    every = -(-steps // count) if every is None else every
    cost = targets * reads / ((1 + BACKWARD) * step_targets)
    at_start = settings.evaluate_every is None
    limit = None if targets == data.validation_targets else limit
    return EvaluationPlan(every, at_start, limit, cost)
