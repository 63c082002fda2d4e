"""The settings of a run that is imported from a checkpoint of another library."""

from typing import Any

from regard.config import Choice, DataConfig, RunConfig
from regard.files.untrusted import read_json
from regard.hub.external_checkpoint import ExternalCheckpoint
from regard.hub.model_types import vit
from regard.models.build import config_table


def imported_run_config(checkpoint: ExternalCheckpoint, name: str) -> RunConfig:
    """The settings of a run with the model, task and tokenizer of an external checkpoint."""
    tokenizers = checkpoint.tokenizers
    data = DataConfig() if tokenizers is None else DataConfig(tokenizer=tokenizers.kind)
    model = config_table(checkpoint.config)
    return RunConfig(name=name, task=_task(checkpoint), data=data, model=model)


def _task(checkpoint: ExternalCheckpoint) -> Choice:
    """The task, with the class names and the pixel statistics of the checkpoint."""
    if checkpoint.task == "text_classification":
        return {"kind": "text_classification", "class_names": checkpoint.class_names}
    if checkpoint.task == "tag":
        return {"kind": "tag", "class_names": checkpoint.class_names, "token": "first"}
    if checkpoint.task != "image_classification":
        return checkpoint.task
    path = checkpoint.path / "preprocessor_config.json"
    processor = read_json(path) if path.exists() else {}
    config: Any = checkpoint.config
    return vit.image_task(checkpoint.config_json, processor, config.channels)
