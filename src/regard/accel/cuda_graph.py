"""A training step as one CUDA graph: launched at once instead of kernel by kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.data.batch import Batch, tensors

Results = tuple[Tensor, ...]
Update = Callable[[Sequence[Batch]], Results]
WARM = 3  # steps of a shape before it is recorded: optimizers make their state, kernels are chosen
MOST = 16  # graphs; batches of further shapes are launched as ever


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Where a graph reads its batches, how it is replayed, and where it leaves its results."""

    read: list[Tensor]
    replay: Callable[[], None]
    results: Results


class Captured:
    """An update that records itself, once for every shape of batches, and is then replayed.

    A small model's kernels take less time than launching them does; a replay launches them all
    together. The update may not depend on any number of the host: rates are tensors, and the
    generator's seed is read anew at each replay.
    """

    def __init__(
        self,
        update: Update,
        record: Callable[[Callable[[], Results]], tuple[Callable[[], None], Results]] | None = None,
    ) -> None:
        self.update, self.record = update, _Recorder() if record is None else record
        self.seen: dict[tuple[torch.Size, ...], int] = {}
        self.graphs: dict[tuple[torch.Size, ...], _Recorded] = {}

    def __call__(self, group: Sequence[Batch]) -> Results:
        """Do the update, as it is or from its graph."""
        given = [tensor for batch in group for tensor in tensors(batch)]
        shape = tuple(tensor.shape for tensor in given)
        graph = self.graphs.get(shape)
        if graph is None:
            count = self.seen[shape] = self.seen.get(shape, 0) + 1
            if count <= WARM or len(self.graphs) == MOST:
                return self.update(group)
            replay, results = self.record(lambda: self.update(group))
            graph = self.graphs[shape] = _Recorded(given, replay, results)
        for to, tensor in zip(graph.read, given, strict=True):
            to.copy_(tensor)  # nothing, for the group that was recorded
        graph.replay()
        return tuple(result.clone() for result in graph.results)


class _Recorder:
    """Records work into graphs that share one pool of memory: only one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """Record without doing: how to do it, and where its results will stand."""
        graph = torch.cuda.CUDAGraph()
        # other threads go on preparing batches meanwhile
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = work()
        return graph.replay, results
