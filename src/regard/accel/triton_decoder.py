"""A LLaMA-like decoder in a few Triton kernels per layer."""

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels import gemv, prefill
from regard.accel.kernels.common import Activation, RotaryPairs
from regard.accel.kernels.decode_attention import MAX_GROUPS, attend
from regard.accel.kernels.gemm import ResidualStream, reads_packed_int8
from regard.accel.packed import PackedBlock
from regard.accel.packed_decoder import PackedDecoder
from regard.models.base import State
from regard.models.transformer import Transformer
from regard.nn.block import ACTIVATIONS, GatedFeedForward, RMSNorm
from regard.nn.position import Rotary
from regard.nn.state import TransformerState

# Rows up to which each is multiplied as a vector (gemv), by the bytes of a weight: two rows of
# bfloat16 are faster on tensor cores (gemm), which do not take float32.
GEMV_ROWS = {2: 1, 4: 4, 8: 4}
ACTIVATION_NAMES = {function: name for name, function in ACTIVATIONS.items()}


class TritonDecoder(PackedDecoder):
    """A `PackedDecoder` that runs every layer of a decode step in five Triton kernels.

    Prefill uses fewer kernels than torch. `coverage.triton_obstacle` must return None for the
    model.
    """

    def __init__(self, model: Transformer, *, int8: bool = False) -> None:
        super().__init__(model, int8=int8)
        attention, position = self.layers[0].block.attention, cast(Rotary, self.stack.position)
        weight = model.embed.token.weight
        self.prefill_layers = self.layers
        if int8:  # prefill uses the original weights
            packed = {block: PackedBlock.of(block) for block in self.stack.blocks}  # type: ignore[arg-type]
            self.prefill_layers = [packed[block] for block in self.stack.layers]
        self.pairs = RotaryPairs.of(
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
        self.counters = torch.zeros(MAX_GROUPS, dtype=torch.int32, device=weight.device)

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
        is_prompt = state.max_length == 0 and 1 < time <= self.context and not all_logits
        training = torch.is_grad_enabled() or self.model.training
        windowed = any(window is not None and window < time for window in windows)
        if not is_prompt or training or windowed:
            return super().step(ids, state, counts=counts, all_logits=all_logits)
        self.require_unchanged()
        state.length_after(time)
        x = self._prefill(ids, state)
        rows = torch.arange(len(x), device=x.device)
        x = x[:, -1:] if counts is None else x[rows, counts - 1].unsqueeze(1)
        return self.model.head(cast(RMSNorm, self.stack.norm)(x)), state.advance(counts, time)

    def _fits_cpu_decoder(self) -> bool:
        return False  # the kernels need the KV cache of a layer contiguous

    def _rotation_tables(self, positions: Int[Tensor, " positions"]) -> tuple[Tensor, ...]:
        rotation = cast(Rotary, self.stack.position).rotation(positions.unsqueeze(0))
        return rotation.cos[0, 0].contiguous(), rotation.sin[0, 0].contiguous()

    def _prefill(self, ids: Tensor, state: TransformerState) -> Float[Tensor, "rows time dim"]:
        """A prompt with an empty KV cache, up to the final norm."""
        (rows, time), x = ids.shape, self._embed(ids, state.lengths)
        shape, x = x.shape, x.flatten(0, 1)
        for packed, cache in zip(self.prefill_layers, state.layers, strict=True):
            block, attention = packed.block, packed.attention
            norm, ffn_norm = cast(RMSNorm, block.attention_norm), cast(RMSNorm, block.ffn_norm)
            qkv = packed.qkv(prefill.rms_norm(x, self.gains[norm], norm.eps))
            q = prefill.rotate_and_cache(qkv, time, self.pairs, self.rotations, cache)
            y = F.scaled_dot_product_attention(
                q.view(rows, time, attention.heads, -1).transpose(1, 2),
                cache.keys.narrow(2, 0, time),
                cache.values.narrow(2, 0, time),
                is_causal=True,
                scale=packed.score_scale,
                enable_gqa=attention.kv_heads != attention.heads,
            )
            x = packed.out.add_to(x, y.transpose(1, 2).reshape(rows * time, -1))
            gate_up = packed.gate_up(prefill.rms_norm(x, self.gains[ffn_norm], ffn_norm.eps))
            x = packed.down.add_to(x, prefill.apply_activation(gate_up, _activation(packed)))
        return x.view(shape)

    def _decode(self, x: Float[Tensor, "rows dim"], state: TransformerState) -> Tensor:
        few = len(x) <= GEMV_ROWS[x.itemsize]
        return (self._decode_by_gemv if few else self._decode_by_gemm)(x, state)

    def _decode_by_gemv(self, x: Tensor, state: TransformerState) -> Tensor:
        x = x.float()
        for number, packed in enumerate(self.layers):
            block, cache = packed.block, state.layers[number]
            norm, ffn_norm = cast(RMSNorm, block.attention_norm), cast(RMSNorm, block.ffn_norm)
            q = gemv.project_qkv(
                x,
                self.gains[norm],
                norm.eps,
                packed.qkv,
                self.pairs,
                self.rotations,
                cache,
                state.lengths,
            )
            x = gemv.linear(self._attend(q, packed, state, number), packed.out, residual=x)
            hidden = gemv.linear(
                x,
                packed.gate_up,
                gain=self.gains[ffn_norm],
                eps=ffn_norm.eps,
                activation=_activation(packed),
            )
            x = gemv.linear(hidden, packed.down, residual=x)
        norm = cast(RMSNorm, self.stack.norm)
        return gemv.linear(x, self.head, gain=self.gains[norm], eps=norm.eps)

    def _decode_by_gemm(self, x: Tensor, state: TransformerState) -> Tensor:
        norms = [cast(RMSNorm, packed.block.attention_norm) for packed in self.layers]
        norms = [*norms, cast(RMSNorm, self.stack.norm)]
        stream = ResidualStream.start(x, self.gains[norms[0]], norms[0].eps, self.layers[0].qkv)
        for number, packed in enumerate(self.layers):
            ffn_norm, next_norm = cast(RMSNorm, packed.block.ffn_norm), norms[number + 1]
            qkv = stream.project(packed.qkv, self.counters)
            y = self._attend(qkv, packed, state, number, packed_qkv=True)
            stream = stream.add(y, packed.out, self.gains[ffn_norm], ffn_norm.eps, self.counters)
            y = stream.project(
                packed.gate_up, self.counters, _activation(packed), consumer=packed.down
            )
            stream = stream.add(y, packed.down, self.gains[next_norm], next_norm.eps, self.counters)
        return stream.project(self.head, self.counters, dtype=torch.float32)

    def _attend(
        self,
        q: Tensor,
        packed: PackedBlock,
        state: TransformerState,
        number: int,
        packed_qkv: bool = False,
    ) -> Tensor:
        return attend(
            q,
            state.layers[number],
            state.lengths,
            packed.score_scale,
            self.stack.windows[number],
            self.counters,
            (self.pairs, self.rotations) if packed_qkv else None,
            packed_qkv and reads_packed_int8(packed.out, q.dtype),
        )


def _activation(packed: PackedBlock) -> Activation:
    gated = isinstance(packed.ffn, GatedFeedForward)
    return Activation(ACTIVATION_NAMES[packed.ffn.activation], gated)
