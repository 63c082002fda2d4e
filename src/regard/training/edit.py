"""Edit the settings of a run: config.json, and those in the metadata of its weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.config import RunConfig, build, flatten, make, merge, to_table
from regard.errors import CheckpointError, ConfigError
from regard.files.safetensors import read_metadata
from regard.models.build import build_on_meta, check_weights, resolve
from regard.tasks import TASKS
from regard.training.fine_tuning import has_adapter, tuning
from regard.training.setup.setting_checks import check_values
from regard.training.storage.checkpoint import read_tensors
from regard.training.storage.run_folder import RunFolder
from regard.training.storage.weight_settings import changes, differences


def edit_run(path: Path, overrides: Mapping[str, Any]) -> list[str]:
    """Change settings of a run and return the changes, as `model.norm_eps: 1e-05 → 1e-06`.

    Nothing is trained, and the weights must fit the changed model. Without overrides, the settings
    in config.json, which may have been edited by hand, are stored in the metadata of the weights.
    """
    folder = RunFolder(path)
    folder.read_config()  # raises if this is not a run folder
    with folder.hold_lock():
        before = folder.read_config()
        model_overrides = overrides.get("model", {})
        for key in ("family", "preset"):
            if key in model_overrides and model_overrides[key] != before.model.get(key):
                raise ConfigError(f"model.{key} cannot be changed: the weights determine it")
        config = build(RunConfig, merge(to_table(before), overrides))
        model = resolve(config.model)
        make(config.task, TASKS, "task")
        check_values(config)
        has_weights = folder.model.exists()
        tensors = read_tensors(folder.model) if has_weights else {}
        weight_changes = changes(read_metadata(folder.model), config) if has_weights else []
        if has_weights:
            meta_model = build_on_meta(model)
            if has_adapter(config):
                tuning(config.train.tune).prepare(meta_model)
            try:
                check_weights(meta_model, tensors, str(folder.model))
            except CheckpointError:
                _raise_if_model_changed(path, before, config)
                raise
        if config != before:
            folder.save_config(config)
        if weight_changes != []:  # None: the weights have no settings yet
            folder.save_weights(tensors, config)
    config_changes = differences(*(dict(flatten(to_table(c))) for c in (before, config)))
    return list(dict.fromkeys([*config_changes, *(weight_changes or ())]))


def _raise_if_model_changed(path: Path, before: RunConfig, after: RunConfig) -> None:
    """Raise an error that names the changed settings of the model, if there are any."""
    keys = [key for key, value in after.model.items() if before.model.get(key) != value]
    if keys:
        changed, trained = (
            " ".join(f"model.{key}={config.model.get(key)}" for key in keys)
            for config in (after, before)
        )
        raise ConfigError(
            f"{changed} does not fit the weights of {path}, which has {trained};\n"
            f"to train a model with other sizes, begin a new run: regard train DATA {changed}"
        )
