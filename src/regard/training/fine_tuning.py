"""Trainable parameters: all, the head, the last layers, gradual unfreezing, or LoRA."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.config import Choice, RunConfig, kind_of, make
from regard.errors import ConfigError
from regard.nn.head import LMHead, LogProbHead, NoHead
from regard.nn.lora import add_lora, check_options, default_targets
from regard.units import count_noun

LAYER = re.compile(r"(?!head\.|image_embed\.)(?P<stack>.*?)\.(?P<index>\d+)\.")
# modules between the last layer and the head, and character-level layers
OUTPUT_MODULES = ("head.", "readout.", "mix.", "characters.")


def layer_depths(model: nn.Module) -> dict[str, int]:
    """The depth of each parameter from the output: 0 the head and final norm, 1 the last layer, …

    What is between the last layer and the head also has depth 0, and so has a character-level
    layer, which a run adds to the model that it starts from. The embeddings are one deeper than the
    first layer. An encoder and a decoder are counted separately. A head that is tied to the
    embedding belongs to the embedding.
    """
    matches = {name: LAYER.match(name) for name, _ in model.named_parameters()}
    stack_sizes: dict[str, int] = {}
    for match in filter(None, matches.values()):
        stack, index = match["stack"], int(match["index"])
        stack_sizes[stack] = max(stack_sizes.get(stack, 0), index + 1)
    deepest = max(stack_sizes.values(), default=0)

    def depth(name: str, match: re.Match[str] | None) -> int:
        if match is not None:
            return stack_sizes[match["stack"]] - int(match["index"])
        is_norm = re.match(r"(encoder|decoder)\.norm\.", name)
        is_output = is_norm is not None or name.startswith(OUTPUT_MODULES)
        return 0 if is_output else deepest + 1

    return {name: depth(name, match) for name, match in matches.items()}


def lr_scales(model: nn.Module, layer_decay: float) -> dict[str, float] | None:
    """The factor of the learning rate of each parameter: layer_decay ** depth from the output.

    Layer-wise learning-rate decay (Howard & Ruder 2018, Clark et al. 2020). None if `layer_decay`
    is 1.
    """
    if layer_decay == 1:
        return None
    return {name: layer_decay**depth for name, depth in layer_depths(model).items()}


class Tuning:
    """Which parameters are trainable: sets `requires_grad`, and may add an adapter."""

    depends_on_step = False  # whether parameters are unfrozen during training
    saves_full_model = True  # whether model.safetensors holds frozen weights too
    default_lr = 1e-4  # the default of `train.lr` with `train.start`

    def options(self, model: nn.Module) -> dict[str, Any]:
        """The options by name, with the defaults that depend on the model."""
        return dict(vars(self))

    def prepare(self, model: nn.Module, step: int = 0) -> None:
        """Freeze the parameters that are not trainable at `step`; adapters are added here."""
        depths = layer_depths(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.is_trainable(name, depths[name], step))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                "train.tune: no parameter is trainable: the head has no parameters of its own, or "
                "it is tied to the embedding; use train.tune=last_layers"
            )

    def is_trainable(self, name: str, depth: int, step: int) -> bool:
        """Whether a parameter at this depth from the output is trainable at `step`."""
        return True


@dataclass(frozen=True)
class AllParameters(Tuning):
    """Every parameter is trained."""

    def prepare(self, model: nn.Module, step: int = 0) -> None:
        """Nothing is frozen."""


@dataclass(frozen=True)
class HeadOnly(Tuning):
    """The head is trained, the rest of the model is frozen (linear probing)."""

    def is_trainable(self, name: str, depth: int, step: int) -> bool:
        """Whether the parameter belongs to the head."""
        return name.startswith("head.")


@dataclass(frozen=True)
class LastLayers(Tuning):
    """The head, the final norm and the last layers are trained."""

    layers: int = 1  # number of layers

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(
                f"train.tune: layers={self.layers} must be at least 1; for the head alone, "
                "train.tune=head"
            )

    def prepare(self, model: nn.Module, step: int = 0) -> None:
        """Freeze all parameters but those of the last `layers` layers and of what follows them."""
        depths = layer_depths(model)
        layers = max((depth for name, depth in depths.items() if LAYER.match(name)), default=0)
        if self.layers > layers:
            raise ConfigError(
                f"train.tune: layers={self.layers}, but the model has {count_noun(layers, 'layer')}"
                "; to train all of it, leave out train.tune"
            )
        super().prepare(model, step)

    def is_trainable(self, name: str, depth: int, step: int) -> bool:
        """Whether the parameter belongs to the head, the final norm or the last `layers` layers."""
        return depth <= self.layers


@dataclass(frozen=True)
class GradualUnfreezing(Tuning):
    """Gradual unfreezing: first the head, then one more layer every `every` steps.

    Howard & Ruder 2018; the embeddings are last.
    """

    every: int  # steps after which one more layer is unfrozen
    depends_on_step = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"train.tune: every={self.every} must be at least 1 step")

    def is_trainable(self, name: str, depth: int, step: int) -> bool:
        """Whether the layer of the parameter is unfrozen at this step."""
        return depth <= step // self.every


@dataclass(frozen=True)
class LoRA(Tuning):
    """Low-rank adaptation: updates of rank `rank` of the linear layers `targets` (Hu et al. 2021).

    All other weights are frozen, except a head that is not over the vocabulary.
    """

    rank: int = 8  # rank of the update of a weight
    alpha: float = 16.0  # the update is scaled by alpha / rank
    dropout: float = 0.0  # dropout of the input of the update
    # globs of the names of linear layers, "*" is all of them; None: queries and values, or all if
    # the model does not have both
    targets: list[str] | None = None
    saves_full_model = False
    default_lr = 1e-3  # ten times that of full fine-tuning

    def __post_init__(self) -> None:
        check_options(self.rank, self.alpha, self.dropout)

    def options(self, model: nn.Module) -> dict[str, Any]:
        """With the targets in this model."""
        targets = default_targets(model) if self.targets is None else self.targets
        return {**super().options(model), "targets": targets}

    def prepare(self, model: nn.Module, step: int = 0) -> None:
        """Add LoRA to the layers and freeze the rest."""
        add_lora(model, **self.options(model))
        head = getattr(model, "head", None)
        if not isinstance(head, LMHead | LogProbHead | NoHead | None):
            head.requires_grad_(True)


TUNINGS: dict[str, type[Tuning]] = {
    "all": AllParameters,
    "head": HeadOnly,
    "last_layers": LastLayers,
    "gradual_unfreezing": GradualUnfreezing,
    "lora": LoRA,
}


def tuning(choice: Choice) -> Tuning:
    """Build the fine-tuning method that `train.tune` names."""
    return make(choice, TUNINGS, "train.tune")


def has_adapter(config: RunConfig) -> bool:
    """Whether a run trains an adapter, so that its folder holds no weights of the base model."""
    return kind_of(config.train.tune)[0] == "lora"


def check_tuning(config: RunConfig, world_size: int) -> None:
    """Raise if `train.tune` contradicts the other settings."""
    method, kind = tuning(config.train.tune), kind_of(config.train.tune)[0]
    if not method.saves_full_model and config.train.start is None:
        raise ConfigError(
            f"train.tune={kind} trains an adapter of a model that is already trained;\n"
            "name that model: train.start=RUN"
        )
    if world_size > 1 and (method.depends_on_step or not method.saves_full_model):
        raise ConfigError(f"train.tune={kind} supports one process only; start it without torchrun")


def cast_frozen_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen matrices in the dtype in which autocast computes: no copy, half the memory.

    Embeddings stay as they are: autocast does not cast them, and the residual stream has their
    dtype.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() > 1 and id(parameter) not in embeddings:
            parameter.data = parameter.data.to(dtype)


def describe_tuning(config: RunConfig, model: nn.Module) -> list[str]:
    """Lines for the heading that count the trainable parameters; empty if all are trained."""
    method = format_tuning(config, model)
    if not method:
        return []
    trainable, total = count_trainable(model)
    fraction = f"{trainable:,} of {total:,} parameters ({trainable / total:.2%})"
    warning = frozen_warning(config)
    return [f"trainable  {method}: {fraction}", *([f"warning    {warning}"] if warning else [])]


def format_tuning(config: RunConfig, model: nn.Module) -> str:
    """`train.tune` with all its options, and the learning rate; "" if all parameters are trained.

    `lora rank=8 alpha=16 dropout=0 targets=*.query,*.value lr=0.001`
    """
    settings, kind = config.train, kind_of(config.train.tune)[0]
    if kind == "all" and settings.layer_decay == 1:
        return ""
    options = {**tuning(settings.tune).options(model), "lr": settings.lr}
    if settings.layer_decay != 1:
        options["layer_decay"] = settings.layer_decay
    return " ".join([kind, *(f"{name}={_format(value)}" for name, value in options.items())])


def count_trainable(model: nn.Module) -> tuple[int, int]:
    """How many parameters of a model are trainable, and how many there are."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)


def frozen_warning(config: RunConfig) -> str:
    """A warning for a run that freezes parameters with random values, else ""."""
    kind = kind_of(config.train.tune)[0]
    if config.train.start is not None or kind == "all":
        return ""
    return (
        f"train.tune={kind} without train.start: frozen parameters keep random initial values; "
        "train.start=RUN gives them those of a trained model"
    )


def _format(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
