"""FLOPs of matmuls and attention per token; a multiply-add is two."""

import math
from typing import Any

from torch import nn

from regard.models.cost.parts import (
    decoder_stack,
    non_transformer_body,
    qkv_widths,
    recurrent_attentions,
    stacks,
    visible_keys,
)
from regard.nn.attention import Attention
from regard.nn.head import LMHead, TagHead
from regard.nn.recurrent_attention import RecurrentAttention
from regard.nn.score import (
    Additive,
    Disentangled,
    General,
    Location,
    Score,
    Shaw,
    TransformerXL,
)

# of recurrent encoder-decoders and captioners: they run once, in `start`, not in a decode step
SOURCE_MODULES = ("encoder", "direction_projection", "bridge", "image_embed", "image_layers")


def forward_flops(model: nn.Module, time: int) -> int:
    """FLOPs per token of a forward pass over a row of `time` tokens."""
    total = _head_flops(getattr(model, "head", None), time)
    total += time * matmul_flops(non_transformer_body(model))
    total += time * sum(_attention_flops(a, time, time) for a in recurrent_attentions(model))
    for stack in stacks(model):
        total += time * (matmul_flops(model.embed) + matmul_flops(stack.project))
        bidirectional = stack is not decoder_stack(model)
        for block, window in zip(stack.layers, stack.windows, strict=True):
            keys = visible_keys(time, window, bidirectional=bidirectional)
            total += time * (matmul_flops(block.attention) + matmul_flops(block.ffn))
            total += time * _attention_flops(block.attention, keys, time)
            if block.cross is not None:
                total += time * (
                    matmul_flops(block.cross) + _attention_flops(block.cross, time, time)
                )
    return round(total / time)


def decode_flops(model: nn.Module, time: int) -> int:
    """FLOPs of a decode step after `time - 1` tokens; 0 if a model does not generate tokens."""
    decoder, body = decoder_stack(model), non_transformer_body(model)
    head = getattr(model, "head", None)
    generates = isinstance(head, LMHead) and hasattr(model, "start")
    if not generates or (decoder is None and body is None):
        return 0
    total = _head_flops(head, 1) + matmul_flops(body)
    for name in SOURCE_MODULES:
        total -= 0 if body is None else matmul_flops(getattr(model, name, None))
    for attention in recurrent_attentions(model):
        total -= matmul_flops(attention.key) + matmul_flops(attention.value)
        total += _attention_flops(attention, time, math.inf)
    if decoder is None:
        return round(total)
    total += matmul_flops(model.embed) + matmul_flops(decoder.project)
    for block, window in zip(decoder.layers, decoder.windows, strict=True):
        total += matmul_flops(block.attention) + matmul_flops(block.ffn)
        total += _attention_flops(block.attention, visible_keys(time, window), 1)
        if block.cross is not None:  # its keys and values are computed once, in `start`
            total += matmul_flops(block.cross.query) + matmul_flops(block.cross.out)
            total += _attention_flops(block.cross, time, 1)
    return round(total)


def matmul_flops(module: Any) -> int:
    """FLOPs per vector of all linear and convolution layers, without those of a score."""
    if module is None:
        return 0
    in_scores = {
        id(layer)
        for score in module.modules()
        if isinstance(score, Score)
        for layer in score.modules()
    }
    return 2 * sum(
        layer.weight.numel()
        for layer in module.modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) and id(layer) not in in_scores
    )


def _attention_flops(attention: Attention | RecurrentAttention, keys: int, queries: float) -> float:
    """FLOPs per query of the scores and of the weighted sum of values, over `keys` keys.

    FLOPs that a score needs once per key are divided by the number of `queries`.
    """
    if isinstance(attention, Attention):
        q_width, k_width, _ = qkv_widths(attention)
        v_width, head_dim = attention.out.in_features, attention.head_dim
    else:
        q_width = k_width = v_width = attention.dim
        head_dim = attention.dim // attention.heads
    score, score_flops = attention.score, 0.0
    if isinstance(score, Additive):
        score_flops = 2 * q_width * head_dim
    if isinstance(score, Additive | General):  # a matmul on every key
        score_flops += 2 * k_width * head_dim * keys / queries
    if isinstance(score, Location):  # one score for every position of the context
        score_flops = 2 * q_width * (score.location.out_features - keys)
    if isinstance(score, Shaw):
        score_flops = 2 * q_width * (2 * score.max_distance + 1)
    if isinstance(score, TransformerXL):  # a key for every distance, in both directions
        distances = 2 * keys - 1
        score_flops = 2 * distances * (q_width + score.distance.weight.numel() / queries)
    # Q r and K r, and their products with keys and queries
    if isinstance(score, Disentangled) and isinstance(attention, Attention):
        weights = attention.query.weight.numel() + attention.key.weight.numel()
        score_flops = 4 * score.attention_span * (q_width + (q_width * keys + weights) / queries)
    return 2 * (q_width + v_width) * keys + score_flops


def _head_flops(head: Any, time: int) -> float:
    """FLOPs of the head on a row; a language modelling head computes logits at every position."""
    if isinstance(head, LMHead):
        layers = [getattr(head, name, None) for name in ("project", "dense")]
        return time * (2 * head.matrix.numel() + sum(map(matmul_flops, layers)))
    return (time if isinstance(head, TagHead) else 1) * matmul_flops(head)
