"""Write without the host: a step and a draw, recorded once as a CUDA graph and then replayed."""

from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels import usable
from regard.generate.chain import Chain, failures
from regard.generate.sampler_context import SamplerContext
from regard.generate.samplers.logits_processor import PerRow
from regard.models.base import Capturable, Language, State
from regard.nn.state import Source

BLOCK = 16  # tokens that are written before the host looks at them


@runtime_checkable
class DecodeLoop(Protocol):
    """Takes in what was drawn last and draws again, for every row."""

    block: int  # how many tokens it best writes at once
    context: SamplerContext
    state: State
    last: Int[Tensor, " rows"]

    def decode(self, count: int) -> Int[Tensor, "rows count"]:
        """The next `count` ids of each row, for which nobody waits."""

    def check(self) -> None:
        """Complain of a row that had nothing to draw from."""

    def select(self, rows: Int[Tensor, " some"], chain: Chain) -> "DecodeLoop":
        """Another loop, for some of the rows and their chain."""


class EagerLoop:
    """A loop that asks the model and the chain, token by token."""

    block = 1

    def __init__(
        self, model: Language, chain: Chain, context: SamplerContext, state: State, last: Tensor
    ) -> None:
        self.model, self.chain, self.context = model, chain, context
        self.state, self.last = state, last

    def decode(self, count: int) -> Int[Tensor, "rows count"]:
        """The next `count` ids of each row."""
        written = []
        for _ in range(count):
            scored, self.state = self.model.step(self.last.unsqueeze(1), self.state)
            self.last = self.chain(scored[:, -1], self.context)
            self.context.append(self.last)
            written.append(self.last)
        return self.last.unsqueeze(1) if count == 1 else torch.stack(written, 1)

    def check(self) -> None:
        """The chain has done so for every token."""

    def select(self, rows: Int[Tensor, " some"], chain: Chain) -> "EagerLoop":
        """Another loop, for some of the rows and their chain."""
        context, state = self.context.select(rows), self.state.select(rows)
        return EagerLoop(self.model, chain, context, state, self.last[rows])


class CudaGraphLoop:
    """A loop whose stroke is recorded after its first use: from then on nothing waits for the host.

    All it touches stays in place, so that another text of the same size can be put there. On a
    CPU there is no recorder: it does the same things one by one.
    """

    block = BLOCK

    def __init__(
        self, model: Language, chain: Chain, context: SamplerContext, state: State, last: Tensor
    ) -> None:
        self.model, self.chain, self.context = model, chain, context
        self.state, self.last = cast(Capturable, state).with_static_shapes(), last.clone()
        self.decide = _decision(chain, context)
        self.stroke: Callable[[], None] | None = None
        self.reading: Callable[[], None] | None = None
        self.ids = self.counts = self.read_logits = last  # until a prompt is read

    def decode(self, count: int) -> Int[Tensor, "rows count"]:
        """The next `count` ids of each row."""
        for _ in range(count):
            if self.stroke is not None:
                self.stroke()
            else:
                self._stroke()
                self.stroke = _recorded(self._stroke, self.last.device)
        recent = torch.arange(-count, 0, device=self.last.device)
        return self.context.history.gather(1, self.context.lengths.unsqueeze(1) + recent)

    def check(self) -> None:
        """Complain of a row that had nothing to draw from."""
        self.chain.check(self.context, self._logits)

    def read(
        self, ids: Int[Tensor, "rows time"], counts: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows vocab"]:
        """Read another text's prompt into the state; the logits of what follows."""
        if self.reading is None or self.ids.shape != ids.shape:
            self.ids, self.counts = ids.clone(), counts.clone()
            self.reading = _recorded(self._read, ids.device)
        self.ids.copy_(ids)
        self.counts.copy_(counts)
        self.reading()
        return self.read_logits

    def select(self, rows: Int[Tensor, " some"], chain: Chain) -> "CudaGraphLoop":
        """Another loop, for some of the rows and their chain."""
        context, state = self.context.select(rows), self.state.select(rows)
        return CudaGraphLoop(self.model, chain, context, state, self.last[rows])

    def take(self, context: SamplerContext, last: Tensor) -> None:
        """Go on with the text that was read."""
        self.last.copy_(last)
        for mine, other in zip(_tensors(self.context), _tensors(context), strict=True):
            mine.copy_(other)

    def fits(self, chain: Chain, context: SamplerContext, capacity: int) -> bool:
        """Whether another text has as many rows, as much room and the same chain."""
        mine = self.context
        return (
            (chain is self.chain or (not _of_rows(chain) and chain == self.chain))
            and capacity == cast(Capturable, self.state).capacity
            and context.history.shape == mine.history.shape
            and context.stop == mine.stop
        )

    def _logits(self, row: int, length: int) -> Float[Tensor, "rows vocab"]:
        """What the model said after so many ids of a row, asked again."""
        ids = self.context.history[row : row + 1, :length][:, -(self.model.context or length) :]
        scored, _ = self.model.step(ids, self.model.start(1, ids.shape[1]))
        return scored[:, -1]

    def _stroke(self) -> None:
        scored, self.state = self.model.step(self.last.unsqueeze(1), self.state)
        self.last.copy_(self.chain.pick(scored[:, -1], self.context, self.decide))
        self.context.append(self.last)

    def _read(self) -> None:
        state = cast(Capturable, self.state).reset()
        scored, _ = self.model.step(self.ids, state, counts=self.counts)
        self.read_logits = scored[:, -1]


class Engine:
    """The same `Language`, written with a recorded loop, which is kept for the next text."""

    def __init__(self, model: Language, *, records: bool | None = None) -> None:
        self.model = model
        self._records = records  # None: on a GPU
        self.loop: CudaGraphLoop | None = None

    @property
    def context(self) -> int | None:
        """The most ids a row can hold."""
        return self.model.context

    @property
    def vocab_size(self) -> int:
        """The number of logits per position."""
        return self.model.vocab_size

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    def start(self, rows: int, capacity: int, source: Source | None = None) -> State:
        """As the model's."""
        return self.model.start(rows, capacity, source)

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        every: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], State]:
        """As the model's."""
        return self.model.step(ids, state, counts=counts, every=every)

    def records(self, chain: Chain, state: State | None = None) -> bool:
        """Whether what is written with this chain can be recorded."""
        state = self.model.start(1, 1) if state is None else state
        wanted = state.lengths.is_cuda if self._records is None else self._records
        return wanted and chain.capturable and isinstance(state, Capturable)

    def begin(
        self,
        chain: Chain,
        context: SamplerContext,
        ids: Int[Tensor, "rows time"],
        counts: Int[Tensor, " rows"],
        capacity: int,
    ) -> CudaGraphLoop:
        """Read a prompt and draw what follows; the loop writes the rest. It is not shared."""
        loop, self.loop = self.loop, None
        if loop is not None and loop.fits(chain, context, capacity):
            logits = loop.read(ids, counts)
        else:
            loop, state = None, self.model.start(len(ids), capacity)
            scored, state = self.model.step(ids, state, counts=counts)
            logits = scored[:, -1]
        last = chain.pick(logits, context, _decision(chain, context))
        context.append(last)
        if loop is None:
            return CudaGraphLoop(self.model, chain, context, state, last)
        loop.take(context, last)
        return loop


def _of_rows(chain: Chain) -> bool:
    """Whether its settings are tensors, which have no one answer to whether they are equal."""
    return any(isinstance(stage, PerRow) for stage in chain.stages)


def _recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same work without the host, on a GPU where it was done before."""
    if device.type != "cuda":
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _decision(chain: Chain, context: SamplerContext) -> Callable[[Tensor], Tensor] | None:
    """The draw as one kernel instead of thirty, on a GPU; a chain with a tail has its own."""
    if chain.greedy or not usable(context.lengths) or chain.tail is not None:
        return None
    from regard.accel.kernels import sampling as kernel

    keys, used, failed = context.generators.keys, context.generators.used, failures(context)
    return lambda left: kernel.draw(left, keys, used, context.lengths, failed)


def _tensors(context: SamplerContext) -> list[Tensor]:
    """All that changes while a text is written, in a fixed order."""
    generators = context.generators
    fixed = [context.history, context.lengths, context.prompts, generators.keys, generators.used]
    return [*fixed, *(context.state[key] for key in sorted(context.state, key=str))]
