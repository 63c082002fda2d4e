"""`train.log`: statistics of activations at hook points, at every evaluation."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.errors import ConfigError, list_names
from regard.explain.trace import trace
from regard.nn.hook_point import HookPoint
from regard.tasks import Task
from regard.training.events import ActivationStatistics

_SUFFIX = "_hook"


def find_hook_points(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The paths of the hook points that match any of the patterns, in the order of the model.

    A pattern is a glob over the path with or without its suffix `_hook`: `layers.*.forget_gate`
    matches `layers.0.forget_gate_hook`. A pattern that matches no hook point is an error.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, HookPoint)]
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            known = list_names([name.removesuffix(_SUFFIX) for name in names]) or "none"
            raise ConfigError(
                f"train.log={pattern!r} matches no hook point of this model; hook points: {known}"
            )
    return [name for name in names if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(_SUFFIX), pattern)


@torch.no_grad()
def activation_statistics(
    model: nn.Module, task: Task, batches: Iterator[Batch], patterns: Sequence[str]
) -> ActivationStatistics:
    """Run the first of `batches` through the model; return statistics by hook point.

    They are measured in evaluation mode, with the EMA weights if `train.ema` is set, over all
    values of the activation, padding included. If a hook point is called several times, its last
    activation is used; a hook point that is not called is left out.

    mean    the mean of all values
    norm    the L2 norm of the vectors along the last axis, averaged over them
    zeros   the fraction of values that are exactly 0
    """
    names = find_hook_points(model, patterns)
    if not names:
        return {}
    model.eval()
    with ExitStack() as stack:
        traces = [(name, stack.enter_context(trace(model, name))) for name in names]
        task.loss(model, next(batches).to(next(model.parameters()).device))
    return {
        name.removesuffix(_SUFFIX): statistics(activations[name])
        for name, activations in traces
        if name in activations
    }


def statistics(x: Tensor) -> dict[str, float | None]:
    """The statistics of an activation by name; None where one is not finite."""
    x = x.detach().float()
    values = {
        "mean": x.mean(),
        "norm": torch.linalg.vector_norm(x, dim=-1).mean(),
        "zeros": (x == 0).float().mean(),
    }
    numbers = {name: float(value) for name, value in values.items()}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
