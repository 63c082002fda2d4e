"""The history of a run, read from its log: metrics, cost and curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.config import RunConfig, kind_of, make
from regard.errors import CheckpointError
from regard.files.safetensors import read_header
from regard.files.untrusted import read_json
from regard.models.build import is_fitted_without_gradients, resolve
from regard.models.cost import cost
from regard.tasks import TASKS
from regard.training.baseline import read_baselines, read_ngram_baseline
from regard.training.events import NGramBaselineEvaluated
from regard.training.storage.evaluation import Evaluation
from regard.training.storage.run_folder import RunFolder

MAX_VALUE = 1e100  # larger numbers in logs are left out of curves
Points = list[tuple[int, float]]  # step and value


@dataclass(frozen=True, slots=True)
class History:
    """The log of a run, finished or not."""

    path: Path
    config: RunConfig
    evaluation: Evaluation  # of the best model
    parameters: int  # of a model fitted without gradients, the number of values in its file
    step: int  # the last logged step
    targets: int  # number of targets trained on
    seconds: float | None  # of training and evaluation; None if unknown
    flops: float | None  # None where it depends on padding or masking
    losses: Points  # of every step
    validation: dict[str, Points]  # of every metric
    activations: dict[str, Points]  # of every statistic of `train.log`, as NAME.STATISTIC
    baseline: NGramBaselineEvaluated | None  # of n-grams
    baselines: dict[str, dict[str, float]]  # their metrics by name, on all validation data

    @property
    def is_fitted_without_gradients(self) -> bool:
        """Whether the model was fitted without gradients, in one call of `fit`."""
        return is_fitted_without_gradients(self.config.model["family"])

    @property
    def metrics(self) -> dict[str, float]:
        """The validation metrics of the best model."""
        return self.evaluation.metrics


def read_history(path: Path | str) -> History:
    """Read the log of a run, which may still be training."""
    folder = RunFolder(path)
    config = folder.load_config()
    rows = folder.rows()
    model_cost = cost(resolve(config.model))
    targets = sum(row.get("targets", 0) for row in rows)
    validation: dict[str, Points] = {}
    activations: dict[str, Points] = {}
    for row in rows:
        for name, value in row.get("validation", {}).items():
            _add_point(validation, name, row["step"], value)
        for hook_point, statistics in row.get("activations", {}).items():
            for name, value in statistics.items():
                _add_point(activations, f"{hook_point}.{name}", row["step"], value)
    tokens = _tokens_per_target(config)
    flops = None if tokens is None else targets * tokens * model_cost.training_flops_per_token
    return History(
        path=folder.path,
        config=config,
        evaluation=folder.load_evaluation(),
        parameters=model_cost.parameters or stored_parameters(folder),
        step=max((row["step"] for row in rows), default=0),
        targets=targets,
        seconds=read_seconds(folder),
        flops=flops or None,
        losses=[(row["step"], row["loss"]) for row in rows if _is_number(row.get("loss"))],
        validation=validation,
        activations=activations,
        baseline=read_ngram_baseline(folder),
        baselines=read_baselines(folder),
    )


def _add_point(curves: dict[str, Points], name: str, step: int, value: Any) -> None:
    if _is_number(value):
        curves.setdefault(name, []).append((step, value))


def read_seconds(folder: RunFolder) -> float | None:
    """The seconds that a run has taken, over all its sessions."""
    try:
        seconds: Any = read_json(folder.clock).get("seconds")
    except CheckpointError:
        return None
    return float(seconds) if _is_number(seconds) else None


def stored_parameters(folder: RunFolder) -> int:
    """The number of values in model.safetensors; 0 if it does not exist yet."""
    try:
        return sum(math.prod(entry.shape) for entry in read_header(folder.model).values())
    except OSError:
        return 0


def downsample(points: Points, max_points: int) -> Points:
    """At most `max_points` points, each the mean of neighbouring ones.

    >>> downsample([(1, 4.0), (2, 2.0), (3, 1.0)], max_points=2)
    [(2, 3.0), (3, 1.0)]
    """
    size = -(-len(points) // max_points)
    groups = [points[i : i + size] for i in range(0, len(points), size)] if size else []
    return [(group[len(group) // 2][0], _mean(group)) for group in groups]


def _mean(points: Sequence[tuple[int, float]]) -> float:
    return math.fsum(value for _, value in points) / len(points)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < MAX_VALUE


def _tokens_per_target(config: RunConfig) -> int | None:
    """How many tokens a model reads per target; None where that varies from row to row."""
    if kind_of(config.task)[0] not in TASKS:
        return None
    return make(config.task, TASKS, "task").tokens_per_target(resolve(config.model))
