"""LoRA adapters in the files of the PEFT library: adapter_config.json, adapter_model.safetensors.

PEFT names a layer as transformers does: base_model.model.transformer.h.0.attn.c_attn.lora_A.weight.
Where one matrix in transformers holds several layers of a model here (GPT-2's c_attn is query, key
and value), their updates are written as one update. If all of them have the same A, it is the A of
that update; otherwise its rank is the sum of theirs,

    A = [A_q; A_k; A_v],      B = diag(B_q, B_k, B_v),      alpha / r unchanged

and an update that is read becomes one update per layer, with the same A and the layer's rows of B.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.config import kind_of
from regard.errors import CheckpointError, ConfigError
from regard.files.atomic import write_json
from regard.files.safetensors import TensorReader, read_header
from regard.files.untrusted import path_exists, quote, read_json
from regard.hub import MODEL_TYPES
from regard.hub.config_json import read_config_as, write_config
from regard.hub.convert_weights import Shapes, is_finite
from regard.hub.external_checkpoint import TIED_WEIGHTS, candidate_rules, prefixed_rules
from regard.hub.rope_config import is_interleaved, to_half_split
from regard.hub.safetensors_writer import SafetensorsWriter
from regard.hub.weight_mapping import (
    CONCATENATED,
    Concatenated,
    GroupedByHead,
    Layout,
    TensorMapping,
    WeightPlan,
    plan_export,
    plan_import,
)
from regard.models.build import build_on_meta, weights
from regard.models.presets import ModelConfig
from regard.nn.lora import Adapter

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"  # of older versions
PREFIX = "base_model.model."
MAX_ALPHA = 1_000_000  # usually 8 to 256
MAX_REPETITIONS = 2  # of `*` in a pattern of alpha_pattern
LORA = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
SUPPORTED_VALUES = {  # other values of these settings change the computation of an adapter
    "bias": ("none", None),
    "use_dora": (False, None),
    "init_lora_weights": (True, False, "gaussian", "eva", None),  # others change the base weights
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "megatron_config": (None,),
}


def is_adapter(path: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return path_exists(path / CONFIG)


def write_adapter(
    folder: Path,
    adapter: Adapter,
    config: ModelConfig,
    *,
    base: str,
    dropout: float = 0.0,
    model_type: str | None = None,
) -> str:
    """Write an adapter of a model with this configuration; return the name of its model type.

    The model type gives the names of the layers; by default it is the first that can express the
    model.
    """
    chosen, hf = write_config(config, model_type)
    exported = read_config_as(chosen, hf)
    names = weights(build_on_meta(exported))
    mappings = plan_export(prefixed_rules(chosen, exported), names).mappings

    def transform(name: str, tensor: Tensor) -> Tensor:
        return to_half_split(config, name, tensor)

    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    transposed, modules_to_save = False, []
    for mapping in mappings:
        layers = [name.removesuffix(".weight") for name in mapping.internal]
        if any(layer in adapter.layers for layer in layers):
            module = mapping.external.removesuffix(".weight")
            a, b, scale = _join(adapter, mapping, layers, names, transform)
            tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
            ranks[module], alphas[module] = len(a), scale * len(a)
            transposed |= getattr(mapping.layout, "transposed", False)
        elif all(name in adapter.others for name in mapping.internal):
            joined = mapping.layout.join([adapter.others[name] for name in mapping.internal])
            tensors[f"{PREFIX}{mapping.external}"] = joined
            modules_to_save.append(mapping.external.rpartition(".")[0])
    rank, alpha = (Counter(table.values()).most_common(1)[0][0] for table in (ranks, alphas))
    architecture = getattr(config, "architecture", None)
    task_types = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}
    is_language_model = kind_of(getattr(config, "head", "none"))[0] == "linear"
    settings = {
        "peft_type": "LORA",
        "task_type": task_types.get(str(architecture)) if is_language_model else None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": list(ranks),
        "modules_to_save": list(dict.fromkeys(modules_to_save)) or None,
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {name: a for name, a in alphas.items() if a != alpha},
    }
    write_json(folder / CONFIG, settings)
    tensors = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with SafetensorsWriter({folder / MODEL: specs}, {"format": "pt"}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return chosen.name


def _join(
    adapter: Adapter,
    mapping: TensorMapping,
    layers: list[str],
    names: Mapping[str, Tensor],
    transform: Any,
) -> tuple[Tensor, Tensor, float]:
    """A, B and the scale of an external layer; its internal layers may have different scales."""
    updates = {layer: adapter.layers[layer] for layer in layers if layer in adapter.layers}
    scale = next(iter(updates.values()))[2]
    parts = {
        layer: (a, transform(f"{layer}.weight", b) * (layer_scale / scale))
        for layer, (a, b, layer_scale) in updates.items()
    }
    shared = next(iter(parts.values()))[0]
    is_shared = len(parts) == len(layers) and all(torch.equal(a, shared) for a, _ in parts.values())
    a = shared if is_shared else torch.cat([a for a, _ in parts.values()])
    rows, column = [], 0
    for layer in layers:
        block = a.new_zeros(len(names[f"{layer}.weight"]), len(a))
        if layer in parts:
            layer_a, layer_b = parts[layer]
            first = 0 if is_shared else column
            block[:, first : first + len(layer_a)] = layer_b
            column += len(layer_a)
        rows.append(block)
    return a, _row_layout(mapping.layout).join(rows), scale


def _row_layout(layout: Layout) -> Layout:
    """The layout of the rows of B, which are the outputs of the layer."""
    if isinstance(layout, Concatenated):
        return CONCATENATED
    if not isinstance(layout, GroupedByHead):
        raise ConfigError(f"LoRA on a weight stored as {type(layout).__name__} is not supported")
    return layout


def read_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """Read an adapter for a model with this configuration; every tensor must match a weight."""
    settings = _read_settings(folder)
    if is_interleaved(config):
        raise ConfigError(
            f"{folder} cannot be used: the RoPE of the model is interleaved "
            "(model.position.interleaved), and that of PEFT's adapters half-split;\nexport the "
            "model and import it again: regard export RUN BASE, then regard import BASE NEW"
        )
    if not path_exists(folder / MODEL) and path_exists(folder / PICKLE):
        raise CheckpointError(
            f"{folder / PICKLE} is a pickle, which can execute arbitrary code and is not read;\n"
            "save the adapter again with a newer PEFT on a machine where you trust it"
        )
    tensors = TensorReader(read_header(folder / MODEL))
    with tensors:
        values = {name.removeprefix(PREFIX): tensors.read(name).float() for name in tensors.entries}
    factors: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in values.items():
        match = LORA.fullmatch(name)
        if match is not None:
            factors.setdefault(match["layer"], {})[match["part"]] = tensor
        else:
            others[name] = tensor
    if non_finite := [name for name, tensor in values.items() if not is_finite(tensor)]:
        raise CheckpointError(
            f"{folder / MODEL}: {quote(non_finite[0])} has values that are not finite"
        )
    if incomplete := next((name for name, parts in factors.items() if len(parts) < 2), None):
        raise CheckpointError(
            f"{folder / MODEL}: {quote(incomplete)} has only one of lora_A and lora_B"
        )
    shapes = {name: tensor.shape for name, tensor in weights(build_on_meta(config)).items()}
    external = [*(f"{layer}.weight" for layer in factors), *others]
    unexpected: list[str] | None = None  # by the names of the first model type
    for plan in _plans(config, external, shapes):
        if not plan.unexpected:
            break
        unexpected = plan.unexpected if unexpected is None else unexpected
    else:
        listed = ", ".join(map(quote, (unexpected or external)[:3]))
        raise CheckpointError(
            f"{folder / MODEL} has tensors that match no weight of the model: {listed}\n"
            "use the adapter with the model it was trained on"
        )
    layers: dict[str, tuple[Tensor, Tensor, float]] = {}
    saved_weights: dict[str, Tensor] = {}  # of PEFT's modules_to_save
    for mapping in plan.mappings:
        expected = [shapes[name] for name in mapping.internal]
        module = mapping.external.removesuffix(".weight")
        if module in factors:
            a, b = factors[module]["A"], factors[module]["B"]
            if a.dim() != 2 or not len(a) or a.shape[1] != expected[0][1]:
                raise _mismatch(folder, mapping, "lora_A", a)
            sizes = [torch.Size((s[0], len(a))) for s in expected]
            rows = _split(folder, mapping, _row_layout(mapping.layout), "lora_B", b, sizes)
            scale = _scale(settings, module, len(a))
            for name, part in zip(mapping.internal, rows, strict=True):
                layers[name.removesuffix(".weight")] = (a, part.contiguous(), scale)
        else:
            tensor = others[mapping.external]
            parts = _split(folder, mapping, mapping.layout, "the weight", tensor, expected)
            saved_weights |= dict(zip(mapping.internal, parts, strict=True))
    return Adapter(layers, saved_weights)


def _plans(config: ModelConfig, external: list[str], shapes: Shapes) -> Iterator[WeightPlan]:
    """The plan of each model type that can express the model, for tensors with these names."""
    aliases = {alias: name for alias, name in TIED_WEIGHTS.items() if alias not in shapes}
    for name in MODEL_TYPES:
        with suppress(ConfigError):
            model_type, hf = write_config(config, name)
            rules = candidate_rules(model_type, read_config_as(model_type, hf))
            yield plan_import(rules, external, shapes, aliases)


def _split(
    folder: Path,
    mapping: TensorMapping,
    layout: Layout,
    what: str,
    tensor: Tensor,
    shapes: list[torch.Size],
) -> list[Tensor]:
    """The tensors of the layers; raises if they do not have the shapes of the model."""
    try:
        parts = layout.split(tensor, shapes)
    except (RuntimeError, IndexError):  # the tensor cannot be split
        parts = []
    if [part.shape for part in parts] != shapes:
        raise _mismatch(folder, mapping, what, tensor)
    return parts


def _mismatch(folder: Path, mapping: TensorMapping, what: str, tensor: Tensor) -> CheckpointError:
    return CheckpointError(
        f"{folder / MODEL}: {what} of {quote(mapping.external)} has shape {tuple(tensor.shape)}, "
        "which does not fit the model; use the adapter with the model it was trained on"
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / CONFIG)
    if settings.get("peft_type") != "LORA":
        raise ConfigError(
            f"{folder / CONFIG}: peft_type={quote(settings.get('peft_type'))} is not supported; "
            "only LORA is"
        )
    for key, allowed in SUPPORTED_VALUES.items():
        if settings.get(key) not in allowed:
            raise ConfigError(f"{folder / CONFIG}: {key}={quote(settings[key])} is not supported")
    table = settings.get("alpha_pattern") or {}
    if not isinstance(table, dict):
        raise ConfigError(f"{folder / CONFIG}: alpha_pattern must be an object, not {quote(table)}")
    for key, value in (("lora_alpha", settings.get("lora_alpha")), *table.items()):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MAX_ALPHA:
            raise ConfigError(
                f"{folder / CONFIG}: {quote(key)} must be a number up to {MAX_ALPHA:,}, "
                f"not {quote(value)}"
            )
    return settings


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r of a layer, or alpha / sqrt(r) with rank-stabilized LoRA (Kalajdzievski 2023)."""
    alpha = float(settings["lora_alpha"])
    for pattern, value in _patterns(settings.get("alpha_pattern") or {}):
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _patterns(table: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The checked patterns of `alpha_pattern`; repetitions are limited, since they can be slow."""
    for pattern, value in table.items():
        repeated = re.search(r"[*)][*]", pattern) or pattern.count("*") > MAX_REPETITIONS
        if repeated or not re.fullmatch(r"[\w.\\^$|()*]*", pattern):
            raise ConfigError(
                f"alpha_pattern: {quote(pattern)} is not supported: a pattern may have letters, "
                f"digits, _ . \\ ^ $ | ( ) and up to {MAX_REPETITIONS} *, none after ) or *"
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"alpha_pattern: {quote(pattern)} is not a regular expression: {error}"
            ) from None
        yield pattern, value
