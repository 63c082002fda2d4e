"""`Family`: the settings, heads and tensor names of one model family of the Hugging Face hub."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from regard.config import Choice
from regard.errors import ConfigError
from regard.files.safetensors import Tensors
from regard.hub.weight_mapping import Rule
from regard.models.build import MAX_LAYERS as MAX_LAYERS
from regard.models.presets import ModelConfig
from regard.text import PairTokenizers

Settings = dict[str, Any]  # the content of a config.json, or the fields of a model's configuration
TensorTransform = Callable[[str, Tensor], Tensor]  # (internal name, tensor) to the new tensor

ACTIVATIONS = {  # external to internal; export writes the first of several
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of config.json: how to read and write its settings and its tensors.

    `fields` maps settings that differ only in their name, external to internal. `constants` are
    internal settings that all models of the family share. `supported_values` lists external
    settings of which only this value (or one of a tuple, whose first is written) can be read.
    `defaults` are the values that transformers uses for settings that a file omits.
    `read_settings` computes the internal settings that are not one to one from config.json with
    its defaults filled in, `write_settings` does the reverse. `write_settings` accepts any
    configuration; `write_config` detects what it cannot express by reading the result again.
    """

    name: str  # model_type in config.json
    heads: Mapping[str, Choice | Callable[[Settings], Choice]]  # by class; the first is the default
    fields: Mapping[str, str]
    rules: Callable[[Any], list[Rule]]  # for a configuration; without `prefix`
    prefix: str = ""  # of all external names except those of the head, if the model has a head
    constants: Mapping[str, Any] = field(default_factory=dict)
    supported_values: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored_tensors: tuple[str, ...] = ()  # patterns of buffers and unused weights; prefix optional
    read_settings: Callable[[Settings], Settings] = lambda hf: {}
    write_settings: Callable[[Any], Settings] = lambda config: {}
    shift_positions: Callable[[Any, int], tuple[Any, TensorTransform]] | None = None  # see roberta
    # Adds settings that follow from the names of the tensors, if config.json lacks them; see t5.
    complete: Callable[[Settings, Collection[str]], Settings] = lambda hf, names: hf
    model_family: str = "transformer"  # the family in models.build


@dataclass(frozen=True)
class CheckpointWithoutConfig:
    """A checkpoint without a config.json; its format is recognized by the content of the file."""

    family: Family
    config: ModelConfig
    tensors: Tensors
    tokenizers: PairTokenizers | None = None  # None: read them from the files of the folder


def read_activation(name: str) -> str:
    """The internal name of an external activation."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_gated_ffn(name: str) -> str:
    """The internal name of the feed-forward that is gated by this external activation."""
    activation = read_activation(name)
    if activation not in GATED:
        raise ConfigError(f"a feed-forward gated by activation {name!r} is not supported")
    return GATED[activation]


def write_activation(ffn: str) -> str:
    """The external name of the activation inside a feed-forward, gated or not.

    >>> write_activation("swiglu"), write_activation("gelu_tanh")
    ('silu', 'gelu_new')
    """
    activation = next((name for name, gated in GATED.items() if gated == ffn), ffn)
    names = (external for external, name in ACTIVATIONS.items() if name == activation)
    return next(names, activation)


def write_gate_activation(ffn: str) -> str:
    """The external name of the activation of a gate; "silu" for a feed-forward without one."""
    return write_activation(ffn if ffn in GATED.values() else "swiglu")
