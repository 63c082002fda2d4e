"""Building models from settings, and loading and saving their weights."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.config import build, merge, to_table
from regard.errors import CheckpointError, ConfigError, indented_list, unknown
from regard.models.autoregression import Autoregression, AutoregressionConfig
from regard.models.bag_of_words import BagOfWords, BagOfWordsConfig
from regard.models.captioner import (
    Captioner,
    CaptionerConfig,
    RecurrentCaptioner,
    RecurrentCaptionerConfig,
)
from regard.models.cbow import CBOW, CBOWConfig
from regard.models.convolution import ConvolutionConfig, ConvolutionLM
from regard.models.feedforward import FeedForwardConfig, FeedForwardLM
from regard.models.hmm import HMM, HMMConfig
from regard.models.ngram import NGram, NGramConfig
from regard.models.nlinear import NLinear, NLinearConfig
from regard.models.presets import PRESETS, ModelConfig
from regard.models.recurrent import RecurrentConfig, RecurrentLM
from regard.models.seq2seq import RecurrentEncoderDecoder, Seq2SeqConfig
from regard.models.soft_window import SoftWindowConfig, SoftWindowLM
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vision import VisionConfig, VisionTransformer
from regard.nn.lora import has_lora

FAMILIES: dict[str, tuple[type[Any], Callable[[Any], nn.Module]]] = {
    "transformer": (TransformerConfig, Transformer),
    "recurrent": (RecurrentConfig, RecurrentLM),
    "lstm": (RecurrentConfig, RecurrentLM),  # the former name of "recurrent", in old runs
    "seq2seq": (Seq2SeqConfig, RecurrentEncoderDecoder),
    "feedforward": (FeedForwardConfig, FeedForwardLM),
    "convolution": (ConvolutionConfig, ConvolutionLM),
    "bag": (BagOfWordsConfig, BagOfWords),
    "cbow": (CBOWConfig, CBOW),
    "ngram": (NGramConfig, NGram),
    "hmm": (HMMConfig, HMM),
    "autoregression": (AutoregressionConfig, Autoregression),
    "linear": (NLinearConfig, NLinear),
    "vision": (VisionConfig, VisionTransformer),
    "captioner": (CaptionerConfig, Captioner),
    "recurrent_captioner": (RecurrentCaptionerConfig, RecurrentCaptioner),
    "soft_window": (SoftWindowConfig, SoftWindowLM),
}
# Limits on the number of layers and on all other integer settings. Larger values are typos;
# counting the parameters of such a model would take hours.
MAX_LAYERS, MAX_MODEL_INTEGER = 10_000, 1 << 24


def preset(name: str, **fields: Any) -> ModelConfig:
    """The configuration of a preset, with some fields replaced.

    >>> preset("gpt2", position="alibi").position
    'alibi'
    """
    return resolve({"preset": name, **fields})


def resolve(table: Mapping[str, Any], **derived: Any) -> ModelConfig:
    """The configuration that a table describes: a `preset` or a `family`, and overriding fields.

    `derived` settings come from the data, such as `vocab_size`; those for which the family has no
    field are ignored.
    """
    fields = dict(table)
    name, family = fields.pop("preset", None), fields.pop("family", None)
    base: dict[str, Any] = {}
    if name is not None:
        if not isinstance(name, str) or name not in PRESETS:
            raise ConfigError(unknown("preset", str(name), PRESETS))
        config = PRESETS[name]()
        preset_family, base = family_of(config), to_table(config)
        family = preset_family if family is None else family
    family = "transformer" if family is None else family
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(unknown("model family", str(family), FAMILIES))
    cls = FAMILIES[family][0]
    if name is not None and cls is not FAMILIES[preset_family][0]:
        raise ConfigError(
            f"model.preset={name!r} is of model.family={preset_family!r}, not {family!r}; "
            "leave out one of them"
        )
    known = {field.name for field in dataclasses.fields(cls)}
    applicable = {name: value for name, value in derived.items() if name in known}
    resolved: ModelConfig = build(cls, merge(merge(base, fields), applicable), "model")
    for key in known:
        limit = MAX_LAYERS if key in ("layers", "encoder_layers") else MAX_MODEL_INTEGER
        size = getattr(resolved, key)
        if isinstance(size, int) and size > limit:
            raise ConfigError(f"model.{key}={size} is too large: at most {limit:,} is supported")
    return resolved


def family_of(config: ModelConfig) -> str:
    """The name of the family a configuration belongs to."""
    for name, (cls, _) in FAMILIES.items():
        if type(config) is cls:
            return name
    raise ConfigError(f"{config!r:.100} is not a model configuration")


def is_fitted_without_gradients(family: str) -> bool:
    """Whether models of this family have a `fit` instead of gradient descent."""
    return hasattr(FAMILIES[family][1], "fit")


def config_table(config: ModelConfig) -> dict[str, Any]:
    """The table from which `resolve` makes an equal configuration; every field is explicit."""
    return {"family": family_of(config), **to_table(config)}


def build_model(config: ModelConfig) -> nn.Module:
    """A new model, freshly initialized."""
    return FAMILIES[family_of(config)][1](config)


class _SkipInit(TorchFunctionMode):
    """Skips `torch.nn.init`: on the meta device it does nothing but import torch's compiler."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def build_on_meta(config: ModelConfig) -> nn.Module:
    """A model on the meta device: names and shapes of weights, nothing allocated or initialized."""
    with torch.device("meta"), _SkipInit():
        return build_model(config)


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters, counted on the meta device."""
    return sum(p.numel() for p in build_on_meta(config).parameters())


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model.state_dict()`; a tied parameter occurs once.

    With LoRA, only the trainable parameters: the others are weights of the base model.
    """
    if has_lora(model):
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return {name: tensor.detach() for name, tensor in trainable.items()}
    tensors = dict(model.named_parameters()) | persistent_buffers(model)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the weights, such as the noise distribution of CBOW."""
    state = model.state_dict(keep_vars=True)
    return {name: b for name, b in state.items() if not isinstance(b, nn.Parameter)}


def load_model(config: ModelConfig, tensors: Mapping[str, Tensor], origin: str) -> nn.Module:
    """A model with saved weights, which are assigned, not copied, and keep their dtype.

    The weights of a model with `fit` are copied.
    """
    model = build_on_meta(config)
    if hasattr(model, "fit"):
        model = build_model(config)
        load_weights(model, tensors, origin)
    else:
        check_weights(model, tensors, origin)
        model.load_state_dict(dict(tensors), assign=True)
    return model


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Copy saved weights into a model; all names and shapes are checked first."""
    check_weights(model, tensors, origin)
    if hasattr(model, "fit"):
        model.load_state_dict(dict(tensors))
        return
    with torch.no_grad():
        for name, tensor in weights(model).items():
            tensor.copy_(tensors[name])


def check_weights(model: nn.Module, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Raise if names, shapes or dtypes of saved weights are not those of a model."""
    expected = weights(model)
    any_shape = hasattr(model, "fit")  # the sizes of its tables depend on the data
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # copying converts them
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [
        f"{name} is not a weight of this model" for name in tensors if name not in expected
    ]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, but the model has {tuple(weight.shape)}"
        for name, weight in expected.items()
        if not any_shape and name in tensors and tensors[name].shape != weight.shape
    ]
    problems += [
        f"{name} has dtype {tensors[name].dtype}, but the model has {weight.dtype}"
        for name, weight in expected.items()
        if name in tensors
        and tensors[name].dtype != weight.dtype
        and not {tensors[name].dtype, weight.dtype} <= {*floats}
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {origin} do not fit the model:{indented_list(problems)}"
        )
