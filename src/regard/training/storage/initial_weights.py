"""The initial weights of a run (`train.start`), and those of a run with an adapter."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.config import RunConfig, kind_of
from regard.errors import CheckpointError, ConfigError, RegardWarning
from regard.files.untrusted import path_exists
from regard.hub.chat_template_file import read_chat_template
from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
from regard.hub.peft import is_adapter, read_adapter
from regard.models.build import build_on_meta, config_table, load_weights, resolve, weights
from regard.models.compatibility import with_defaults
from regard.nn.head import HEADS
from regard.nn.lora import Adapter
from regard.pipelines.base import Tokenizers
from regard.pipelines.prepare import tokenizer_fingerprint
from regard.tasks import Instruct
from regard.text import Tokenizer
from regard.text.chat_template import CHATML, CHATML_JINJA
from regard.training.fine_tuning import LoRA, has_adapter, tuning
from regard.training.storage.imported import imported_run_config
from regard.training.storage.run_folder import RunFolder

ADAPTERS = "adapters"  # a folder of a run, for adapters that are chosen by name
DATA_DEPENDENT = ("head", "char_dim", "vocab_size", "source_vocab_size")  # settings of `model`
DERIVED = (*DATA_DEPENDENT, "input_dim", "channels", "context")  # from the data or the task
POOLER = {f"head.hidden.{part}": f"head.pool.{part}" for part in ("weight", "bias")}


@dataclass(frozen=True, slots=True)
class InitialRun:
    """A run, or a Hugging Face checkpoint as a run: settings, tokenizers and weights."""

    config: RunConfig
    tokenizers: Tokenizers | None
    origin: str  # the file or folder of the weights, for messages
    template: str | None  # the chat template of its tokenizer
    tensors: Callable[[], dict[str, Tensor]]


def open_initial_run(path: Path | str) -> InitialRun:
    """Open a run folder or a Hugging Face folder; no weights are read yet."""
    folder = RunFolder(path)
    if is_external_checkpoint(folder.path):
        checkpoint = open_checkpoint(folder.path)
        config = imported_run_config(checkpoint, folder.path.name)
        tensors = lambda: weights(checkpoint.load())  # noqa: E731
        return InitialRun(
            config,
            checkpoint.tokenizers,
            str(folder.path),
            read_chat_template(folder.path),
            tensors,
        )
    config = folder.load_config()
    tokenizers = folder.load_tokenizers(config)
    return InitialRun(
        config,
        tokenizers,
        str(folder.model),
        run_template(folder, config),
        lambda: run_weights(folder, config),
    )


def initial_tokenizers(config: RunConfig) -> Tokenizers | None:
    """The tokenizers of `train.start`; None if the run starts from random weights."""
    return None if config.train.start is None else open_initial_run(config.train.start).tokenizers


def run_template(folder: RunFolder, config: RunConfig) -> str | None:
    """The chat template of a run: that of its task, or that of the imported tokenizer."""
    kind, options = kind_of(config.task)
    if kind == "instruct":
        return str(options.get("chat_template", Instruct.chat_template))
    return read_chat_template(folder.path)


def run_jinja_template(folder: RunFolder, config: RunConfig, tokenizers: Any) -> str | None:
    """The chat template of a run as a Jinja template, for other programs."""
    template = run_template(folder, config)
    if template != CHATML:
        return template
    adds_bos = isinstance(tokenizers, Tokenizer) and tokenizers.prefix_ids
    return ("{{ bos_token }}" if adds_bos else "") + CHATML_JINJA


def run_weights(folder: RunFolder, config: RunConfig) -> dict[str, Tensor]:
    """All weights of a run; an adapter is merged into the weights that it started from."""
    tensors = folder.load_weights()
    if not has_adapter(config):
        return tensors
    adapter = run_adapter(tensors, config)
    return adapter.merge(base_weights(folder, config, adapter.dtype))


def run_adapter(tensors: dict[str, Tensor], config: RunConfig) -> Adapter:
    """The adapter of a run, from the tensors in its folder."""
    return Adapter.of(tensors, cast(LoRA, tuning(config.train.tune)).alpha)


def open_adapter(
    run: Path | str, adapter: Path | str, config: RunConfig, tokenizers: Tokenizers | None
) -> tuple[Adapter, RunConfig]:
    """An adapter for a run with these settings, and the settings of the run with it.

    `adapter` is a run, or a PEFT folder: a path, or a name in the folder `adapters` of `run`.
    If it was trained on dialogues, its task, which has the chat template, and its data replace
    those of the run.
    """
    path = Path(adapter)
    if not path_exists(path):
        path = Path(run) / ADAPTERS / adapter
    if is_adapter(path):
        return read_adapter(path, resolve(config.model)), config
    if not path_exists(path / "config.json"):
        names = ", ".join(adapter_names(run)) or "none"
        raise ConfigError(
            f"no adapter at {adapter}; give a run with train.tune=lora, a PEFT folder, or one "
            f"of those in {Path(run) / ADAPTERS}: {names}"
        )
    folder = RunFolder(path)
    adapter_config = folder.load_config()
    if not has_adapter(adapter_config):
        raise ConfigError(f"{path} is a run without an adapter; train it with train.tune=lora")
    start = cast(str, adapter_config.train.start)
    if tokenizer_fingerprint(folder.load_tokenizers(adapter_config)) != tokenizer_fingerprint(
        tokenizers
    ):
        raise ConfigError(
            f"{path} is an adapter of {start}, whose tokenizer is not that of {run};\n"
            "use it with the run that it was trained on"
        )
    if Path(start).resolve() != Path(run).resolve():
        warnings.warn(
            f"{path} is an adapter of {start}, and is used with {run}; if both are the same model, "
            f"set the new path: regard edit {path} train.start={run}",
            RegardWarning,
            stacklevel=3,
        )
    if kind_of(adapter_config.task)[0] == "instruct":
        config = replace(config, task=adapter_config.task, data=adapter_config.data)
    return run_adapter(folder.load_weights(), adapter_config), config


def adapter_names(run: Path | str) -> list[str]:
    """The names of the adapters in the folder of a run."""
    folder = Path(run) / ADAPTERS
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path.name for path in paths if is_adapter(path) or path_exists(path / "config.json")]


def base_weights(folder: RunFolder, config: RunConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of `train.start`, without its head if the run has another head.

    A base in half precision is converted to `dtype`, that of the adapter, as in training.
    """
    path = cast(str, config.train.start)
    try:
        start = open_initial_run(path)
        tensors = start.tensors()
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{folder.path} is an adapter of {path}, which cannot be opened: {error}\n"
            f"restore it, or set its new path: regard edit {folder.path} train.start=PATH"
        ) from None
    keeps_head = _head_and_classes(start.config) == _head_and_classes(config)
    return {
        name: tensor.to(dtype)
        for name, tensor in tensors.items()
        if keeps_head or not name.startswith("head.")
    }


def load_initial_weights(config: RunConfig, model: nn.Module) -> None:
    """Load the weights of `train.start`; a head for another task keeps its initial weights.

    So does a character-level layer (`model.char_dim`), if `train.start` has none. The hidden
    layer of a new classification head is BERT's pooler, if `train.start` has one.
    """
    start = open_initial_run(cast(str, config.train.start))
    tensors = start.tensors()
    if config.model.get("char_dim") and not start.config.model.get("char_dim"):
        if (kind := kind_of(config.train.tune)[0]) in ("lora", "head"):
            raise ConfigError(
                f"train.tune={kind} does not train a new character-level layer;\n"
                "leave out model.char_dim, or set train.tune=all"
            )
        tensors |= {name: w for name, w in weights(model).items() if name.startswith("characters.")}
    if _head_and_classes(start.config) != _head_and_classes(config):
        head = {name: w for name, w in weights(model).items() if name.startswith("head.")}
        for name in head.keys() & POOLER.keys():
            pooler = tensors.get(POOLER[name])
            if pooler is not None and pooler.shape == head[name].shape:
                head[name] = pooler
        tensors = {name: w for name, w in tensors.items() if not name.startswith("head.")} | head
    try:
        load_weights(model, tensors, start.origin)
    except CheckpointError:
        if error := _model_error(start, config):
            raise error from None
        raise


def check_initial_model(config: RunConfig) -> None:
    """Raise if the weights of `train.start` do not fit the model; reads no weights.

    The head and the vocabulary are not compared: they depend on the data.
    """
    start = open_initial_run(cast(str, config.train.start))
    before = start.config.model
    settings = {key: value for key, value in config.model.items() if key not in DATA_DEPENDENT}
    after = {**before, **settings}
    if "preset" in settings or after["family"] != before["family"]:
        derived = {key: before[key] for key in DERIVED if key in before and key not in settings}
        after = config_table(resolve(settings, **derived))
    has_same_family = after["family"] == before["family"]
    if has_same_family and _body_shapes(before) == _body_shapes(after):
        return
    if error := _model_error(start, replace(config, model=after)):
        raise error


def _body_shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of a model, without those of its head and character-level layer."""
    return {
        name: tuple(tensor.shape)
        for name, tensor in weights(build_on_meta(resolve(model))).items()
        if not name.startswith(("head.", "characters."))
    }


def _model_error(start: InitialRun, config: RunConfig) -> ConfigError | None:
    """An error that names the settings of `model` that differ from `train.start`, or None."""
    before, after = start.config.model, config.model
    keys = [key for key in after if key != "head" and before.get(key, after[key]) != after[key]]
    if not keys:
        return None
    return ConfigError(
        f"{' '.join(f'model.{key}={after[key]}' for key in keys)} does not fit the weights of "
        f"train.start={config.train.start}, "
        f"which has {' '.join(f'model.{key}={before[key]}' for key in keys)};\n"
        "leave these settings out: a run that starts from another run has the model of that run"
    )


def _head_and_classes(config: RunConfig) -> tuple[Any, Any]:
    head = config.model.get("head")
    options = None if head is None else with_defaults(head, HEADS)
    return options, kind_of(config.task)[1].get("class_names")
