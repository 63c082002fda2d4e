"""The process group of a distributed run: collectives, and the launch plan from rank 0.

`torchrun` starts one process, a *rank*, per GPU. All ranks take the same steps, each with its own
rows of every batch. Rank 0 prepares the data, writes all files and yields all events; it sends
the others a `LaunchPlan`.
"""

import json
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from regard.data.batch import Batch, map_tensors, tensors
from regard.errors import RegardError
from regard.training.parallel import launch

T = TypeVar("T")
PLAN_TIMEOUT = timedelta(days=1)  # for rank 0 to prepare the data
CONNECTION_ERROR = re.compile(
    r"gloo|nccl|connection|timed out|timeout|broken pipe|socket", re.IGNORECASE
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The process group of a run, as seen from one of its ranks."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_rank0(self) -> bool:
        """Whether this rank writes the files and yields the events."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.world_size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, *numbers: int) -> list[int]:
        """The maximum of each number over all ranks, in one collective."""
        if self.world_size == 1:
            return list(numbers)
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        maxima: list[int] = tensor.tolist()
        return maxima

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """The value that rank `source` passes, on every rank; anything that JSON can represent."""
        if self.world_size == 1:
            return cast(T, value)
        message = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor(len(message))
        dist.broadcast(length, source)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(buffer, source)
        received: T = json.loads(buffer.numpy().tobytes())
        return received

    def all_or_fail(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank; if one raises a `RegardError`, all raise its message."""
        if self.world_size == 1:
            return work()
        failure: RegardError | None = None
        try:
            result = work()
        except RegardError as error:
            failure = error
        (worst,) = self.all_reduce_max(0 if failure is None else self.world_size - self.rank)
        failed_rank = self.world_size - worst  # the lowest one; `world_size` if none failed
        if failed_rank == self.world_size:
            return result
        report = (1, "") if failure is None else (failure.exit_code, str(failure))
        code, message = self.broadcast(report, failed_rank)
        if failure is not None and self.rank == failed_rank == 0:
            raise failure
        remote_error = RegardError(
            message if failed_rank == 0 else f"rank {failed_rank}: {message}"
        )
        remote_error.exit_code = code
        raise remote_error

    def on_rank0(self, work: Callable[[], object]) -> None:
        """Call `work` on rank 0 only; if it raises there, all ranks raise."""
        self.all_or_fail(work if self.is_rank0 else lambda: None)

    def local_accumulate(self, accumulate: int) -> int:
        """How many micro-batches of a step this rank processes, out of `accumulate`."""
        return accumulate if accumulate % self.world_size else accumulate // self.world_size

    def local_batch(self, batch: Callable[[int], Batch], accumulate: int, index: int) -> Batch:
        """The micro-batch `index` of this rank.

        If the world size divides `accumulate`, the micro-batches are distributed over the ranks;
        otherwise every rank takes its rows of each micro-batch.
        """
        if accumulate % self.world_size:
            return self.shard_batch(batch(index))
        return batch(index * self.world_size + self.rank)

    def shard_batch(self, batch: Batch) -> Batch:
        """The rows n·rank/world_size … n·(rank + 1)/world_size - 1 of a batch of n rows.

        If the range is empty, an `UnscoredRow`.
        """
        rows = len(tensors(batch)[0])
        begin, end = (rows * rank // self.world_size for rank in (self.rank, self.rank + 1))
        if begin < end:
            return map_tensors(batch, lambda tensor: tensor[begin:end])
        return UnscoredRow.of(batch)


SINGLE = Ranks()


@dataclass(frozen=True, slots=True)
class UnscoredRow(Batch):
    """One row of a batch, for a rank that has none, because every rank must take part in each step.

    `training.loop.Objective` multiplies its loss by 0, and its count is 0.
    """

    row: Batch

    @classmethod
    def of(cls, batch: Batch) -> "UnscoredRow":
        """The first row of a batch."""
        return cls(map_tensors(batch, lambda tensor: tensor[:1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """Sent by rank 0 to the other ranks once the data is prepared and the folder exists."""

    folder: str
    config: dict[str, Any]
    step: int | None  # of the checkpoint to resume from
    shard: bool
    device: str  # "cpu" or "cuda"
    timeout: int


_PLAN = "plan"  # key in the ranks' store


def send_plan(plan: LaunchPlan | None) -> Store | None:
    """Send the plan from rank 0 to the other ranks; None tells them to exit."""
    if launch.world_size() == 1:
        return None
    store = _open_store()
    store.set(_PLAN, json.dumps(None if plan is None else asdict(plan)))
    return store


def receive_plan() -> tuple[LaunchPlan | None, Store]:
    """Wait for the plan of rank 0; None: this rank exits."""
    store = _open_store()
    table = json.loads(store.get(_PLAN))
    return None if table is None else LaunchPlan(**table), store


def _open_store() -> Store:
    store, _, _ = next(rendezvous("env://", timeout=PLAN_TIMEOUT))
    # after a restart of the ranks, the store still has the old keys
    return PrefixStore(f"regard-{launch.restart_count()}", store)


@contextmanager
def process_group(plan: LaunchPlan, store: Store | None) -> Iterator[Ranks]:
    """A context in which the ranks are connected; if one is lost, the others raise."""
    if store is None:
        yield SINGLE
        return
    ranks = Ranks(launch.rank(), launch.world_size())
    path = Path(plan.folder)
    with _log_to(path / "logs" / f"rank-{ranks.rank}.txt"):
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo",
                store=store,
                rank=ranks.rank,
                world_size=ranks.world_size,
                timeout=timedelta(seconds=plan.timeout),
            )
            process = f"process {os.getpid()} on {platform.node()}, {plan.device}"
            logger.info("rank %d of %d: %s", ranks.rank, ranks.world_size, process)
            yield ranks
            dist.destroy_process_group()
        except RuntimeError as error:
            logger.exception("rank %d failed", ranks.rank)
            if not isinstance(error, dist.DistError) and not CONNECTION_ERROR.search(str(error)):
                raise
            raise RegardError(
                f"rank {ranks.rank} lost the connection to the other ranks: {_reason(error)}\n"
                f"each rank's log is in {path / 'logs'}; resume with: "
                f"torchrun … -m regard resume {path}"
            ) from error
        except RegardError as error:
            logger.error("%s", error)
            raise
        except BaseException:
            logger.exception("rank %d failed", ranks.rank)
            raise


def _reason(error: RuntimeError) -> str:
    """The first line of torch's message, without its source location and its advice."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". ")[0]


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """A context in which the library also logs to a file of this rank."""
    path.parent.mkdir(exist_ok=True)
    root = logging.getLogger("regard")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
