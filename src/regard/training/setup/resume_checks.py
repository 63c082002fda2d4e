"""What must hold for a run to go on: the same choices, and something left to do."""

from pathlib import Path
from typing import Any

from regard.config import RunConfig, kind_of, to_table
from regard.errors import CheckpointError, ConfigError
from regard.models.build import is_closed_form
from regard.training.storage.checkpoint import Checkpoint
from regard.training.storage.run_folder import RunFolder


def must_stay(before: RunConfig, after: RunConfig, path: Path) -> None:
    """Refuse to change what the weights and the optimizer's memory depend on."""
    new = lasting(after)
    for key, old in lasting(before).items():
        if old != new[key]:
            raise ConfigError(
                f"{key} cannot change when a run goes on;\n"
                f"begin a new one, with train.start={path} to begin from these weights"
            )


def must_be_as_saved(folder: RunFolder, config: RunConfig, newest: Checkpoint) -> None:
    """Refuse a config.json that was edited in what the checkpoint depends on."""
    saved, now = _state(newest)["config"], lasting(config)
    if not isinstance(saved, dict):  # an older checkpoint: a hash of all settings
        return
    for key, value in saved.items():
        if value != now[key]:
            raise CheckpointError(
                f"{key} in {folder.config} is not what the checkpoint of step {newest.step:,} was "
                f"trained with\nput it back, or begin a new run with train.start={folder.path}"
            )


def lasting(config: RunConfig) -> dict[str, Any]:
    """What stays as it is for as long as a run lasts, as JSON has it."""
    table: dict[str, Any] = to_table(
        {
            "task": kind_of(config.task)[0],
            "model": config.model,
            "data.tokenizer": config.data.tokenizer,
            "train.optimizer": kind_of(config.train.optimizer)[0],
            "train.seed": config.train.seed,
            "train.start": config.train.start,
        }
    )
    return table


def must_have_more(folder: RunFolder, config: RunConfig, newest: Checkpoint | None) -> None:
    """Refuse to go on with a run that has come to its end."""
    steps, patience = config.train.steps, config.train.patience
    if newest is None:
        if is_closed_form(config.model["family"]) and folder.model.exists():
            raise ConfigError(f"{folder.path} has counted all of its data; there is no more to do")
        return
    if newest.step >= steps:
        raise ConfigError(
            f"{folder.path} is at step {newest.step:,} already, and train.steps={steps};\n"
            f"to train on, say for how long: train.steps={2 * newest.step}"
        )
    since = _state(newest)["best"]["since"]
    if patience is not None and since >= patience:
        raise ConfigError(
            f"{folder.path} stopped early at step {newest.step:,}: {since} evaluations in a row "
            f"were no better\nto train on, raise train.patience (now {patience}) or give "
            "train.patience=none"
        )


def _state(newest: Checkpoint) -> dict[str, Any]:
    state = newest.state()
    if absent := [key for key in ("best", "config", "sizes") if key not in state]:
        raise CheckpointError(
            f"{newest.path / 'state.json'} lacks {', '.join(absent)}: another version wrote it"
        )
    return state
