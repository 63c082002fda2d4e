"""The settings with which weights were trained, stored with the weights.

Without them, an edit of config.json (`norm_eps`, class names) would change the results without an
error.
"""

import json
from collections.abc import Mapping
from typing import Any

from regard.config import RunConfig, flatten, kind_of, to_table
from regard.files.untrusted import parse_json, quote
from regard.renamed import current_settings
from regard.training.fine_tuning import has_adapter

METADATA_KEY = "settings"  # in the metadata of model.safetensors
# settings of `data` that determine how texts are read and, with `train.seed`, how they are split
DATA_SETTINGS = ("lower", "text", "text2", "label", "tags", "columns", "validation_fraction")
# settings that the weights of earlier versions lack: any value is accepted
ADDED_SETTINGS = ("data.text2",)
# options of tasks that affect training only
TRAINING_OPTIONS = (
    *("label_smoothing", "scheduled_sampling", "word_dropout", "crop_padding", "flip"),
    "class_weights",
)


def weight_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that determine the results of `evaluate` with given weights, by dotted name."""
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
    """`weight_settings` as an entry of the metadata of model.safetensors."""
    return {METADATA_KEY: json.dumps(weight_settings(config), sort_keys=True)}


def changes(metadata: Mapping[str, str], config: RunConfig) -> list[str] | None:
    """The differences between the settings in the metadata and `config`.

    None if the metadata has no settings, as in files of earlier versions.
    """
    if METADATA_KEY not in metadata:
        return None
    try:
        before = parse_json(metadata[METADATA_KEY])
    except ValueError:
        before = {}
    before = current_settings(before) if isinstance(before, dict) else {}
    after = weight_settings(config)
    return differences({name: after[name] for name in ADDED_SETTINGS} | before, after)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The settings whose values differ, as `train.lr: 0.001 → 0.002`.

    >>> differences({"train.lr": 0.001, "a": 1}, {"train.lr": 0.002, "a": 1, "b": 2})
    ['b: not set → 2', 'train.lr: 0.001 → 0.002']
    """
    absent = object()

    def show(value: Any) -> str:
        return "not set" if value is absent else quote(value)

    pairs = {key: (before.get(key, absent), after.get(key, absent)) for key in {**before, **after}}
    return [f"{key}: {show(a)} → {show(b)}" for key, (a, b) in sorted(pairs.items()) if a != b]
