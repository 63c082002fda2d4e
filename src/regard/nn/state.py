"""Decoding states (KV caches, recurrent states), and the source sequence of a conditional model."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ShapeError

# The input of a model: ids, or vectors if `input_dim` > 0.
Inputs = Int[Tensor, "batch time"] | Float[Tensor, "batch time input_dim"]
CellState = tuple[Tensor, ...]  # the state of a recurrent cell, (batch, dim) each: h, or h and c


@dataclass(frozen=True, slots=True)
class Source:
    """The source sequences of an encoder-decoder: right-padded ids and their lengths."""

    ids: Int[Tensor, "batch source"]
    lengths: Int[Tensor, " batch"]

    def to(self, device: torch.device | str) -> "Source":
        """The source on another device; the copy is non-blocking."""
        return type(self)(
            self.ids.to(device, non_blocking=True), self.lengths.to(device, non_blocking=True)
        )

    def select(self, rows: Int[Tensor, " selected"]) -> "Source":
        """The source of these rows, in this order."""
        return type(self)(self.ids[rows], self.lengths[rows])


@dataclass(frozen=True, slots=True)
class ImageSource(Source):
    """The source images of a captioner, in the field `ids`, and their numbers of regions."""

    ids: Float[Tensor, "batch channels height width"]

    @classmethod
    def of(
        cls, images: Float[Tensor, "batch channels height width"], regions: int
    ) -> "ImageSource":
        """Images that all have `regions` regions."""
        return cls(images, torch.full((len(images),), regions, device=images.device))

    @property
    def images(self) -> Float[Tensor, "batch channels height width"]:
        """The pixels."""
        return self.ids


@dataclass(slots=True)
class KVCache:
    """The keys and values of one attention layer, in preallocated buffers.

    Hugging Face's transformers calls the caches of all layers `past_key_values`.
    New keys are written at each row's current length, so rows may have different lengths.
    Entries beyond a row's length are masked out in attention and overwritten later.
    """

    keys: Float[Tensor, "rows kv_heads capacity head_dim"]
    values: Float[Tensor, "rows kv_heads capacity value_dim"]

    def write(
        self,
        k: Float[Tensor, "rows kv_heads time head_dim"],
        v: Float[Tensor, "rows kv_heads time value_dim"],
        positions: Int[Tensor, "rows time"],
        seen: int,
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values at `positions`; return the first `seen` keys and values."""
        index = positions[:, None, :, None]
        self.keys.scatter_(2, index.expand_as(k), k.to(self.keys.dtype))
        self.values.scatter_(2, index.expand_as(v), v.to(self.values.dtype))
        return self.keys[:, :, :seen], self.values[:, :, :seen]

    def select(self, rows: Int[Tensor, " selected"]) -> "KVCache":
        """The cache of these rows, in this order."""
        return KVCache(self.keys.index_select(0, rows), self.values.index_select(0, rows))


@dataclass(frozen=True, slots=True)
class TransformerState:
    """The decoding state of a Transformer: KV caches, cross-attention's k and v, row lengths."""

    layers: list[KVCache]
    lengths: Int[Tensor, " rows"]
    capacity: int  # maximum number of ids per row
    max_length: int = 0  # an upper bound of `lengths`, known without a device synchronization
    memory_kv: list[tuple[Tensor, Tensor]] | None = None  # keys and values of cross-attention
    memory_lengths: Int[Tensor, " rows"] | None = None
    equal_lengths: bool = True  # every row has `max_length` ids
    prefix: bool = False  # the next ids are a prefix, within which attention is bidirectional
    static: bool = False  # shapes do not depend on the lengths, which are updated in place

    def select(self, rows: Int[Tensor, " selected"]) -> "TransformerState":
        """The state of these rows, in this order."""
        return replace(
            self,
            layers=[layer.select(rows) for layer in self.layers],
            lengths=self.lengths.index_select(0, rows),
            memory_kv=self.memory_kv
            and [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.memory_kv],
            memory_lengths=None
            if self.memory_lengths is None
            else self.memory_lengths.index_select(0, rows),
        )

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "TransformerState":
        """Truncate each row to its first `lengths` ids."""
        longest = int(lengths.max())
        if longest > self.max_length:
            raise ShapeError(
                f"cannot rewind to {longest} ids: the state has only {self.max_length}"
            )
        return replace(self, lengths=lengths, max_length=longest, equal_lengths=False)

    def with_static_shapes(self) -> "TransformerState":
        """The same state for a decode step that is captured as a CUDA graph.

        Attention always reads the whole capacity, and `lengths` is updated in place.
        """
        return replace(self, max_length=self.capacity - 1, equal_lengths=False, static=True)

    def matches_capacity(self, capacity: int) -> bool:
        """Whether the buffers have exactly this capacity."""
        return self.capacity == capacity

    def reset(self, initial: "TransformerState | None" = None) -> "TransformerState":
        """An empty state in the same buffers, with the `memory_kv` of `initial` if it has one."""
        self.lengths.zero_()
        if initial is not None and self.memory_kv is not None and initial.memory_kv is not None:
            for buffers, values in zip(self.memory_kv, initial.memory_kv, strict=True):
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)
        if initial is not None and self.memory_lengths is not None:
            self.memory_lengths.copy_(cast(Tensor, initial.memory_lengths))
        return replace(self, max_length=0)

    def advance(self, counts: Int[Tensor, " rows"] | None, time: int) -> "TransformerState":
        """The state after `time` more ids, of which `counts` per row are valid (None: all)."""
        if self.static:
            self.lengths.add_(time if counts is None else counts)
            return self
        if counts is None:
            lengths = self.lengths + time
            return replace(self, lengths=lengths, max_length=self.max_length + time, prefix=False)
        lengths = self.lengths + counts
        longest = int(lengths.max())
        return replace(self, lengths=lengths, max_length=longest, equal_lengths=False, prefix=False)

    def length_after(self, time: int) -> int:
        """The number of keys after `time` more ids; raise `ShapeError` beyond the capacity."""
        length = self.max_length + time
        if length > self.capacity:
            raise ShapeError(
                f"{self.max_length} ids and {time} more do not fit the KV cache, "
                f"which has capacity={self.capacity}; start with a larger capacity"
            )
        return length


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The decoding state of a model without a KV cache, such as a recurrent network or an HMM.

    A recurrence cannot be inverted, so the states before the last step and after each of its ids
    are stored: `rewind` can go back to the beginning of the last step and no further. After a step
    with different `counts`, rows are at different snapshots.

        snapshot     0        1        2       …  time
                  before   after x1  after x2     after all
    """

    layers: list[CellState]  # the states of each layer: (rows, time + 1, …)
    lengths: Int[Tensor, " rows"]
    index: Int[Tensor, " rows"]  # the current snapshot of each row

    @classmethod
    def initial(cls, layers: list[CellState]) -> "RecurrentState":
        """The state before the first id: one snapshot."""
        zeros = layers[0][0].new_zeros(len(layers[0][0]), dtype=torch.long)
        return cls(
            [tuple(vector.unsqueeze(1) for vector in layer) for layer in layers], zeros, zeros
        )

    def current(self) -> list[CellState]:
        """The state of each layer at the current snapshot of each row: (rows, …)."""
        rows = torch.arange(len(self.index), device=self.index.device)
        return [tuple(vector[rows, self.index] for vector in layer) for layer in self.layers]

    def advance(
        self, layers: list[CellState], counts: Int[Tensor, " rows"] | None
    ) -> "RecurrentState":
        """The state after a step with these snapshots; `counts` ids per row are valid."""
        if counts is None:
            counts = torch.full_like(self.index, layers[0][0].shape[1] - 1)
        return replace(self, layers=layers, lengths=self.lengths + counts, index=counts)

    def select(self, rows: Int[Tensor, " selected"]) -> "RecurrentState":
        """The state of these rows, in this order."""
        return replace(
            self,
            layers=[tuple(x.index_select(0, rows) for x in layer) for layer in self.layers],
            lengths=self.lengths.index_select(0, rows),
            index=self.index.index_select(0, rows),
        )

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "RecurrentState":
        """Truncate each row to its first `lengths` ids, within the last step."""
        index = self.index - (self.lengths - lengths)
        if bool(((index < 0) | (index > self.index)).any()):
            raise ShapeError(
                f"cannot rewind from lengths {self.lengths.tolist()} to {lengths.tolist()}: "
                f"only the states of the last step are stored, {self.index.tolist()} ids per row.\n"
                "To go back further, call start() and step through the first ids again."
            )
        return replace(self, lengths=lengths, index=index)


@dataclass(frozen=True, slots=True)
class CapturableRecurrentState(RecurrentState):
    """A recurrent state whose decode step can be captured as a CUDA graph."""

    static: bool = False  # one snapshot, which is updated in place

    def with_static_shapes(self) -> "CapturableRecurrentState":
        """The same state for a decode step that is captured as a CUDA graph."""
        layers = [tuple(vector.unsqueeze(1) for vector in layer) for layer in self.current()]
        lengths, index = self.lengths.clone(), torch.zeros_like(self.index)
        return CapturableRecurrentState(layers, lengths, index, static=True)

    def matches_capacity(self, capacity: int) -> bool:
        """True: a row can hold any number of ids."""
        return True

    def reset(
        self, initial: "CapturableRecurrentState | None" = None
    ) -> "CapturableRecurrentState":
        """The state before the first id, zeros or `initial`, in the same buffers."""
        self.lengths.zero_()
        if initial is not None:
            self._store(initial.current())
            return self
        for vector in (vector for layer in self.layers for vector in layer):
            vector.zero_()
        return self

    def advance(
        self, layers: list[CellState], counts: Int[Tensor, " rows"] | None
    ) -> "RecurrentState":
        """The state after a step with these snapshots; `counts` ids per row are valid."""
        next_state = RecurrentState.advance(self, layers, counts)
        if not self.static:
            return next_state
        self._store(next_state.current())
        self.lengths.copy_(next_state.lengths)
        return self

    def _store(self, states: list[CellState]) -> None:
        for buffers, vectors in zip(self.layers, states, strict=True):
            for buffer, vector in zip(buffers, vectors, strict=True):
                buffer[:, 0].copy_(vector)
