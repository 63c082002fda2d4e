"""One token for rows that all stand at one place, on a CPU, in as few calls as there can be.

A small model's token is hundreds of calls that do next to nothing. So what all layers remember
is one tensor, every layer works in the same room, and the views of both are made once.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.packed import PackedBlock
from regard.nn.ffn import GatedFeedForward
from regard.nn.state import KVCache, TransformerState

NOTHING = torch.zeros((), dtype=torch.float32, device="cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Where a layer puts what it works out for one token per row; layers take turns."""

    layer: PackedBlock  # all are like this one
    qkv: Float[Tensor, "rows width"]
    q: Float[Tensor, "rows kv_heads group head_dim"]
    kv: Float[Tensor, "rows 2 kv_heads head_dim"]
    qk: Float[Tensor, "rows heads_and_kv_heads head_dim"]
    pairs: Tensor | None  # queries and keys as complex numbers
    wide: Float[Tensor, "rows inner"]
    parts: tuple[Tensor, ...]  # of it: gate and up, or up alone

    @classmethod
    def of(cls, packed: PackedBlock, like: Tensor, rows: int) -> "Room":
        """Room for layers like this one."""
        heads, kv_heads = packed.attention.heads, packed.attention.kv_heads
        qkv = like.new_empty(rows, len(packed.look_up.weight))
        by_head = qkv.unflatten(1, (heads + 2 * kv_heads, -1))
        q, kv = by_head.split((heads, 2 * kv_heads), 1)
        qk = by_head.narrow(1, 0, heads + kv_heads)
        even = qk.shape[2] % 2 == 0
        wide = like.new_empty(rows, len(packed.wide.weight))
        return cls(
            packed,
            qkv,
            q.unflatten(1, (kv_heads, -1)),
            kv.unflatten(1, (2, kv_heads)),
            qk,
            torch.view_as_complex(qk.unflatten(2, (-1, 2))) if even else None,
            wide,
            wide.chunk(2, -1) if isinstance(packed.ffn, GatedFeedForward) else (wide,),
        )


@dataclass(frozen=True, slots=True)
class CpuDecoderState(TransformerState):
    """A state whose layers are views of one tensor, with the room to work in."""

    whole: Tensor | None = None  # (layers, rows, keys and values, kv_heads, capacity, head_dim)
    room: Room | None = None

    @classmethod
    def of(cls, whole: Tensor, layer: PackedBlock) -> "CpuDecoderState":
        """Nothing remembered yet; all layers are like this one."""
        (_, rows, _, _, capacity, _), room = whole.shape, Room.of(layer, whole, whole.shape[1])
        lengths = torch.zeros(rows, dtype=torch.long)
        return cls(_layers(whole), lengths, capacity, whole=whole, room=room)

    def select(self, rows: Int[Tensor, " chosen"]) -> "CpuDecoderState":
        """The state of these rows, in this order."""
        whole = cast(Tensor, self.whole).index_select(1, rows)
        room = Room.of(cast(Room, self.room).layer, whole, len(rows))
        lengths = self.lengths.index_select(0, rows)
        return replace(self, layers=_layers(whole), lengths=lengths, whole=whole, room=room)


def _layers(whole: Tensor) -> list[KVCache]:
    return [KVCache(keys, values) for keys, values in (each.unbind(1) for each in whole)]


class CpuDecoder:
    """What the layers of one step share; see `pack._Now`, which is for all other cases."""

    __slots__ = ("here", "keys", "one", "room", "turn", "values")

    def __init__(self, state: CpuDecoderState, turn: tuple[Tensor, ...]) -> None:
        whole, seen = cast(Tensor, state.whole), state.length_after(1)
        self.room, self.turn = cast(Room, state.room), turn
        keys, values = whole.narrow(4, 0, seen).unbind(2)
        self.one = whole.shape[1] == 1
        if self.one:  # whose attention is two plain products
            keys, values = keys.squeeze(1).transpose(2, 3), values.squeeze(1)
        self.keys, self.values = keys.unbind(), values.unbind()
        self.here = whole.select(4, seen - 1).unbind()

    def look(self, x: Float[Tensor, "rows dim"], packed: PackedBlock, layer: int) -> Tensor:
        """Attention of one token per row; the queries that share a head of keys look at once."""
        room, turn, attention = self.room, self.turn, packed.attention
        packed.look_up.into(room.qkv, x)
        if attention.q_norm is not None and attention.k_norm is not None:
            room.q.copy_(attention.q_norm(room.q))
            keys = room.kv[:, 0]
            keys.copy_(attention.k_norm(keys))
        if len(turn) == 1:
            cast(Tensor, room.pairs).mul_(turn[0])
        elif turn:
            cos, sin = turn
            width = cos.shape[-1]
            qk = room.qk.narrow(2, 0, width)
            turned = qk.roll(width // 2, -1).mul_(sin)
            torch.addcmul(turned, qk, cos, out=qk)
        self.here[layer].copy_(room.kv)
        keys, values = self.keys[layer], self.values[layer]
        if self.one:
            scores = torch.baddbmm(NOTHING, room.q.squeeze(0), keys, beta=0, alpha=packed.scale)
            return torch.bmm(scores.softmax(-1), values).view(1, -1)
        y = F.scaled_dot_product_attention(room.q, keys, values, scale=packed.scale)
        return y.reshape(x.shape[0], -1)

    def widen(self, x: Float[Tensor, "rows dim"], packed: PackedBlock) -> Tensor:
        """The inner vector of the feed-forward part."""
        parts = self.room.parts
        packed.wide.into(self.room.wide, x)
        inner = packed.ffn.activation(parts[0])
        return inner if len(parts) == 1 else inner.mul_(parts[1])
