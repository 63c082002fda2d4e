"""A Transformer decoder in a few Triton kernels per layer, or one CUDA kernel for all layers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.accel.description import ACTIVATION_NAMES, DecoderDescription, inspect_decoder
from regard.accel.kernels import gemv, prefill
from regard.accel.kernels.common import FFNActivation, RotaryPairs
from regard.accel.kernels.decode_attention import MAX_KV_HEADS, AttentionOptions, attend
from regard.accel.kernels.gemm import ResidualStream, reads_packed_int8
from regard.accel.kernels.residual import OutputNorm, add_branch
from regard.accel.nvrtc import CudaKernelError
from regard.accel.packed import FusedNormLinear, PackedBlock
from regard.accel.packed_decoder import ConcatenatedPrompts, PackedDecoder
from regard.accel.persistent_step import PersistentStep
from regard.accel.sparse_attention import FLASH_DTYPES, causal_window_attention, varlen_attention
from regard.accel.support import (
    GPUProperties,
    gemm_unsupported_reason,
    packed_unsupported_reason,
    persistent_unsupported_reason,
    prefill_unsupported_reason,
)
from regard.models.base import State
from regard.models.transformer import Transformer
from regard.nn.block import GatedFeedForward
from regard.nn.norm import LayerNorm, RMSNorm
from regard.nn.position import ALiBi, Rotary
from regard.nn.state import KVCache, TransformerState

logger = logging.getLogger(__name__)

# The largest batch that is decoded with gemv, by bytes per weight; larger ones use gemm, which is
# faster from two rows of bfloat16 on: tensor cores do not multiply float32.
MAX_GEMV_ROWS = {2: 1, 4: 4, 8: 4}
INT4_ROWS = 4  # rows up to which int4 weights are used: more are faster on tensor cores


@dataclass(frozen=True, slots=True, eq=False)
class TritonLayer:
    """A layer as the kernels compute it."""

    packed: PackedBlock
    qkv: FusedNormLinear
    out: FusedNormLinear
    gate_up: FusedNormLinear
    down: FusedNormLinear
    options: AttentionOptions
    activation: FFNActivation
    parallel: bool  # attention and feed-forward network read the same input
    post: bool  # norms follow the sum with x, as in the 2017 Transformer
    # after each branch: of its output (sandwich) or of the residual sum (post, deepnorm)
    output_norms: tuple[OutputNorm, OutputNorm] | None

    def add(self, x: Tensor, y: Tensor, layer: FusedNormLinear, branch: int) -> Tensor:
        """x + `layer`(y), the end of branch 0 (attention) or 1 (feed-forward), with its norms."""
        if self.output_norms is None:
            return gemv.linear(y, layer, residual=x)
        norm, residual_scale = (
            self.output_norms[branch],
            self.packed.block.norm_placement.residual_scale,
        )
        y = gemv.linear(y, layer)
        return add_branch(x, y, norm, post=self.post, residual_scale=residual_scale)


class TritonDecoder(PackedDecoder):
    """A `PackedDecoder` that runs every layer of a decode step in four to eight Triton kernels.

    `support.triton_unsupported_reason` must return None for the model. Several rows and prefill
    use faster kernels where `support.gemm_unsupported_reason` and
    `support.prefill_unsupported_reason` return None; one row uses one CUDA kernel for all layers
    (`PersistentStep`) where `support.persistent_unsupported_reason` returns None.

    With `int4` the blocks have int4 weights and the head int8, in steps of up to `INT4_ROWS` rows.
    Without `one_row`, there is no kernel for steps of one row.
    """

    def __init__(
        self, model: Transformer, *, int8: bool = False, int4: bool = False, one_row: bool = True
    ) -> None:
        super().__init__(model, int8=int8, int4=int4)
        self.prefill_model = model  # prompts use the original weights
        self.decoder_for_many_rows = TritonDecoder(model, one_row=False) if int4 else None
        description = inspect_decoder(model)
        self.supports_gemm = gemm_unsupported_reason(description) is None
        self.supports_packed_step = packed_unsupported_reason(description) is None
        self.supports_prefill = prefill_unsupported_reason(description) is None
        device, position = model.device, self.stack.position
        self.prefill_layers = self.layers
        if int8 or int4:  # prefill uses the original weights
            packed = {block: PackedBlock.of(block) for block in self.stack.blocks}  # type: ignore[arg-type]
            self.prefill_layers = [packed[block] for block in self.stack.layers]
        attention, num_frequencies = self.layers[0].attention, 0
        tables = (torch.zeros(0, 0),) * 2  # cos and sin
        if isinstance(position, Rotary):
            num_frequencies = position.rotary_dim // 2
            rotation = position.rotation(torch.arange(self.context, device=device).unsqueeze(0))
            tables = (rotation.cos[0, 0].contiguous(), rotation.sin[0, 0].contiguous())
        self.tables = tuple(table.to(device) for table in tables)
        self.pairs = RotaryPairs.of(
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            num_frequencies,
            isinstance(position, Rotary) and position.interleaved,
            device,
        )
        self.triton_layers = [
            self._make_layer(packed, window)
            for packed, window in zip(self.layers, self.stack.windows, strict=True)
        ]
        # the kernels cannot scale or project the input of the head; torch does
        self.head_needs_preparation = description.head_scale != 1.0 or description.head_projects
        self.normed_head = FusedNormLinear.of(
            self.head, None if self.head_needs_preparation else self.stack.norm
        )
        self.counters = torch.zeros(MAX_KV_HEADS, dtype=torch.int32, device=device)
        self.persistent_step: PersistentStep | None = None
        self.persistent_unsupported_reason = "it needs a CUDA GPU"
        if device.type == "cuda" and one_row:
            self._make_persistent_step(description)

    def _make_persistent_step(self, description: DecoderDescription) -> None:
        gpu, bits = GPUProperties.of(self.device), self.layers[0].qkv.bits
        reason = persistent_unsupported_reason(description, gpu, bits=bits)
        if reason is None:
            try:
                self.persistent_step = PersistentStep.on_gpu(self)
            except CudaKernelError as error:  # too little shared memory, no NVRTC, …
                reason = str(error)
                logger.info("The decode step of one row uses Triton kernels: %s", reason)
        self.persistent_unsupported_reason = reason or ""

    def _copies_large_weights(self) -> bool:
        return any(isinstance(m, LayerNorm) for m in self.model.modules())  # W g is a copy

    def _make_layer(self, packed: PackedBlock, window: int | None) -> TritonLayer:
        block, attention, position = packed.block, packed.attention, self.stack.position
        kind = block.norm_placement.kind
        post = kind in ("post", "deepnorm")
        norm, ffn_norm = block.attention_norm, block.ffn_norm or block.attention_norm
        output_norms = {
            "sandwich": (block.attention_post_norm, block.ffn_post_norm),
            "post": (norm, ffn_norm),
            "deepnorm": (norm, ffn_norm),
        }.get(kind)
        gains = None
        if isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm):
            gains = tuple(n.gain.detach().float() for n in (attention.q_norm, attention.k_norm))
        options = AttentionOptions(
            attention.score.scale,
            attention.score.cap,
            window,
            (self.pairs, self.tables) if isinstance(position, Rotary) else None,
            cast("tuple[Tensor, Tensor] | None", gains),
            cast(RMSNorm, attention.q_norm).eps if gains else 0.0,
            position.slope.float() if isinstance(position, ALiBi) else None,
        )
        return TritonLayer(
            packed,
            FusedNormLinear.of(packed.qkv, None if post else norm),
            FusedNormLinear.of(packed.out),
            FusedNormLinear.of(packed.gate_up, None if post else ffn_norm),
            FusedNormLinear.of(packed.down),
            options,
            FFNActivation(
                ACTIVATION_NAMES[packed.ffn.activation], isinstance(packed.ffn, GatedFeedForward)
            ),
            block.norm_placement.parallel,
            post,
            output_norms and tuple(OutputNorm.of(cast(nn.Module, n)) for n in output_norms),  # type: ignore[arg-type]
        )

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
        needs_window = any(window is not None and window < time for window in windows)
        lacks_kernel = needs_window and self.embed.token.weight.dtype not in FLASH_DTYPES
        if not self.supports_prefill or not is_prompt or training or lacks_kernel:
            return super().step(ids, state, counts=counts, all_logits=all_logits)
        self.require_unchanged()
        state.length_after(time)
        x = self._prefill(ids, state)
        rows = torch.arange(len(x), device=x.device)
        x = x[:, -1:] if counts is None else x[rows, counts - 1].unsqueeze(1)
        return self.model.head(cast(RMSNorm, self.stack.norm)(x)), state.advance(counts, time)

    @property
    def supports_concatenated_prompts(self) -> bool:
        """Whether it can prefill concatenated prompts; on a GPU they need 16-bit weights."""
        weight = self.embed.token.weight
        head_dim = self.layers[0].attention.head_dim
        flash = weight.dtype in FLASH_DTYPES and head_dim % 8 == 0
        return self.supports_prefill and (flash or not weight.is_cuda)

    def prefill_concatenated(
        self, prompts: ConcatenatedPrompts, caches: Sequence[KVCache]
    ) -> Float[Tensor, "sequences vocab"]:
        """Store the keys and values of prompts in rows of the KV caches; return the next logits.

        There is no padding, and no shape depends on values on the device, so that a CUDA graph can
        capture it.
        """
        x = self._embed(prompts.ids.unsqueeze(0), prompts.positions).squeeze(0)
        layers = zip(self.triton_layers, self.prefill_layers, caches, strict=True)
        for layer, packed, cache in layers:
            heads, kv_heads = packed.attention.heads, packed.attention.kv_heads
            qkv = packed.qkv(prefill.rms_norm(x, layer.qkv))
            qk = prefill.rotate_and_cache(
                qkv, 1, layer.options, cache, prompts.positions, prompts.rows
            ).unflatten(1, (heads + kv_heads, -1))
            v = qkv.unflatten(1, (heads + 2 * kv_heads, -1))[:, heads + kv_heads :]
            q, k = qk[:, :heads], qk[:, heads:]
            y = varlen_attention(
                q, k, v, prompts.cu_seqlens, layer.options.window, packed.score_scale
            )
            x = packed.out.add_to(x, y.flatten(1))
            gate_up = packed.gate_up(prefill.rms_norm(x, layer.gate_up))
            x = packed.down.add_to(x, prefill.apply_activation(gate_up, layer.activation))
        last_token = (prompts.cu_seqlens[1:] - 1).clamp_min(0)
        x = cast(RMSNorm, self.stack.norm)(x[last_token].unsqueeze(1))
        return self.model.head(x).squeeze(1)

    def _has_fast_path(self, rows: int) -> bool:
        if self.decoder_for_many_rows is not None:
            return rows <= INT4_ROWS or self.decoder_for_many_rows._has_fast_path(rows)
        few = rows <= MAX_GEMV_ROWS[self.model.embed.token.weight.itemsize]
        return few or self.supports_gemm or self.supports_packed_step

    def _fits_cpu_decoder(self) -> bool:
        return False  # the kernels need the KV cache of a layer contiguous

    def _prefill(self, ids: Tensor, state: TransformerState) -> Float[Tensor, "rows time dim"]:
        """The hidden states of prompts, before the final norm; fills the empty KV cache."""
        (rows, time), x = ids.shape, self._embed(ids, state.lengths)
        shape, x = x.shape, x.flatten(0, 1)
        layers = zip(self.triton_layers, self.prefill_layers, state.layers, strict=True)
        for layer, packed, cache in layers:
            attention = packed.attention
            qkv = packed.qkv(prefill.rms_norm(x, layer.qkv))
            q = prefill.rotate_and_cache(qkv, time, layer.options, cache, state.lengths)
            q = q.view(rows, time, attention.heads, -1)
            k, v = cache.keys.narrow(2, 0, time), cache.values.narrow(2, 0, time)
            if layer.options.window is not None and layer.options.window < time:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
                y = causal_window_attention(q, k, v, layer.options.window, packed.score_scale)
            else:
                y = F.scaled_dot_product_attention(
                    q.transpose(1, 2),
                    k,
                    v,
                    is_causal=True,
                    scale=packed.score_scale,
                    enable_gqa=attention.kv_heads != attention.heads,
                ).transpose(1, 2)
            x = packed.out.add_to(x, y.reshape(rows * time, -1))
            gate_up = packed.gate_up(prefill.rms_norm(x, layer.gate_up))
            x = packed.down.add_to(x, prefill.apply_activation(gate_up, layer.activation))
        return x.view(shape)

    def _decode(self, x: Float[Tensor, "rows dim"], state: TransformerState) -> Tensor:
        if self.persistent_step is not None and len(x) == 1:
            out = self.persistent_step(x, state)
            if not self.head_needs_preparation:
                return out
            return gemv.linear(self._prepare_head(out, x.dtype), self.normed_head)
        if self.decoder_for_many_rows is not None:
            few = len(x) <= INT4_ROWS
            return (
                self._decode_by_gemv(x, state)
                if few
                else self.decoder_for_many_rows._decode(x, state)
            )
        if len(x) <= MAX_GEMV_ROWS[x.itemsize]:
            return self._decode_by_gemv(x, state)
        return self._decode_by_gemm(x, state) if self.supports_gemm else super()._decode(x, state)

    def _decode_by_gemv(self, x: Tensor, state: TransformerState) -> Tensor:
        dtype, x = x.dtype, x.float()
        for layer, cache in zip(self.triton_layers, state.layers, strict=True):
            y = self._attend_by_gemv(x, layer, cache, state.lengths)
            if layer.parallel and layer.down.layer.bits >= 16:
                hidden = gemv.linear(
                    x, layer.gate_up, activation=layer.activation, reads_previous=False
                )
                x = gemv.linear(y, layer.out, residual=x, added=(hidden, layer.down))
                continue
            residual = layer.add(x, y, layer.out, 0)
            ffn_input = x if layer.parallel else residual
            hidden = gemv.linear(ffn_input, layer.gate_up, activation=layer.activation)
            x = layer.add(residual, hidden, layer.down, 1)
        return gemv.linear(self._prepare_head(x, dtype), self.normed_head)

    def _prepare_head(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The input of the head, before its norm if the kernel of the head has one."""
        return self.prepare(self.norm(x.to(dtype))).float() if self.head_needs_preparation else x

    def _attend_by_gemv(
        self, x: Tensor, layer: TritonLayer, cache: KVCache, lengths: Tensor
    ) -> Tensor:
        if layer.options.qk_gains is None:
            q = gemv.project_qkv(x, layer.qkv, self.pairs, self.tables, cache, lengths)
            return attend(q, cache, lengths, layer.options, self.counters, only_q=True)
        qkv = gemv.linear(x, layer.qkv)  # not rotated yet: the norm of a head comes first
        if layer.options.rotary is None:
            return attend(qkv, cache, lengths, layer.options, self.counters)
        q = prefill.rotate_and_cache(qkv, 1, layer.options, cache, lengths)
        return attend(q, cache, lengths, layer.options, self.counters, only_q=True)

    def _decode_by_gemm(self, x: Tensor, state: TransformerState) -> Tensor:
        layers, counters = self.triton_layers, self.counters
        consumers = [*(layer.qkv for layer in layers[1:]), self.normed_head]
        stream = ResidualStream.start(x, layers[0].qkv)
        for layer, cache, next_layer in zip(layers, state.layers, consumers, strict=True):
            packed = layer.packed
            qkv = stream.project(layer.qkv, counters)
            permute = reads_packed_int8(packed.out, qkv.dtype)
            y = attend(qkv, cache, state.lengths, layer.options, counters, permute=permute)
            residual = stream.add(y, packed.out, layer.gate_up, counters)
            ffn_input = stream if layer.parallel else residual
            y = ffn_input.project(layer.gate_up, counters, layer.activation, consumer=packed.down)
            stream = residual.add(y, packed.down, next_layer, counters)
        return stream.project(self.normed_head, counters, dtype=torch.float32)
