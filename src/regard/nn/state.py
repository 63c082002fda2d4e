"""What a model reads before it writes, and what it remembers while it writes."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Source:
    """What a conditional model reads before it writes: right-padded ids and their real lengths."""

    ids: Int[Tensor, "batch source"]
    lengths: Int[Tensor, " batch"]

    def to(self, device: torch.device | str) -> "Source":
        """The same on another device."""
        return Source(
            self.ids.to(device, non_blocking=True), self.lengths.to(device, non_blocking=True)
        )

    def select(self, rows: Int[Tensor, " chosen"]) -> "Source":
        """Those of these rows."""
        return Source(self.ids[rows], self.lengths[rows])


@dataclass(slots=True)
class KeyValues:
    """The keys and values of one attention layer, in buffers made once.

    A row's new keys are written at its own length, so rows may stand at different positions;
    what lies beyond a row's length is never looked at and is simply written over.
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
        """Store new keys and values at `positions`; return the first `seen` of all of them."""
        index = positions[:, None, :, None]
        self.keys.scatter_(2, index.expand_as(k), k.to(self.keys.dtype))
        self.values.scatter_(2, index.expand_as(v), v.to(self.values.dtype))
        return self.keys[:, :, :seen], self.values[:, :, :seen]

    def select(self, rows: Int[Tensor, " chosen"]) -> "KeyValues":
        """The same for these rows, in this order."""
        return KeyValues(self.keys.index_select(0, rows), self.values.index_select(0, rows))


@dataclass(frozen=True, slots=True)
class TransformerState:
    """Keys and values of every layer, those of the source, and how far each row has come.

    `longest` is a bound on `lengths` that the host knows without asking the device, and `level`
    says that all rows are as long as that. A `steady` one counts its lengths in place.
    """

    layers: list[KeyValues]
    lengths: Int[Tensor, " rows"]
    capacity: int
    longest: int = 0
    memory: list[tuple[Tensor, Tensor]] | None = None  # cross-attention's keys and values
    memory_lengths: Int[Tensor, " rows"] | None = None
    level: bool = True
    steady: bool = False

    def select(self, rows: Int[Tensor, " chosen"]) -> "TransformerState":
        """The state of these rows, in this order."""
        return replace(
            self,
            layers=[layer.select(rows) for layer in self.layers],
            lengths=self.lengths.index_select(0, rows),
            memory=self.memory
            and [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.memory],
            memory_lengths=None
            if self.memory_lengths is None
            else self.memory_lengths.index_select(0, rows),
        )

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "TransformerState":
        """Forget all but the first `lengths` ids of each row."""
        longest = int(lengths.max())
        if longest > self.longest:
            raise ShapeError(f"cannot rewind to {longest} ids: only {self.longest} were taken in")
        return replace(self, lengths=lengths, longest=longest, level=False)

    def recordable(self) -> "TransformerState":
        """The same, of which a step can be recorded once and replayed.

        Every look is as wide as the capacity, whatever the lengths, and they grow in place.
        """
        return replace(self, longest=self.capacity - 1, level=False, steady=True)

    def restarted(self) -> "TransformerState":
        """The same buffers, with nothing in them yet."""
        self.lengths.zero_()
        return replace(self, longest=0)

    def advanced(self, counts: Int[Tensor, " rows"] | None, time: int) -> "TransformerState":
        """The same after `time` more ids, of which `counts` per row are real (None: all)."""
        if self.steady:
            self.lengths.add_(time if counts is None else counts)
            return self
        if counts is None:
            return replace(self, lengths=self.lengths + time, longest=self.longest + time)
        lengths = self.lengths + counts
        return replace(self, lengths=lengths, longest=int(lengths.max()), level=False)

    def room_for(self, time: int) -> int:
        """How many keys there are to look at after `time` more; an error when there is no room."""
        if self.longest + time > self.capacity:
            raise ShapeError(
                f"{self.longest} ids and {time} more do not fit a state of capacity {self.capacity}"
            )
        return self.longest + time
