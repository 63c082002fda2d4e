"""A training step captured as a CUDA graph: one launch instead of one per kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.accel.cublaslt import AUTOTUNE_AT_CALL
from regard.data.batch import Batch, tensors

Results = tuple[Tensor, ...]
TrainingStep = Callable[[Sequence[Batch]], Results]
# Steps of a shape before it is captured: optimizers create their state and matmuls are autotuned,
# which cannot happen during a capture.
WARM_UP_STEPS = 3
assert WARM_UP_STEPS >= AUTOTUNE_AT_CALL, "a matmul must be autotuned before it is captured"
MAX_GRAPHS = 16  # batches of further shapes run eagerly


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured graph: the tensors it reads, its replay, and the tensors it writes."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    results: Results


class CudaGraphTrainingStep:
    """A training step, captured as a CUDA graph for each shape of batches and then replayed.

    The kernels of a small model take less time than their launches; a replay launches all of them
    at once. The step must not depend on host values: learning rates are tensors, and the
    generator's seed is read at each replay.
    """

    def __init__(
        self,
        training_step: TrainingStep,
        capture: Callable[[Callable[[], Results]], tuple[Callable[[], None], Results]]
        | None = None,
    ) -> None:
        self.training_step = training_step
        self.capture = _Capture() if capture is None else capture
        self.steps: dict[tuple[torch.Size, ...], int] = {}
        self.graphs: dict[tuple[torch.Size, ...], _Graph] = {}

    def __call__(self, micro_batches: Sequence[Batch]) -> Results:
        """Run the step, eagerly or by replaying its graph."""
        inputs = [tensor for batch in micro_batches for tensor in tensors(batch)]
        shape = tuple(tensor.shape for tensor in inputs)
        graph = self.graphs.get(shape)
        if graph is None:
            count = self.steps[shape] = self.steps.get(shape, 0) + 1
            if count <= WARM_UP_STEPS or len(self.graphs) == MAX_GRAPHS:
                return self.training_step(micro_batches)
            replay, results = self.capture(lambda: self.training_step(micro_batches))
            graph = self.graphs[shape] = _Graph(inputs, replay, results)
        for buffer, tensor in zip(graph.inputs, inputs, strict=True):
            buffer.copy_(tensor)  # a no-op for the batches of the capture itself
        graph.replay()
        return tuple(result.clone() for result in graph.results)


class _Capture:
    """Captures functions as graphs that share one memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """Capture `function` without running it: the replay, and the tensors it will write."""
        graph = torch.cuda.CUDAGraph()
        # other threads prepare batches during the capture
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = function()
        return graph.replay, results
