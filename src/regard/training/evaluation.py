"""Evaluations of a run: what they cost, how many there are, and the one at its end."""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from regard import pipelines
from regard.config import TrainConfig
from regard.pipelines.base import EvalData
from regard.training.setup.device import autocast

TIMED_SECONDS = 0.25  # an evaluation that takes at least this long is timed


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
