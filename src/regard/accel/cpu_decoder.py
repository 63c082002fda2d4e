"""Decode steps of rows of equal length on a CPU, in as few calls to torch as possible.

With a small model, the overhead of hundreds of torch calls dominates a decode step. Therefore the
KV cache of all layers is one tensor, all layers share one workspace, and views are made once.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.packed import PackedBlock
from regard.nn.block import GatedFeedForward
from regard.nn.state import KVCache, TransformerState

ZERO = torch.zeros((), dtype=torch.float32, device="cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Buffers for one token per row, with views of them; used by one layer after the other."""

    packed: PackedBlock  # all layers have the shapes of this one
    qkv: Float[Tensor, "rows width"]
    q: Float[Tensor, "rows kv_heads group head_dim"]
    kv: Float[Tensor, "rows 2 kv_heads head_dim"]
    qk: Float[Tensor, "rows heads_and_kv_heads head_dim"]
    complex_qk: Tensor | None  # queries and keys as complex numbers
    gate_up: Float[Tensor, "rows inner"]
    gate_and_up: tuple[Tensor, ...]  # views of `gate_up`: gate and up, or up alone

    @classmethod
    def of(cls, packed: PackedBlock, like: Tensor, rows: int) -> "Workspace":
        """Buffers for layers with the shapes of `packed`."""
        heads, kv_heads = packed.attention.heads, packed.attention.kv_heads
        qkv = like.new_empty(rows, len(packed.qkv.weight))
        by_head = qkv.unflatten(1, (heads + 2 * kv_heads, -1))
        q, kv = by_head.split((heads, 2 * kv_heads), 1)
        qk = by_head.narrow(1, 0, heads + kv_heads)
        even = qk.shape[2] % 2 == 0
        gate_up = like.new_empty(rows, len(packed.gate_up.weight))
        return cls(
            packed,
            qkv,
            q.unflatten(1, (kv_heads, -1)),
            kv.unflatten(1, (2, kv_heads)),
            qk,
            torch.view_as_complex(qk.unflatten(2, (-1, 2))) if even else None,
            gate_up,
            gate_up.chunk(2, -1) if isinstance(packed.ffn, GatedFeedForward) else (gate_up,),
        )


@dataclass(frozen=True, slots=True)
class CpuDecoderState(TransformerState):
    """A state whose KV caches are views of one tensor, with a workspace."""

    kv: Tensor | None = None  # (layers, rows, keys and values, kv_heads, capacity, head_dim)
    workspace: Workspace | None = None

    @classmethod
    def of(cls, kv: Tensor, packed: PackedBlock) -> "CpuDecoderState":
        """An empty state for layers with the shapes of `packed`."""
        (_, rows, _, _, capacity, _), workspace = kv.shape, Workspace.of(packed, kv, kv.shape[1])
        lengths = torch.zeros(rows, dtype=torch.long)
        return cls(_kv_caches(kv), lengths, capacity, kv=kv, workspace=workspace)

    def select(self, rows: Int[Tensor, " selected"]) -> "CpuDecoderState":
        """The state of these rows, in this order."""
        kv = cast(Tensor, self.kv).index_select(1, rows)
        workspace = Workspace.of(cast(Workspace, self.workspace).packed, kv, len(rows))
        lengths = self.lengths.index_select(0, rows)
        return replace(self, layers=_kv_caches(kv), lengths=lengths, kv=kv, workspace=workspace)


def _kv_caches(kv: Tensor) -> list[KVCache]:
    return [KVCache(keys, values) for keys, values in (layer.unbind(1) for layer in kv)]


class CpuDecodeStep:
    """One decode step on a `CpuDecoderState`; `packed_decoder.DecodeStep` runs all other states."""

    __slots__ = ("keys", "new_kv", "rotation", "single_row", "values", "workspace")

    def __init__(self, state: CpuDecoderState, rotation: tuple[Tensor, ...]) -> None:
        kv, seen = cast(Tensor, state.kv), state.length_after(1)
        self.workspace, self.rotation = cast(Workspace, state.workspace), rotation
        keys, values = kv.narrow(4, 0, seen).unbind(2)
        self.single_row = kv.shape[1] == 1
        if self.single_row:  # its attention is two plain matmuls
            keys, values = keys.squeeze(1).transpose(2, 3), values.squeeze(1)
        self.keys, self.values = keys.unbind(), values.unbind()
        self.new_kv = kv.select(4, seen - 1).unbind()

    def attend(self, x: Float[Tensor, "rows dim"], packed: PackedBlock, layer: int) -> Tensor:
        """Attention of one token per row, for all queries that share a KV head at once."""
        workspace, rotation, attention = self.workspace, self.rotation, packed.attention
        packed.qkv.write_to(workspace.qkv, x)
        if attention.q_norm is not None and attention.k_norm is not None:
            workspace.q.copy_(attention.q_norm(workspace.q))
            keys = workspace.kv[:, 0]
            keys.copy_(attention.k_norm(keys))
        if len(rotation) == 1:
            cast(Tensor, workspace.complex_qk).mul_(rotation[0])
        elif rotation:
            cos, sin = rotation
            width = cos.shape[-1]
            qk = workspace.qk.narrow(2, 0, width)
            rotated = qk.roll(width // 2, -1).mul_(sin)
            torch.addcmul(rotated, qk, cos, out=qk)
        self.new_kv[layer].copy_(workspace.kv)
        keys, values, scale = self.keys[layer], self.values[layer], packed.score_scale
        if self.single_row:
            scores = torch.baddbmm(ZERO, workspace.q.squeeze(0), keys, beta=0, alpha=scale)
            return torch.bmm(scores.softmax(-1), values).view(1, -1)
        y = F.scaled_dot_product_attention(workspace.q, keys, values, scale=scale)
        return y.reshape(x.shape[0], -1)

    def ffn_hidden(self, x: Float[Tensor, "rows dim"], packed: PackedBlock) -> Tensor:
        """The hidden vector of the feed-forward network."""
        parts = self.workspace.gate_and_up
        packed.gate_up.write_to(self.workspace.gate_up, x)
        hidden = packed.ffn.activation(parts[0])
        return hidden if len(parts) == 1 else hidden.mul_(parts[1])
