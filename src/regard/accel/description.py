"""The structure of a decoder that the fast paths must reproduce, read from its modules.

`inspect_decoder` lists every class and every attribute that a supported model may have. A module
of another class (a new norm, score or position encoding) or with another attribute (a new field of
a block) raises `UnsupportedModelError`, and the model then decodes with its slower `step`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.accel.compile import ATTACHED
from regard.models.cost import linear_weights
from regard.models.transformer import Transformer
from regard.nn.attention import Attention
from regard.nn.block import ACTIVATIONS, Block, Embedding, FeedForward, GatedFeedForward, Stack
from regard.nn.head import LMHead
from regard.nn.hook_point import CarryHookPoint, HookPoint
from regard.nn.norm import LayerNorm, RMSNorm, RMSNormPlusOne
from regard.nn.position import ALiBi, Learned, Position, Rotary, Sinusoidal, T5Bias
from regard.nn.score import Dot, ScaledDot

NORM_NAMES: dict[type, str] = {LayerNorm: "layer", RMSNorm: "rms", RMSNormPlusOne: "rms_plus_one"}
POSITION_NAMES: dict[type, str] = {
    Position: "none",
    Sinusoidal: "sinusoidal",
    Learned: "learned",
    Rotary: "rotary",
    ALiBi: "alibi",
    T5Bias: "t5",
}
ACTIVATION_NAMES = {function: name for name, function in ACTIVATIONS.items()}
KNOWN_ATTRIBUTES: dict[type, str] = {
    Transformer: "config context embed characters source_embed encoder decoder head",
    Embedding: "token segment project scale",
    Stack: "position relative_embedding embed_norm project blocks windows norm dropout",
    Block: "attention attention_norm attention_post_norm cross ffn ffn_norm ffn_post_norm "
    "norm_placement dropout carry_hook out_hook",
    Attention: "heads kv_heads head_dim dropout query key value out q_norm k_norm score "
    "q_hook k_hook v_hook heads_hook",
    FeedForward: "up down activation dropout hidden_hook",
    GatedFeedForward: "up down activation dropout gate hidden_hook",
    LMHead: "scale cap project _tied weight bias",
    LayerNorm: "eps weight bias",
    RMSNorm: "eps weight",
    RMSNormPlusOne: "eps weight",
    Dot: "scale cap fused",
    ScaledDot: "scale cap fused",
    Position: "",
    Sinusoidal: "dim base interleaved each_layer after_projection",
    Learned: "table offset each_layer after_projection",
    Rotary: "rotary_dim base interleaved scaling length_dependent window_rotary",
    ALiBi: "slope",
    T5Bias: "causal buckets max_distance table",
    HookPoint: "",
    CarryHookPoint: "",
    nn.ModuleList: "",
    nn.Linear: "in_features out_features weight bias",
    nn.Embedding: "num_embeddings embedding_dim padding_idx max_norm norm_type "
    "scale_grad_by_freq sparse weight",
}
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes of every module: `training`, …


@dataclass(frozen=True, slots=True)
class BlockDescription:
    """One layer of a decoder."""

    weights: int  # the number of weights of its linear layers
    norm_placement: str
    norm: str  # class of `attention_norm` and `ffn_norm`
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    ffn_dim: int
    score_scale: float
    score_cap: float | None
    qk_norm: str | None
    activation: str | None  # None: not one of `nn.block.ACTIVATIONS`
    gated: bool
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderDescription:
    """A decoder-only Transformer with a linear head."""

    dim: int
    blocks: tuple[BlockDescription, ...]  # of each layer
    position: str
    position_in_each_layer: bool
    rotary_dim: int  # of each query and key
    interleaved: bool
    length_dependent: bool  # rotary scaling that depends on the length of the sequence
    has_window_base: bool  # layers with a window have another RoPE base (`window_base`)
    biases_scores: bool
    final_norm: str | None
    head_scale: float
    head_projects: bool
    dtype: torch.dtype
    device: torch.device


class UnsupportedModelError(Exception):
    """Raised for a model that no fast path supports; the message is the reason."""


def inspect_decoder(model: object) -> DecoderDescription:
    """The structure of a model; raise `UnsupportedModelError` if a part of it is not known here."""
    if type(model) is not Transformer:
        raise UnsupportedModelError(f"{type(model).__name__} is not a Transformer")
    if model.decoder is None or model.encoder is not None:
        raise UnsupportedModelError(
            f"architecture={model.config.architecture!r} is not decoder-only"
        )
    if model.config.prefix:
        raise UnsupportedModelError("a prefix LM reads its prompt bidirectionally")
    for name, module in model.named_modules():
        _require_known(name or "the model", module)
    stack, head = model.decoder, model.head
    if type(head) is not LMHead:
        raise UnsupportedModelError(f"head {type(head).__name__} is not a linear head")
    position, weight = stack.position, model.embed.token.weight
    return DecoderDescription(
        dim=model.config.dim,
        blocks=tuple(map(_inspect_block, stack.layers, stack.windows)),
        position=POSITION_NAMES[type(position)],
        position_in_each_layer=position.each_layer,
        rotary_dim=position.rotary_dim if isinstance(position, Rotary) else 0,
        interleaved=isinstance(position, Rotary) and position.interleaved,
        length_dependent=isinstance(position, Rotary) and position.length_dependent,
        has_window_base=position.for_sliding_window() is not position,
        biases_scores=type(position).bias is not Position.bias,
        final_norm=_norm_name(stack.norm),
        head_scale=head.scale,
        head_projects=head.project is not None,
        dtype=weight.dtype,
        device=weight.device,
    )


def _inspect_block(block: Block, window: int | None) -> BlockDescription:
    if block.ffn is None:
        raise UnsupportedModelError("a layer has no feed-forward network")
    attention, ffn = block.attention, cast(FeedForward, block.ffn)
    score = attention.score
    (norm, *others) = {type(norm) for norm in (block.attention_norm, block.ffn_norm) if norm}
    if others:
        raise UnsupportedModelError("the norms of a block are of different classes")
    return BlockDescription(
        weights=linear_weights(block),
        norm_placement=block.norm_placement.kind,
        norm=NORM_NAMES[norm],
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        value_dim=attention.value.out_features // attention.kv_heads,
        ffn_dim=ffn.up.out_features,
        score_scale=score.scale,
        score_cap=score.cap,
        qk_norm=_norm_name(attention.q_norm),
        activation=ACTIVATION_NAMES.get(ffn.activation),
        gated=isinstance(ffn, GatedFeedForward),
        qkv_bias=attention.query.bias is not None,
        out_bias=attention.out.bias is not None,
        ffn_bias=ffn.up.bias is not None,
        window=window,
    )


def _norm_name(norm: nn.Module | None) -> str | None:
    return None if norm is None else NORM_NAMES[type(norm)]


def _require_known(name: str, module: nn.Module) -> None:
    """Raise `UnsupportedModelError` for classes, attributes and hooks without a fast path."""
    if type(module) not in KNOWN_ATTRIBUTES:
        raise UnsupportedModelError(
            f"{name} is a {type(module).__name__}, which no fast path implements"
        )
    attributes = set(vars(module)) - MODULE_ATTRIBUTES
    for members in (module._parameters, module._buffers, module._modules):
        attributes |= set() if type(module) is nn.ModuleList else members.keys()
    for attribute in attributes - set(KNOWN_ATTRIBUTES[type(module)].split()):
        if not _preserves_results(getattr(module, attribute)):
            raise UnsupportedModelError(
                f"{name}.{attribute} is an attribute that no fast path supports"
            )
    if module._forward_hooks or module._forward_pre_hooks:
        raise UnsupportedModelError(f"{name} has a forward hook")


def _preserves_results(attribute: Any) -> bool:
    """Whether an attribute is a method that preserves results: of `ATTACHED`, or checkpointing."""
    if isinstance(attribute, partial):
        return attribute.func in (checkpoint, *ATTACHED)
    return getattr(attribute, "__func__", None) in ATTACHED
