"""What a run has become so far: how good it is, what it cost, and its curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.config import RunConfig, kind_of
from regard.errors import CheckpointError
from regard.files.safetensors import read_header
from regard.files.untrusted import read_json
from regard.models.build import resolve
from regard.models.cost import cost
from regard.training.baseline import read_baseline
from regard.training.events import BaselineEvaluated
from regard.training.storage.run_folder import RunFolder

LARGEST = 1e100  # of the numbers that are told; what is more, or no number, is left out
Points = list[tuple[int, float]]  # step and value


@dataclass(frozen=True, slots=True)
class History:
    """A run as its folder tells it, finished or not."""

    path: Path
    config: RunConfig
    metrics: dict[str, float]  # held out, of the model that was kept
    parameters: int  # of a model that counts, the numbers it keeps
    step: int  # the last one that was logged
    targets: int  # learned from
    seconds: float | None  # of training and judging; None where nobody took the time
    flops: float | None  # None where padding or masking makes it a guess
    losses: Points  # of every step
    held_out: dict[str, Points]  # of every metric
    counted: BaselineEvaluated | None  # what n-grams of the same text get, where that was asked for


def read_history(path: Path | str) -> History:
    """Read what a run has logged; it may still be going on."""
    folder = RunFolder(path)
    config = folder.load_config()
    rows = folder.rows()
    counted = cost(resolve(config.model))
    targets = sum(row.get("targets", 0) for row in rows)
    held_out: dict[str, Points] = {}
    for row in rows:
        for name, value in row.get("validation", {}).items():
            if _is_number(value):
                held_out.setdefault(name, []).append((row["step"], value))
    tokens = _tokens_per_target(config)
    flops = None if tokens is None else targets * tokens * counted.training_flops_per_token
    return History(
        path=folder.path,
        config=config,
        metrics=folder.kept_metrics(),
        parameters=counted.parameters or kept(folder),
        step=max((row["step"] for row in rows), default=0),
        targets=targets,
        seconds=spent(folder),
        flops=flops or None,
        losses=[(row["step"], row["loss"]) for row in rows if _is_number(row.get("loss"))],
        held_out=held_out,
        counted=read_baseline(folder),
    )


def spent(folder: RunFolder) -> float | None:
    """How many seconds went into a run, over all its sessions."""
    try:
        seconds: Any = read_json(folder.clock).get("seconds")
    except CheckpointError:
        return None
    return float(seconds) if _is_number(seconds) else None


def kept(folder: RunFolder) -> int:
    """How many numbers a model that counts has kept; none where it has not counted yet."""
    try:
        return sum(math.prod(each.shape) for each in read_header(folder.model).values())
    except OSError:
        return 0


def thinned(points: Points, most: int) -> Points:
    """Points so few that a picture can show them, each the mean of its neighbours.

    >>> thinned([(1, 4.0), (2, 2.0), (3, 1.0)], most=2)
    [(2, 3.0), (3, 1.0)]
    """
    size = -(-len(points) // most)
    groups = [points[at : at + size] for at in range(0, len(points), size)] if size else []
    return [(group[len(group) // 2][0], _mean(group)) for group in groups]


def _mean(points: Sequence[tuple[int, float]]) -> float:
    return math.fsum(value for _, value in points) / len(points)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def _tokens_per_target(config: RunConfig) -> int | None:
    """How many tokens a model reads for a target; None where that varies from row to row."""
    if kind_of(config.task)[0] == "causal":
        return 1
    if config.model.get("family") == "vision":
        return int(resolve(config.model).context)
    return None
