"""Many processes, one run: what the ranks tell each other and agree on.

`torchrun` starts a process, a *rank*, for each GPU. All take the same steps, each with its own
rows of every batch. Rank 0 decides, writes and speaks; the others are told.
"""

import json
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from regard.data.batch import Batch, map_tensors
from regard.errors import RegardError
from regard.nn.head import IGNORED
from regard.training.parallel import launch

T = TypeVar("T")
PATIENCE = timedelta(days=1)  # the others wait while rank 0 prepares the data
LOST = re.compile(r"gloo|nccl|connection|timed out|timeout|broken pipe|socket", re.IGNORECASE)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1

    @property
    def is_rank0(self) -> bool:
        """Whether this is the one that decides, writes and speaks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, *numbers: int) -> list[int]:
        """The largest of each number that any rank has, in one exchange."""
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        found: list[int] = tensor.tolist()
        return found

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """What one rank says, as all of them hear it; anything that JSON can write."""
        if self.size == 1:
            return cast(T, value)
        words = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor(len(words))
        dist.broadcast(length, source)
        heard = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            heard = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        dist.broadcast(heard, source)
        told: T = json.loads(heard.numpy().tobytes())
        return told

    def all_or_fail(self, work: Callable[[], T]) -> T:
        """What `work` gives here; where it fails on any rank, it fails on all, with one message."""
        if self.size == 1:
            return work()
        failure: RegardError | None = None
        try:
            result = work()
        except RegardError as error:
            failure = error
        (worst,) = self.all_reduce_max(0 if failure is None else self.size - self.rank)
        failed = self.size - worst
        if failed == self.size:
            return result
        code, message = self.broadcast(_told(failure), failed)
        if failure is not None and self.rank == failed == 0:
            raise failure
        alike = RegardError(message if failed == 0 else f"rank {failed}: {message}")
        alike.exit_code = code
        raise alike

    def on_rank0(self, work: Callable[[], object]) -> None:
        """Let rank 0 do what is done once; where that fails, it fails on all."""
        self.all_or_fail(work if self.is_rank0 else lambda: None)

    def split_batches(
        self, batch: Callable[[int], Batch], accumulate: int
    ) -> tuple[Callable[[int], Batch], int]:
        """This rank's share of every micro-batch, by number, and how many of them make a step.

        They are dealt out whole if that is fair; else each rank takes its rows of all.
        """
        if accumulate % self.size:
            return lambda number: self.shard_batch(batch(number)), accumulate
        return lambda number: batch(number * self.size + self.rank), accumulate // self.size

    def shard_batch(self, batch: Batch) -> Batch:
        """The rows of a batch that are this rank's: n·rank/size … n·(rank + 1)/size - 1.

        Where that is none, one row that does not count: all ranks must take part in a step.
        """
        rows = len(batch.targets)
        begin, end = (rows * number // self.size for number in (self.rank, self.rank + 1))
        if begin < end:
            return map_tensors(batch, lambda tensor: tensor[begin:end])
        return unscored(batch)


ALONE = Ranks()


def unscored(batch: Batch) -> Batch:
    """A row of a batch, none of whose targets counts."""
    row = map_tensors(batch, lambda tensor: tensor[:1])
    goals = {
        field.name: torch.full_like(value, IGNORED)
        for field in fields(row)
        if field.name in ("targets", "follows") and (value := getattr(row, field.name)) is not None
    }
    return replace(row, **cast(Any, goals))


def _told(failure: RegardError | None) -> tuple[int, str]:
    return (1, "") if failure is None else (failure.exit_code, str(failure))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """What rank 0 tells the others to do, once the data is prepared and the folder is there."""

    folder: str
    config: dict[str, Any]
    step: int | None  # the checkpoint to go on from
    shard: bool
    device: str  # "cpu" or "cuda"
    timeout: int


_ORDER = "order"  # its key in the ranks' common store


def give(order: LaunchPlan | None) -> Store | None:
    """Tell the others what to do, as rank 0; None: there is nothing to do."""
    if launch.size() == 1:
        return None
    store = _store()
    store.set(_ORDER, json.dumps(None if order is None else asdict(order)))
    return store


def receive() -> tuple[LaunchPlan | None, Store]:
    """Wait for what rank 0 says."""
    store = _store()
    words = json.loads(store.get(_ORDER))
    return None if words is None else LaunchPlan(**words), store


def _store() -> Store:
    store, _, _ = next(rendezvous("env://", timeout=PATIENCE))
    return PrefixStore(f"regard-{launch.attempt()}", store)  # torchrun keeps the old keys


@contextmanager
def joined(order: LaunchPlan, store: Store | None) -> Iterator[Ranks]:
    """Inside, the ranks work together; when one is lost, the others end instead of waiting."""
    if store is None:
        yield ALONE
        return
    ranks = Ranks(launch.rank(), launch.size())
    path = Path(order.folder)
    with _logging(path / "logs" / f"rank-{ranks.rank}.txt"):
        try:
            _connect(order, store, ranks)
            where = f"process {os.getpid()} on {platform.node()}, {order.device}"
            logger.info("rank %d of %d: %s", ranks.rank, ranks.size, where)
            yield ranks
            dist.destroy_process_group()
        except RuntimeError as error:
            logger.exception("the end")
            if not isinstance(error, dist.DistError) and not LOST.search(str(error)):
                raise
            raise RegardError(
                f"rank {ranks.rank} lost the others: {_reason(error)}\n"
                f"what each rank saw stands in {path / 'logs'}; go on with: "
                f"torchrun … -m regard resume {path}"
            ) from error
        except RegardError as error:
            logger.error("%s", error)
            raise
        except BaseException:
            logger.exception("the end")
            raise


def _reason(error: RuntimeError) -> str:
    """What torch says, without the place in its own source and its advice."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". ")[0]


def _connect(order: LaunchPlan, store: Store, ranks: Ranks) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if order.device == "cuda" else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=order.timeout),
    )


@contextmanager
def _logging(path: Path) -> Iterator[None]:
    """Inside, what the library logs goes into a file of this rank's own."""
    path.parent.mkdir(exist_ok=True)
    top = logging.getLogger("regard")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = top.level
    top.addHandler(handler)
    top.setLevel(logging.INFO)
    try:
        yield
    finally:
        top.removeHandler(handler)
        top.setLevel(before)
        handler.close()
