"""An objective as one or several ranks learn it: wrapped from outside, the model knows nothing.

alone       the objective itself
replicated  every rank has all weights; gradients are averaged (DDP, Li et al. 2020)
sharded     every rank keeps its rows of each weight, gradient and moment, and borrows the
            others' while it computes, block by block (FSDP2, Zhao et al. 2023)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard.config import TrainConfig
from regard.data.batch import Batch
from regard.errors import CheckpointError
from regard.models.build import load_weights, weights
from regard.models.cost import training_bytes
from regard.nn.block import Block
from regard.tasks.base import Objective
from regard.training.optim import Muon
from regard.training.parallel import launch
from regard.training.parallel.ranks import ALONE, Ranks, unscored
from regard.training.setup.device import memory

T = TypeVar("T")


class ParallelStrategy:
    """An objective that one process learns, and what differs where there are several."""

    cut = (0, 1)  # of how many parts of every tensor this rank keeps which

    def __init__(self, objective: Objective, ranks: Ranks = ALONE) -> None:
        self.objective, self.ranks = objective, ranks
        self.local_model: nn.Module = objective.model  # the parameters that this rank updates
        self.loss: Callable[[Batch], Tensor] = objective

    @property
    def sharded(self) -> bool:
        """Whether this rank keeps a part of each tensor only."""
        return self.cut[1] > 1

    def compile(self) -> None:
        """Compile the loss: a function, so that no parameter's name changes."""
        self.loss = compiled(self.loss)

    def attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Tell optimizers what they must know of the other ranks."""

    def syncing(self, now: bool) -> AbstractContextManager[object]:
        """Inside, gradients are summed over the ranks only if it is time."""
        return nullcontext()

    def clip(self, limit: float) -> Tensor:
        """Cut the gradient to this norm, if not 0; its norm before."""
        parameters = [p for p in self.local_model.parameters() if p.requires_grad]
        return torch.nn.utils.clip_grad_norm_(parameters, limit if limit else torch.inf)

    def with_full_weights(self, function: Callable[[nn.Module], T]) -> T | None:
        """What a function finds in the whole model; None on a rank that is not needed for it."""
        return function(self.objective.model) if self.ranks.is_rank0 else None

    def part(self) -> dict[str, Tensor]:
        """The weights that this rank keeps."""
        return weights(self.objective.model)

    def whole(self) -> dict[str, Tensor]:
        """All weights, on rank 0; all ranks must ask."""
        return weights(self.objective.model)

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take saved weights, of which this rank has its part."""
        load_weights(self.objective.model, tensors, where)


class SingleProcess(ParallelStrategy):
    """One process trains the whole model: no wrapper, no communication."""


class Replicated(ParallelStrategy):
    """Distributed data parallel (DDP): every rank has all weights."""

    def __init__(self, objective: Objective, ranks: Ranks, batch: Batch) -> None:
        super().__init__(objective, ranks)
        row = unscored(batch).to(next(objective.parameters()).device)
        _freeze_idle(objective, row)
        self.loss = self.wrapped = DistributedDataParallel(objective, gradient_as_bucket_view=True)
        # DDP orders its sums by how the first gradients arrive. Let these be worth nothing, so
        # that a run which goes on sums as one which begins does: to the last bit.
        _rehearse(self.wrapped, row)

    def syncing(self, now: bool) -> AbstractContextManager[object]:
        """Gradients meet in the backward pass, unless told otherwise before the forward pass."""
        return nullcontext() if now else self.wrapped.no_sync()


def _rehearse(wrapped: nn.Module, row: Batch) -> None:
    """Take the way of a step with a row that does not count."""
    wrapped(row).backward()
    wrapped.zero_grad(set_to_none=True)


def _freeze_idle(objective: Objective, batch: Batch) -> None:
    """Let what the loss does not depend on not wait for a gradient, as DDP would for ever."""
    parameters = [p for p in objective.parameters() if p.requires_grad]
    grads = torch.autograd.grad(objective(batch), parameters, allow_unused=True)
    for p, grad in zip(parameters, grads, strict=True):
        p.requires_grad_(grad is not None)


class Sharded(ParallelStrategy):
    """Fully sharded data parallel (FSDP2): every rank keeps its rows.

    Optimizers, running means and checkpoints see those rows as plain tensors under the names
    of the whole; but for Muon, they work element by element.
    """

    def __init__(
        self,
        objective: Objective,
        ranks: Ranks,
        device: torch.device,
        batch: Batch,
        *,
        half: bool,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (  # two thirds of a second, which few need
            MixedPrecisionPolicy,
            fully_shard,
        )

        super().__init__(objective, ranks)
        mesh = init_device_mesh(device.type, (ranks.size,))
        policy = MixedPrecisionPolicy()
        if half:
            # what blocks are handed stays as it is: bfloat16 would round the turns of positions
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        self.blocks = [part for part in objective.modules() if isinstance(part, Block)]
        self.groups: list[Any] = [
            fully_shard(part, mesh=mesh, mp_policy=policy) for part in (*self.blocks, objective)
        ]
        self.cut = (ranks.rank, ranks.size)
        self.whole_parameters: dict[str, Any] = dict(objective.model.named_parameters())
        self.local_model = self.rows = Rows(self.whole_parameters, ranks)
        # FSDP learns at the first step which group is the outermost. Let it not be an evaluation,
        # which goes past the objective.
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            _rehearse(objective, unscored(batch).to(device))

    def compile(self) -> None:
        """Compile block by block: between them weights come and go."""
        for block in self.blocks:
            block.forward = _while_training(block)  # type: ignore[method-assign]

    def attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Muon looks at whole matrices."""
        for optimizer in optimizers:
            if isinstance(optimizer, Muon):
                optimizer.parts = self.rows

    def syncing(self, now: bool) -> AbstractContextManager[object]:
        """Gradients of several micro-batches are kept whole until the last."""
        self.groups[-1].set_requires_gradient_sync(now)
        return nullcontext()

    def clip(self, limit: float) -> Tensor:
        """Give each row its gradient, and cut it by the norm over all ranks."""
        for (_, own), p in zip(
            self.local_model.named_parameters(), self.whole_parameters.values(), strict=True
        ):
            own.grad, p.grad = None if p.grad is None else p.grad.to_local(), None
        parameters = [p for p in self.local_model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])  # type: ignore[misc]
        norm = self.ranks.sum(norm.square()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit if limit else torch.inf, norm)
        return norm

    def with_full_weights(self, function: Callable[[nn.Module], T]) -> T | None:
        """Borrow all weights at once: a function may look anywhere, in any order.

        All ranks look, or they would not agree any more on what to borrow next.
        """
        for group in self.groups:
            group.set_reshard_after_forward(False, recurse=False)
            group.unshard()
        try:
            return function(self.objective.model)
        finally:
            for group in self.groups:
                group.reshard()
                group.set_reshard_after_forward(group is not self.groups[-1], recurse=False)

    def part(self) -> dict[str, Tensor]:
        """This rank's rows."""
        return {name: p.detach() for name, p in self.local_model.named_parameters()}

    def whole(self) -> dict[str, Tensor]:
        """The rows of all ranks put together, tensor by tensor."""
        result = {}
        for name, p in self.whole_parameters.items():
            tensor = p.detach().full_tensor()
            if self.ranks.is_rank0:
                result[name] = tensor.cpu()
        return result

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take this rank's rows."""
        own = self.part()
        for name in own.keys() | tensors.keys():
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
                raise CheckpointError(f"{name} in {where} does not fit the model")
            own[name].copy_(tensors[name])


class Rows(nn.Module):
    """A rank's rows of the parameters of a model, by the names that these have there."""

    def __init__(self, whole: Mapping[str, Any], ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.named = {
            name: nn.Parameter(p.data.to_local(), requires_grad=p.requires_grad)
            for name, p in whole.items()
        }
        self.shapes = {self.named[name]: p.shape for name, p in whole.items()}

    def named_parameters(self, *words: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """All of them; dots in their names keep torch from registering them itself."""
        yield from self.named.items()

    def shape(self, param: nn.Parameter) -> torch.Size:
        """The shape of the whole."""
        return self.shapes[param]

    def gather(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """All rows of matrices of one shape, in one exchange; as many from each rank, so padded."""
        each = -(-shape[0] // self.ranks.size)
        padded = F.pad(rows, (0, 0, 0, each - rows.shape[1])).contiguous()
        found = [torch.empty_like(padded) for _ in range(self.ranks.size)]
        dist.all_gather(found, padded)
        return torch.cat(found, 1)[:, : shape[0]]

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of them."""
        each = -(-whole.shape[1] // self.ranks.size)
        return whole[:, each * self.ranks.rank : each * (self.ranks.rank + 1)]


def _while_training(block: Block) -> Callable[..., Any]:
    """Compiled for the one shape of training; judging and writing have many."""
    eager, fast = block.forward, compiled(block.forward)

    def forward(*words: Any, **options: Any) -> Any:
        return (fast if block.training else eager)(*words, **options)

    return forward


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """A function, compiled for one shape.

    While torch compiles it looks at the gradients too, in this thread alone: other threads forget
    the type that autocast was told, and refuse what indexes in bfloat16 (torch 2.11).
    """
    from regard.accel.inductor_pass import Faster  # it brings the compiler, which few need

    fast = torch.compile(function, dynamic=False, options={"post_grad_custom_post_pass": Faster()})

    def call(*words: Any, **options: Any) -> T:
        with torch.autograd.set_multithreading_enabled(False):
            return fast(*words, **options)

    return call


def should_shard(parameters: int, config: TrainConfig, device: torch.device) -> bool:
    """Whether ranks keep parts of the weights: where asked to, or where they would fill them.

    `auto` leaves half of a rank's memory to what is computed.
    """
    if launch.size() == 1 or config.shard == "none":
        return False
    needed = training_bytes(parameters, ema=config.ema > 0)
    return config.shard == "full" or 2 * needed > memory(device)


def make_strategy(
    objective: Objective,
    ranks: Ranks,
    device: torch.device,
    batch: Callable[[int], Batch],
    *,
    shard: bool,
    half: bool,
) -> ParallelStrategy:
    """The strategy for so many ranks, on its device."""
    if ranks.size == 1:
        return SingleProcess(objective.to(device))
    if shard:
        return Sharded(objective, ranks, device, batch(0), half=half)
    return Replicated(objective.to(device), ranks, batch(0))
