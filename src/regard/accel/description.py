"""The structure of a decoder, read from its modules: what the fast paths must reproduce.

`inspect_decoder` lists every class and every attribute that a supported model may have. A module
of another class (a new norm, score or position encoding) or with another attribute (a new field of
a block) raises `UnsupportedModel`, and the model then decodes with its own, slower `step`.
`ModelFingerprint` detects that a model has changed since.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.accel.compile import ATTACHED
from regard.accel.packed import BLOCKED_ELEMENTS
from regard.models.transformer import Transformer
from regard.nn.attention import Attention
from regard.nn.block import (
    ACTIVATIONS,
    Block,
    Embedding,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    RMSNorm,
    RMSNormPlusOne,
    Stack,
)
from regard.nn.head import Head
from regard.nn.hook_point import CarryHookPoint, HookPoint
from regard.nn.position import T5, ALiBi, Learned, Position, Rotary, Sinusoidal
from regard.nn.score import Dot, ScaledDot

NORMS: dict[type, str] = {LayerNorm: "layer", RMSNorm: "rms", RMSNormPlusOne: "rms_plus_one"}
POSITIONS: dict[type, str] = {
    Position: "none",
    Sinusoidal: "sinusoidal",
    Learned: "learned",
    Rotary: "rotary",
    ALiBi: "alibi",
    T5: "t5",
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
    Head: "scale cap project _tied weight bias",
    LayerNorm: "eps weight bias",
    RMSNorm: "eps weight",
    RMSNormPlusOne: "eps weight",
    Dot: "scale cap fused",
    ScaledDot: "scale cap fused",
    Position: "",
    Sinusoidal: "dim base interleaved each_layer after_projection",
    Learned: "table offset each_layer after_projection",
    Rotary: "rotary_dim base interleaved scaling",
    ALiBi: "slope",
    T5: "causal buckets max_distance table",
    HookPoint: "",
    CarryHookPoint: "",
    nn.ModuleList: "",
    nn.Linear: "in_features out_features weight bias",
    nn.Embedding: "num_embeddings embedding_dim padding_idx max_norm norm_type "
    "scale_grad_by_freq sparse weight",
}
HASH_CHUNK = 1 << 16  # words of 8 bytes that have one hash
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # of every module, `training` among them


@dataclass(frozen=True, slots=True)
class BlockDescription:
    """One layer of a decoder."""

    norm_placement: str
    norm: str  # before attention and, if any, before the feed-forward network
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
class Description:
    """A decoder-only Transformer with a linear head."""

    blocks: tuple[BlockDescription, ...]  # of each layer
    position: str
    position_in_each_layer: bool
    rotated_dims: int  # of each query and key
    interleaved: bool
    biases_scores: bool
    final_norm: str | None
    head_scale: float
    head_projects: bool
    dtype: torch.dtype
    device: torch.device


class UnsupportedModel(Exception):
    """Raised for a model that no fast path supports; the message is the reason."""


def inspect_decoder(model: object) -> Description:
    """The structure of a model; `UnsupportedModel` for anything that is not known here."""
    if type(model) is not Transformer:
        raise UnsupportedModel(f"{type(model).__name__} is not a Transformer")
    if model.decoder is None or model.encoder is not None:
        raise UnsupportedModel(f"architecture={model.config.architecture!r} is not a decoder alone")
    if model.config.prefix:
        raise UnsupportedModel("a prefix LM reads its prompt bidirectionally")
    for name, module in model.named_modules():
        _require_known(name or "the model", module)
    stack, head = model.decoder, model.head
    if type(head) is not Head:
        raise UnsupportedModel(f"head {type(head).__name__} is not a linear head")
    position, weight = stack.position, model.embed.token.weight
    return Description(
        blocks=tuple(map(_inspect_block, stack.layers, stack.windows)),
        position=POSITIONS[type(position)],
        position_in_each_layer=position.each_layer,
        rotated_dims=position.rotary_dim if isinstance(position, Rotary) else 0,
        interleaved=isinstance(position, Rotary) and position.interleaved,
        biases_scores=type(position).bias is not Position.bias,
        final_norm=_norm_name(stack.norm),
        head_scale=head.scale,
        head_projects=head.project is not None,
        dtype=weight.dtype,
        device=weight.device,
    )


def _inspect_block(block: Block, window: int | None) -> BlockDescription:
    if block.ffn is None:
        raise UnsupportedModel("a layer has no feed-forward network")
    attention, ffn = block.attention, cast(FeedForward, block.ffn)
    score = attention.score
    (norm, *others) = {type(norm) for norm in (block.attention_norm, block.ffn_norm) if norm}
    if others:
        raise UnsupportedModel("the norms of a block are of different classes")
    return BlockDescription(
        norm_placement=block.norm_placement.kind,
        norm=NORMS[norm],
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
    return None if norm is None else NORMS[type(norm)]


def _require_known(name: str, module: nn.Module) -> None:
    """Raise `UnsupportedModel` for classes, attributes and hooks that no fast path supports."""
    if type(module) not in KNOWN_ATTRIBUTES:
        raise UnsupportedModel(
            f"{name} is a {type(module).__name__}, which no fast path implements"
        )
    attributes = set(vars(module)) - MODULE_ATTRIBUTES
    for members in (module._parameters, module._buffers, module._modules):
        attributes |= set() if type(module) is nn.ModuleList else members.keys()
    for attribute in attributes - set(KNOWN_ATTRIBUTES[type(module)].split()):
        if not _preserves_results(getattr(module, attribute)):
            raise UnsupportedModel(f"{name}.{attribute} is an attribute that no fast path knows")
    if module._forward_hooks or module._forward_pre_hooks:
        raise UnsupportedModel(f"{name} has a forward hook")


def _preserves_results(attribute: Any) -> bool:
    """Whether an attached method computes what the original does: compiled, or checkpointed."""
    if isinstance(attribute, partial):
        return attribute.func in (checkpoint, *ATTACHED)
    return getattr(attribute, "__func__", None) in ATTACHED


class ModelFingerprint:
    """The values and tensors of a model, to detect that one of them has changed.

    Compares attributes, storage addresses and version counters, a few comparisons per tensor. A
    write through `tensor.data` does not change the version counter, so tensors of up to
    `copied_elements`, of which a decoder has copies, are also compared by content: small ones byte
    by byte, large ones by hashes, which miss a change with a probability under 2^-32. Larger
    tensors are shared with the decoder, which sees such a write as the model does.
    """

    def __init__(self, model: nn.Module, *, copied_elements: int = 0) -> None:
        self.values: list[tuple[Mapping[str, Any], str, Any, str]] = []
        self.tensors: list[tuple[Tensor, int, int, str]] = []
        for prefix, module in model.named_modules():
            attributes = {key: vars(module)[key] for key in vars(module).keys() - MODULE_ATTRIBUTES}
            for members, watched in (
                (vars(module), attributes),
                (module._modules, module._modules),
                (module._parameters, module._parameters),
                (module._buffers, module._buffers),
            ):
                for key, value in watched.items():
                    name = f"{prefix}.{key}".lstrip(".")
                    frozen = dict(value) if isinstance(value, Mapping) else value
                    self.values.append((members, key, frozen, name))
                    if isinstance(value, Tensor):
                        self.tensors.append((value, value.data_ptr(), _version(value), name))
        copied = [(t, name) for t, *_, name in self.tensors if t.numel() <= copied_elements]
        self.small = [(t, name) for t, name in copied if t.numel() < BLOCKED_ELEMENTS]
        self.large = [(t, name) for t, name in copied if t.numel() >= BLOCKED_ELEMENTS]
        # a changed address is found before the contents are read, so that views stay valid
        self.views = [_bytes(t) if t.is_contiguous() else None for t, _ in self.small]
        self.contents = [_concatenate(parts) for parts in self._contents()]

    def find_change(self, *, contents: bool = True) -> str | None:
        """The name of the first value that has changed; None if none has.

        Without `contents`, writes through `tensor.data` are not looked for.
        """
        for members, key, value, name in self.values:
            current = members.get(key)
            if current is not value and (isinstance(value, Tensor) or current != value):
                return name
        for tensor, address, version, name in self.tensors:
            if tensor.data_ptr() != address or _version(tensor) != version:
                return name
        if not contents:
            return None
        for watched, before, now in zip(
            (self.small, self.large), self.contents, self._contents(), strict=True
        ):
            if not torch.equal(before, _concatenate(now)):  # one synchronization on a GPU
                parts = zip(watched, before.split([len(part) for part in now]), now, strict=True)
                return next(name for (_, name), a, b in parts if not torch.equal(a, b))
        return None

    def _contents(self) -> tuple[list[Tensor], list[Tensor]]:
        """The bytes of small tensors and the hashes of large ones."""
        small = [
            _bytes(tensor) if view is None else view
            for (tensor, _), view in zip(self.small, self.views, strict=True)
        ]
        return small, [_hash(tensor) for tensor, _ in self.large]


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: a view if it is contiguous, else a copy."""
    return tensor.detach().flatten().view(torch.uint8)


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors else torch.empty(0)


def _hash(tensor: Tensor) -> Tensor:
    """A hash of every chunk of a tensor: the sum of its 8-byte words times random odd numbers."""
    data = _bytes(tensor)
    if data.storage_offset() % 8 or len(data) % 8:  # not words
        data = F.pad(data, (0, -len(data) % 8)).clone()
    words, factors = data.view(torch.int64), _factors(data.device)
    whole = len(words) // HASH_CHUNK * HASH_CHUNK
    chunks, rest = words[:whole].view(-1, HASH_CHUNK), words[whole:]
    if words.is_cuda:
        products = [(part * factors).sum(1) for part in chunks.split(1 << 12)]
    else:  # twice as fast as torch.mv, and four times as fast as torch.mul
        products = [torch.from_numpy(chunks.numpy() @ factors.numpy())]
    return torch.cat([*products, (rest * factors[: len(rest)]).sum(0, keepdim=True)])


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (HASH_CHUNK,), generator=generator) | 1).to(device)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
