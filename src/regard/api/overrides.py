"""Settings as `key=value` arguments of the command line, and as keyword arguments in Python."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from regard.config import (
    Choice,
    DataConfig,
    RunConfig,
    TrainConfig,
    check_overrides,
    kind_of,
    merge,
    parse_overrides,
    to_table,
)
from regard.errors import ConfigError, unknown
from regard.models.build import FAMILIES, config_table, is_fitted_without_gradients, resolve
from regard.models.presets import ModelConfig
from regard.tasks import TASKS

SIZES = ("dim", "layers", "heads", "context")  # listed even where they are the default
DERIVED = ("family", "vocab_size", "source_vocab_size")  # from the tokenizer, or listed separately
TASK_DERIVED = ("mean", "std", "class_names")  # computed from the data
WITHOUT_TOKENIZER = ("images", "series", "strokes")  # kinds of data
TOP_LEVEL = tuple(field.name for field in fields(RunConfig))  # settings without a table
TABLE_OF = {  # the table of a setting that a keyword may name alone: lr=… is train.lr=…
    field.name: table
    for table, config in (("train", TrainConfig), ("data", DataConfig))
    for field in fields(config)
}
DATA_PATHS = ("path", "source", "target", "validation")


def read_overrides(overrides: Sequence[str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `key=value` strings and keyword arguments into one nested table; keywords win.

    A keyword names a table (`train`), a top-level setting (`task`), or a setting of `train` or
    `data` (`steps`, `tokenizer`). `model` may also be the name of a preset or a configuration. A
    keyword with the value None is ignored.

    >>> read_overrides(["model.dim=8"], {"model": {"layers": 2}, "lr": 0.1, "task": None})
    {'model': {'dim': 8, 'layers': 2}, 'train': {'lr': 0.1}}
    """
    table: dict[str, Any] = {}
    for name, value in keywords.items():
        if value is None:
            continue
        if name in TOP_LEVEL:
            value = _model_table(value) if name == "model" else to_table(value)
            table = merge(table, {name: _paths_to_strings(value)})
        elif name in TABLE_OF:
            table = merge(table, {TABLE_OF[name]: {name: _paths_to_strings(to_table(value))}})
        else:
            raise ConfigError(_unknown_keyword(name))
    merged = merge(parse_overrides(overrides), table)
    check_overrides(merged)
    return merged


def _unknown_keyword(name: str) -> str:
    if any(name in {field.name for field in fields(config)} for config, _ in FAMILIES.values()):
        return (
            f"{name} is a setting of the model: write model={{{name!r}: …}}, "
            f"regard.preset(NAME, {name}=…) or 'model.{name}=…'"
        )
    return unknown("keyword", name, (*TOP_LEVEL, *TABLE_OF))


def _model_table(model: Any) -> Any:
    """The table of a configuration or of a preset's name; a table is returned unchanged."""
    if isinstance(model, str):
        return {"preset": model}
    return config_table(cast(ModelConfig, model)) if is_dataclass(model) else model


def _paths_to_strings(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _paths_to_strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_paths_to_strings(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def format_overrides(config: RunConfig) -> list[list[str]]:
    """The settings that differ from the defaults as `key=value` arguments, quoted for a shell.

    The groups are task and data, model, and training unless the model is fitted without gradients.
    """
    family = config.model.get("family", "transformer")
    model_defaults = to_table(resolve({"family": family}, vocab_size=1))
    model = {key: value for key, value in config.model.items() if key not in DERIVED}
    changed = _changes(model, {k: v for k, v in model_defaults.items() if k not in SIZES})
    data = _changes(to_table(config.data), to_table(DataConfig()))
    paths = DATA_PATHS if config.data.path is None else ("path", "validation")
    data = {key: value for key, value in data.items() if key not in paths}
    task = TASKS.get(kind_of(config.task)[0])
    if task is None or task.data_kind not in WITHOUT_TOKENIZER:
        data["tokenizer"] = config.data.tokenizer
    groups = [
        {"task": _task_choice(config.task), **{f"data.{key}": v for key, v in data.items()}},
        {
            **({} if family == "transformer" else {"model.family": family}),
            **{f"model.{key}": value for key, value in changed.items()},
        },
    ]
    if not is_fitted_without_gradients(family):
        train = {"steps": config.train.steps} | _changes(
            to_table(config.train), to_table(TrainConfig())
        )
        groups.append({f"train.{key}": value for key, value in train.items()})
    return [[format_override(key, value) for key, value in group.items()] for group in groups]


def format_override(key: str, value: Any) -> str:
    """`key=value`, quoted so that a shell and then `parse_overrides` restore the value.

    >>> print(format_override("train.schedule", {"kind": "cosine", "warmup": 100}))
    'train.schedule={kind="cosine",warmup=100}'
    """
    if value is None:
        return f"{key}=none"
    plain = f"{key}={value}" if isinstance(value, str) else None
    if plain is not None and list(_leaves(parse_overrides([plain]))) == [value]:
        return shlex.quote(plain)
    return shlex.quote(f"{key}={format_toml(value)}")


def _task_choice(task: Choice) -> Choice:
    kind, options = kind_of(task)
    chosen = {key: value for key, value in options.items() if key not in TASK_DERIVED}
    return {"kind": kind, **chosen} if chosen else kind


def _changes(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values that differ from the defaults; a key without a default has the default None."""
    return {key: value for key, value in table.items() if value != defaults.get(key)}


def format_toml(value: Any) -> str:
    """A value as TOML, without spaces.

    >>> print(format_toml({"multiplier": 0.8, "breakers": ["\\n"], "on": True}))
    {multiplier=0.8,breakers=["\\n"],on=true}
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_toml_key(k)}={format_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _toml_string(value) if isinstance(value, str) else repr(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_string(key)


def _toml_string(text: str) -> str:
    # TOML does not allow escaped surrogate pairs, and requires that DEL is escaped
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _leaves(table: Any) -> Iterator[Any]:
    if isinstance(table, Mapping):
        for value in table.values():
            yield from _leaves(value)
    else:
        yield table
