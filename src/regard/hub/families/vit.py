"""The Vision Transformer (Dosovitskiy et al. 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.config import kind_of
from regard.errors import ConfigError
from regard.files.untrusted import quote
from regard.hub.family import Family, Table, activation, activation_name
from regard.hub.weight_mapping import Rule, renamed

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
    if len(sides) != 1 or type(side := sides.pop()) is not int:
        raise ConfigError(f"{key}={quote(value)} is not supported: sides are equal whole numbers")
    return side


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
    mean, std = _colours(processor, channels)
    return {"kind": "classify", "names": _names(theirs), "mean": mean, "std": std}


def _names(theirs: Table) -> list[str]:
    labels = theirs.get("id2label") or {
        str(number): f"LABEL_{number}" for number in range(theirs.get("num_labels", 2))
    }
    numbers = [str(number) for number in range(len(labels))]
    if not isinstance(labels, dict) or labels.keys() != {*numbers}:
        raise ConfigError("id2label must be a table that names the classes 0, 1, 2, … without gaps")
    return [str(labels[number]) for number in numbers]


def _colours(processor: Table, channels: int) -> tuple[list[float], list[float]]:
    """Mean and spread of colours from 0 to 1, where theirs are of colours times some factor.

    (colour · factor - mean) / std = (colour / 255 - mean / (255 factor)) / (std / (255 factor))
    """
    if processor.get("do_center_crop"):
        raise ConfigError("do_center_crop=true is not supported: images are only resized here")
    (factor,) = _numbers(processor, "rescale_factor", 1 / 255, 1)
    unit = 255 * (factor if _switch(processor, "do_rescale") else 1)
    mean, std = [0.0] * channels, [1.0] * channels
    if _switch(processor, "do_normalize"):
        mean = _numbers(processor, "image_mean", 0.5, channels)
        std = _numbers(processor, "image_std", 0.5, channels)
    if unit <= 0 or min(std) <= 0:
        raise ConfigError(f"rescale_factor={factor} and image_std={std} must be above 0")
    return [each / unit for each in mean], [each / unit for each in std]


def _numbers(processor: Table, key: str, default: float, count: int) -> list[float]:
    """A number for each channel, which may be given as one for all."""
    value = default if processor.get(key) is None else processor[key]
    each = value if isinstance(value, list) else [value] * count
    if len(each) != count or not all(type(n) in (int, float) and abs(n) <= 1e6 for n in each):
        raise ConfigError(f"{key}={quote(value)} must be a number for each of {count} channels")
    return [float(n) for n in each]


def _switch(processor: Table, key: str) -> bool:
    value = processor.get(key)
    if not (value is None or isinstance(value, bool)):
        raise ConfigError(f"{key}={quote(value)} must be true or false")
    return value is not False


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
