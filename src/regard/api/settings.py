"""The settings of a run as the words that would set them again."""

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

SIZES = ("dim", "layers", "heads", "context")  # told even when they are the default
FACTS = ("family", "vocab_size", "source_vocab_size")  # not choices, or told elsewhere
TASK_FACTS = ("mean", "std", "names")  # of images, as the data has them
PLACES = ("path", "source", "target", "validation")


def choices(config: RunConfig) -> list[list[str]]:
    """Words like model.dim=128, quoted for a shell: what differs from the defaults, in groups."""
    family = config.model.get("family", "transformer")
    model_defaults = to_table(resolve({"family": family}, vocab_size=1))
    model = {key: value for key, value in config.model.items() if key not in FACTS}
    changed = _changed(model, {k: v for k, v in model_defaults.items() if k not in SIZES})
    data = _changed(to_table(config.data), to_table(DataConfig()))
    data = {key: value for key, value in data.items() if key not in PLACES}
    if family not in ("vision", "autoregression"):
        data["tokenizer"] = config.data.tokenizer
    groups = [
        {"task": _chosen(config.task), **{f"data.{key}": value for key, value in data.items()}},
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
    return [[word(key, value) for key, value in group.items()] for group in groups]


def _chosen(task: Choice) -> Choice:
    kind, options = kind_of(task)
    chosen = {key: value for key, value in options.items() if key not in TASK_FACTS}
    return {"kind": kind, **chosen} if chosen else kind


def _changed(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in table.items()
        if (key not in defaults or value != defaults[key]) and value is not None
    }


def word(key: str, value: Any) -> str:
    """`key=value` as a shell and then `parse_overrides` read it back.

    >>> print(word("train.schedule", {"kind": "cosine", "warmup": 100}))
    'train.schedule={kind="cosine",warmup=100}'
    """
    plain = f"{key}={value}" if isinstance(value, str) else None
    if plain is not None and list(_leaves(parse_overrides([plain]))) == [value]:
        return shlex.quote(plain)
    return shlex.quote(f"{key}={_toml(value)}")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}={_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _leaves(table: Any) -> Iterator[Any]:
    if isinstance(table, Mapping):
        for each in table.values():
            yield from _leaves(each)
    else:
        yield table
