"""Rotary positions as config.json writes them, in the old form and in the new.

    old    rope_theta, partial_rotary_factor, rope_scaling = {rope_type or type, factor, …}
    new    rope_parameters = {rope_type, rope_theta, partial_rotary_factor, factor, …}

Both are read. The old one is written: every version of transformers understands it.

All of them turn the pairs (i, i + d/2) of a head. A model here that turns (2i, 2i + 1) is written
with its queries and keys reordered, which changes no score: both are reordered alike.
"""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.config import Choice, kind_of
from regard.errors import ConfigError
from regard.hub.family import Table

TURNED = re.compile(r".*\.attention\.(query|key|q_norm|k_norm)\.\w+")

SCALINGS: dict[str, dict[str, str]] = {  # their rope_type: their options to ours
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
    },
}


def read_rotary(
    theirs: Table,
    *,
    base: float = 10_000.0,
    fraction: float = 1.0,
    base_key: str = "rope_theta",
    fraction_key: str = "partial_rotary_factor",
) -> Choice:
    """Our choice of position; `base` and `fraction` are what the family takes by default."""
    table: Table = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = theirs.get(key) or {}
        if not isinstance(given, dict) or any(isinstance(each, dict) for each in given.values()):
            raise ConfigError(
                f"{key}={given!r} is not supported: all layers turn by the same angles here"
            )
        table |= given
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in SCALINGS:
        raise ConfigError(
            f"rope_type={kind!r} is not supported; rotary positions can be scaled by: "
            f"{', '.join(sorted(SCALINGS))}"
        )
    told = {"rope_theta": theirs.get(base_key), "partial_rotary_factor": theirs.get(fraction_key)}
    usual: Table = {"rope_theta": base, "partial_rotary_factor": fraction}
    usual |= {key: value for key, value in (told | table).items() if value is not None}
    choice: Table = {
        "kind": "rotary",
        "base": float(usual["rope_theta"]),
        "fraction": float(usual["partial_rotary_factor"]),
    }
    if kind != "default":
        if missing := [key for key in SCALINGS[kind] if key not in table]:
            raise ConfigError(f"rope_type={kind!r} needs {', '.join(missing)}")
        options = {ours: table[key] for key, ours in SCALINGS[kind].items()}
        choice["scaling"] = {"kind": kind, **options}
    return choice


def write_rotary(
    position: Choice, *, base_key: str = "rope_theta", fraction_key: str | None = None
) -> Table:
    """Their settings; nothing for other positions, and for scalings that they have not."""
    kind, options = kind_of(position)
    if kind != "rotary":
        return {}
    table: Table = {base_key: options.get("base", 10_000.0), "rope_scaling": None}
    if fraction_key is not None:
        table[fraction_key] = options.get("fraction", 1.0)
    scaling = options.get("scaling")
    if scaling is not None and scaling["kind"] in SCALINGS:
        names = SCALINGS[scaling["kind"]]
        defaults = {"low": 1.0, "high": 4.0}
        values = {theirs: {**defaults, **scaling}[ours] for theirs, ours in names.items()}
        table["rope_scaling"] = {"rope_type": scaling["kind"], **values}
    return table


def interleaved(config: Any) -> bool:
    """Whether a model turns neighbouring coordinates."""
    kind, options = kind_of(config.position)
    return kind == "rotary" and options.get("interleaved", False)


def in_halves(config: Any) -> Any:
    """The same model, but for the order of the coordinates of its queries and keys."""
    if not interleaved(config):
        return config
    return replace(config, position={**config.position, "interleaved": False})


def reordered(config: Any, name: str, tensor: Tensor) -> Tensor:
    """One of its tensors in that order: the rows 0 1 2 3 4 5 of a head become 0 2 4 1 3 5."""
    found = TURNED.fullmatch(name)
    if found is None or not interleaved(config):
        return tensor
    head_dim = config.head_dim or config.dim // config.heads
    width = int(head_dim * kind_of(config.position)[1].get("fraction", 1.0))
    rows = torch.arange(head_dim)
    rows[:width] = torch.arange(width).unflatten(0, (-1, 2)).T.flatten()
    return tensor.unflatten(0, (-1, head_dim))[:, rows].flatten(0, 1)
