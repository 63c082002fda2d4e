"""The evaluation of a saved model: its metrics, and the targets they were computed on."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from regard.pipelines.base import EvalData
from regard.tasks.base import Task

FEW_TARGETS = 100  # with fewer targets, validation metrics are unreliable


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Metrics of the model in model.safetensors; stored in evaluation.json of the run."""

    metrics: dict[str, Any]
    evaluated_on: str = ""  # the targets, as "all 3,000 tokens, context 64, stride 32"
    targets: int | None = None  # validation targets that were evaluated; None: unknown
    total: int | None = None  # all validation targets
    data: str | None = None  # fingerprint of the validation data
    context: int | None = None  # of a language model: tokens of a window
    stride: int | None = None  # of a language model: tokens by which the windows advance

    @property
    def is_complete(self) -> bool:
        """Whether all validation data was evaluated."""
        return self.targets is not None and self.targets == self.total

    @property
    def overlap(self) -> Fraction:
        """The fraction of a window that overlaps the previous window."""
        if self.stride is None or self.context is None:
            return Fraction(0)
        return 1 - Fraction(self.stride, self.context)


def make_evaluation(data: EvalData, metrics: dict[str, Any], limit: int | None) -> Evaluation:
    """An `Evaluation` with these metrics, computed on all targets, or on `limit` of them."""
    targets, total, stride = data.targets(limit), data.validation_targets, data.stride
    windows = "" if stride is None else f", context {data.model.context:,}, stride {stride:,}"
    return Evaluation(
        metrics=metrics,
        evaluated_on=describe_targets(type(data.task), targets, total) + windows,
        targets=targets,
        total=total,
        data=data.validation_data.fingerprint(),
        context=None if stride is None else data.model.context,
        stride=stride,
    )


def few_targets_warning(task: type[Task], total: int | None) -> list[str]:
    """A line for the heading if the validation data has few targets."""
    if total is None or total >= FEW_TARGETS:
        return []
    name = task.target_name.removesuffix("s") if total == 1 else task.target_name
    return [f"warning    {describe_few(total, f'{name} to predict')}"]


def describe_few(count: int, unit: str) -> str:
    """A warning that the validation data is too small."""
    return f"the validation data has only {count} {unit}: its metrics are unreliable; add data"


def describe_targets(task: type[Task], targets: int | None, total: int | None) -> str:
    """How many targets were evaluated, as in "all 3,000 tokens"."""
    if targets is None or total is None:
        return "an unknown part of the validation data"
    return task.describe_part(targets, total) or f"all {total:,} {task.target_name}"
