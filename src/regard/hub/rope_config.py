"""RoPE settings of config.json, in the old and in the new format.

    old    rope_theta, partial_rotary_factor, rope_scaling = {rope_type or type, factor, …}
    new    rope_parameters = {rope_type, rope_theta, partial_rotary_factor, factor, …}

Both are read. The old one is written: every version of transformers reads it.

transformers rotates the pairs (i, i + d/2) of a head ("half-split"). A model that rotates the
pairs (2i, 2i + 1) ("interleaved") is exported with the rows of its query and key projections
reordered. That changes no attention score, because queries and keys are reordered alike.
"""

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.config import Choice, kind_of
from regard.errors import ConfigError
from regard.files.untrusted import quote
from regard.hub.model_type import ConfigDict

ROTATED = re.compile(r".*\.attention\.(query|key|q_norm|k_norm)\.\w+")

SCALING_OPTIONS: dict[str, dict[str, str]] = {  # by rope_type: external names to internal ones
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {"factor": "factor", "original_max_position_embeddings": "original_context"},
    "dynamic": {"factor": "factor", "original_max_position_embeddings": "original_context"},
    "longrope": {
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "original_max_position_embeddings": "original_context",
    },
}
OPTIONAL_SCALING_OPTIONS: dict[str, dict[str, str]] = {  # those with a default
    "yarn": {
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
    "longrope": {"attention_factor": "attention_factor"},
}


def read_rope(
    hf: ConfigDict,
    *,
    base: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    base_key: str = "rope_theta",
    partial_rotary_factor_key: str = "partial_rotary_factor",
) -> Choice:
    """The `position` setting; `base` and `partial_rotary_factor` are the model type's defaults."""
    rope: ConfigDict = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = hf.get(key) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{key}={quote(value)} must be an object of RoPE settings")
        if any(isinstance(v, dict) for v in value.values()):
            raise ConfigError(
                f"{key}={value!r} is not supported: all layers have the same RoPE frequencies here"
            )
        rope |= value
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in the first files of Phi-3
    if kind not in SCALING_OPTIONS:
        raise ConfigError(
            f"rope_type={kind!r} is not supported; known: {', '.join(sorted(SCALING_OPTIONS))}"
        )
    top_level = {
        "rope_theta": hf.get(base_key),
        "partial_rotary_factor": hf.get(partial_rotary_factor_key),
    }
    values: ConfigDict = {"rope_theta": base, "partial_rotary_factor": partial_rotary_factor}
    values |= {key: value for key, value in (top_level | rope).items() if value is not None}
    choice: ConfigDict = {
        "kind": "rotary",
        "base": float(values["rope_theta"]),
        "partial_rotary_factor": float(values["partial_rotary_factor"]),
    }
    if kind != "default":
        choice["scaling"] = {"kind": kind, **_read_scaling(kind, rope, hf)}
    return choice


def _read_scaling(kind: str, rope: ConfigDict, hf: ConfigDict) -> ConfigDict:
    """The options of a scaling; transformers computes some from the context length."""
    context = hf.get("max_position_embeddings")
    original = hf.get("original_max_position_embeddings")
    if kind == "dynamic":
        original = context
    elif kind != "llama3":
        rope = {"original_max_position_embeddings": context} | rope
    if original is not None:  # it overrides the value in rope_parameters in transformers too
        rope = rope | {"original_max_position_embeddings": original}
    if missing := [key for key in SCALING_OPTIONS[kind] if rope.get(key) is None]:
        raise ConfigError(f"rope_type={kind!r} needs {', '.join(missing)}")
    options = {name: rope[key] for key, name in SCALING_OPTIONS[kind].items()}
    for key, name in OPTIONAL_SCALING_OPTIONS.get(kind, {}).items():
        if rope.get(key) is not None:
            options[name] = rope[key]
    if kind in OPTIONAL_SCALING_OPTIONS and "attention_factor" not in options:
        options |= _default_attention_factor(kind, rope, context)
    return options


def _default_attention_factor(kind: str, rope: ConfigDict, context: Any) -> ConfigDict:
    if kind == "yarn":
        scales = [rope[key] for key in ("mscale", "mscale_all_dim") if rope.get(key)]
        if len(scales) < 2 or rope["factor"] <= 1:
            return {}
        first, second = (0.1 * scale * math.log(rope["factor"]) + 1 for scale in scales)
        return {"attention_factor": first / second}
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or context / original
    if factor <= 1:
        return {}
    return {"attention_factor": math.sqrt(1 + math.log(factor) / math.log(original))}


def write_rope(
    position: Choice, *, base_key: str = "rope_theta", partial_rotary_factor_key: str | None = None
) -> ConfigDict:
    """The RoPE settings of config.json; empty for other position encodings.

    A scaling that transformers does not have is left out.
    """
    kind, options = kind_of(position)
    if kind != "rotary":
        return {}
    hf: ConfigDict = {base_key: options.get("base", 10_000.0), "rope_scaling": None}
    if partial_rotary_factor_key is not None:
        hf[partial_rotary_factor_key] = options.get("partial_rotary_factor", 1.0)
    scaling = options.get("scaling")
    if scaling is not None and scaling["kind"] in SCALING_OPTIONS:
        values = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **scaling}
        names = SCALING_OPTIONS[scaling["kind"]] | OPTIONAL_SCALING_OPTIONS.get(scaling["kind"], {})
        hf_options = {external: values[name] for external, name in names.items() if name in values}
        hf["rope_scaling"] = {"rope_type": scaling["kind"], **hf_options}
    return hf


def is_interleaved(config: Any) -> bool:
    """Whether the RoPE of a model is interleaved: it rotates the pairs (2i, 2i + 1)."""
    kind, options = kind_of(config.position)
    return kind == "rotary" and options.get("interleaved", False)


def with_half_split_pairs(config: Any) -> Any:
    """The configuration of the same model after `to_half_split` of all its tensors."""
    if not is_interleaved(config):
        return config
    return replace(config, position={**config.position, "interleaved": False})


def to_half_split(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Reorder a query or key tensor: rows 0 1 2 3 4 5 of a head become 0 2 4 1 3 5."""
    if ROTATED.fullmatch(name) is None or not is_interleaved(config):
        return tensor
    head_dim = config.head_dim or config.dim // config.heads
    width = int(head_dim * kind_of(config.position)[1].get("partial_rotary_factor", 1.0))
    rows = torch.arange(head_dim)
    rows[:width] = torch.arange(width).unflatten(0, (-1, 2)).T.flatten()
    return tensor.unflatten(0, (-1, head_dim))[:, rows].flatten(0, 1)
