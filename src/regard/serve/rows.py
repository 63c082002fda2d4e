"""The decoding states of the rows that an engine decodes together; rows join and leave."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from regard.accel.cpu_decoder import CpuDecoderState, Workspace
from regard.models.base import Language, State
from regard.nn.state import KVCache, TransformerState

CAPACITY_MULTIPLE = 64  # tokens
# batch sizes for which a CUDA graph is captured
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)


class Rows(Protocol):
    """The rows of one model. New rows are appended; `keep` removes rows and closes the gaps."""

    def fits(self, rows: int, capacity: int, prompt_tokens: int) -> bool:
        """Whether `rows` sequences of `capacity` tokens fit, with `prompt_tokens` in prefill."""

    def join(
        self, state: State, rows: Sequence[int], lengths: Sequence[int], max_length: int
    ) -> None:
        """Append these rows of a prefilled state, which will hold up to `max_length` tokens."""

    def keep(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order; order[i] >= i."""

    def step(self, last_ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Read the last id of each row; return the next logits."""


class StateRows:
    """Rows of any model: states are concatenated when rows join and selected when they leave."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.state: State | None = None

    def fits(self, rows: int, capacity: int, prompt_tokens: int) -> bool:
        """Always true: the memory of these states is not limited."""
        return True

    def join(
        self, state: State, rows: Sequence[int], lengths: Sequence[int], max_length: int
    ) -> None:
        """Append these rows of a prefilled state."""
        new = state.select(torch.tensor(rows, device=state.lengths.device))
        self.state = new if self.state is None else concatenate(self.state, new)

    def keep(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        assert self.state is not None
        order_ids = torch.tensor(order, dtype=torch.long, device=self.state.lengths.device)
        self.state = self.state.select(order_ids) if order else None
        if isinstance(self.state, TransformerState):
            self.state = replace(self.state, max_length=int(self.state.lengths.max()))

    def step(self, last_ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Read the last id of each row; return the next logits."""
        assert self.state is not None
        logits, self.state = self.language.step(last_ids.unsqueeze(1), self.state)
        return logits[:, -1]


class KVRows:
    """Rows of a Transformer decoder, in one KV cache.

    The first rows are in use. A row that leaves is overwritten by the last one, so that a step
    computes no unused rows. The buffers grow with the number and the lengths of the rows, up to
    `budget` bytes.
    """

    def __init__(self, language: Language, budget: int) -> None:
        self.language, self.budget = language, budget
        # one row of one token: the buffers have its shapes, dtypes and device
        self.example_state = cast(TransformerState, language.start(1, 1))
        self.bytes_per_token = sum(
            cache.keys.nbytes + cache.values.nbytes for cache in self.example_state.layers
        )
        self.rows = self.capacity = 0  # of the buffers
        self.kv: Tensor | None = None
        self.caches: list[KVCache] = []
        self.lengths: list[int] = []
        self.max_lengths: list[int] = []
        self.state: TransformerState | None = None  # of the rows in use

    def fits(self, rows: int, capacity: int, prompt_tokens: int) -> bool:
        """Whether rows and prompts fit into the budget; a single row always fits."""
        buffer_rows, buffer_capacity = self._buffer_size(rows, max([capacity, *self.max_lengths]))
        num_tokens = buffer_rows * buffer_capacity + prompt_tokens
        return rows == 1 or num_tokens * self.bytes_per_token <= self.budget

    def _buffer_size(self, rows: int, capacity: int) -> tuple[int, int]:
        """The rows and capacity to allocate; buffers do not shrink while they are in use."""
        capacity = _round_up(capacity, CAPACITY_MULTIPLE)
        if self.lengths:
            capacity = max(capacity, self.capacity)
        context = self.language.context
        capacity = capacity if context is None else min(capacity, context)
        # a quarter of the budget is for prompts
        max_rows = 3 * self.budget // (4 * capacity * self.bytes_per_token)
        rounded = min(1 << (rows - 1).bit_length(), max(rows, max_rows))
        return max(rounded, self.rows if self.lengths else 0), capacity

    def join(
        self, state: State, rows: Sequence[int], lengths: Sequence[int], max_length: int
    ) -> None:
        """Append these rows of a prefilled state."""
        first, longest = len(self.lengths), max(lengths)
        self._resize(first + len(rows), max([max_length, *self.max_lengths]))
        new_rows, layers = slice(first, first + len(rows)), cast(TransformerState, state).layers
        if list(rows) != list(range(len(layers[0].keys))):
            index = to_device(rows, state.lengths.device)
            layers = [cache.select(index) for cache in layers]
        for cache, new in zip(self.caches, layers, strict=True):
            cache.keys[new_rows, :, :longest] = new.keys[:, :, :longest]
            cache.values[new_rows, :, :longest] = new.values[:, :, :longest]
        self.lengths = [*self.lengths, *lengths]
        self.max_lengths += [max_length] * len(rows)
        self.state = None

    def keep(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        for target, source in enumerate(order):
            if source != target:
                self._move(source, target)
        self.lengths = [self.lengths[row] for row in order]
        self.max_lengths = [self.max_lengths[row] for row in order]
        self.state = None

    def step(self, last_ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Read the last id of each row; return the next logits."""
        state = self._make_state() if self.state is None else self.state
        logits, self.state = self.language.step(last_ids.unsqueeze(1), state)  # type: ignore[assignment]
        self.lengths = [length + 1 for length in self.lengths]
        return logits[:, -1]

    def _move(self, source: int, target: int) -> None:
        length = self.lengths[source]
        for cache in self.caches:
            cache.keys[target, :, :length] = cache.keys[source, :, :length]
            cache.values[target, :, :length] = cache.values[source, :, :length]

    def _resize(self, rows: int, capacity: int) -> None:
        """Allocate buffers of another size if they are needed, and copy the rows in use."""
        rows, capacity = self._buffer_size(rows, capacity)
        if (rows, capacity) == (self.rows, self.capacity):
            return
        old, used = self.caches, len(self.lengths)
        if isinstance(self.example_state, CpuDecoderState):
            kv = cast(Tensor, self.example_state.kv)  # (layers, 1, 2, kv_heads, 1, head_dim)
            self.kv = kv.new_zeros(kv.shape[0], rows, *kv.shape[2:4], capacity, kv.shape[5])
            self.caches = [KVCache(*layer.unbind(1)) for layer in self.kv]
        else:
            self.caches = [
                KVCache(
                    *(
                        part.new_zeros(rows, part.shape[1], capacity, part.shape[3])
                        for part in (cache.keys, cache.values)
                    )
                )
                for cache in self.example_state.layers
            ]
        if used:
            seen = max(self.lengths)
            for new, cache in zip(self.caches, old, strict=True):
                new.keys[:used, :, :seen] = cache.keys[:used, :, :seen]
                new.values[:used, :, :seen] = cache.values[:used, :, :seen]
        self.rows, self.capacity = rows, capacity

    def _make_state(self) -> TransformerState:
        """The state of the rows in use: views of their part of the buffers."""
        used = len(self.lengths)
        caches = [KVCache(cache.keys[:used], cache.values[:used]) for cache in self.caches]
        lengths = torch.tensor(self.lengths, device=self.example_state.lengths.device)
        state = replace(
            self.example_state,
            layers=caches,
            lengths=lengths,
            capacity=self.capacity,
            max_length=max(self.lengths),
            equal_lengths=min(self.lengths) == max(self.lengths),
        )
        if isinstance(state, CpuDecoderState):
            kv = cast(Tensor, self.kv)[:, :used]
            packed = cast(Workspace, state.workspace).packed
            state = replace(state, kv=kv, workspace=Workspace.of(packed, kv, used))
        return state


class GraphRows(KVRows):
    """Rows of a Transformer decoder on a GPU: a decode step is replayed as a CUDA graph.

    The buffers have their final size from the start, since a graph reads fixed addresses. There
    is a graph for each batch size in `BUCKETS`; its results for unused rows are not read. On a CPU
    the same steps run uncaptured.
    """

    def __init__(self, language: Language, budget: int, rows: int) -> None:
        super().__init__(language, budget)
        assert language.context is not None
        self.capacity = language.context
        rows_in_budget = budget // (self.capacity * self.bytes_per_token)
        self.rows = max(1, min(rows, rows_in_budget - 1))  # the memory of one row is for prompts
        keys, values = self.example_state.layers[0].keys, self.example_state.layers[0].values
        layers, device = len(self.example_state.layers), keys.device
        self.buffers = [  # keys and values of all layers: (layers, rows, kv_heads, capacity, …)
            part.new_zeros(layers, self.rows, part.shape[1], self.capacity, part.shape[3])
            for part in (keys, values)
        ]
        self.caches = [KVCache(*pair) for pair in zip(*self.buffers, strict=True)]
        self.lengths_buffer = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.last_ids = torch.zeros_like(self.lengths_buffer)
        self.graphs: dict[int, Callable[[], Tensor]] = {}
        self.pool: Any = None

    def fits(self, rows: int, capacity: int, prompt_tokens: int) -> bool:
        """Whether there are enough rows, and enough memory for the prompts in prefill."""
        prompt_budget = self.budget - self.rows * self.capacity * self.bytes_per_token
        return rows <= self.rows and (
            rows == 1 or prompt_tokens * self.bytes_per_token <= prompt_budget
        )

    def step(self, last_ids: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Read the last id of each row; return the next logits."""
        used = len(self.lengths)
        if self.state is None:  # rows have joined or left
            lengths = self.lengths + [0] * (self.rows - used)
            self.lengths_buffer.copy_(to_device(lengths, self.last_ids.device))
            self.state = self.example_state
        self.last_ids[:used].copy_(last_ids)
        bucket = min(next((size for size in BUCKETS if size >= used), used), self.rows)
        if bucket not in self.graphs:
            run = partial(self._run, bucket)
            logits = run()
            self.graphs[bucket] = self.capture(run)
        else:
            logits = self.graphs[bucket]()
        self.lengths = [length + 1 for length in self.lengths]
        return logits[:used]

    def _run(self, bucket: int) -> Tensor:
        state = replace(
            self.example_state,
            layers=[KVCache(cache.keys[:bucket], cache.values[:bucket]) for cache in self.caches],
            lengths=self.lengths_buffer[:bucket],
            capacity=self.capacity,
        ).with_static_shapes()
        logits, _ = self.language.step(self.last_ids[:bucket].unsqueeze(1), state)
        return logits[:, -1]

    def append(self, lengths: Sequence[int], max_length: int) -> None:
        """Count the next rows as in use, after prompts were prefilled in them."""
        self.lengths = [*self.lengths, *lengths]
        self.max_lengths += [max_length] * len(lengths)
        self.state = None

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture a function as a CUDA graph; return its replay, on a CPU the function itself."""
        if not self.last_ids.is_cuda:
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def _move(self, source: int, target: int) -> None:
        length = self.lengths[source]
        for part in self.buffers:
            part[:, target, :, :length] = part[:, source, :, :length]

    def read(self, row: int, span: slice) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of a row: (layers, kv_heads, tokens, head_dim)."""
        keys, values = (part[:, row, :, span].clone() for part in self.buffers)
        return keys, values

    def _resize(self, rows: int, capacity: int) -> None:
        assert rows <= self.rows


def make_rows(language: Language, budget: int, rows: int, *, capture: bool | None = None) -> Rows:
    """Make the rows of a model; a Transformer decoder has one KV cache for all rows.

    `capture` says whether decode steps are captured as CUDA graphs; by default they are on a GPU.
    The KV cache of a CPU decoder is one tensor with a different layout, which only `KVRows`
    supports.
    """
    if _has_source(language):
        return StateRows(language)
    state = language.start(1, 1)
    if not isinstance(state, TransformerState):
        return StateRows(language)
    capture = state.lengths.is_cuda if capture is None else capture
    if capture and type(state) is TransformerState:
        return GraphRows(language, budget, rows)
    return KVRows(language, budget)


def _has_source(language: Language) -> bool:
    model = getattr(language, "model", language)
    return getattr(getattr(model, "config", None), "architecture", None) == "encoder-decoder"


def concatenate(first: Any, second: Any) -> Any:
    """Two states as one, with the rows of the first before those of the second.

    Tensors are concatenated along their first axis; where other axes differ (the capacity of a KV
    cache, the length of a source, the ids of the last step of a recurrence), the shorter one is
    padded: values beyond the length of a row are not read.
    """
    if isinstance(first, TransformerState):
        joined = _concatenate_fields(first, second)
        return replace(joined, equal_lengths=False)
    if isinstance(first, Tensor):
        shape = [max(sizes) for sizes in zip(first.shape[1:], second.shape[1:], strict=True)]
        return torch.cat([_pad_to(first, shape), _pad_to(second, shape)])
    if is_dataclass(first):
        return _concatenate_fields(first, second)
    if isinstance(first, list | tuple):
        return type(first)(concatenate(*pair) for pair in zip(first, second, strict=True))
    return first if first is None or isinstance(first, bool) else max(first, second)


def _concatenate_fields(first: Any, second: Any) -> Any:
    names = [f.name for f in fields(first)]
    return replace(
        first, **{name: concatenate(getattr(first, name), getattr(second, name)) for name in names}
    )


def _pad_to(x: Tensor, shape: list[int]) -> Tensor:
    padding = [target - size for target, size in zip(shape, x.shape[1:], strict=True)]
    return pad(x, [width for size in reversed(padding) for width in (0, size)])


def to_device(values: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Copy integers to a device; to a GPU asynchronously, from pinned memory."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.long)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
