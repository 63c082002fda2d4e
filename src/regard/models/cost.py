"""What a model is made of and what it costs, counted on the meta device: nothing is allocated."""

from dataclasses import dataclass

import torch
from torch import nn

from regard.models.build import build_model
from regard.models.presets import ModelConfig
from regard.models.recurrent import LSTMConfig
from regard.models.transformer import TransformerConfig
from regard.nn.tap import Tap

FLOAT = 4  # bytes of a float32
COPIES = 4  # while training with AdamW: weights, gradients, two moments


@dataclass(frozen=True, slots=True)
class Cost:
    r"""Sizes in bytes of float32, arithmetic in multiply-adds counted as two.

        forward  = 2 N + 4 A T h d_h  per token,      training = 3 forward

    N are the weights that multiply (all matrices, the output matrix included, tables not), A
    the attention layers, T the context, h d_h the width of all heads: at a full context every
    query meets T keys and mixes T values. A causal mask halves that on average.
    """

    parts: dict[str, int]  # parameters of each
    parameters: int
    weight_bytes: int
    training_bytes: int
    state_bytes_per_token: int  # keys and values; 0 where the state does not grow
    state_bytes: int  # of a state that does not grow
    flops_per_token: int
    training_flops_per_token: int
    taps: list[str]


def cost(config: ModelConfig) -> Cost:
    """Count a model."""
    with torch.device("meta"):
        model = build_model(config)
    parts: dict[str, int] = {}
    multiplying = 0
    for name, parameter in model.named_parameters():
        part = _part(name)
        parts[part] = parts.get(part, 0) + parameter.numel()
        if parameter.ndim > 1 and part not in ("embedding", "position", "head"):
            multiplying += parameter.numel()
    parameters = sum(parts.values())
    growing = fixed = forward = 0
    if isinstance(config, TransformerConfig):
        head_dim = config.head_dim or config.dim // config.heads
        encoder, decoder = config.depths
        crossing = decoder if config.shape == "encoder-decoder" else 0
        growing = 2 * decoder * (config.kv_heads or config.heads) * head_dim * FLOAT
        attention = 4 * (encoder + decoder + crossing) * config.context * config.heads * head_dim
        forward = 2 * (multiplying + config.vocab_size * config.dim) + attention
    elif isinstance(config, LSTMConfig):
        fixed = 2 * config.layers * config.dim * FLOAT
        forward = 2 * (multiplying + config.vocab_size * config.dim)
    return Cost(
        parts=parts,
        parameters=parameters,
        weight_bytes=FLOAT * parameters,
        training_bytes=FLOAT * COPIES * parameters,
        state_bytes_per_token=growing,
        state_bytes=fixed,
        flops_per_token=forward,
        training_flops_per_token=3 * forward,
        taps=_taps(model),
    )


def _taps(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, Tap)]


def _part(name: str) -> str:
    """What a parameter belongs to, by its path."""
    pieces = name.split(".")
    if any("norm" in piece or piece.endswith("_after") for piece in pieces):
        return "norms"
    known = {"cross": "cross-attention", "attention": "attention", "ffn": "feed-forward"}
    known |= {"position": "position", "head": "head"}
    for piece in pieces:
        if piece in known:
            return known[piece]
    return "embedding" if "embed" in pieces[0] else pieces[0]
