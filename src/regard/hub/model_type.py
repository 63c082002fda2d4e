"""`ModelType`: the settings, heads and tensor names of one `model_type` of transformers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from regard.config import Choice
from regard.errors import ConfigError
from regard.files.safetensors import TensorReader
from regard.hub.weight_mapping import Rule
from regard.models.build import MAX_LAYERS as MAX_LAYERS
from regard.models.presets import ModelConfig
from regard.text import PairTokenizers

ConfigDict = dict[str, Any]  # the content of a config.json, or the fields of a model configuration
TensorTransform = Callable[[str, Tensor], Tensor]  # (internal name, tensor) to the new tensor

HF_ACTIVATIONS = {  # external to internal; export writes the first of several
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
GATED_FFNS = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """One `model_type` of config.json: how to read and write its settings and its tensors.

    `fields` maps settings that differ only in their name, external to internal. `constants` are
    internal settings that all models of the type share. `supported_values` lists external
    settings of which only this value (or one of a tuple, whose first is written) can be read.
    `defaults` are the values that transformers uses for settings that a file omits.
    `read_settings` computes all other internal settings from config.json with its defaults filled
    in; `write_settings` does the reverse. `write_settings` accepts any configuration;
    `write_config` reads the result again to detect settings that it cannot express.
    """

    name: str  # model_type in config.json
    # the head of each class of transformers; the first is the default
    heads: Mapping[str, Choice | Callable[[ConfigDict], Choice]]
    fields: Mapping[str, str]
    rules: Callable[[Any], list[Rule]]  # for a configuration; without `prefix`
    prefix: str = ""  # of all external names except those of the head, if the model has a head
    constants: Mapping[str, Any] = field(default_factory=dict)
    supported_values: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored_tensors: tuple[str, ...] = ()  # patterns of buffers and unused weights; prefix optional
    read_settings: Callable[[ConfigDict], ConfigDict] = lambda hf: {}
    write_settings: Callable[[Any], ConfigDict] = lambda config: {}
    shift_positions: Callable[[Any, int], tuple[Any, TensorTransform]] | None = None  # see roberta
    # Corrects settings of config.json that contradict the names of the tensors; see t5.
    correct_settings: Callable[[ConfigDict, Collection[str]], ConfigDict] = lambda hf, names: hf
    family: str = "transformer"  # model.family of its configurations


@dataclass(frozen=True)
class CheckpointWithoutConfig:
    """A checkpoint without a config.json; its format is recognized by the content of the file."""

    model_type: ModelType
    config: ModelConfig
    tensors: TensorReader
    tokenizers: PairTokenizers | None = None  # None: read them from the files of the folder


def read_activation(name: str) -> str:
    """The internal name of an external activation."""
    if name not in HF_ACTIVATIONS:
        raise ConfigError(
            f"activation {name!r} is not supported; known: {', '.join(HF_ACTIVATIONS)}"
        )
    return HF_ACTIVATIONS[name]


def read_gated_ffn(name: str) -> str:
    """The internal name of the feed-forward that is gated by this external activation."""
    activation = read_activation(name)
    if activation not in GATED_FFNS:
        raise ConfigError(f"a feed-forward gated by activation {name!r} is not supported")
    return GATED_FFNS[activation]


def write_activation(ffn: str) -> str:
    """The external name of the activation inside a feed-forward, gated or not.

    >>> write_activation("swiglu"), write_activation("gelu_tanh")
    ('silu', 'gelu_new')
    """
    activation = next((name for name, gated in GATED_FFNS.items() if gated == ffn), ffn)
    names = (external for external, name in HF_ACTIVATIONS.items() if name == activation)
    return next(names, activation)


def write_gate_activation(ffn: str) -> str:
    """The external name of the activation of a gate; "silu" for a feed-forward without one."""
    return write_activation(ffn if ffn in GATED_FFNS.values() else "swiglu")
