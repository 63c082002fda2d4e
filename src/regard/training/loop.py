"""The training loop: a generator that learns while it is iterated."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from regard.data.batch import Batch
from regard.tasks.base import Objective


@dataclass(frozen=True, slots=True)
class Step:
    """What happened in one step, as tensors: nobody waits for the device here."""

    number: int
    loss: Tensor  # mean over the step's targets
    grad_norm: Tensor
    rate: float
    targets: Tensor
    skipped: Tensor  # 1.0 where the gradient was not finite and the weights were left alone


def train(
    objective: Objective,
    batches: Iterable[Batch],
    optimizers: list[torch.optim.Optimizer],
    rate: Callable[[int], float],
    *,
    accumulate: int = 1,
    clip: float = 1.0,
    seed: int = 1,
    start: int = 0,
    loss: Callable[[Batch], Tensor] | None = None,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Step]:
    """Take one optimizer step per `accumulate` batches; yield what happened, for as long as asked.

    The gradient is that of sum(loss) / sum(targets) over the whole step, so splitting a batch
    into micro-batches changes nothing but memory. Logging, evaluation, checkpoints and
    stopping belong to whoever iterates. `loss` is the objective itself, or its compiled twin.
    The optimizers must heed `found_inf`, as ours and torch's fused ones do.
    """
    loss = objective if loss is None else loss
    parameters = [p for p in objective.parameters() if p.requires_grad]
    stream = iter(batches)
    number = start
    while group := list(islice(stream, accumulate)):
        if not objective.model.training:  # whoever iterates may have evaluated
            objective.train()
        targets = torch.stack([objective.task.count(batch) for batch in group]).sum().clamp_min(1)
        _seed(_mix(seed, number), targets.device)  # dropout is a function of (seed, step)
        total = torch.zeros((), device=targets.device)
        for batch in group:
            with autocast():
                summed = loss(batch)
            (summed / targets).backward()
            total += summed.detach()
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip if clip else torch.inf)
        skipped = (~torch.isfinite(norm)).float()
        for optimizer in optimizers:
            for part in optimizer.param_groups:
                part["lr"] = rate(number)
            optimizer.found_inf = skipped  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield Step(number, total / targets, norm, rate(number), targets, skipped)
        number += 1


def _seed(value: int, device: torch.device) -> None:
    """As `torch.manual_seed`, which takes 0.3 ms, for the devices in use."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
    elif device.type == "mps":
        torch.mps.manual_seed(value)


def _mix(seed: int, step: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % (1 << 63)
