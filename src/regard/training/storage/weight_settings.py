"""The settings for which weights were trained, stored with the weights.

An edited config.json (`norm_eps`, class names) would load without an error and give other results.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from regard.config import RunConfig, flatten, kind_of, to_table
from regard.files.untrusted import parse_json, quote
from regard.training.fine_tuning import has_adapter

T = TypeVar("T")
KEY = "settings"  # in the metadata of model.safetensors
# of the data: how texts are read, and which of them are for validation, as is `train.seed`
DATA_SETTINGS = ("lower", "text", "label", "tags", "columns", "validation_fraction")
# options of tasks that affect training only
TRAINING_OPTIONS = (
    *("label_smoothing", "scheduled_sampling", "word_dropout", "crop", "flip"),
    "class_weights",
)

# Settings, and values of settings, in run folders of earlier versions, and their current names.
RENAMED = {
    "model.characters": "model.char_dim",
    "model.inputs": "model.input_dim",
    "model.rounds": "model.iterations",
    "model.position.fraction": "model.position.partial_rotary_factor",
    "model.position.halves": "model.position.interleaved",
    "model.position.projected": "model.position.after_projection",
    "model.score.width": "model.score.scale_dim",
    "model.width": "model.kernel_size",
    "model.score.norm_distances": "model.score.norm_relative_embeddings",
    "model.factored": "model.factorize_positions",
    "model.curves": "model.components",
    "model.norm_order": "model.norm_placement",
    "model.stream_scale": "model.residual_scale",
    "model.shape": "model.architecture",
    "data.tokenizer.size": "data.tokenizer.vocab_size",
    "data.path.colours": "data.path.types",
    "train.evaluate_tokens": "train.evaluate_targets",
    "task.season": "task.seasonal_period",
    "time_plan.at": "time_plan.step",  # of state.json
    "time_plan.evaluated": "time_plan.last_evaluation",
    "time_plan.saved": "time_plan.last_save",
    "task.inputs": "task.covariates",
    "task.independent": "task.channel_independent",
    "task.scheduled_sampling.most": "task.scheduled_sampling.max_probability",
    "task.scheduled_sampling.over": "task.scheduled_sampling.ramp_fraction",
}
INVERTED = ("model.position.halves",)  # the new setting is true where this was false
RENAMED_VALUES: dict[str, dict[str | bool, str | bool]] = {
    "data.path": {"nested": "dyck"},
    "task": {"label": "text_classification", "classify": "image_classification"},
    "model.cell": {"gated": "update_gate"},
    "model.score": {"content": "cosine"},
    "model.smoothing": {"interpolated": "witten_bell"},
    "model.factorize_positions": {"tables": True, "tokens": False},
    "model.norm_placement": {"none": "no_residual"},
    "model.head": {"classify": "classification"},
    "train.schedule": {"stable_decay": "warmup_stable_decay"},
    "train.tune": {"last": "last_layers", "gradual": "gradual_unfreezing"},
}

# The same for tensors of model.safetensors and of checkpoints: patterns of names.
RENAMED_TENSORS = {
    r"\b(attention|cross|ffn)_after\b": r"\1_post_norm",
    r"\bahead\.(?=input|hidden)": "forward_layer.",
    r"\bback\.(?=input|hidden)": "backward_layer.",
    r"^cell_positions\b": "region_positions",
    r"^join\b": "direction_projection",
    r"^(encoder|decoder)\.distances\b": r"\1.relative_embedding",
    r"^log_first$": "log_initial",
    r"^log_move$": "log_transition",
    r"^log_write$": "log_emission",
    r"^head\.first\b": "head.start_transitions",
    r"^head\.between\b": "head.transitions",
    r"^head\.last\b": "head.end_transitions",
}


def current_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors, or anything else that has their names, under the current names.

    >>> current_tensors({"blocks.0.ffn_after.weight": 1})
    {'blocks.0.ffn_post_norm.weight': 1}
    """
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, new in RENAMED_TENSORS.items():
            name = re.sub(pattern, new, name)
        renamed[name] = tensor
    return renamed


def current_settings(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings under their current names; `table` is nested or has dotted names.

    >>> current_settings({"model": {"characters": 3}, "model.characters": 4})
    {'model': {'char_dim': 3}, 'model.char_dim': 4}
    """
    current = {}
    for key, value in table.items():
        name = _current_name(f"{where}{key}")
        value = not value if f"{where}{key}" in INVERTED else value
        if isinstance(value, Mapping):
            value = current_settings(value, f"{name}.")
        elif isinstance(value, str | bool):
            value = RENAMED_VALUES.get(name.removesuffix(".kind"), {}).get(value, value)
        current[name.removeprefix(where)] = value
    return current


def _current_name(name: str) -> str:
    """The current dotted name of a setting; a renamed table renames what is in it."""
    table, dot, last = name.rpartition(".")
    name = f"{_current_name(table)}.{last}" if dot else name
    return RENAMED.get(name, name)


def weight_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that determine what `evaluate` computes with given weights, by dotted names."""
    kind, options = kind_of(config.task)
    task = {name: value for name, value in options.items() if name not in TRAINING_OPTIONS}
    data = {name: getattr(config.data, name) for name in DATA_SETTINGS}
    table = {
        "model": config.model,
        "task": {"kind": kind, **task},
        "data": {**data, "tokenizer": kind_of(config.data.tokenizer)[0]},
        "train": {"seed": config.train.seed}
        | ({"tune": config.train.tune} if has_adapter(config) else {}),
    }
    return dict(flatten(to_table(table)))


def as_metadata(config: RunConfig) -> dict[str, str]:
    """The entry of the metadata of model.safetensors."""
    return {KEY: json.dumps(weight_settings(config), sort_keys=True)}


def changes(metadata: Mapping[str, str], config: RunConfig) -> list[str] | None:
    """What differs from the settings in the metadata; None if there are none to compare with."""
    if KEY not in metadata:
        return None
    try:
        before = parse_json(metadata[KEY])
    except ValueError:
        before = {}
    before = current_settings(before) if isinstance(before, dict) else {}
    return differences(before, weight_settings(config))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Every setting with another value, as `train.lr: 0.001 → 0.002`.

    >>> differences({"train.lr": 0.001, "a": 1}, {"train.lr": 0.002, "a": 1, "b": 2})
    ['b: not set → 2', 'train.lr: 0.001 → 0.002']
    """
    absent = object()

    def show(value: Any) -> str:
        return "not set" if value is absent else quote(value)

    pairs = {key: (before.get(key, absent), after.get(key, absent)) for key in {**before, **after}}
    return [f"{key}: {show(a)} → {show(b)}" for key, (a, b) in sorted(pairs.items()) if a != b]
