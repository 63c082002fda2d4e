"""The training loop: a generator that takes one optimizer step per iteration."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from regard.accel.cuda_graph import CudaGraphUpdate, Update
from regard.data.batch import Batch
from regard.seeds import step_seed
from regard.training.parallel.strategy import Objective, ParallelStrategy, SingleProcess


@dataclass(frozen=True, slots=True)
class Step:
    """The results of one step, as device tensors: reading them synchronizes."""

    number: int
    loss: Tensor  # mean over the step's targets
    grad_norm: Tensor
    lr: float
    targets: Tensor
    skipped: Tensor  # 1.0 if loss or gradient was not finite and the weights were not changed


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
    before_step: Callable[[int], None] = lambda number: None,
) -> Iterator[Step]:
    """Take one optimizer step per `accumulate` micro-batches and yield its results.

    Gradient accumulation is exact: the gradient is that of sum(loss) / sum(targets) over the
    whole step, so splitting a batch into micro-batches only saves memory. Logging, evaluation,
    checkpoints and stopping are up to the caller. The optimizers must skip the update where
    `found_inf` is 1, as `Muon` and torch's fused optimizers do. With several ranks each has its
    own batches; sums and norms are over all ranks. DDP and FSDP average gradients over ranks, so
    the loss is multiplied by the world size.
    `before_step` is called with the number of each step, before its forward pass; a group of an
    optimizer may have a factor `lr_scale` of its learning rate.
    With `capture`, steps are captured as CUDA graphs and replayed, which saves small models the
    time to launch kernels.
    """
    strategy = SingleProcess(objective) if strategy is None else strategy
    ranks, device = strategy.ranks, next(objective.parameters()).device
    param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def update(micro_batches: Sequence[Batch]) -> tuple[Tensor, ...]:
        counts = torch.stack([objective.task.count(batch) for batch in micro_batches])
        targets = strategy.all_reduce_sum(count_on(device, counts.sum())).clamp_min(1)
        total = torch.zeros((), device=device)
        for index, batch in enumerate(micro_batches, 1):
            with strategy.sync_gradients(index == len(micro_batches)):
                with autocast():
                    loss = strategy.loss(batch)
                (loss * ranks.world_size / targets).backward()
            total += loss.detach()
        total = strategy.all_reduce_sum(total)
        norm = strategy.clip_gradients(clip)
        skipped = (~(torch.isfinite(norm) & torch.isfinite(total))).float()
        for optimizer in optimizers:
            optimizer.found_inf = skipped  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total / targets, norm, targets, skipped

    run_update: Update = update
    if capture:
        run_update = CudaGraphUpdate(update)
        for group in param_groups:
            group["lr"] = torch.tensor(group["lr"], device=device)
    stream = iter(batches)
    number = start
    while micro_batches := list(islice(stream, accumulate)):
        if not objective.model.training:  # the caller may have evaluated
            objective.train()
        before_step(number)
        for group in param_groups:
            group_lr = lr(number) * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group_lr)
            else:
                group["lr"] = group_lr
        _seed_generators(step_seed(seed, number, ranks.rank), device)  # for dropout
        mean, norm, targets, skipped = run_update(micro_batches)
        yield Step(number, mean, norm, lr(number), targets, skipped)
        number += 1


def _seed_generators(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the CPU and `device` only: seeding all devices takes 0.3 ms."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def count_on(device: torch.device, count: Tensor) -> Tensor:
    """A count of targets on the device of the model; a task may count on the host.

    It is filled in, not copied: a copy cannot be captured in a CUDA graph.
    """
    if count.device == device or count.device.type != "cpu":
        return count
    return torch.full((), int(count), dtype=count.dtype, device=device)
