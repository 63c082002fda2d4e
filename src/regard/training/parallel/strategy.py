"""Strategies for several ranks: they wrap the objective, and the model's code does not change.

Replicated     every rank has all weights; gradients are averaged (DDP, Li et al. 2020)
Sharded        every rank stores its rows of each weight, gradient and optimizer state, and
               gathers the weights of one block at a time (FSDP2, Zhao et al. 2023)
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard.accel import (
    attach_onednn_linear,
    attach_window_blocks,
    compile_for_training,
    training_path,
)
from regard.config import TrainConfig
from regard.data.batch import Batch
from regard.errors import CheckpointError
from regard.models.build import persistent_buffers
from regard.models.cost import training_bytes
from regard.nn.block import Block
from regard.pipelines.base import TrainingData
from regard.training.loop import Objective, ParallelStrategy, SingleProcess
from regard.training.optim import Muon
from regard.training.parallel import launch
from regard.training.parallel.ranks import Ranks, UnscoredRow
from regard.training.setup.device import (
    autocast,
    checkpoint_activations,
    free_memory,
)

T = TypeVar("T")


class _Distributed(ParallelStrategy):
    """Several ranks: each takes its part of a batch, and sums and maxima are all-reduced."""

    def local_batch(self, batch: Callable[[int], Batch], accumulate: int, index: int) -> Batch:
        return self.ranks.local_batch(batch, accumulate, index)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return self.ranks.all_reduce_sum(tensor)

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        return tuple(self.ranks.all_reduce_max(*numbers))


class Replicated(_Distributed):
    """Distributed data parallel (DDP): every rank has all weights."""

    def __init__(self, objective: Objective, ranks: Ranks, batch: Batch) -> None:
        super().__init__(objective, ranks)
        row = UnscoredRow.of(batch).to(next(objective.parameters()).device)
        _freeze_unused(objective, row)
        self.loss = self.ddp = DistributedDataParallel(objective, gradient_as_bucket_view=True)
        # DDP orders its all-reduces by the arrival of the first gradients. A first step with zero
        # gradients makes a resumed run use the same order as an uninterrupted one, to the bit.
        _warm_up(self.ddp, row)

    def sync_gradients(self, enabled: bool) -> AbstractContextManager[object]:
        """Use DDP's `no_sync`, which must surround the forward pass too."""
        return nullcontext() if enabled else self.ddp.no_sync()


def _warm_up(module: nn.Module, row: Batch) -> None:
    """Run forward and backward on a row that is not scored: all gradients are 0."""
    module(row).backward()
    module.zero_grad(set_to_none=True)


def _freeze_unused(objective: Objective, batch: Batch) -> None:
    """Freeze parameters that the loss does not depend on: DDP would wait for their gradients."""
    parameters = [p for p in objective.parameters() if p.requires_grad]
    grads = torch.autograd.grad(objective(batch), parameters, allow_unused=True)
    for p, grad in zip(parameters, grads, strict=True):
        p.requires_grad_(grad is not None)


class Sharded(_Distributed):
    """Fully sharded data parallel (FSDP2): every rank stores its rows of each parameter.

    Optimizers, EMA and checkpoints see those rows as plain tensors under the names of the full
    parameters; all of them but Muon work element by element.
    """

    def __init__(
        self,
        objective: Objective,
        ranks: Ranks,
        device: torch.device,
        batch: Batch,
        *,
        bfloat16: bool,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (  # importing this takes two thirds of a second
            MixedPrecisionPolicy,
            fully_shard,
        )

        super().__init__(objective, ranks)
        mesh = init_device_mesh(device.type, (ranks.world_size,))
        policy = MixedPrecisionPolicy()
        if bfloat16:
            # the inputs of blocks keep their dtype: bfloat16 would round the rotary positions
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        self.blocks = [module for module in objective.modules() if isinstance(module, Block)]
        self.fsdp_modules: list[Any] = [
            fully_shard(module, mesh=mesh, mp_policy=policy) for module in (*self.blocks, objective)
        ]
        self.shard = (ranks.rank, ranks.world_size)
        self.sharded_parameters: dict[str, Any] = dict(objective.model.named_parameters())
        self.local_model = self.shards = LocalShards(self.sharded_parameters, ranks)
        self.buffers = persistent_buffers(objective.model)  # not sharded
        # FSDP2 makes the module of the first forward pass its root. That must be the objective, and
        # an evaluation calls the model only.
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            _warm_up(objective, UnscoredRow.of(batch).to(device))

    def compile(self, *, float8: bool = False) -> None:
        """Compile block by block: between blocks, weights are gathered and freed."""
        assert not float8, "require_float8 refuses it"
        for block in self.blocks:
            block.forward = _compile_training_forward(block)  # type: ignore[method-assign]

    def attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Muon orthogonalizes full matrices, so it must gather their rows."""
        for optimizer in optimizers:
            if isinstance(optimizer, Muon):
                optimizer.shards = self.shards

    def sync_gradients(self, enabled: bool) -> AbstractContextManager[object]:
        """Accumulate unsharded gradients until the last micro-batch."""
        self.fsdp_modules[-1].set_requires_gradient_sync(enabled)
        return nullcontext()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Assign the sharded gradients to the local rows; clip them by the norm over all ranks."""
        for (_, local), p in zip(
            self.local_model.named_parameters(), self.sharded_parameters.values(), strict=True
        ):
            local.grad, p.grad = None if p.grad is None else p.grad.to_local(), None
        parameters = [p for p in self.local_model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])  # type: ignore[misc]
        norm = self.ranks.all_reduce_sum(norm.square()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm if max_norm else torch.inf, norm)
        return norm

    def with_full_weights(self, function: Callable[[nn.Module], T]) -> T | None:
        """Gather all weights at once, since a function may use them in any order.

        All ranks call it: otherwise they would not agree on the next collective.
        """
        for module in self.fsdp_modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            return function(self.objective.model)
        finally:
            for module in self.fsdp_modules:
                module.reshard()
                is_root = module is self.fsdp_modules[-1]
                module.set_reshard_after_forward(not is_root, recurse=False)

    def local_weights(self) -> dict[str, Tensor]:
        """The rows of this rank, of parameters and of buffers."""
        rows = {name: p.detach() for name, p in self.local_model.named_parameters()}
        return rows | {name: self._local_shard(buffer) for name, buffer in self.buffers.items()}

    def _local_shard(self, buffer: Tensor) -> Tensor:
        return self.shards.local_shard(buffer.unsqueeze(0)).squeeze(0) if buffer.dim() else buffer

    def full_weights(self) -> dict[str, Tensor]:
        """Gather one tensor at a time."""
        result = {}
        for name, p in self.sharded_parameters.items():
            tensor = p.detach().full_tensor()
            if self.ranks.is_rank0:
                result[name] = tensor.cpu()
        return result | self.buffers if self.ranks.is_rank0 else result

    def load(self, tensors: Mapping[str, Tensor], path: str) -> None:
        """Load the rows of this rank."""
        local = self.local_weights()
        for name in local.keys() | tensors.keys():
            if name not in local or name not in tensors or local[name].shape != tensors[name].shape:
                raise CheckpointError(
                    f"{name} in {path} is missing, unexpected, or differs in shape from the model's"
                )
            local[name].copy_(tensors[name])
        for name, buffer in self.buffers.items():
            if buffer.dim():  # every rank has read its own rows only
                rows = local[name].reshape(1, len(local[name]), math.prod(buffer.shape[1:]))
                buffer.copy_(self.shards.all_gather(rows, buffer.shape).view_as(buffer))


class LocalShards(nn.Module):
    """This rank's shard (rows) of every parameter, under the parameter's name."""

    def __init__(self, sharded: Mapping[str, Any], ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.shards = {
            name: nn.Parameter(p.data.to_local(), requires_grad=p.requires_grad)
            for name, p in sharded.items()
        }
        self.shapes = {self.shards[name]: p.shape for name, p in sharded.items()}

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all shards, since torch cannot register parameters whose names have dots."""
        yield from self.shards.items()

    def full_shape(self, param: nn.Parameter) -> torch.Size:
        """The shape of the unsharded parameter."""
        return self.shapes[param]

    def all_gather(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """All rows of several matrices of one shape, in one collective.

        Every rank must contribute equally many rows, so they are padded.
        """
        rows_per_rank = -(-shape[0] // self.ranks.world_size)
        padded = F.pad(rows, (0, 0, 0, rows_per_rank - rows.shape[1])).contiguous()
        gathered = [torch.empty_like(padded) for _ in range(self.ranks.world_size)]
        dist.all_gather(gathered, padded)
        return torch.cat(gathered, 1)[:, : shape[0]]

    def local_shard(self, full: Tensor) -> Tensor:
        """The rows of this rank."""
        rows_per_rank = -(-full.shape[1] // self.ranks.world_size)
        return full[:, rows_per_rank * self.ranks.rank : rows_per_rank * (self.ranks.rank + 1)]


def _compile_training_forward(block: Block) -> Callable[..., Any]:
    """A forward that is compiled in training, which has one shape, and eager in evaluation."""
    eager, compiled = block.forward, compile_for_training(block.forward, block)

    def forward(*args: Any, **options: Any) -> Any:
        return (compiled if block.training else eager)(*args, **options)

    return forward


def should_shard(parameters: int, settings: TrainConfig, device: torch.device) -> bool:
    """Whether to shard the weights over the ranks: `train.shard=full`, or `auto` if they are large.

    `auto` reserves half of a rank's memory for activations.
    """
    if launch.world_size() == 1 or settings.shard == "none":
        return False
    needed = training_bytes(parameters, ema=settings.ema > 0)
    return settings.shard == "full" or 2 * needed > free_memory(device)


def make_strategy(
    model: nn.Module,
    data: TrainingData,
    settings: TrainConfig,
    ranks: Ranks,
    device: torch.device,
    *,
    shard: bool,
) -> ParallelStrategy:
    """Combine a model with its task, on its device, for this number of ranks."""
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    if device.type == "cpu":
        attach_window_blocks(model)
        attach_onednn_linear(model)
    objective = Objective(model, data.task)
    strategy: ParallelStrategy
    if ranks.world_size == 1:
        strategy = SingleProcess(objective.to(device))
    elif shard:
        bfloat16 = autocast(settings, device) is not nullcontext
        strategy = Sharded(objective, ranks, device, data.batch(0), bfloat16=bfloat16)
    else:
        strategy = Replicated(objective.to(device), ranks, data.batch(0))
    if training_path(settings, device).compile:
        strategy.compile(float8=settings.precision == "float8")
    return strategy
