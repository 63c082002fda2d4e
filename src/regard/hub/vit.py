"""The Vision Transformer (Dosovitskiy et al. 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.config import kind_of
from regard.errors import ConfigError
from regard.hub.family import Family, Table, activation, activation_name
from regard.hub.rules import Rule, renamed

FIELDS = {
    "num_channels": "channels",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_dim",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "norm_eps",
}
DEFAULTS = {
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
}


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Inside axes of length one, so that there are three in all."""

    def split(self, theirs: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Ours."""
        return [theirs.squeeze(0) if len(shapes[0]) == 2 else theirs.flatten()]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs."""
        return ours[0][(None,) * (3 - ours[0].ndim)]


LAYER = {
    "attention.attention.query": "attention.query",
    "attention.attention.key": "attention.key",
    "attention.attention.value": "attention.value",
    "attention.output.dense": "attention.out",
    "layernorm_before": "attention_norm",
    "layernorm_after": "ffn_norm",
    "intermediate.dense": "ffn.up",
    "output.dense": "ffn.down",
}
NEWER = {  # what version 5 of the library calls them in memory
    "attention.q_proj": "attention.query",
    "attention.k_proj": "attention.key",
    "attention.v_proj": "attention.value",
    "attention.o_proj": "attention.out",
    "layernorm_before": "attention_norm",
    "layernorm_after": "ffn_norm",
    "mlp.fc1": "ffn.up",
    "mlp.fc2": "ffn.down",
}
BODY = [
    Rule("embeddings.cls_token", "embed.cls", Wrapped()),
    Rule("embeddings.position_embeddings", "encoder.position.table.weight", Wrapped()),
    *renamed(
        {"embeddings.patch_embeddings.projection": "embed.patch", "layernorm": "encoder.norm"}
    ),
    *renamed(LAYER, "encoder.layer.{i}.", "encoder.blocks.{i}."),
    *renamed(NEWER, "layers.{i}.", "encoder.blocks.{i}."),
]
HEADS = {"classify": {"classifier": "head.out"}, "pooled": {"pooler.dense": "head.pool"}}


def _rules(config: Any) -> list[Rule]:
    return [*BODY, *renamed(HEADS.get(kind_of(config.head)[0], {}))]


def _side(theirs: Table, key: str) -> int:
    """Height and width, which may be given as one number or as two."""
    value = theirs[key]
    sides = set(value if isinstance(value, list | tuple) else [value])
    if len(sides) != 1:
        raise ConfigError(f"{key}={value} is not supported: images and patches are square here")
    return int(sides.pop())


def _read(theirs: Table) -> Table:
    width = theirs.get("pooler_output_size")
    if width not in (None, theirs["hidden_size"]):
        raise ConfigError(f"pooler_output_size={width} is not supported: the pooler is square here")
    return {
        "image_size": _side(theirs, "image_size"),
        "patch": _side(theirs, "patch_size"),
        "ffn": activation(theirs["hidden_act"]),
    }


def _write(ours: Any) -> Table:
    return {
        "image_size": ours.image_size,
        "patch_size": ours.patch,
        "encoder_stride": ours.patch,
        "hidden_act": activation_name(ours.ffn),
    }


def image_task(theirs: Table, processor: Table, channels: int) -> Table:
    """The task that goes with a classifier: the names of its classes, and how to scale colours."""
    labels = theirs.get("id2label") or {}
    return {
        "kind": "classify",
        "names": [str(labels[key]) for key in sorted(labels, key=int)],
        "mean": processor.get("image_mean", [0.5] * channels),
        "std": processor.get("image_std", [0.5] * channels),
    }


def labels(names: Sequence[str]) -> Table:
    """The names of classes as config.json has them."""
    numbered = {str(number): name for number, name in enumerate(names)}
    return {"id2label": numbered, "label2id": {name: int(n) for n, name in numbered.items()}}


def processor(size: int, mean: Sequence[float], std: Sequence[float]) -> Table:
    """The preprocessor_config.json that makes their images those that the model has learned."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


VIT = Family(
    name="vit",
    model="vision",
    heads={"ViTForImageClassification": "classify", "ViTModel": "pooled"},
    fields=FIELDS,
    rules=_rules,
    prefix="vit.",
    only={"qkv_bias": True, "pooler_act": "tanh"},
    defaults=DEFAULTS,
    read=_read,
    write=_write,
)
