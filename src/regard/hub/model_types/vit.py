"""ViT, the Vision Transformer (Dosovitskiy et al. 2020): image classifier, pooled features.

Also reads and writes preprocessor_config.json: image size, and mean and standard deviation of the
pixel values.
"""

from collections.abc import Sequence
from typing import Any

from regard.config import kind_of
from regard.errors import ConfigError
from regard.files.untrusted import quote
from regard.hub.class_names import read_class_names
from regard.hub.model_type import ConfigDict, ModelType, read_activation, write_activation
from regard.hub.weight_mapping import LeadingAxes, Rule, module_rules

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
    "qkv_bias": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
}


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
NEW_LAYER = {  # the names in transformers 5
    "attention.q_proj": "attention.query",
    "attention.k_proj": "attention.key",
    "attention.v_proj": "attention.value",
    "attention.o_proj": "attention.out",
    "layernorm_before": "attention_norm",
    "layernorm_after": "ffn_norm",
    "mlp.fc1": "ffn.up",
    "mlp.fc2": "ffn.down",
}
BODY_RULES = [
    Rule("embeddings.cls_token", "embed.cls", LeadingAxes(3)),
    Rule("embeddings.position_embeddings", "encoder.position.table.weight", LeadingAxes(3)),
    *module_rules(
        {"embeddings.patch_embeddings.projection": "embed.patch", "layernorm": "encoder.norm"}
    ),
    *module_rules(LAYER, "encoder.layer.{i}.", "encoder.blocks.{i}."),
    *module_rules(NEW_LAYER, "layers.{i}.", "encoder.blocks.{i}."),
]
HEADS = {"classification": {"classifier": "head.out"}, "pooled": {"pooler.dense": "head.pool"}}


def _rules(config: Any) -> list[Rule]:
    return [*BODY_RULES, *module_rules(HEADS.get(kind_of(config.head)[0], {}))]


def _size(hf: ConfigDict, key: str) -> int | list[int]:
    """The side of a square, or height and width if they differ."""
    value = hf[key]
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if len(sides) not in (1, 2) or any(type(side) is not int for side in sides):
        raise ConfigError(f"{key}={quote(value)} must be an integer, or a height and a width")
    return sides[0] if len({*sides}) == 1 else sides


def _read(hf: ConfigDict) -> ConfigDict:
    width = hf.get("pooler_output_size")
    if width not in (None, hf["hidden_size"]):
        raise ConfigError(f"pooler_output_size={width} is not supported: it must equal hidden_size")
    return {
        "image_size": _size(hf, "image_size"),
        "patch_size": _size(hf, "patch_size"),
        "ffn": read_activation(hf["hidden_act"]),
        "bias": {True: True, False: "not_qkv"}[hf["qkv_bias"]],
    }


def _write(config: Any) -> ConfigDict:
    return {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "encoder_stride": config.patch_sides[0],  # used by ViTForMaskedImageModeling only
        "hidden_act": write_activation(config.ffn),
        "qkv_bias": config.bias is True,
    }


def image_task(hf: ConfigDict, processor: ConfigDict, channels: int) -> ConfigDict:
    """The `task` setting of a classifier: class names, mean and standard deviation of pixels."""
    mean, std = _pixel_statistics(processor, channels)
    return {
        "kind": "image_classification",
        "class_names": read_class_names(hf),
        "mean": mean,
        "std": std,
    }


def _pixel_statistics(processor: ConfigDict, channels: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of pixels in 0 to 1; the file gives those after rescaling.

    (pixel · factor - mean) / std = (pixel / 255 - mean / (255 factor)) / (std / (255 factor))
    """
    if processor.get("do_center_crop"):
        raise ConfigError("do_center_crop=true is not supported: images are resized here")
    (factor,) = _per_channel(processor, "rescale_factor", 1 / 255, 1)
    unit = 255 * (factor if _flag(processor, "do_rescale") else 1)
    mean, std = [0.0] * channels, [1.0] * channels
    if _flag(processor, "do_normalize"):
        mean = _per_channel(processor, "image_mean", 0.5, channels)
        std = _per_channel(processor, "image_std", 0.5, channels)
    if unit <= 0 or min(std) <= 0:
        raise ConfigError(f"rescale_factor={factor} and image_std={std} must be above 0")
    return [value / unit for value in mean], [value / unit for value in std]


def _per_channel(processor: ConfigDict, key: str, default: float, count: int) -> list[float]:
    """One number per channel; a single number applies to all channels."""
    value = default if processor.get(key) is None else processor[key]
    numbers = value if isinstance(value, list) else [value] * count
    valid = all(type(n) in (int, float) and abs(n) <= 1e6 for n in numbers)
    if len(numbers) != count or not valid:
        raise ConfigError(f"{key}={quote(value)} must be a number for each of {count} channels")
    return [float(n) for n in numbers]


def _flag(processor: ConfigDict, key: str) -> bool:
    value = processor.get(key)
    if not (value is None or isinstance(value, bool)):
        raise ConfigError(f"{key}={quote(value)} must be true or false")
    return value is not False


def write_processor(
    sides: tuple[int, int], mean: Sequence[float], std: Sequence[float]
) -> ConfigDict:
    """The content of preprocessor_config.json."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": sides[0], "width": sides[1]},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


VIT = ModelType(
    name="vit",
    family="vision",
    heads={"ViTForImageClassification": "classification", "ViTModel": "pooled"},
    fields=FIELDS,
    rules=_rules,
    prefix="vit.",
    supported_values={"pooler_act": "tanh"},
    defaults=DEFAULTS,
    read_settings=_read,
    write_settings=_write,
)
