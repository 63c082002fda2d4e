"""A decoder made ready to write: packed matrices, tables made once, nothing that is not needed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.accel.cpu_decoder import CpuDecoder, CpuDecoderState
from regard.accel.kernels import usable
from regard.accel.packed import Matrix, PackedBlock
from regard.models.base import Language, State
from regard.models.transformer import Transformer
from regard.nn.attention import AttentionInputs
from regard.nn.ffn import GatedFeedForward
from regard.nn.head import Head
from regard.nn.loss import soft_cap
from regard.nn.mask import Mask
from regard.nn.norm import RMSNorm
from regard.nn.position import Position
from regard.nn.stack import Stack
from regard.nn.state import KVCache, Source, TransformerState

ORDERS = ("pre", "parallel", "parallel_norms")


def pack(model: Language, *, int8: bool = False) -> Language:
    """The model as one that writes faster, or the model itself where it is not of that kind.

    Its matrices are packed in place: they keep their names and values. With `int8`, single
    tokens are written with weights of eight bits; prompts are still read with those given.
    """
    if not isinstance(model, Transformer) or not _suits(model):
        return model
    if usable(model.embed.token.weight):
        from regard.accel.triton_decoder import TritonDecoder, fusible

        if fusible(model):
            return TritonDecoder(model, int8=int8)
    return PackedDecoder(model, int8=int8)


def _suits(model: Transformer) -> bool:
    stack = model.decoder
    return (
        stack is not None
        and model.encoder is None
        and not stack.position.each_layer
        and isinstance(model.head, Head)
        and all(
            block.norm_order.kind in ORDERS and block.attention.score.fused
            for block in stack.layers
        )
    )


class PackedDecoder:
    """The same `Language` as a Transformer, with a short way for one id per row.

    Everything else (a prompt, several ids, all logits) is the model's own `step`; both write
    into the same state.
    """

    def __init__(self, model: Transformer, *, int8: bool = False) -> None:
        self.model, self.context = model, model.context
        self.stack = cast(Stack, model.decoder)
        packed = {block: PackedBlock.of(block, int8=int8) for block in self.stack.blocks}  # type: ignore[arg-type]
        self.layers = [packed[block] for block in self.stack.layers]
        head = Matrix(model.head.matrix.detach(), model.head.bias)
        self.head = head.int8() if int8 else head.turned()
        self.embed, self.prepare, self.cap = model.embed, model.head.prepare, model.head.cap
        embed, position = model.embed, self.stack.position
        plain = embed.scale == 1.0 and embed.segment is None and embed.project is None
        self.table = embed.token.weight if plain else None  # where there is nothing but a look
        self.places = type(position).embed is not Position.embed
        self.norm = _norm(self.stack.norm)
        self.norms = [  # in front of each layer's two parts; None: the second takes the first's
            (_norm(block.attention_norm), block.ffn_norm and _norm(block.ffn_norm))
            for block in self.stack.layers
        ]
        self.parallel = self.stack.layers[0].norm_order.parallel
        self.windows = set(self.stack.windows)
        self.level = self._level()
        self.turns = self._turns(torch.arange(self.context, device=head.weight.device))

    @property
    def vocab_size(self) -> int:
        """The number of logits per position."""
        return self.model.vocab_size

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    def start(self, rows: int, capacity: int, source: Source | None = None) -> TransformerState:
        """As the model's."""
        state = self.model.start(rows, capacity, source)
        if not self.level or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return state
        keys = state.layers[0].keys
        whole = keys.new_zeros(len(state.layers), rows, 2, *keys.shape[1:])
        return CpuDecoderState.of(whole, self.layers[0])

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
        if not single or state.capacity > self.context:
            return self.model.step(ids, state, counts=counts, all_logits=all_logits)
        x = self._write(self._embedded(ids, state.lengths).squeeze(1), state)
        return soft_cap(x, self.cap).unsqueeze(1), state.advance(None, 1)

    def _embedded(self, ids: Tensor, at: Tensor) -> Float[Tensor, "rows time dim"]:
        stack = self.stack
        x = F.embedding(ids, self.table) if self.table is not None else self.embed(ids)
        if self.places and (placed := stack.position.embed(at.unsqueeze(1))) is not None:
            x = x + placed.to(x.dtype)
        x = x if stack.embed_norm is None else stack.embed_norm(x)
        return x if stack.project is None else stack.project(x)

    def _write(self, x: Float[Tensor, "rows dim"], state: TransformerState) -> Tensor:
        """From the embedded ids to the logits, before their cap."""
        now = {window: self._now(state, window) for window in self.windows}
        parts = zip(self.layers, self.norms, self.stack.windows, strict=True)
        for layer, (packed, (norm, ffn_norm), window) in enumerate(parts):
            normed = norm(x)
            y = packed.out.onto(x, now[window].look(normed, packed, layer))
            if ffn_norm is not None:
                normed = ffn_norm(x if self.parallel else y)
            x = packed.narrow.onto(y, now[window].widen(normed, packed))
        return self.head(self.prepare(self.norm(x)))

    def _level(self) -> bool:
        """Whether `CpuDecoder` will do for rows that stand at one place: on a CPU, in float32, with
        nothing added to scores, in layers of one shape whose values are as wide as their keys."""
        like, first = self.model.embed.token.weight, self.layers[0].attention
        return (
            not like.is_cuda
            and like.dtype == torch.float32
            and type(self.stack.position).bias is Position.bias
            and first.value.out_features == first.key.out_features
            and len({(each.look_up.weight.shape, each.wide.weight.shape) for each in self.layers})
            == 1
        )

    def _turns(self, at: Int[Tensor, " places"]) -> tuple[Tensor, ...]:
        """What turns queries and keys at each place: complex numbers where neighbours are turned
        together, else cos and ±sin."""
        turn = self.stack.position.rotation(at.unsqueeze(0))
        if turn is None:
            return ()
        cos, sin = turn.cos[0, 0], turn.sin[0, 0]  # (places, pairs)
        if turn.interleaved:
            rest = self.layers[0].block.attention.head_dim // 2 - cos.shape[1]
            return (torch.complex(F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))),)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def _now(self, state: TransformerState, window: int | None) -> "_Now | CpuDecoder":
        seen = state.length_after(1)
        place = seen - 1 if state.equal_lengths else state.lengths
        turn = tuple(table[place].unsqueeze(-2) for table in self.turns)
        past_only = state.equal_lengths and (window is None or seen <= window)
        if past_only and isinstance(state, CpuDecoderState):
            return CpuDecoder(state, turn)
        at = state.lengths.unsqueeze(1)
        if past_only:
            mask = Mask.none()  # there is nothing but the past
        else:
            mask = Mask.causal() if window is None else Mask.causal() & Mask.window(window)
        key_positions = torch.arange(seen, device=at.device).unsqueeze(0)
        inputs = AttentionInputs.of(mask, at, key_positions, _Bias(self.stack.position))
        seeing = inputs.allowed if inputs.bias is None else inputs.bias
        return _Now(state.layers, at, seen, state.equal_lengths, turn, seeing)


class _Bias(Position):
    """Of a position, only what it adds to scores: the rest is in tables."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.bias = position.bias  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, eq=False)
class _Now:
    """Where each row stands in this step, and what it may see in some layers."""

    layers: list[KVCache]
    at: Int[Tensor, "rows 1"]
    seen: int
    level: bool
    turn: tuple[Tensor, ...]
    mask: Tensor | None

    def look(self, x: Tensor, packed: PackedBlock, layer: int) -> Tensor:
        """Attention of one token per row; the queries that share a head of keys look at once."""
        attention, rows, kept = packed.attention, len(x), self.layers[layer]
        heads, kv_heads, width = attention.heads, attention.kv_heads, kept.keys.shape[3]
        qkv = packed.look_up(x)
        qk = qkv.narrow(1, 0, (heads + kv_heads) * width).view(rows, -1, width)
        v = qkv.narrow(1, qk.shape[1] * width, qkv.shape[1] - qk.shape[1] * width)
        v = v.view(rows, kv_heads, -1)
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = qk.split((heads, kv_heads), 1)
            qk = torch.cat((attention.q_norm(q), attention.k_norm(k)), 1)
        qk = _turned(qk, self.turn)
        q, k = qk.narrow(1, 0, heads), qk.narrow(1, heads, kv_heads)
        if self.level:
            kept.keys.select(2, self.seen - 1).copy_(k)
            kept.values.select(2, self.seen - 1).copy_(v)
        else:
            kept.write(k.unsqueeze(2), v.unsqueeze(2), self.at, self.seen)
        mask = self.mask
        if mask is not None and mask.shape[1] > 1:  # of each query
            mask = mask.view(-1, kv_heads, heads // kv_heads, self.seen).to(q.dtype)
        y = F.scaled_dot_product_attention(
            q.reshape(rows, kv_heads, heads // kv_heads, -1),
            kept.keys.narrow(2, 0, self.seen),
            kept.values.narrow(2, 0, self.seen),
            attn_mask=mask,
            scale=packed.scale,
        )
        return y.reshape(rows, -1)

    def widen(self, x: Tensor, packed: PackedBlock) -> Tensor:
        """The inner vector of the feed-forward part."""
        ffn, wide = packed.ffn, packed.wide(x)
        if not isinstance(ffn, GatedFeedForward):
            return ffn.activation(wide)
        gate, up = wide.chunk(2, -1)
        return ffn.activation(gate).mul_(up)


def _norm(norm: nn.Module | None) -> Callable[[Tensor], Tensor]:
    """The norm as a plain function; torch's RMSNorm is slow on a CPU, where this is used.

    x / sqrt(|x|^2 + d eps) * sqrt(d) g
    """
    if norm is None:
        return lambda x: x
    if not isinstance(norm, RMSNorm) or norm.weight.is_cuda or norm.weight.itemsize < 4:
        return norm
    dim, length = len(norm.weight), torch.linalg.vector_norm
    gain = norm.scale.detach() * math.sqrt(dim)
    least = gain.new_tensor(math.sqrt(dim * norm.eps))
    return lambda x: (x / length(x, dim=-1, keepdim=True).hypot_(least)).mul_(gain)


def _turned(x: Float[Tensor, "rows heads head_dim"], turn: tuple[Tensor, ...]) -> Tensor:
    if not turn:
        return x
    if len(turn) == 1:
        wide = x if x.dtype == torch.float32 else x.float()
        pairs = torch.view_as_complex(wide.view(*x.shape[:2], -1, 2))
        turned = torch.view_as_real(pairs * turn[0]).view(x.shape)
        return turned if x.dtype == torch.float32 else turned.to(x.dtype)
    cos, sin = turn
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(width // 2, -1), sin).to(x.dtype)
    turned, rest = x[..., :width], x[..., width:]
    return torch.cat((_turned(turned, turn), rest), -1)
