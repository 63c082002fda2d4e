"""The settings of a run as `key=value` arguments of the command line."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from regard.config import (
    Choice,
    DataConfig,
    RunConfig,
    TrainConfig,
    kind_of,
    parse_overrides,
    to_table,
)
from regard.models.build import is_closed_form, resolve

SIZES = ("dim", "layers", "heads", "context")  # listed even where they are the default
DERIVED = ("family", "vocab_size", "source_vocab_size")  # not choices, or listed elsewhere
TASK_DERIVED = ("mean", "std", "names")  # of images, computed from the data
DATA_PATHS = ("path", "source", "target", "validation")


def override_words(config: RunConfig) -> list[list[str]]:
    """`key=value` words, quoted for a shell, of settings that differ from the defaults.

    In groups: task and data, model, training.
    """
    family = config.model.get("family", "transformer")
    model_defaults = to_table(resolve({"family": family}, vocab_size=1))
    model = {key: value for key, value in config.model.items() if key not in DERIVED}
    changed = _changed(model, {k: v for k, v in model_defaults.items() if k not in SIZES})
    data = _changed(to_table(config.data), to_table(DataConfig()))
    data = {key: value for key, value in data.items() if key not in DATA_PATHS}
    if family not in ("vision", "autoregression"):
        data["tokenizer"] = config.data.tokenizer
    groups = [
        {"task": _task_choice(config.task), **{f"data.{key}": v for key, v in data.items()}},
        {
            **({} if family == "transformer" else {"model.family": family}),
            **{f"model.{key}": value for key, value in changed.items()},
        },
    ]
    if not is_closed_form(family):
        train = {"steps": config.train.steps} | _changed(
            to_table(config.train), to_table(TrainConfig())
        )
        groups.append({f"train.{key}": value for key, value in train.items()})
    return [[override_word(key, value) for key, value in group.items()] for group in groups]


def override_word(key: str, value: Any) -> str:
    """`key=value`, quoted so that a shell and then `parse_overrides` restore the value.

    >>> print(override_word("train.schedule", {"kind": "cosine", "warmup": 100}))
    'train.schedule={kind="cosine",warmup=100}'
    """
    plain = f"{key}={value}" if isinstance(value, str) else None
    if plain is not None and list(_leaves(parse_overrides([plain]))) == [value]:
        return shlex.quote(plain)
    return shlex.quote(f"{key}={_toml(value)}")


def _task_choice(task: Choice) -> Choice:
    kind, options = kind_of(task)
    chosen = {key: value for key, value in options.items() if key not in TASK_DERIVED}
    return {"kind": kind, **chosen} if chosen else kind


def _changed(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in table.items()
        if (key not in defaults or value != defaults[key]) and value is not None
    }


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}={_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _leaves(table: Any) -> Iterator[Any]:
    if isinstance(table, Mapping):
        for value in table.values():
            yield from _leaves(value)
    else:
        yield table
