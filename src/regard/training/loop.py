"""The training loop: a generator that takes one optimizer step per iteration.

`ParallelStrategy` is the interface between the loop and the ranks, here for one process. DDP and
FSDP are in `training/parallel/strategy.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.accel import compile_for_training
from regard.accel.cuda_graph import CudaGraphTrainingStep, TrainingStep
from regard.data.batch import Batch
from regard.models.build import load_weights, weights
from regard.seeds import step_seed
from regard.tasks import Task
from regard.training.parallel.ranks import SINGLE, Ranks, UnscoredRow

T = TypeVar("T")


class Objective(nn.Module):
    """A model and its task as one module from batch to loss, for torch.compile and DDP/FSDP."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Batch) -> Float[Tensor, ""]:
        """The summed loss; 0 for an `UnscoredRow`."""
        if isinstance(batch, UnscoredRow):
            return 0.0 * self.task.loss(self.model, batch.row)
        return self.task.loss(self.model, batch)

    def count(self, batch: Batch) -> Int[Tensor, ""]:
        """The number of scored targets; 0 for an `UnscoredRow`."""
        if isinstance(batch, UnscoredRow):
            return torch.zeros_like(self.task.count(batch.row))
        return self.task.count(batch)


class ParallelStrategy:
    """The part of training that depends on the number of ranks; this class is for one rank."""

    shard = (0, 1)  # index of the shard that this rank stores, and number of shards

    def __init__(self, objective: Objective, ranks: Ranks = SINGLE) -> None:
        self.objective, self.ranks = objective, ranks
        self.local_model: nn.Module = objective.model  # holds the parameters this rank updates
        self.loss: Callable[[Batch], Tensor] = objective

    @property
    def is_sharded(self) -> bool:
        """Whether this rank stores only a shard of each tensor."""
        return self.shard[1] > 1

    def compile(self, *, float8: bool = False) -> None:
        """Compile the loss: a function, so that no parameter name changes."""
        self.loss = compile_for_training(self.loss, self.objective.model, float8=float8)

    def attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Give the optimizers access to the shards of other ranks, if they need it."""

    def sync_gradients(self, enabled: bool) -> AbstractContextManager[object]:
        """A context in which the backward pass all-reduces gradients only if `enabled`.

        With gradient accumulation, it is enabled for the last micro-batch of a step only.
        """
        return nullcontext()

    def local_batch(self, batch: Callable[[int], Batch], accumulate: int, index: int) -> Batch:
        """The micro-batch `index` of this rank; all ranks together have `accumulate` per step."""
        return batch(index)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        return tensor

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        """The maximum of each number over all ranks."""
        return numbers

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradient to `max_norm`, unless that is 0; returns the norm before clipping."""
        parameters = [p for p in self.local_model.parameters() if p.requires_grad]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm else torch.inf)

    def with_full_weights(self, function: Callable[[nn.Module], T]) -> T | None:
        """Call a function on the unsharded model; None on ranks that are not needed for it."""
        return function(self.objective.model) if self.ranks.is_rank0 else None

    def local_weights(self) -> dict[str, Tensor]:
        """The weights, or shards of weights, that this rank stores."""
        return weights(self.objective.model)

    def full_weights(self) -> dict[str, Tensor]:
        """All weights, on rank 0; every rank must call this."""
        return weights(self.objective.model)

    def load(self, tensors: Mapping[str, Tensor], path: str) -> None:
        """Load the saved weights, or shards of weights, that this rank stores."""
        load_weights(self.objective.model, tensors, path)


class SingleProcess(ParallelStrategy):
    """One process trains the whole model."""


@dataclass(frozen=True, slots=True)
class Step:
    """The results of one step, as device tensors: reading them synchronizes."""

    index: int  # counted from 0
    loss: Tensor  # mean over the step's targets
    grad_norm: Tensor
    lr: float
    num_targets: Tensor
    skipped: Tensor  # 1.0 if loss or gradient was not finite and the weights were not changed


def train(
    objective: Objective,
    batches: Iterable[Batch],
    optimizers: list[torch.optim.Optimizer],
    lr: Callable[[int], float],
    *,
    accumulate: int = 1,
    max_grad_norm: float = 1.0,
    seed: int = 1,
    start: int = 0,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    strategy: ParallelStrategy | None = None,
    capture: bool = False,
    before_step: Callable[[int], None] = lambda index: None,
) -> Iterator[Step]:
    """Take one optimizer step per `accumulate` micro-batches and yield its results.

    Gradient accumulation is exact: the gradient is that of sum(loss) / sum(targets) over the
    whole step, so splitting a batch into micro-batches only saves memory. Logging, evaluation,
    checkpoints and stopping are up to the caller. The optimizers must skip the update where
    `found_inf` is 1, as `Muon` and torch's fused optimizers do. With several ranks, each rank has
    its own batches; sums and norms are over all ranks. DDP and FSDP average gradients over ranks,
    so the loss is multiplied by the world size.
    `before_step` is called with the index of each step, before its forward pass. The learning rate
    of a parameter group is multiplied by its entry `lr_scale`, if it has one.
    With `capture`, steps are captured as CUDA graphs and replayed, without the overhead of
    launching kernels, which is a large part of a step of a small model.
    """
    strategy = SingleProcess(objective) if strategy is None else strategy
    ranks, device = strategy.ranks, next(objective.parameters()).device
    param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def training_step(micro_batches: Sequence[Batch]) -> tuple[Tensor, ...]:
        counts = torch.stack([objective.count(batch) for batch in micro_batches])
        targets = strategy.all_reduce_sum(count_on_device(device, counts.sum())).clamp_min(1)
        total = torch.zeros((), device=device)
        for number, batch in enumerate(micro_batches, 1):
            with strategy.sync_gradients(number == len(micro_batches)):
                with autocast():
                    loss = strategy.loss(batch)
                (loss * ranks.world_size / targets).backward()
            total += loss.detach()
        total = strategy.all_reduce_sum(total)
        norm = strategy.clip_gradients(max_grad_norm)
        skipped = (~(torch.isfinite(norm) & torch.isfinite(total))).float()
        for optimizer in optimizers:
            optimizer.found_inf = skipped  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total / targets, norm, targets, skipped

    run_step: TrainingStep = training_step
    if capture:
        run_step = CudaGraphTrainingStep(training_step)
        for group in param_groups:
            group["lr"] = torch.tensor(group["lr"], device=device)
    stream = iter(batches)
    index = start
    while micro_batches := list(islice(stream, accumulate)):
        if not objective.model.training:  # the caller may have evaluated
            objective.train()
        before_step(index)
        for group in param_groups:
            group_lr = lr(index) * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group_lr)
            else:
                group["lr"] = group_lr
        _seed_generators(step_seed(seed, index, ranks.rank), device)  # for dropout
        loss, norm, targets, skipped = run_step(micro_batches)
        yield Step(index, loss, norm, lr(index), targets, skipped)
        index += 1


def _seed_generators(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the CPU and `device` only: seeding all devices takes 0.3 ms."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def count_on_device(device: torch.device, count: Tensor) -> Tensor:
    """Move a count of targets to the device of the model; a task may count on the CPU.

    `torch.full` writes the value on the device: a copy could not be captured in a CUDA graph.
    """
    if count.device == device or count.device.type != "cpu":
        return count
    return torch.full((), int(count), dtype=count.dtype, device=device)
