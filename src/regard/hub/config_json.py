"""Read a config.json into a model configuration, and write one that transformers understands."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from regard.config import Choice, kind_of, merge, to_table
from regard.errors import ConfigError, unknown
from regard.files.untrusted import quote
from regard.hub import MODEL_TYPES
from regard.hub.class_names import read_class_count, read_class_names, write_class_names
from regard.hub.model_type import MAX_LAYERS, ConfigDict, ModelType
from regard.hub.rope_config import with_half_split_pairs
from regard.models.build import family_of, resolve
from regard.models.presets import ModelConfig
from regard.nn.head import HEADS
from regard.nn.position import POSITIONS
from regard.nn.score import SCORES

UNSUPPORTED_SETTINGS = {  # refused for every model type when they are set, with the reason
    "quantization_config": "quantized weights cannot be read; use the original checkpoint",
}
UNSUPPORTED_MODEL_TYPES = {
    "gemma3": "it reads images and text; its language model alone is gemma3_text",
    "mixtral": "mixture of experts is not implemented",
    "qwen2_moe": "mixture of experts is not implemented",
    "qwen3_moe": "mixture of experts is not implemented",
    "mamba": "state space models are not implemented",
    "mamba2": "state space models are not implemented",
}
NO_MODEL_TYPE = "config.json has no model_type, so the tensors cannot be interpreted"
TRAINING_ONLY = {"init", "dropout", "attention_dropout", "ffn_dropout"}  # no effect in eval
CHOICES: dict[str, Mapping[str, Any]] = {"position": POSITIONS, "score": SCORES, "head": HEADS}
DEPTHS = ("layers", "encoder_layers")
# Heads of models that read vectors instead of ids, and the data that the vectors hold.
VECTOR_INPUTS = {"forecast": "the rows of a series", "mixture": "pen strokes"}
# The distance of a model type is the number of differing settings. Another architecture, another
# head and a missing position encoding count as this many settings.
INCOMPATIBLE = 100
OTHER_HEAD = 10
NO_POSITION = 5
Differences = dict[str, str | None]  # a differing setting: the argument that changes it
# Errors that malformed values of a config.json can cause in `ModelType.read_settings`.
READ_ERRORS = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def read_config(hf: Mapping[str, Any]) -> tuple[ModelType, ModelConfig]:
    """The model type and the model configuration that a config.json describes."""
    model_type = read_model_type(hf)
    if model_type is None:
        raise ConfigError(NO_MODEL_TYPE)
    return model_type, read_config_as(model_type, hf)


def read_model_type(hf: Mapping[str, Any]) -> ModelType | None:
    """The type that `model_type` names, or the class in `architectures`; None without both."""
    name = hf.get("model_type")
    if name is None:
        architectures = hf.get("architectures")
        for model_type in MODEL_TYPES.values():
            if isinstance(architectures, list) and architectures[:1] in (
                [a] for a in model_type.heads
            ):
                return model_type
        return None
    if not isinstance(name, str):
        raise ConfigError(f"model_type={quote(name)} in config.json must be a string")
    if name in UNSUPPORTED_MODEL_TYPES:
        raise ConfigError(f"model_type={name!r} is not supported: {UNSUPPORTED_MODEL_TYPES[name]}")
    if name not in MODEL_TYPES:
        raise ConfigError(unknown("model_type", name, MODEL_TYPES))
    return MODEL_TYPES[name]


def read_config_as(
    model_type: ModelType, hf: Mapping[str, Any], architecture: str | None = None
) -> Any:
    """The configuration of a config.json of this model type.

    The head is that of the class `architecture`, or of the class that the file names.
    """
    hf = {**model_type.defaults, **hf}
    for key, reason in UNSUPPORTED_SETTINGS.items():
        if hf.get(key):
            raise ConfigError(f"{key}={quote(hf[key])} is not supported: {reason}")
    for key, values in model_type.supported_values.items():
        supported = values if isinstance(values, tuple) else (values,)
        if key in hf and hf[key] not in supported:
            listed = " or ".join(map(repr, supported))
            raise ConfigError(
                f"{key}={quote(hf[key])} is not supported for {model_type.name}: "
                f"it must be {listed}"
            )
    if missing := [key for key in model_type.fields if key not in hf]:
        raise ConfigError(f"config.json of a {model_type.name} has no {', '.join(missing)}")
    settings = {name: hf[key] for key, name in model_type.fields.items()}
    for key, name in model_type.fields.items():
        value = hf[key]
        if name in DEPTHS and isinstance(value, int | float) and value > MAX_LAYERS:
            raise ConfigError(f"{key}={quote(value)} is not supported: at most {MAX_LAYERS:,}")
    try:
        settings = merge(merge(settings, model_type.constants), model_type.read_settings(hf))
        settings["head"] = _read_head(model_type, hf, architecture)
        return canonicalize(resolve({"family": model_type.family, **settings}))
    except ConfigError:
        raise
    except READ_ERRORS as error:
        problem = f"{type(error).__name__}: {quote(str(error))}"
        raise ConfigError(f"config.json does not describe a {model_type.name}: {problem}") from None


def write_config(
    config: ModelConfig, model_type: str | None = None
) -> tuple[ModelType, ConfigDict]:
    """The first model type (or the one named) that can express a model, and its config.json.

    Each candidate is read again, and accepted only if the configuration is equal or one of a
    model that computes the same.
    """
    if model_type is not None and model_type not in MODEL_TYPES:
        raise ConfigError(unknown("model_type", model_type, MODEL_TYPES))
    head = kind_of(getattr(config, "head", "none"))[0]
    if head == "crf":
        raise ConfigError(
            "no class of transformers has a conditional random field, so head='crf' cannot be "
            "exported;\ntrain with model.head=tag"
        )
    candidates = MODEL_TYPES.values() if model_type is None else [MODEL_TYPES[model_type]]
    if model_type is None and family_of(config) not in {
        candidate.family for candidate in candidates
    }:
        raise ConfigError(
            f"no Hugging Face model type corresponds to model.family={family_of(config)}, so the "
            "run cannot be exported"
        )
    if head in VECTOR_INPUTS:
        raise ConfigError(
            f"no Hugging Face model type takes {VECTOR_INPUTS[head]} as input, so a model with the "
            f"head {head!r} cannot be exported"
        )
    failures: list[tuple[int, str, Differences]] = []  # distance, model type, differing settings
    for equivalent in equivalent_configs(config):
        for candidate in candidates:
            if candidate.family != family_of(equivalent):
                failures.append((INCOMPATIBLE, candidate.name, {"model.family": None}))
                continue
            for architecture in candidate.heads:
                hf = _write_candidate(candidate, equivalent, architecture)
                distance, differences = _differences(candidate, equivalent, hf)
                if not differences:
                    return candidate, hf
                failures.append((distance, candidate.name, differences))
    _, nearest, differences = min(failures, key=lambda failure: failure[0])
    problem = f"{model_type} does not support all settings of this model; it differs in"
    if model_type is None:
        problem = (
            "no Hugging Face model type supports all settings of this model; the nearest, "
            f"{nearest}, differs in"
        )
    listed = "".join(f"\n  {difference}" for difference in list(differences)[:6])
    changes = [change for change in differences.values() if change is not None]
    smallest = f"\nthe smallest change: train with {' '.join(changes)}" if changes else ""
    raise ConfigError(f"{problem}{listed}{smallest}")


def find_head(config: ModelConfig, kind: str) -> Choice | None:
    """The head of this kind that a model's Hugging Face type has; None if it has none."""
    try:
        model_type, _ = write_config(config)
    except ConfigError:
        return None
    heads = (head for head in model_type.heads.values() if not callable(head))
    return next((head for head in heads if kind_of(head)[0] == kind), None)


def equivalent_configs(config: Any) -> Iterator[Any]:
    """Configurations that compute the same: RoPE pairs as in transformers, zero biases added."""
    if not hasattr(config, "position"):
        yield config
        return
    kind, options = kind_of(config.head)
    heads = [config.head] + [{"kind": kind, **options, "bias": True}] * (kind == "linear")
    for bias, head in product(dict.fromkeys((config.bias, True)), heads):
        yield replace(with_half_split_pairs(config), bias=bias, head=head)


def canonicalize(config: Any) -> Any:
    """An equivalent configuration in which settings that equal what None implies are None."""
    table = to_table(config)
    implied = {
        "kv_heads": config.heads,
        "head_dim": config.dim // config.heads,
        "embed_dim": config.dim,
        "encoder_layers": config.layers,
        "encoder_heads": config.heads,
        "encoder_ffn_dim": config.resolved_ffn_dim,
    }
    for name, value in implied.items():
        if name in table and table[name] == value:
            table[name] = None
    if config.global_every is not None and config.global_every > config.layers:
        table["global_every"] = None
    if config.global_every == 1:
        table |= {"global_every": None, "window": None}
    default_ffn: Any = resolve({"family": family_of(config), **table, "ffn_dim": None})
    if default_ffn.resolved_ffn_dim == config.resolved_ffn_dim:
        table["ffn_dim"] = None
    for name, parts in CHOICES.items():
        if name in table:
            table[name] = _without_defaults(table[name], parts)
    if kind_of(table["head"])[0] not in ("linear", "masked") and "tied" in table:
        table["tied"] = True  # without an output matrix the setting has no effect
    return resolve({"family": family_of(config), **table})


def _without_defaults(choice: Choice, parts: Mapping[str, Any]) -> Choice:
    kind, options = kind_of(choice)
    known = inspect.signature(parts[kind]).parameters if kind in parts else {}
    changed = {k: v for k, v in options.items() if k not in known or known[k].default != v}
    return {"kind": kind, **changed} if changed else kind


def _read_head(model_type: ModelType, hf: ConfigDict, architecture: str | None) -> Choice:
    architectures = hf.get("architectures") or list(model_type.heads)
    if not isinstance(architectures, list):
        raise ConfigError(f"architectures={quote(architectures)} is not a list of names")
    name = architecture or architectures[0]
    if name not in model_type.heads:
        raise ConfigError(unknown(f"class of a {model_type.name}", str(name), model_type.heads))
    choice = model_type.heads[name]
    kind, options = kind_of(choice(hf) if callable(choice) else choice)
    if kind in ("classification", "tag"):
        options.setdefault("classes", read_class_count(hf))
    return {"kind": kind, **options}


def _write_candidate(model_type: ModelType, config: Any, architecture: str) -> ConfigDict:
    hf: ConfigDict = {"model_type": model_type.name, "architectures": [architecture]}
    for key, value in model_type.supported_values.items():
        hf[key] = value[0] if isinstance(value, tuple) else value
    for key, name in model_type.fields.items():
        hf[key] = EFFECTIVE[name](config) if name in EFFECTIVE else getattr(config, name)
    classes = kind_of(config.head)[1].get("classes")
    if classes is not None:
        hf |= write_class_names(read_class_names({"num_labels": classes}))
    return hf | model_type.write_settings(config)


EFFECTIVE: dict[str, Any] = {  # the value of a setting that is None by default
    "kv_heads": lambda config: config.kv_heads or config.heads,
    "head_dim": lambda config: config.head_dim or config.dim // config.heads,
    "ffn_dim": lambda config: config.resolved_ffn_dim,
    "embed_dim": lambda config: config.embed_dim or config.dim,
    "encoder_layers": lambda config: config.depths[0],
    "encoder_heads": lambda config: config.encoder_heads or config.heads,
    "encoder_ffn_dim": lambda config: config.encoder_ffn_dim or config.resolved_ffn_dim,
}


def _differences(model_type: ModelType, config: Any, hf: ConfigDict) -> tuple[int, Differences]:
    """The distance of a model from the one that `hf` describes, and the differing settings."""
    try:
        reread = to_table(read_config_as(model_type, hf))
    except ConfigError as error:
        return INCOMPATIBLE, {str(error).splitlines()[0]: None}
    table = to_table(canonicalize(config))
    keys = [key for key in table if key not in TRAINING_ONLY and table[key] != reread[key]]
    other_head = kind_of(table["head"])[0] != kind_of(reread["head"])[0]
    # A suggestion to train without any position encoding would not help.
    no_position = "position" in keys and kind_of(reread["position"])[0] == "none"
    distance = len(keys) + INCOMPATIBLE * ("architecture" in keys)
    distance += OTHER_HEAD * other_head + NO_POSITION * no_position
    return distance, {
        f"{key} = {table[key]!r} ({model_type.name}: {reread[key]!r})": _argument(key, reread[key])
        for key in keys
    }


def _argument(key: str, value: Any) -> str | None:
    """A setting as an argument of `regard train`; None if its value is None.

    >>> _argument("head", {"kind": "classification", "bias": False})
    'model.head.kind=classification model.head.bias=false'
    """
    if isinstance(value, dict):
        parts = [_argument(f"{key}.{name}", part) for name, part in value.items()]
        return " ".join(part for part in parts if part is not None)
    shown = str(value).lower() if isinstance(value, bool) else value
    return None if value is None else f"model.{key}={shown}"
