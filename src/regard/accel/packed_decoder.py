"""A Transformer decoder with packed weights and precomputed tables, for single-token steps."""

import math
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.accel.cpu_decoder import ZERO, CpuDecoderState, CpuDecodeStep
from regard.accel.description import inspect_decoder
from regard.accel.fingerprint import ModelFingerprint
from regard.accel.packed import BLOCKED_ELEMENTS, PackedBlock, PackedLinear
from regard.accel.support import cpu_unsupported_reason
from regard.errors import RegardError
from regard.models.base import State
from regard.models.transformer import Transformer
from regard.nn.attention import Attention, AttentionInputs, Mask
from regard.nn.block import FeedForward, Stack
from regard.nn.loss import soft_cap
from regard.nn.norm import LayerNorm, RMSNorm
from regard.nn.position import Position
from regard.nn.state import KVCache, Source, TransformerState

BY_ROW_ELEMENTS = 1 << 16  # from this many key elements per row, rows attend one at a time


@dataclass(frozen=True, slots=True, eq=False)
class ConcatenatedPrompts:
    """Prompts without padding between them."""

    ids: Int[Tensor, " tokens"]
    rows: Int[Tensor, " tokens"]  # row of the KV caches for each token; -1: it is not stored
    positions: Int[Tensor, " tokens"]
    cu_seqlens: Int[Tensor, " cu_seqlens"]  # cumulative lengths, 0 first


class PackedDecoder:
    """A Transformer decoder with packed weights and a fast path for single-token steps.

    Everything else (prefill, several ids, all logits) calls the model's `step`; both use the same
    state. Where FBGEMM or oneDNN computes the matmuls, and gradients and autocast are off, the
    `step` of `prefill_model` runs instead: a copy of the modules that uses the packed weights.
    `support.packed_unsupported_reason` must return None for the model. The model must not change
    afterwards, because tables and packed weights would be out of date; `start` and prefill check
    this.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        int8: bool = False,
        float16: bool = False,
        int4: bool = False,
    ) -> None:
        self.model, self.context = model, model.config.context
        self.stack = cast(Stack, model.decoder)
        convert = PackedLinear.for_cpu
        if int8 or float16:
            convert = PackedLinear.quantize_int8 if int8 else PackedLinear.to_float16
        convert_block = PackedLinear.quantize_int4 if int4 else convert
        packed = {block: PackedBlock.of(block, convert_block) for block in self.stack.blocks}  # type: ignore[arg-type]
        self.layers = [packed[block] for block in self.stack.layers]
        head = PackedLinear(model.head.matrix.detach(), model.head.bias)
        self.head = head.quantize_int8() if int4 else convert(head)
        self.prefill_model = model
        if self.head.uses_fbgemm and not int4:
            self.prefill_model = with_packed_layers(model, self.layers, self.head)
        self.embed, self.prepare, self.cap = model.embed, model.head.prepare, model.head.cap
        embed, position = model.embed, self.stack.position
        is_plain_lookup = embed.scale == 1.0 and embed.segment is None and embed.project is None
        self.table = embed.token.weight if is_plain_lookup else None
        self.embeds_positions = type(position).embed is not Position.embed
        self.norm = _norm_function(self.stack.norm)
        self.norms = [  # of attention and feed-forward; None: both use the attention norm
            (
                _norm_function(block.attention_norm),
                block.ffn_norm and _norm_function(block.ffn_norm),
            )
            for block in self.stack.layers
        ]
        self.parallel = self.stack.layers[0].norm_placement.parallel
        self.windows = set(self.stack.windows)
        self.uses_cpu_decoder = self._fits_cpu_decoder()
        self.rotations = self._rotation_tables(
            torch.arange(self.context, device=head.weight.device)
        )
        copies_all = int8 or float16 or int4 or self._copies_large_weights()
        copied_elements = sys.maxsize if copies_all else BLOCKED_ELEMENTS
        self.fingerprint = ModelFingerprint(model, copied_elements=copied_elements)
        self.checks_contents = True  # in `start`; False if the caller checks them
        self.frozen = False  # True: the model never changes, so `require_unchanged` returns at once

    @property
    def vocab_size(self) -> int:
        """The number of logits per position."""
        return self.model.vocab_size

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def supports_concatenated_prompts(self) -> bool:
        """Whether it can read concatenated prompts (`TritonDecoder.prefill_concatenated`)."""
        return False

    def _copies_large_weights(self) -> bool:
        """Whether the decoder holds values that were computed from large weights."""
        return False

    def require_unchanged(self, *, contents: bool = False) -> None:
        """Raise `RegardError` if the model has changed since it was packed.

        With `contents`, also if a tensor was written through `tensor.data`.
        """
        if self.frozen:
            return
        if name := self.fingerprint.find_change(contents=contents):
            raise RegardError(
                f"{name} has changed since the model was packed for decoding; pack it again"
            )

    def start(self, rows: int, capacity: int, source: Source | None = None) -> TransformerState:
        """See `Language.start`."""
        self.require_unchanged(contents=self.checks_contents)
        state = self.model.start(rows, capacity, source)
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        if not self.uses_cpu_decoder or grad or autocast:
            return state
        keys = state.layers[0].keys
        kv = keys.new_zeros(len(state.layers), rows, 2, *keys.shape[1:])
        return CpuDecoderState.of(kv, self.layers[0])

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
        single = ids.shape[1] == 1 and counts is None and state.max_length > 0
        if not single or state.capacity > self.context or not self._has_fast_path(len(ids)):
            self.require_unchanged()
            use_original = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
            model = self.model if use_original else self.prefill_model
            return model.step(ids, state, counts=counts, all_logits=all_logits)
        x = self._decode(self._embed(ids, state.lengths).squeeze(1), state)
        return soft_cap(x, self.cap).unsqueeze(1), state.advance(None, 1)

    def _has_fast_path(self, rows: int) -> bool:
        """Whether a single-token step of this many rows has a fast path."""
        return True

    def _embed(self, ids: Tensor, positions: Tensor) -> Float[Tensor, "rows time dim"]:
        stack = self.stack
        x = F.embedding(ids, self.table) if self.table is not None else self.embed(ids)
        if self.embeds_positions:
            position_embedding = stack.position.embed(positions.unsqueeze(1))
            x = x if position_embedding is None else x + position_embedding.to(x.dtype)
        x = x if stack.embed_norm is None else stack.embed_norm(x)
        return x if stack.project is None else stack.project(x)

    def _decode(self, x: Float[Tensor, "rows dim"], state: TransformerState) -> Tensor:
        """The logits of one embedded id per row, before their soft cap."""
        steps = {window: self._decode_step(state, window) for window in self.windows}
        parts = zip(self.layers, self.norms, self.stack.windows, strict=True)
        for layer, (packed, (norm, ffn_norm), window) in enumerate(parts):
            normed = norm(x)
            y = packed.out.add_to(x, steps[window].attend(normed, packed, layer))
            if ffn_norm is not None:
                normed = ffn_norm(x if self.parallel else y)
            x = packed.down.add_to(y, steps[window].ffn_hidden(normed, packed))
        return self.head(self.prepare(self.norm(x)))

    def _fits_cpu_decoder(self) -> bool:
        return cpu_unsupported_reason(inspect_decoder(self.model)) is None

    def _rotation_tables(self, positions: Int[Tensor, " positions"]) -> tuple[Tensor, ...]:
        """The rotations of queries and keys at each position.

        Complex numbers where pairs are interleaved, else (cos, cos) and (-sin, sin).
        """
        rotation = self.stack.position.rotation(positions.unsqueeze(0))
        if rotation is None:
            return ()
        cos, sin = rotation.cos[0, 0], rotation.sin[0, 0]  # (positions, pairs)
        if rotation.interleaved:
            padding = (0, self.layers[0].block.attention.head_dim // 2 - cos.shape[1])
            return (torch.complex(F.pad(cos, padding, value=1.0), F.pad(sin, padding)),)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def _decode_step(
        self, state: TransformerState, window: int | None
    ) -> "DecodeStep | CpuDecodeStep":
        seen = state.length_after(1)
        index = seen - 1 if state.equal_lengths else state.lengths
        rotation = tuple(table[index].unsqueeze(-2) for table in self.rotations)
        attends_to_all = state.equal_lengths and (window is None or seen <= window)
        if attends_to_all and isinstance(state, CpuDecoderState):
            return CpuDecodeStep(state, rotation)
        positions = state.lengths.unsqueeze(1)
        keys = seen * state.layers[0].keys[0, :, 0].numel()
        by_row = self.uses_cpu_decoder and window is None and keys >= BY_ROW_ELEMENTS
        if by_row and not attends_to_all:
            lengths = (state.lengths + 1).tolist()
            return DecodeStep(state.layers, positions, seen, False, rotation, None, lengths)
        if attends_to_all:
            mask = Mask.none()  # the cache holds earlier positions only
        else:
            mask = Mask.causal() if window is None else Mask.causal() & Mask.window(window)
        key_positions = torch.arange(seen, device=positions.device).unsqueeze(0)
        inputs = AttentionInputs.of(mask, positions, key_positions, _BiasOnly(self.stack.position))
        allowed = inputs.allowed if inputs.bias is None else inputs.bias
        return DecodeStep(state.layers, positions, seen, state.equal_lengths, rotation, allowed)


class _BiasOnly(Position):
    """The score bias of a position encoding; its rotations are in tables."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.bias = position.bias  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """One decode step: the positions of the rows, and which keys they may attend to."""

    layers: list[KVCache]
    positions: Int[Tensor, "rows 1"]
    seen: int
    equal_lengths: bool
    rotation: tuple[Tensor, ...]
    mask: Tensor | None
    lengths: list[int] | None = None  # of the rows, if they attend one at a time, without a mask

    def attend(self, x: Tensor, packed: PackedBlock, layer: int) -> Tensor:
        """Attention of one token per row, for all queries that share a KV head at once."""
        attention, rows, cache = packed.attention, len(x), self.layers[layer]
        heads, kv_heads, width = attention.heads, attention.kv_heads, cache.keys.shape[3]
        qkv = packed.qkv(x)
        qk = qkv.narrow(1, 0, (heads + kv_heads) * width).view(rows, -1, width)
        v = qkv.narrow(1, qk.shape[1] * width, qkv.shape[1] - qk.shape[1] * width)
        v = v.view(rows, kv_heads, -1)
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = qk.split((heads, kv_heads), 1)
            qk = torch.cat((attention.q_norm(q), attention.k_norm(k)), 1)
        qk = _rotate(qk, self.rotation)
        q, k = qk.narrow(1, 0, heads), qk.narrow(1, heads, kv_heads)
        if self.equal_lengths:
            cache.keys.select(2, self.seen - 1).copy_(k)
            cache.values.select(2, self.seen - 1).copy_(v)
        else:
            cache.write(k.unsqueeze(2), v.unsqueeze(2), self.positions, self.seen)
        if self.lengths is not None:
            return self._attend_by_row(q, cache, packed.score_scale)
        mask = self.mask
        if mask is not None and mask.shape[1] > 1:  # one per query head
            mask = mask.view(-1, kv_heads, heads // kv_heads, self.seen).to(q.dtype)
        y = F.scaled_dot_product_attention(
            q.reshape(rows, kv_heads, heads // kv_heads, -1),
            cache.keys.narrow(2, 0, self.seen),
            cache.values.narrow(2, 0, self.seen),
            attn_mask=mask,
            scale=packed.score_scale,
        )
        return y.reshape(rows, -1)

    def _attend_by_row(self, q: Tensor, cache: KVCache, scale: float) -> Tensor:
        """Attend row by row: with a mask, every row would read as many keys as the longest row."""
        assert self.lengths is not None
        y, kv_heads = torch.empty_like(q), cache.keys.shape[1]
        grouped, out = q.unflatten(1, (kv_heads, -1)), y.unflatten(1, (kv_heads, -1))
        for row, length in enumerate(self.lengths):
            keys = cache.keys[row, :, :length].transpose(1, 2)
            scores = torch.baddbmm(ZERO, grouped[row], keys, beta=0, alpha=scale)
            torch.bmm(scores.softmax(-1), cache.values[row, :, :length], out=out[row])
        return y.flatten(1)

    def ffn_hidden(self, x: Tensor, packed: PackedBlock) -> Tensor:
        """The hidden vector of the feed-forward network."""
        return packed.ffn_hidden(x)


def with_packed_layers(
    model: Transformer, layers: Sequence[PackedBlock], head: PackedLinear
) -> Transformer:
    """A copy of the modules of a model, with the same parameters, that uses packed weights."""
    tensors = [*model.parameters(), *model.buffers()]
    packed_model = deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for block, packed in zip(cast(Stack, packed_model.decoder).layers, layers, strict=True):
        attention, ffn = block.attention, cast(FeedForward, block.ffn)
        attention._uses_fused_qkv = lambda: True  # type: ignore[method-assign]
        attention._fused_qkv = partial(_project, attention, packed.qkv)  # type: ignore[method-assign]
        attention.out.forward = packed.out.apply  # type: ignore[method-assign, assignment]
        ffn.forward = packed.apply_ffn  # type: ignore[method-assign]
    prepare, cap = packed_model.head.prepare, packed_model.head.cap
    packed_model.head.forward = lambda x: soft_cap(head.apply(prepare(x)), cap)
    return packed_model


def _project(
    attention: Attention, qkv: PackedLinear, x: Float[Tensor, "batch time dim"]
) -> tuple[Tensor, Tensor, Tensor]:
    return attention.split_qkv(qkv.apply(x))


def _norm_function(norm: nn.Module | None) -> Callable[[Tensor], Tensor]:
    """The norm as a function.

    On a CPU, calling a module takes longer than a LayerNorm of one token, and torch's RMSNorm is
    slow, where this form is used:

        x / sqrt(|x|^2 + d eps) * sqrt(d) g
    """
    if norm is None:
        return lambda x: x
    if norm.weight.is_cuda or norm.weight.dtype != torch.float32:
        return norm
    if type(norm) is LayerNorm:
        arguments = norm.weight.shape, norm.weight, norm.bias, norm.eps
        return lambda x: torch.layer_norm(x, *arguments)
    if not isinstance(norm, RMSNorm):
        return norm
    dim, vector_norm = len(norm.weight), torch.linalg.vector_norm
    gain = norm.gain.detach() * math.sqrt(dim)
    eps = gain.new_tensor(math.sqrt(dim * norm.eps))
    return lambda x: (x / vector_norm(x, dim=-1, keepdim=True).hypot_(eps)).mul_(gain)


def _rotate(x: Float[Tensor, "rows heads head_dim"], rotation: tuple[Tensor, ...]) -> Tensor:
    if not rotation:
        return x
    if len(rotation) == 1:
        x_float32 = x if x.dtype == torch.float32 else x.float()
        pairs = torch.view_as_complex(x_float32.view(*x.shape[:2], -1, 2))
        rotated = torch.view_as_real(pairs * rotation[0]).view(x.shape)
        return rotated if x.dtype == torch.float32 else rotated.to(x.dtype)
    cos, sin = rotation
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(width // 2, -1), sin).to(x.dtype)
    rotary, unrotated = x[..., :width], x[..., width:]
    return torch.cat((_rotate(rotary, rotation), unrotated), -1)
