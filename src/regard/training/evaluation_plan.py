"""The plan of the evaluations of a run: their number, their targets and their cost."""

from dataclasses import dataclass, replace

from regard.config import RunConfig, TrainConfig, kind_of
from regard.models.cost import BACKWARD_FLOPS_RATIO
from regard.pipelines.base import TrainingData
from regard.tasks import TASKS

MAX_COST_FRACTION = 0.1  # of the cost of a run, for its evaluations during training
MAX_EVALUATIONS = 10  # besides the one before the first step
MAX_TARGETS = 200_000  # of an evaluation during training
MIN_TARGETS_IN_STEPS = 8  # minimum targets of an evaluation, in units of the targets of a step


def with_best_metric(config: RunConfig) -> RunConfig:
    """Set `train.best_metric` to the default metric of the task, unless it is set."""
    task = TASKS.get(kind_of(config.task)[0])
    if config.train.best_metric is not None or task is None:
        return config
    return replace(config, train=replace(config.train, best_metric=task.best_metric))


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """When a run is evaluated, and on how many validation targets."""

    every: int  # steps between two evaluations
    at_start: bool  # also before the first step
    limit: int | None  # targets of an evaluation; None: all
    cost: float  # of one evaluation, in training steps


def plan_evaluations(settings: TrainConfig, data: TrainingData) -> EvaluationPlan:
    """Plan an evaluation at the start and ten more, which together cost at most a tenth of the run.

    The cost is counted in forward passes per target: 3 in a training step (the backward pass
    costs 2), context / stride in an evaluation. If all evaluations, of 200,000 targets each, cost
    too much, each gets fewer targets, at least as many as 8 steps have. If they still cost too
    much, there are fewer evaluations, at least one at the start and one at the end.
    `train.evaluate_every` and `train.evaluate_targets` take precedence if they are set.
    """
    steps, every = settings.steps, settings.evaluate_every
    step_targets = settings.accumulate * data.task.evaluation_count(data.batch(0))
    passes = 1 if data.stride is None else data.model.context / data.stride  # per target
    budget = MAX_COST_FRACTION * (1 + BACKWARD_FLOPS_RATIO) * steps * step_targets / passes
    counts = [MAX_EVALUATIONS, 5, 2, 1] if every is None else [-(-steps // every)]
    limit = settings.evaluate_targets
    if limit is None:
        evaluations = counts[0] + (every is None)
        affordable = max(int(budget / evaluations), MIN_TARGETS_IN_STEPS * step_targets)
        limit = min(MAX_TARGETS, affordable)
    targets = data.targets(limit)
    count = next((n for n in counts if (n + 1) * targets <= budget), counts[-1])
    every = -(-steps // count) if every is None else every
    cost = targets * passes / ((1 + BACKWARD_FLOPS_RATIO) * step_targets)
    at_start = settings.evaluate_every is None
    limit = None if targets == data.validation_targets else limit
    return EvaluationPlan(every, at_start, limit, cost)
