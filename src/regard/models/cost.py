"""What a model is made of and what it costs, counted on the meta device: nothing is allocated."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from regard.models.build import on_meta
from regard.models.presets import ModelConfig
from regard.models.seq2seq import EncoderDecoder
from regard.nn.attention import Attention
from regard.nn.block import Block
from regard.nn.ffn import ACTIVATIONS, FeedForward, GatedFeedForward
from regard.nn.head import GivenHead, Head, TagHead
from regard.nn.norm import RMSNorm
from regard.nn.position import T5, ALiBi, Rotary
from regard.nn.recurrent import Cell, Snapshots
from regard.nn.recurrent_attention import RecurrentAttention
from regard.nn.score import Additive, General, Location, Score, Shaw, TransformerXL
from regard.nn.stack import Stack
from regard.nn.tap import Tap

FLOAT, HALF = 4, 2  # bytes of a float32, of a bfloat16
MOMENTS = 2  # that AdamW keeps of every parameter
OPEN = (3, 0)  # numbers kept of a query and a key by a score that no kernel fuses: per head, once
PAIRS: dict[type[Score], tuple[int, int]] = {Shaw: (2, 2), TransformerXL: (4, 2)}
BACKWARD = 2  # a gradient of what came in and one of the weights: twice the forward pass


@dataclass(frozen=True, slots=True)
class Cost:
    r"""Bytes of float32 unless said otherwise, arithmetic with a multiply-add as two.

    T is the context, of which one row is counted; a source is as long as its target.

        forward     = 2 N + 4 A T h d_h        per token: N weights that multiply, A attentions
        training    = 3 forward                the backward pass is two
        generating  = forward of one token that sees T others; the source was read before
        state       = 2 A k d_h                numbers per token, k the heads of keys
        to train    = 4 + 4 + 8                bytes per parameter: weights, gradients, moments

    A window of w stands for T where it is less. A causal mask is not counted as half, as in
    Chowdhery et al. 2022. A layer that is used again counts again, a table not at all.

    Activations are what the backward pass needs of T tokens, without dropout, as torch keeps it
    on a CPU. In numbers per token, for each

        norm            d + 2, RMSNorm 2 d + 1, and d for what it gives
        attention       2 h d_h + 2 k d_h + h;  rotary (2 h + k) d_h more
        feed-forward    2 f;  ReLU f, gated 4 f;  f its width
        looks at T keys a window T, T5 h T, scores outside the kernel 2 h T to 4 h T, additive
                        h d_h T more

    and once per layer the joint matrix of queries, keys and values. The loss keeps d more, never
    the logits. With recomputation only the input of each layer is kept, and one layer whole.

    Mixed precision, compiled, keeps less: in bfloat16 what each product and the kernel of
    attention read, in float32 the stream before each norm; all else is computed again. In bytes
    per token, for each

        norm            4 d + 8, and 2 d for what it gives
        attention       4 h d_h + 4 k d_h + 4 h
        feed-forward    4 f, gated 6 f
    """

    parts: dict[str, int]  # parameters of each
    parameters: int
    context: int | None
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # AdamW's moments, float32 whatever the precision
    training_bytes: int  # weights, gradients and moments
    mixed_training_bytes: int  # and a bfloat16 copy of what multiplies
    activation_bytes: int
    recomputed_bytes: int  # the same with recomputation
    mixed_activation_bytes: int  # in bfloat16, compiled
    mixed_recomputed_bytes: int
    logits_per_token: int  # that the loss makes, in chunks; 0 where no vocabulary is read
    layer_parameters: int  # of the largest layer
    outside_parameters: int  # of all that is in no layer
    state_bytes_per_token: int  # keys and values; 0 where the state does not grow
    state_bytes: int  # of a row of the whole context, keys and values of the source included
    window_bytes: int  # of these, what the windows can still see
    flops_per_token: int
    training_flops_per_token: int
    generation_flops_per_token: int
    taps: list[str]


def cost(config: ModelConfig) -> Cost:
    """Count a model."""
    model = on_meta(config)
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(name)
        parts[part] = parts.get(part, 0) + parameter.numel()
    parameters = sum(parts.values())
    context: int | None = getattr(config, "context", None)
    time = context or 1
    forward = _flops(model, time)
    state = _State.of(model, time)
    whole, recomputed = _activations(model, time, _layer, FLOAT)
    mixed, mixed_recomputed = _activations(model, time, _mixed_layer, HALF)
    layers = {id(b): _size(b) for stack in _stacks(model) for b in stack.layers}
    head = getattr(model, "head", None)
    training = training_bytes(parameters)
    return Cost(
        parts=parts,
        parameters=parameters,
        context=context,
        weight_bytes=FLOAT * parameters,
        gradient_bytes=FLOAT * parameters,
        optimizer_bytes=MOMENTS * FLOAT * parameters,
        training_bytes=training,
        mixed_training_bytes=training + HALF * _matrices(model),
        activation_bytes=whole,
        recomputed_bytes=recomputed,
        mixed_activation_bytes=mixed,
        mixed_recomputed_bytes=mixed_recomputed,
        logits_per_token=len(head.matrix) if isinstance(head, Head) else 0,
        layer_parameters=max(layers.values(), default=0),
        outside_parameters=parameters - sum(layers.values()),
        state_bytes_per_token=FLOAT * state.growing,
        state_bytes=FLOAT * state.whole,
        window_bytes=FLOAT * state.in_sight,
        flops_per_token=forward,
        training_flops_per_token=(1 + BACKWARD) * forward,
        generation_flops_per_token=_generation_flops(model, time),
        taps=[name for name, part in model.named_modules() if isinstance(part, Tap)],
    )


def training_bytes(parameters: int, averaged: bool = False) -> int:
    """What weights, gradients and moments take in float32, and the mean of the weights if kept."""
    return (2 + MOMENTS + averaged) * FLOAT * parameters


def _size(part: nn.Module) -> int:
    return sum(weight.numel() for weight in part.parameters())


def _matrices(model: nn.Module) -> int:
    """How many numbers multiply: those of all products, the output matrix included, tables not."""
    products = (
        part for part in model.modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)
    )
    counted = {id(part.weight): part.weight.numel() for part in products}
    head = getattr(model, "head", None)
    if isinstance(head, Head):
        counted[id(head.matrix)] = head.matrix.numel()
    return sum(counted.values())


def _part(name: str) -> str:
    """What a parameter belongs to, by its path."""
    pieces = name.split(".")
    if any("norm" in piece or piece.endswith("_after") for piece in pieces):
        return "norms"
    known = {"cross": "cross-attention", "attention": "attention", "ffn": "feed-forward"}
    known |= {"position": "position", "head": "head", "project": "embedding"}
    for piece in pieces:
        if piece in known:
            return known[piece]
    return "embedding" if "embed" in pieces[0] else pieces[0]


# Arithmetic


def _flops(model: nn.Module, time: int) -> int:
    """Of a forward pass over a row of `time` tokens, by the token."""
    total = _reading(getattr(model, "head", None), time)
    total += time * _products(_inner(model))
    total += time * sum(_looking(glimpse, time, time) for glimpse in _glimpses(model))
    for stack in _stacks(model):
        total += time * (_products(model.embed) + _products(stack.project))
        for block, window in zip(stack.layers, stack.windows, strict=True):
            seen = _in_sight(time, window, bidirectional=stack is not _decoder(model))
            total += time * (_products(block.attention) + _products(block.ffn))
            total += time * _looking(block.attention, seen, time)
            if block.cross is not None:
                total += time * (_products(block.cross) + _looking(block.cross, time, time))
    return round(total / time)


def _generation_flops(model: nn.Module, time: int) -> int:
    """Of one more token after `time - 1` others; 0 for a model that does not generate."""
    decoder, inner = _decoder(model), _inner(model)
    head = getattr(model, "head", None)
    if not isinstance(head, Head) or (decoder is None and inner is None):
        return 0
    if not hasattr(model, "start"):
        return 0
    total = _reading(head, 1) + _products(inner)
    for name in ("encoder", "join", "bridge"):  # the source was read before
        total -= 0 if inner is None else _products(getattr(model, name, None))
    for glimpse in _glimpses(model):
        total -= _products(glimpse.key) + _products(glimpse.value)
        total += _looking(glimpse, time, math.inf)
    if decoder is None:
        return round(total)
    total += _products(model.embed) + _products(decoder.project)
    for block, window in zip(decoder.layers, decoder.windows, strict=True):
        total += _products(block.attention) + _products(block.ffn)
        total += _looking(block.attention, _in_sight(time, window), 1)
        if block.cross is not None:
            total += _products(block.cross.query) + _products(block.cross.out)
            total += _looking(block.cross, time, 1)
    return round(total)


def _products(part: Any) -> int:
    """Of one vector through all matrices of a part; those of scores have their own count."""
    if part is None:
        return 0
    scores = {id(m) for s in part.modules() if isinstance(s, Score) for m in s.modules()}
    return 2 * sum(
        m.weight.numel()
        for m in part.modules()
        if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d) and id(m) not in scores
    )


def _looking(attention: Attention | RecurrentAttention, seen: int, queries: float) -> float:
    """Of one of `queries` queries that meets `seen` keys and mixes their values."""
    width, keys, value_width, head_dim = _looked(attention)
    score, extra = attention.score, 0.0
    if isinstance(score, Additive):
        extra = 2 * width * head_dim
    if isinstance(score, Additive | General):  # every key is prepared
        extra += 2 * keys * head_dim * seen / queries
    if isinstance(score, Location):  # all places there are, met or not
        extra = 2 * width * (score.place.out_features - seen)
    if isinstance(score, Shaw):
        extra = 2 * width * (2 * score.reach + 1)
    if isinstance(score, TransformerXL):  # every distance there and back is turned into a key
        distances = 2 * seen - 1
        extra = 2 * distances * (width + score.distance.weight.numel() / queries)
    return 2 * (width + value_width) * seen + extra


def _looked(attention: Attention | RecurrentAttention) -> tuple[int, int, int, int]:
    """The widths of all queries, keys and values of a token, and of one head."""
    if isinstance(attention, Attention):
        query, key, _ = _widths(attention)
        return query, key, attention.out.in_features, attention.head_dim
    return (attention.dim,) * 3 + (attention.dim // attention.heads,)


def _reading(head: Any, time: int) -> float:
    """Of reading the hidden states of a row; a head of words reads them all, as if all counted."""
    if isinstance(head, Head):
        bent = [getattr(head, name, None) for name in ("project", "dense")]
        return time * (2 * head.matrix.numel() + sum(map(_products, bent)))
    return (time if isinstance(head, TagHead) else 1) * _products(head)


def _in_sight(time: int, window: int | None, bidirectional: bool = False) -> int:
    return time if window is None else min(time, 2 * window - 1 if bidirectional else window)


# What decoding remembers


@dataclass(frozen=True, slots=True)
class _State:
    """Numbers kept: per token, for a row of the whole context, and what is still in sight."""

    growing: int = 0
    whole: int = 0
    in_sight: int = 0

    @classmethod
    def of(cls, model: nn.Module, time: int) -> "_State":
        decoder = _decoder(model)
        if isinstance(model, EncoderDecoder):
            cells = sum(part.kept * part.dim for part in model.decoder if isinstance(part, Cell))
            read = time * sum(2 * glimpse.dim for glimpse in _glimpses(model))
            fixed = cells + model.config.dim * model.config.input_feeding + read
            return cls(whole=fixed, in_sight=fixed)
        if decoder is None:
            written = isinstance(getattr(model, "head", None), Head | GivenHead)
            written &= hasattr(model, "start")
            fixed = _floats(cast(Any, model).start(1, time)) if _inner(model) and written else 0
            return cls(whole=fixed, in_sight=fixed)
        each = [sum(_widths(block.attention)[1:]) for block in decoder.layers]
        crossing = [sum(_widths(b.cross)[1:]) for b in decoder.layers if b.cross is not None]
        sights = [_in_sight(time, window) for window in decoder.windows]
        return cls(
            growing=sum(each),
            whole=time * (sum(each) + sum(crossing)),
            in_sight=sum(n * seen for n, seen in zip(each, sights, strict=True))
            + time * sum(crossing),
        )


def _floats(state: Any) -> int:
    """Numbers that a state of fixed size keeps; ids are not counted."""
    layers = state.layers if isinstance(state, Snapshots) else []
    return sum(part.numel() for layer in layers for part in layer if part.is_floating_point())


# What the backward pass needs


def _activations(
    model: nn.Module, time: int, layer_bytes: Callable[..., int], size: int
) -> tuple[int, int]:
    """Bytes kept of a row of `time` tokens: all of them, and with recomputation.

    `size` is that of what products read; the stream and its norms are float32 always.
    """
    ends = inputs = 0
    layers: list[int] = []
    for stack in _stacks(model):
        blocks = stack.layers
        dim = blocks[0].attention.query.in_features
        ends += time * (FLOAT * (_normed(stack.embed_norm) + _normed(stack.norm)) + size * dim)
        if isinstance(stack.position, ALiBi | T5):  # one bias, or its buckets, for all layers
            once = blocks[0].attention.heads if isinstance(stack.position, ALiBi) else 2
            ends += size * time * time * once
        if stack.project is not None:
            ends += size * time * cast(nn.Linear, stack.project).in_features
        inputs += FLOAT * time * dim * len(blocks)
        layers += [
            layer_bytes(block, stack, window, time)
            for block, window in zip(blocks, stack.windows, strict=True)
        ]
    for part in model.modules():
        if isinstance(part, Cell):  # what came in, the gates, and the state
            gates = part.input.out_features + part.kept * part.dim
            ends += size * time * (part.input.in_features + gates)
    return ends + sum(layers), ends + inputs + max(layers, default=0)


def _layer(block: Block, stack: Stack, window: int | None, time: int) -> int:
    """Bytes that one layer keeps in float32."""
    dim = block.attention.query.in_features
    each = sum(map(_normed, _norms(block))) + _read(block) * dim + _widened(block.ffn)
    each -= dim if block.norm_order.kind == "parallel_norms" else 0  # both norms keep the same x
    each += _attended(block.attention, stack, window, time)
    if block.cross is not None:
        each += _attended(block.cross, None, time, time)
    return FLOAT * (time * each + sum(_widths(block.attention)) * dim)


def _mixed_layer(block: Block, stack: Stack, window: int | None, time: int) -> int:
    """Bytes that one layer keeps in mixed precision, compiled."""
    dim = block.attention.query.in_features
    norms = len([norm for norm in _norms(block) if norm is not None])
    halves = _read(block) * dim
    for attention, stack_of, seen in (
        (block.attention, stack, window),
        (block.cross, None, time),
    ):
        if attention is not None:
            halves += sum(_widths(attention)) + attention.out.in_features + 2 * attention.heads
            halves += _pairs(attention, stack_of, seen, time)
            if attention.q_norm is not None:
                halves += sum(_widths(attention)[:2])
    if isinstance(block.ffn, FeedForward):
        halves += (3 if isinstance(block.ffn, GatedFeedForward) else 2) * block.ffn.up.out_features
    return time * (HALF * halves + norms * (FLOAT * dim + 2 * FLOAT))


def _norms(block: Block) -> list[Any]:
    named = block.named_children()
    return [part for name, part in named if "norm" in name or name.endswith("_after")]


def _read(block: Block) -> int:
    """How many normed vectors of a token the products of a layer read."""
    return sum(each is not None for each in (block.attention_norm, block.cross, block.ffn_norm))


def _normed(norm: Any) -> int:
    """Numbers that a norm keeps of a vector, without what it gives."""
    if norm is None:
        return 0
    dim = norm.weight.numel()
    return 2 * dim + 1 if isinstance(norm, RMSNorm) else dim + 2


def _attended(attention: Attention, stack: Stack | None, window: int | None, time: int) -> int:
    """Numbers that attention keeps of a token, without what it reads."""
    width, *rest = _widths(attention)
    keys, heads = rest[0], attention.heads
    kept = width + sum(rest) + attention.out.in_features + heads
    turn = stack.position if stack is not None and isinstance(stack.position, Rotary) else None
    if attention.q_norm is not None and attention.k_norm is not None:
        times = [(attention.q_norm, heads), (attention.k_norm, attention.kv_heads)]
        kept += sum(count * _normed(norm) for norm, count in times)
    if turn is not None:
        kept += width + keys
    if attention.q_norm is not None or (turn is not None and not turn.interleaved):
        kept += attention.out.in_features  # heads lie in another order, so merging them copies
    if type(attention.score) in PAIRS:
        kept += 3 * width  # copies of q, k and v
    elif attention.score.fused and stack is not None and isinstance(stack.position, T5):
        kept += width + keys  # q and k are scaled beforehand
    return kept + _pairs(attention, stack, window, time)


def _pairs(attention: Attention, stack: Stack | None, window: int | None, time: int) -> int:
    """Numbers that attention keeps of a token and all it may look at."""
    if not attention.score.fused:
        per_head, once = PAIRS.get(type(attention.score), OPEN)
        if isinstance(attention.score, Additive):  # its tanh is a vector
            per_head += attention.head_dim
        return (per_head * attention.heads + once) * time
    if stack is not None and isinstance(stack.position, T5):
        return attention.heads * time
    return 0 if window is None else time


def _widened(ffn: Any) -> int:
    """Numbers that a feed-forward part keeps of a token, without what it reads."""
    if not isinstance(ffn, FeedForward):
        return 0
    if isinstance(ffn, GatedFeedForward):
        return 4 * ffn.up.out_features
    return (1 if ffn.activation is ACTIVATIONS["relu"] else 2) * ffn.up.out_features


def _widths(attention: Attention) -> tuple[int, int, int]:
    """Of all queries, keys and values of a token."""
    parts = (attention.query, attention.key, attention.value)
    return cast(tuple[int, int, int], tuple(part.out_features for part in parts))


def _stacks(model: nn.Module) -> list[Stack]:
    return [part for part in model.children() if isinstance(part, Stack)]


def _glimpses(model: nn.Module) -> list[RecurrentAttention]:
    return [part for part in model.modules() if isinstance(part, RecurrentAttention)]


def _inner(model: nn.Module) -> nn.Module | None:
    """What lies below the head of a model that has no stack of blocks."""
    parts = [part for name, part in model.named_children() if name != "head"]
    return None if _stacks(model) else nn.ModuleList(parts)


def _decoder(model: nn.Module) -> Stack | None:
    decoder = getattr(model, "decoder", None)
    return decoder if isinstance(decoder, Stack) else None
