"""The weights from which a run starts (`train.start`), and those of a run with an adapter."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from regard.config import RunConfig, kind_of
from regard.errors import CheckpointError
from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
from regard.models.build import load_weights, weights
from regard.models.compatibility import with_defaults
from regard.nn.head import HEADS
from regard.nn.lora import Adapter
from regard.pipelines.base import Tokenizers
from regard.training.storage.imported import imported_run_config
from regard.training.storage.run_folder import RunFolder
from regard.training.tuning import LoRA, has_adapter, tuning

POOLER = {f"head.hidden.{part}": f"head.pool.{part}" for part in ("weight", "bias")}


@dataclass(frozen=True, slots=True)
class Start:
    """A run, or a Hugging Face checkpoint as a run: settings, tokenizers and weights."""

    config: RunConfig
    tokenizers: Tokenizers | None
    origin: str  # the file or folder of the weights, for messages
    tensors: Callable[[], dict[str, Tensor]]


def open_start(path: Path | str) -> Start:
    """Open a run folder or a Hugging Face folder; no weights are read yet."""
    folder = RunFolder(path)
    if is_external_checkpoint(folder.path):
        checkpoint = open_checkpoint(folder.path)
        config = imported_run_config(checkpoint, folder.path.name)
        tensors = lambda: weights(checkpoint.load())  # noqa: E731
        return Start(config, checkpoint.tokenizers, str(folder.path), tensors)
    config = folder.load_config()
    tokenizers = folder.load_tokenizers(config)
    return Start(config, tokenizers, str(folder.model), lambda: run_weights(folder, config))


def run_weights(folder: RunFolder, config: RunConfig) -> dict[str, Tensor]:
    """All weights of a run; those of an adapter are merged into the run that it started from."""
    tensors = folder.load_weights()
    if not has_adapter(config):
        return tensors
    return run_adapter(tensors, config).merge(_base_weights(folder, config))


def run_adapter(tensors: dict[str, Tensor], config: RunConfig) -> Adapter:
    """The adapter of a run, from the tensors in its folder."""
    return Adapter.of(tensors, cast(LoRA, tuning(config.train.tune)).alpha)


def _base_weights(folder: RunFolder, config: RunConfig) -> dict[str, Tensor]:
    """The weights of `train.start`; without its head if the run has another."""
    path = cast(str, config.train.start)
    try:
        start = open_start(path)
        tensors = start.tensors()
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{folder.path} is an adapter of {path}, which cannot be opened: {error}\n"
            f"restore it, or give its new place: regard edit {folder.path} train.start=PATH"
        ) from None
    if _head_and_classes(start.config) == _head_and_classes(config):
        return tensors
    return {name: w for name, w in tensors.items() if not name.startswith("head.")}


def load_initial_weights(config: RunConfig, model: nn.Module) -> None:
    """Load the weights of `train.start`; a head for another task keeps its initial weights.

    The hidden layer of a new classification head is BERT's pooler, if the other run has one.
    """
    start = open_start(cast(str, config.train.start))
    tensors = start.tensors()
    if _head_and_classes(start.config) != _head_and_classes(config):
        head = {name: w for name, w in weights(model).items() if name.startswith("head.")}
        for name in head.keys() & POOLER.keys():
            pooler = tensors.get(POOLER[name])
            if pooler is not None and pooler.shape == head[name].shape:
                head[name] = pooler
        tensors = {name: w for name, w in tensors.items() if not name.startswith("head.")} | head
    load_weights(model, tensors, start.origin)


def _head_and_classes(config: RunConfig) -> tuple[Any, Any]:
    head = config.model.get("head")
    options = None if head is None else with_defaults(head, HEADS)
    return options, kind_of(config.task)[1].get("names")
