"""What there is to know of a family of foreign checkpoints: settings, heads and names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from regard.config import Choice
from regard.errors import ConfigError
from regard.files.safetensors import Tensors
from regard.hub.weight_mapping import Rule
from regard.models.build import MOST_LAYERS as MOST_LAYERS
from regard.models.presets import ModelConfig
from regard.text import PairTokenizers

Table = dict[str, Any]
Change = Callable[[str, Tensor], Tensor]  # of one of our tensors, by its name

ACTIVATIONS = {  # theirs to ours; the first of several is what is written
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
    """One `model_type` of the Hugging Face world.

    `fields` are settings that only change their name, theirs to ours; `always` are ours that
    all of the family share; `only` are theirs for which we have just this value (or one of a
    tuple, the first of which is written), and refuse others; `defaults` are what their class
    takes where a file leaves a setting out. What is not one to one is computed by `read`
    (theirs, defaults filled in, to ours) and `write` (ours to theirs). `write` may be handed
    any model: what it cannot say comes to light when the result is read again.
    """

    name: str  # model_type in config.json
    heads: Mapping[str, Choice | Callable[[Table], Choice]]  # class to head; first: the usual one
    fields: Mapping[str, str]
    rules: Callable[[Any], list[Rule]]  # of our config; names without the prefix, but for `head.…`
    prefix: str = ""  # before the names of all but the heads, where the checkpoint has a head
    always: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # patterns of tensors that hold nothing to learn; prefix optional
    read: Callable[[Table], Table] = lambda theirs: {}
    write: Callable[[Any], Table] = lambda ours: {}
    shift_positions: Callable[[Any, int], tuple[Any, Change]] | None = (
        None  # see `roberta.shift_positions`
    )
    model: str = "transformer"  # the family of models.build that it is built as


@dataclass(frozen=True)
class CheckpointWithoutConfig:
    """A checkpoint that no config.json describes; its reader knows it by what lies in the file."""

    family: Family
    config: ModelConfig
    tensors: Tensors
    tokenizers: PairTokenizers | None = None  # None: in files beside it


def activation(name: str) -> str:
    """Our name of an activation."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"activation {name!r} has no counterpart; known: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def gated(name: str) -> str:
    """Our name of the feed-forward that is gated by this activation of theirs."""
    ours = activation(name)
    if ours not in GATED:
        raise ConfigError(f"no feed-forward here is gated by activation {name!r}")
    return GATED[ours]


def activation_name(ffn: str) -> str:
    """Their name of the activation inside one of our feed-forwards, gated or not.

    >>> activation_name("swiglu"), activation_name("gelu_tanh")
    ('silu', 'gelu_new')
    """
    ours = next((name for name, gate in GATED.items() if gate == ffn), ffn)
    return next((theirs for theirs, each in ACTIVATIONS.items() if each == ours), ours)


def gate_name(ffn: str) -> str:
    """Their name of the activation of a gate; of a feed-forward without one, the usual."""
    return activation_name(ffn if ffn in GATED.values() else "swiglu")
