"""The settings for which weights were trained, stored with them: config.json may be edited.

A changed `norm_eps` or class name fits every tensor and gives other results.
"""

import json
from collections.abc import Mapping
from typing import Any

from regard.config import RunConfig, flatten, kind_of, to_table
from regard.files.untrusted import parse_json, quote
from regard.training.tuning import has_adapter

KEY = "settings"  # in the metadata of model.safetensors
# of the data: how texts are read, and which of them are for validation, as is `train.seed`
DATA_SETTINGS = ("lower", "text", "label", "tags", "columns", "validation_fraction")
# options of tasks that affect training only
TRAINING_OPTIONS = (
    *("label_smoothing", "scheduled_sampling", "word_dropout", "crop", "flip"),
    "class_weights",
)

RENAMED = {"characters": "char_dim"}  # settings of models in run folders of earlier versions


def current_names(model: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model as they are called now."""
    return {RENAMED.get(name, name): value for name, value in model.items()}


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
    before = before if isinstance(before, dict) else {}
    renamed = {f"model.{old}": f"model.{new}" for old, new in RENAMED.items()}
    before = {renamed.get(name, name): value for name, value in before.items()}
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
