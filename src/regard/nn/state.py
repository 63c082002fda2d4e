"""The KV cache of a Transformer decoder, and the source sequence of a conditional model."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ShapeError

# What a model reads: ids, or the vectors of a model with `input_dim` > 0.
Inputs = Int[Tensor, "batch time"] | Float[Tensor, "batch time input_dim"]


@dataclass(frozen=True, slots=True)
class Source:
    """The source sequences of an encoder-decoder: right-padded ids and their lengths."""

    ids: Int[Tensor, "batch source"]
    lengths: Int[Tensor, " batch"]

    def to(self, device: torch.device | str) -> "Source":
        """The source on another device; the copy does not block."""
        return type(self)(
            self.ids.to(device, non_blocking=True), self.lengths.to(device, non_blocking=True)
        )

    def select(self, rows: Int[Tensor, " selected"]) -> "Source":
        """The source of these rows, in this order."""
        return type(self)(self.ids[rows], self.lengths[rows])


@dataclass(frozen=True, slots=True)
class ImageSource(Source):
    """The images that a captioner writes about, in place of ids, and their numbers of regions."""

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
        """Store keys and values at `positions`; return the first `seen` of the cache."""
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
    capacity: int  # the most ids a row can hold
    max_length: int = 0  # an upper bound of `lengths`, known without a device synchronization
    memory: list[tuple[Tensor, Tensor]] | None = None  # keys and values of cross-attention
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
            memory=self.memory
            and [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.memory],
            memory_lengths=None
            if self.memory_lengths is None
            else self.memory_lengths.index_select(0, rows),
        )

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "TransformerState":
        """Truncate each row to its first `lengths` ids."""
        longest = int(lengths.max())
        if longest > self.max_length:
            raise ShapeError(
                f"cannot rewind to {longest} ids: the state has {self.max_length}; give fewer"
            )
        return replace(self, lengths=lengths, max_length=longest, equal_lengths=False)

    def with_static_shapes(self) -> "TransformerState":
        """The same state for a decode step that is captured as a CUDA graph.

        Attention always reads the whole capacity, and `lengths` is updated in place.
        """
        return replace(self, max_length=self.capacity - 1, equal_lengths=False, static=True)

    def reset(self) -> "TransformerState":
        """An empty state on the same buffers."""
        self.lengths.zero_()
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
        """The number of keys in the cache after `time` more ids; an error beyond the capacity."""
        length = self.max_length + time
        if length > self.capacity:
            raise ShapeError(
                f"{self.max_length} ids and {time} more do not fit the KV cache, "
                f"which has capacity={self.capacity}; start with a larger capacity"
            )
        return length
