"""A decoder like LLaMA made ready to write on a GPU, by few kernels of our own."""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.models.lean import Lean
from regard.models.transformer import Transformer
from regard.nn import decode_kernels as kernels
from regard.nn.ffn import ACTIVATIONS, FeedForward, GatedFeedForward
from regard.nn.norm import RMSNorm
from regard.nn.packed import PackedBlock
from regard.nn.position import Rotary
from regard.nn.stack import Stack
from regard.nn.state import TransformerState

FEW = 4  # so many rows are written by products of our own; more, by those of the library
BENDS = {activation: name for name, activation in ACTIVATIONS.items()}


def fusible(model: Transformer) -> bool:
    """Whether the kernels say what this model does: RMSNorm before each branch, rotary turns."""
    stack, head = cast(Stack, model.decoder), model.head
    return (
        isinstance(stack.position, Rotary)
        and isinstance(stack.norm, RMSNorm)
        and head.scale == 1.0
        and head.project is None
        and all(
            block.order.kind == "pre"
            and isinstance(block.attention_norm, RMSNorm)
            and block.attention.q_norm is None
            and block.attention.head_dim in (16, 32, 64, 128, 256)
            and cast(FeedForward, block.ffn).activation in BENDS
            for block in stack.layers
        )
    )


class Fused(Lean):
    """`Lean`, with every layer of a step in five kernels for few rows, in nine for many."""

    def __init__(self, model: Transformer, *, int8: bool = False) -> None:
        super().__init__(model, int8=int8)
        attention, position = self.layers[0].block.attention, cast(Rotary, self.stack.position)
        weight = model.embed.token.weight
        self.pairing = kernels.Pairing.of(
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            position.width // 2,
            position.interleaved,
            weight.device,
        )
        self.gains = {
            norm: norm.scale.detach().clone()
            for norm in self.stack.modules()
            if isinstance(norm, RMSNorm)
        }
        self.arrived = torch.zeros(kernels.GROUPS, dtype=torch.int32, device=weight.device)

    def _turns(self, at: Int[Tensor, " places"]) -> tuple[Tensor, ...]:
        turn = cast(Rotary, self.stack.position).turn(at.unsqueeze(0))
        return turn.cos[0, 0].contiguous(), turn.sin[0, 0].contiguous()

    def _write(self, x: Float[Tensor, "rows dim"], state: TransformerState) -> Tensor:
        layer = self._layer_of_few if len(x) <= FEW else self._layer_of_many
        x = x.float() if len(x) <= FEW else x
        for number, packed in enumerate(self.layers):
            x = layer(x, packed, state, number)
        norm = cast(RMSNorm, self.stack.norm)
        if len(x) <= FEW:
            return kernels.project(x, self.head, gain=self.gains[norm], eps=norm.eps)
        return kernels.product(self._normed(x, norm), self.head)

    def _layer_of_few(
        self, x: Tensor, packed: PackedBlock, state: TransformerState, number: int
    ) -> Tensor:
        block, kept = packed.block, state.layers[number]
        before, between = cast(RMSNorm, block.attention_norm), cast(RMSNorm, block.ffn_norm)
        q = kernels.look_up(
            x,
            self.gains[before],
            before.eps,
            packed.look_up,
            self.pairing,
            self.turns,
            kept,
            state.lengths,
        )
        x = kernels.project(self._attend(q, packed, state, number), packed.out, stream=x)
        wide = kernels.project(
            x, packed.wide, gain=self.gains[between], eps=between.eps, bend=_bend(packed)
        )
        return kernels.project(wide, packed.narrow, stream=x)

    def _layer_of_many(
        self, x: Tensor, packed: PackedBlock, state: TransformerState, number: int
    ) -> Tensor:
        block, kept = packed.block, state.layers[number]
        before, between = cast(RMSNorm, block.attention_norm), cast(RMSNorm, block.ffn_norm)
        qkv = kernels.product(self._normed(x, before), packed.look_up)
        q = kernels.turn_and_store(qkv, self.pairing, self.turns, kept, state.lengths)
        x = kernels.product(self._attend(q, packed, state, number), packed.out, x)
        wide = kernels.product(self._normed(x, between), packed.wide)
        return kernels.product(kernels.gate(wide, _bend(packed)), packed.narrow, x)

    def _attend(
        self, q: Tensor, packed: PackedBlock, state: TransformerState, number: int
    ) -> Tensor:
        return kernels.attend(
            q,
            state.layers[number],
            state.lengths,
            packed.block.attention.score.scale,
            self.stack.windows[number],
            self.arrived,
        )

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return kernels.norm(x, self.gains[norm], norm.eps)


def _bend(packed: PackedBlock) -> kernels.Bend:
    ffn = cast(FeedForward, packed.block.ffn)
    return kernels.Bend(BENDS[ffn.activation], isinstance(ffn, GatedFeedForward))
