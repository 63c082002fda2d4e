"""A decoder like LLaMA made ready to write on a GPU, by few kernels of our own."""

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels import gemv as few
from regard.accel.kernels import prefill as read
from regard.accel.kernels.common import Bend, Pairing
from regard.accel.kernels.decode_attention import GROUPS, attend
from regard.accel.kernels.gemm import Flow, in_fours
from regard.accel.packed import PackedBlock
from regard.accel.packed_decoder import PackedDecoder
from regard.models.base import State
from regard.models.transformer import Transformer
from regard.nn.ffn import ACTIVATIONS, FeedForward, GatedFeedForward
from regard.nn.norm import RMSNorm
from regard.nn.position import Rotary
from regard.nn.stack import Stack
from regard.nn.state import TransformerState

# Rows up to which each is multiplied by itself, by the bytes of a number: two of bfloat16 are
# faster with tensor cores, which take no float32.
FEW = {2: 1, 4: 4, 8: 4}
MOST = 32  # heads that share their keys: of more, a card's shared memory may not hold the queries
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
            block.norm_order.kind == "pre"
            and isinstance(block.attention_norm, RMSNorm)
            and block.attention.q_norm is None
            and block.attention.head_dim in (16, 32, 64, 128, 256)
            and block.attention.heads <= MOST * block.attention.kv_heads
            and cast(FeedForward, block.ffn).activation in BENDS
            for block in stack.layers
        )
    )


class TritonDecoder(PackedDecoder):
    """A `PackedDecoder` that runs every layer of a decode step in five Triton kernels."""

    def __init__(self, model: Transformer, *, int8: bool = False) -> None:
        super().__init__(model, int8=int8)
        attention, position = self.layers[0].block.attention, cast(Rotary, self.stack.position)
        weight = model.embed.token.weight
        self.given = self.layers  # with the weights that prompts are read with
        if int8:
            packed = {block: PackedBlock.of(block) for block in self.stack.blocks}  # type: ignore[arg-type]
            self.given = [packed[block] for block in self.stack.layers]
        self.pairing = Pairing.of(
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
        self.arrived = torch.zeros(GROUPS, dtype=torch.int32, device=weight.device)

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], State]:
        """See `Language.step`."""
        assert isinstance(state, TransformerState)
        time, windows = ids.shape[1], self.stack.windows
        begins = state.max_length == 0 and 1 < time <= self.context and not all_logits
        learning = torch.is_grad_enabled() or self.model.training
        cut = any(window is not None and window < time for window in windows)
        if not begins or learning or cut:
            return super().step(ids, state, counts=counts, all_logits=all_logits)
        state.length_after(time)
        x = self._read(ids, state)
        rows = torch.arange(len(x), device=x.device)
        x = x[:, -1:] if counts is None else x[rows, counts - 1].unsqueeze(1)
        return self.model.head(cast(RMSNorm, self.stack.norm)(x)), state.advance(counts, time)

    def _level(self) -> bool:
        return False  # the kernels want the buffers of a layer by themselves

    def _turns(self, at: Int[Tensor, " places"]) -> tuple[Tensor, ...]:
        turn = cast(Rotary, self.stack.position).rotation(at.unsqueeze(0))
        return turn.cos[0, 0].contiguous(), turn.sin[0, 0].contiguous()

    def _read(self, ids: Tensor, state: TransformerState) -> Float[Tensor, "rows time dim"]:
        """A prompt, with nothing before it, up to the last norm."""
        (rows, time), x = ids.shape, self._embedded(ids, state.lengths)
        shape, x = x.shape, x.flatten(0, 1)
        for packed, kept in zip(self.given, state.layers, strict=True):
            block, attention = packed.block, packed.attention
            before, between = cast(RMSNorm, block.attention_norm), cast(RMSNorm, block.ffn_norm)
            qkv = packed.look_up(read.norm(x, self.gains[before], before.eps))
            q = read.turn_and_store(qkv, time, self.pairing, self.turns, kept)
            y = F.scaled_dot_product_attention(
                q.view(rows, time, attention.heads, -1).transpose(1, 2),
                kept.keys.narrow(2, 0, time),
                kept.values.narrow(2, 0, time),
                is_causal=True,
                scale=packed.scale,
                enable_gqa=attention.kv_heads != attention.heads,
            )
            x = packed.out.onto(x, y.transpose(1, 2).reshape(rows * time, -1))
            wide = packed.wide(read.norm(x, self.gains[between], between.eps))
            x = packed.narrow.onto(x, read.gate(wide, _bend(packed)))
        return x.view(shape)

    def _write(self, x: Float[Tensor, "rows dim"], state: TransformerState) -> Tensor:
        return (self._write_few if len(x) <= FEW[x.itemsize] else self._write_many)(x, state)

    def _write_few(self, x: Tensor, state: TransformerState) -> Tensor:
        x = x.float()
        for number, packed in enumerate(self.layers):
            block, kept = packed.block, state.layers[number]
            before, between = cast(RMSNorm, block.attention_norm), cast(RMSNorm, block.ffn_norm)
            q = few.look_up(
                x,
                self.gains[before],
                before.eps,
                packed.look_up,
                self.pairing,
                self.turns,
                kept,
                state.lengths,
            )
            x = few.project(self._attend(q, packed, state, number), packed.out, stream=x)
            wide = few.project(
                x, packed.wide, gain=self.gains[between], eps=between.eps, bend=_bend(packed)
            )
            x = few.project(wide, packed.narrow, stream=x)
        norm = cast(RMSNorm, self.stack.norm)
        return few.project(x, self.head, gain=self.gains[norm], eps=norm.eps)

    def _write_many(self, x: Tensor, state: TransformerState) -> Tensor:
        norms = [cast(RMSNorm, packed.block.attention_norm) for packed in self.layers]
        norms = [*norms, cast(RMSNorm, self.stack.norm)]
        flow = Flow.begin(x, self.gains[norms[0]], norms[0].eps, self.layers[0].look_up)
        for number, packed in enumerate(self.layers):
            between, after = cast(RMSNorm, packed.block.ffn_norm), norms[number + 1]
            qkv = flow.project(packed.look_up, self.arrived)
            y = self._attend(qkv, packed, state, number, raw=True)
            flow = flow.add(y, packed.out, self.gains[between], between.eps, self.arrived)
            y = flow.project(packed.wide, self.arrived, _bend(packed), reader=packed.narrow)
            flow = flow.add(y, packed.narrow, self.gains[after], after.eps, self.arrived)
        return flow.project(self.head, self.arrived, dtype=torch.float32)

    def _attend(
        self,
        q: Tensor,
        packed: PackedBlock,
        state: TransformerState,
        number: int,
        raw: bool = False,
    ) -> Tensor:
        return attend(
            q,
            state.layers[number],
            state.lengths,
            packed.scale,
            self.stack.windows[number],
            self.arrived,
            (self.pairing, self.turns) if raw else None,
            raw and in_fours(packed.out, q.dtype),
        )


def _bend(packed: PackedBlock) -> Bend:
    return Bend(BENDS[packed.ffn.activation], isinstance(packed.ffn, GatedFeedForward))
