"""The training loop: a generator that learns while it is iterated."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from regard.accel.cuda_graph import Captured, Update
from regard.data.batch import Batch
from regard.seeds import step_seed
from regard.tasks.base import Objective
from regard.training.parallel.strategy import ParallelStrategy, SingleProcess


@dataclass(frozen=True, slots=True)
class Step:
    """What happened in one step, as tensors: nobody waits for the device here."""

    number: int
    loss: Tensor  # mean over the step's targets
    grad_norm: Tensor
    lr: float
    targets: Tensor
    skipped: Tensor  # 1.0 where loss or gradient was not finite and the weights were left alone


def train(
    objective: Objective,
    batches: Iterable[Batch],
    optimizers: list[torch.optim.Optimizer],
    lr: Callable[[int], float],
    *,
    accumulate: int = 1,
    clip: float = 1.0,
    seed: int = 1,
    start: int = 0,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    strategy: ParallelStrategy | None = None,
    capture: bool = False,
) -> Iterator[Step]:
    """Take one optimizer step per `accumulate` batches; yield what happened, for as long as asked.

    The gradient is that of sum(loss) / sum(targets) over the whole step, so splitting a batch
    into micro-batches changes nothing but memory. Logging, evaluation, checkpoints and
    stopping belong to whoever iterates. The optimizers must heed `found_inf`, as ours and
    torch's fused ones do. Of several ranks, each has its own batches, and sums and norms are
    over all; their strategy averages gradients, hence the factor. On CUDA, `capture` replays
    steps from graphs, which frees small models from the time it takes to launch them.
    """
    strategy = SingleProcess(objective) if strategy is None else strategy
    ranks, device = strategy.ranks, next(objective.parameters()).device
    parts = [part for optimizer in optimizers for part in optimizer.param_groups]

    def update(group: Sequence[Batch]) -> tuple[Tensor, ...]:
        counts = torch.stack([objective.task.count(batch) for batch in group])
        targets = ranks.sum(counts.sum()).clamp_min(1)
        total = torch.zeros((), device=device)
        for place, batch in enumerate(group, 1):
            with strategy.syncing(place == len(group)):
                with autocast():
                    summed = strategy.loss(batch)
                (summed * ranks.size / targets).backward()
            total += summed.detach()
        total = ranks.sum(total)
        norm = strategy.clip(clip)
        skipped = (~(torch.isfinite(norm) & torch.isfinite(total))).float()
        for optimizer in optimizers:
            optimizer.found_inf = skipped  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total / targets, norm, targets, skipped

    act: Update = update
    if capture:
        act = Captured(update)
        for part in parts:
            part["lr"] = torch.tensor(part["lr"], device=device)
    stream = iter(batches)
    number = start
    while group := list(islice(stream, accumulate)):
        if not objective.model.training:  # whoever iterates may have evaluated
            objective.train()
        for part in parts:
            if isinstance(part["lr"], Tensor):
                part["lr"].fill_(lr(number))
            else:
                part["lr"] = lr(number)
        _seed(step_seed(seed, number, ranks.rank), device)  # so dropout is a function of them
        mean, norm, targets, skipped = act(group)
        yield Step(number, mean, norm, lr(number), targets, skipped)
        number += 1


def _seed(value: int, device: torch.device) -> None:
    """As `torch.manual_seed`, which takes 0.3 ms, for the devices in use."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
    elif device.type == "mps":
        torch.mps.manual_seed(value)
