"""From config.json to one of our configurations, and back where a family can say it."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from regard.config import Choice, kind_of, merge, to_table
from regard.errors import ConfigError, unknown
from regard.files.untrusted import quote
from regard.hub import MODEL_TYPES
from regard.hub.family import MOST_LAYERS, Family, Table
from regard.hub.rope_config import in_halves
from regard.models.build import family_of, resolve
from regard.models.presets import ModelConfig
from regard.nn.head import HEADS
from regard.nn.position import POSITIONS
from regard.nn.score import SCORES

REFUSED = {  # theirs that no family has, and why
    "quantization_config": "its weights are packed into fewer bits; take the original ones",
}
UNSUPPORTED = {  # model_type, and what is missing
    "gemma3_text": "its windowed layers turn by another base than the others",
    "gemma3": "its windowed layers turn by another base than the others",
    "mixtral": "mixtures of experts are not built yet",
    "qwen2_moe": "mixtures of experts are not built yet",
    "qwen3_moe": "mixtures of experts are not built yet",
    "mamba": "state spaces are not built yet",
    "mamba2": "state spaces are not built yet",
}
INERT = {"init", "dropout", "attention_dropout", "ffn_dropout"}  # of training, not of the model
CHOICES: dict[str, Mapping[str, Any]] = {"position": POSITIONS, "score": SCORES, "head": HEADS}
DEPTHS = ("layers", "encoder_layers")
FAR = 100  # how many differences another shape is worth, or a family that could not read it
# What a strange table can cause.
READING = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def read_config(table: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """The family and the configuration that a config.json describes."""
    name = table.get("model_type")
    if not isinstance(name, str):
        raise ConfigError("config.json names no model_type, so nobody knows what its tensors mean")
    if name in UNSUPPORTED:
        raise ConfigError(f"model_type={name!r} is not supported: {UNSUPPORTED[name]}")
    if name not in MODEL_TYPES:
        raise ConfigError(unknown("model_type", name, MODEL_TYPES))
    return MODEL_TYPES[name], read_config_as(MODEL_TYPES[name], table)


def read_config_as(
    family: Family, table: Mapping[str, Any], architecture: str | None = None
) -> Any:
    """The configuration of a table of this family, with the head of `architecture` or its own."""
    theirs = {**family.defaults, **table}
    for key, reason in REFUSED.items():
        if theirs.get(key):
            raise ConfigError(f"{key}={quote(theirs[key])} is not supported: {reason}")
    for key, values in family.only.items():
        allowed = values if isinstance(values, tuple) else (values,)
        if key in theirs and theirs[key] not in allowed:
            known = " or ".join(map(repr, allowed))
            raise ConfigError(
                f"{key}={quote(theirs[key])} is not supported: "
                f"of {family.name} there is {known} only"
            )
    if missing := [key for key in family.fields if key not in theirs]:
        raise ConfigError(f"config.json of a {family.name} has no {', '.join(missing)}")
    ours = {name: theirs[key] for key, name in family.fields.items()}
    for key, name in family.fields.items():
        value = theirs[key]
        if name in DEPTHS and isinstance(value, int | float) and value > MOST_LAYERS:
            raise ConfigError(f"{key}={quote(value)} is not supported: at most {MOST_LAYERS:,}")
    try:
        ours = merge(merge(ours, family.always), family.read(theirs))
        ours["head"] = _head(family, theirs, architecture)
        return canonical(resolve({"family": family.model, **ours}))
    except ConfigError:
        raise
    except READING as error:
        what = f"{type(error).__name__}: {quote(str(error))}"
        raise ConfigError(f"config.json is not one of a {family.name}: {what}") from None


def write_config(config: ModelConfig, family: str | None = None) -> tuple[Family, Table]:
    """The first family (or the one named) that has all of a model's choices, and its config.json.

    What is written is read again, and only an equal configuration counts, or one of a model that
    computes the same.
    """
    if family is not None and family not in MODEL_TYPES:
        raise ConfigError(unknown("family", family, MODEL_TYPES))
    families = MODEL_TYPES.values() if family is None else [MODEL_TYPES[family]]
    obstacles: list[tuple[int, str, list[str]]] = []
    for same in equivalent_configs(config):
        for each in families:
            if each.model != family_of(same):
                obstacles.append((FAR, each.name, ["the kind of model"]))
                continue
            for architecture in each.heads:
                table = _written(each, same, architecture)
                distance, found = _differences(each, same, table)
                if not found:
                    return each, table
                obstacles.append((distance, each.name, found))
    _, nearest, listed = min(obstacles, key=lambda each: each[0])
    who = "no family of Hugging Face's library has" if family is None else f"{family} has not"
    choices = "".join(f"\n  {obstacle}" for obstacle in listed[:6])
    raise ConfigError(f"{who} all choices of this model; the nearest, {nearest}, but for{choices}")


def equivalent_configs(config: Any) -> Iterator[Any]:
    """The model itself as others would write it, then with biases where it has none: they are 0."""
    if not hasattr(config, "position"):
        yield config
        return
    kind, options = kind_of(config.head)
    heads = [config.head] + [{"kind": kind, **options, "bias": True}] * (kind == "linear")
    for bias, head in product(dict.fromkeys((config.bias, True)), heads):
        yield replace(in_halves(config), bias=bias, head=head)


def canonical(config: Any) -> Any:
    """An equal configuration that says nothing which goes without saying."""
    table = to_table(config)
    implied = {
        "kv_heads": config.heads,
        "head_dim": config.dim // config.heads,
        "embed_dim": config.dim,
        "encoder_layers": config.layers,
    }
    for name, value in implied.items():
        if name in table and table[name] == value:
            table[name] = None
    if config.global_every is not None and config.global_every > config.layers:
        table["global_every"] = None
    if config.global_every == 1:
        table |= {"global_every": None, "window": None}
    unsaid: Any = resolve({"family": family_of(config), **table, "ffn_dim": None})
    if unsaid.width == config.width:
        table["ffn_dim"] = None
    for name, parts in CHOICES.items():
        if name in table:
            table[name] = _plain(table[name], parts)
    if kind_of(table["head"])[0] not in ("linear", "masked") and "tied" in table:
        table["tied"] = True  # there is no output matrix
    return resolve({"family": family_of(config), **table})


def _plain(choice: Choice, parts: Mapping[str, Any]) -> Choice:
    """A choice without the options that are as by default."""
    kind, options = kind_of(choice)
    known = inspect.signature(parts[kind]).parameters if kind in parts else {}
    told = {k: v for k, v in options.items() if k not in known or known[k].default != v}
    return {"kind": kind, **told} if told else kind


def _head(family: Family, theirs: Table, architecture: str | None) -> Choice:
    named = theirs.get("architectures") or list(family.heads)
    if not isinstance(named, list):
        raise ConfigError(f"architectures={quote(named)} is not a list of names")
    name = architecture or named[0]
    if name not in family.heads:
        raise ConfigError(unknown(f"class of a {family.name}", str(name), family.heads))
    choice = family.heads[name]
    kind, options = kind_of(choice(theirs) if callable(choice) else choice)
    if kind in ("classify", "tag"):
        labels = theirs.get("id2label")
        options.setdefault("classes", len(labels) if labels else theirs.get("num_labels", 2))
    return {"kind": kind, **options}


def _written(family: Family, config: Any, architecture: str) -> Table:
    table: Table = {"model_type": family.name, "architectures": [architecture]}
    for key, value in family.only.items():
        table[key] = value[0] if isinstance(value, tuple) else value
    for key, name in family.fields.items():
        table[key] = EFFECTIVE[name](config) if name in EFFECTIVE else getattr(config, name)
    classes = kind_of(config.head)[1].get("classes")
    if classes is not None:
        names = {str(number): f"LABEL_{number}" for number in range(classes)}
        table |= {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}
    return table | family.write(config)


EFFECTIVE: dict[str, Any] = {  # what None stands for
    "kv_heads": lambda config: config.kv_heads or config.heads,
    "head_dim": lambda config: config.head_dim or config.dim // config.heads,
    "ffn_dim": lambda config: config.width,
    "embed_dim": lambda config: config.embed_dim or config.dim,
    "encoder_layers": lambda config: config.depths[0],
}


def _differences(family: Family, config: Any, table: Table) -> tuple[int, list[str]]:
    """How many choices of a model are others once they were written and read, and which."""
    try:
        back = to_table(read_config_as(family, table))
    except ConfigError as error:
        return FAR, [str(error).splitlines()[0]]
    ours = to_table(canonical(config))
    keys = [key for key in ours if key not in INERT and ours[key] != back[key]]
    distance = len(keys) + FAR * ("shape" in keys)
    return distance, [f"{key} = {ours[key]!r} (there: {back[key]!r})" for key in keys]
