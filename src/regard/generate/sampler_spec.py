"""Specs of samplers: parse a string such as `top_p=0.9`, and format a sampler as one."""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from regard.config import parse_entry
from regard.errors import ConfigError, unknown
from regard.generate.samplers import SAMPLERS, sampler_name
from regard.generate.samplers.logits_processor import PerRow, Sampler
from regard.generate.samplers.temperature import Temperature


def parse_sampler(spec: str, token_ids: Callable[[str, str], list[int]] | None = None) -> Sampler:
    """Make one sampler from a spec such as `top_p=0.9`; see `parse_chain`."""
    if spec == "greedy":
        return Temperature(0.0)
    name, equals, _ = spec.partition("=")
    if name == "greedy":
        raise ConfigError(f"{spec!r}: greedy takes no value")
    if name not in SAMPLERS:
        raise ConfigError(unknown("sampler", name, [*SAMPLERS, "greedy"]))
    if not equals:
        raise ConfigError(f"{spec!r} has no value; write name=value, as in top_p=0.9")

    def with_ids(table: dict[str, Any]) -> dict[str, Any]:
        if isinstance(table.get("tokens"), str):
            table = {**table, "tokens": [table["tokens"]]}
        lists = {key: value for key, value in table.items() if isinstance(value, list)}
        return table | {
            key: [id for token in tokens for id in ids_of(token)] for key, tokens in lists.items()
        }

    def ids_of(token: Any) -> list[Any]:
        if token_ids is None or not isinstance(token, str):
            return [token]
        ids = token_ids(name, token)
        if not ids:
            raise ConfigError(f"{name}: no token in the vocabulary has the text {token!r}")
        return ids

    return parse_entry(spec, SAMPLERS[name], with_ids)


def format_sampler(sampler: Sampler, row: int = 0) -> str:
    """Format a sampler as a spec for `parse_sampler`, without settings at their defaults.

    For a sampler with settings per row, those of `row` are formatted.

    >>> from regard.generate import TopP
    >>> format_sampler(TopP(0.5)), format_sampler(TopP(0.5, min_keep=2))
    ('top_p=0.5', 'top_p={p=0.5, min_keep=2}')
    """
    wrapped: Any = sampler.sampler if isinstance(sampler, PerRow) else sampler
    name = sampler_name(wrapped)
    if name is None or not is_dataclass(wrapped):
        return str(wrapped)
    first, *others = fields(wrapped)
    values = {first.name: getattr(wrapped, first.name)} | {
        f.name: getattr(wrapped, f.name)
        for f in others
        if isinstance(getattr(wrapped, f.name), Tensor) or getattr(wrapped, f.name) != f.default
    }
    formatted = {setting: _toml(value, row) for setting, value in values.items()}
    if len(formatted) == 1:
        return f"{name}={formatted[first.name]}"
    return f"{name}={{{', '.join(f'{setting}={text}' for setting, text in formatted.items())}}}"


def _toml(value: Any, row: int) -> str:
    if isinstance(value, Tensor):
        return f"{value[row].item():.6g}"
    return json.dumps(value)
