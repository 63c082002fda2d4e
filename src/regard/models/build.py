"""From a table of settings to a model, and from a model to its weights and back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import build, merge, to_table
from regard.errors import CheckpointError, ConfigError, unknown
from regard.models.ngram import NGram, NGramConfig
from regard.models.presets import PRESETS, ModelConfig
from regard.models.recurrent import LSTMConfig, LSTMLanguage
from regard.models.transformer import Transformer, TransformerConfig

FAMILIES: dict[str, tuple[type[Any], Callable[[Any], nn.Module]]] = {
    "transformer": (TransformerConfig, Transformer),
    "lstm": (LSTMConfig, LSTMLanguage),
    "ngram": (NGramConfig, NGram),
}


def preset(name: str, **fields: Any) -> ModelConfig:
    """The configuration of this name, with some fields changed.

    >>> preset("gpt2", position="alibi").position
    'alibi'
    """
    return resolve({"preset": name, **fields})


def resolve(table: Mapping[str, Any], **facts: Any) -> ModelConfig:
    """The configuration that a table describes: `preset` or `family`, then fields over it.

    `facts` are what only the data can tell, such as the size of the vocabulary.
    """
    fields = dict(table)
    name, family = fields.pop("preset", None), fields.pop("family", None)
    base: dict[str, Any] = {}
    if name is not None:
        if name not in PRESETS:
            raise ConfigError(unknown("preset", name, PRESETS))
        config = PRESETS[name]()
        family, base = family_of(config), to_table(config)
    family = "transformer" if family is None else family
    if family not in FAMILIES:
        raise ConfigError(unknown("family of models", family, FAMILIES))
    resolved: ModelConfig = build(FAMILIES[family][0], merge(merge(base, fields), facts), "model")
    return resolved


def family_of(config: ModelConfig) -> str:
    """The name of the family a configuration belongs to."""
    return next(name for name, (cls, _) in FAMILIES.items() if isinstance(config, cls))


def describe(config: ModelConfig) -> dict[str, Any]:
    """The table from which `resolve` makes an equal configuration, with nothing left to default."""
    return {"family": family_of(config), **to_table(config)}


def build_model(config: ModelConfig) -> nn.Module:
    """A new model, freshly initialised."""
    return FAMILIES[family_of(config)][1](config)


def count_parameters(config: ModelConfig) -> int:
    """How many numbers a model learns, without making it."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config).parameters())


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every number that makes this model what it is, once, by name."""
    shared = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    buffers = {n: b for n, b in kept.items() if not isinstance(b, nn.Parameter)}
    return {name: tensor.detach() for name, tensor in (shared | buffers).items()}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Put saved weights into a model; a name or shape that does not fit refuses them all."""
    own = weights(model)
    counted = hasattr(model, "fit")  # then its tables have the size of what was counted
    problems = [f"{name} is missing" for name in own if name not in tensors]
    problems += [f"{name} is not of this model" for name in tensors if name not in own]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, the model {tuple(own[name].shape)}"
        for name in own
        if not counted and name in tensors and tensors[name].shape != own[name].shape
    ]
    if problems:
        more = f"\n  … and {len(problems) - 5} more" if len(problems) > 5 else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:5])
        raise CheckpointError(f"the weights in {where} do not fit the model:{listed}{more}")
    if counted:
        model.load_state_dict(dict(tensors))
        return
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
