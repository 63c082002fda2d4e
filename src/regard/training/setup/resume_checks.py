"""Checks before a run is resumed: the same model and optimizer, and steps left to train."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from regard.config import RunConfig, build, flatten, kind_of, to_table
from regard.errors import CheckpointError, ConfigError
from regard.models.build import is_fitted_without_gradients
from regard.renamed import current_settings
from regard.training.budget import TimePlan
from regard.training.setup.device import environment
from regard.training.storage.checkpoint import Checkpoint
from regard.training.storage.run_folder import RunFolder
from regard.training.storage.weight_settings import differences, weight_settings


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that cannot change when a run is resumed, as JSON values."""
    table: dict[str, Any] = to_table(
        {
            "task": kind_of(config.task)[0],
            "model": config.model,
            "data.tokenizer": config.data.tokenizer,
            "train.optimizer": kind_of(config.train.optimizer)[0],
            "train.seed": config.train.seed,
            "train.start": config.train.start,
        }
        | ({} if config.train.tune == "all" else {"train.tune": config.train.tune})
    )
    return table


def check_fixed_settings(before: RunConfig, after: RunConfig, path: Path) -> None:
    """Raise if a setting changed on which weights and optimizer state depend."""
    if before.data.path is None and before.data.source is None:
        raise ConfigError(
            f"{path} was imported, not trained, so there is no training to resume;\n"
            f"train it on your own data: regard train DATA train.start={path}"
        )
    if after.minutes not in (before.minutes, None):
        raise ConfigError(
            "minutes cannot change when a run is resumed; it continues with the remaining time.\n"
            "To train longer, give train.steps=…"
        )
    new = weight_settings(after) | fixed_settings(after)
    for key, old in (weight_settings(before) | fixed_settings(before)).items():
        if old != new.get(key):
            raise ConfigError(
                f"{key} cannot change when a run is resumed; it was trained with {key}={old}.\n"
                f"Begin a new run; train.start={path} initializes it with these weights, "
                "where they fit"
            )


def check_resumable(folder: RunFolder, config: RunConfig, saved: Checkpoint | None) -> None:
    """Raise if the run has finished, or if the checkpoint was written with other settings."""
    check_unfinished(folder, config, saved)
    if saved is None:
        return
    now, state = fixed_settings(config), read_state(saved)
    best, name = state["best"], config.train.best_metric
    if best["step"] is not None and name not in ("last", *best["metrics"]):
        raise CheckpointError(
            f"train.best_metric={name} cannot be used: the best evaluation in "
            f"{saved.path / 'state.json'} has only {', '.join(best['metrics'])}"
        )
    before = current_settings(state["config"])
    if before.keys() != now.keys():
        raise _state_error(saved, "config")
    for key, value in before.items():
        if value != now[key]:
            raise CheckpointError(
                f"{key} in {folder.config} differs from the checkpoint of step {saved.step:,}\n"
                f"restore it, or begin a new run with train.start={folder.path}"
            )


def changed_settings(before: RunConfig, after: RunConfig, saved: Checkpoint | None) -> list[str]:
    """Lines for the heading: the settings that differ from those of the checkpoint.

    A checkpoint of an earlier version has no settings; then config.json is compared instead.
    """
    old = None if saved is None else read_state(saved).get("settings")
    tables = (to_table(before) if old is None else current_settings(old), to_table(after))
    lines = differences(*(dict(flatten(table)) for table in tables))
    return [f"changed    {line}" for line in lines]


def changed_machine(folder: RunFolder, device: torch.device) -> list[str]:
    """Lines for the heading: changes of device, torch or threads that change the last bits."""
    before, now = folder.load_environment(), environment(device)
    lines = [
        f"{key:<11}is now {now[key]} and was {before[key]} when the run began, so the resumed run "
        "will not be bit-identical"
        for key in ("device", "torch")
        if before.get(key) not in (None, now[key])
    ]
    if before.get("threads") not in (None, now["threads"]):
        lines.append(
            f"threads    is now {now['threads']} and was {before['threads']} when the run began, "
            "so the resumed run will not be bit-identical without "
            f"train.threads={before['threads']}"
        )
    return lines


def check_unfinished(folder: RunFolder, config: RunConfig, saved: Checkpoint | None) -> None:
    """Raise if the run has finished."""
    steps, patience = config.train.steps, config.train.patience
    if saved is None:
        if is_fitted_without_gradients(config.model["family"]) and folder.model.exists():
            raise ConfigError(
                f"{folder.path} was fitted without gradients, so there are no steps to resume; "
                "train a new run"
            )
        return
    if config.minutes is not None:
        steps = (read_state(saved).get("time_plan") or {}).get("steps", steps)
    if saved.step >= steps:
        raise ConfigError(
            f"{folder.path} is at step {saved.step:,} already, and train.steps={steps};\n"
            f"to train longer, raise it: train.steps={2 * saved.step}"
        )
    bad_evaluations = read_state(saved)["best"]["num_bad_evaluations"]
    if patience is not None and bad_evaluations >= patience:
        raise ConfigError(
            f"{folder.path} stopped early at step {saved.step:,}: {bad_evaluations} evaluations "
            "in a row were not better\n"
            f"to train longer, raise train.patience (now {patience}) or set train.patience=none"
        )


def is_finished(folder: RunFolder, config: RunConfig, saved: Checkpoint | None) -> bool:
    """Whether the run has finished."""
    try:
        check_unfinished(folder, config, saved)
    except ConfigError:
        return True
    return False


def read_state(saved: Checkpoint) -> dict[str, Any]:
    """Read state.json of a checkpoint; raise if a value is missing or has a wrong type."""
    state = saved.state()
    tables = ("best", "config", "sizes")
    if absent := [key for key in tables if not isinstance(state.get(key), dict)]:
        raise CheckpointError(
            f"{saved.path / 'state.json'} lacks {', '.join(absent)}: another version "
            "of regard wrote it; use that version, or train again"
        )
    best, sizes, stateless = state["best"], state["sizes"], state.get("without_state", [])
    step, metrics, digest = best.get("step"), best.get("metrics"), best.get("sha256")
    matmuls = state.get("matmuls", {})
    rules = {
        "best": best.keys() - {"targets"} == {"step", "metrics", "num_bad_evaluations", "sha256"},
        "best.step": step is None or (_is_count(step) and step <= saved.step),
        "best.metrics": isinstance(metrics, dict) and all(map(_is_number, metrics.values())),
        "best.num_bad_evaluations": _is_count(best.get("num_bad_evaluations")),
        "best.sha256": digest is None or isinstance(digest, str),
        "best.targets": best.get("targets") is None or _is_count(best["targets"]),
        "sizes": {"metrics.jsonl", "samples.txt"} <= sizes.keys()
        and all(map(_is_count, sizes.values())),
        "evaluation_pending": isinstance(state.get("evaluation_pending", False), bool),
        "without_state": isinstance(stateless, list) and all(isinstance(n, str) for n in stateless),
        "ema": isinstance(state.get("ema", False), bool),
        "settings": isinstance(state.get("settings", {}), dict),
        "matmuls": isinstance(matmuls, dict) and all(isinstance(n, str) for n in matmuls.values()),
        "threads": _is_count(state.get("threads", 1)),
        "time_plan": _is_time_plan(state.get("time_plan")),
    }
    for key, valid in rules.items():
        if not valid:
            raise _state_error(saved, key)
    return state


def _state_error(saved: Checkpoint, key: str) -> CheckpointError:
    return CheckpointError(
        f"{saved.path / 'state.json'}: {key} is not valid\n"
        "resume from another checkpoint with --step, or train again"
    )


def _is_time_plan(plan: Any) -> bool:
    """Whether this is a saved `TimePlan`, or None, as without a time budget."""
    if plan is None:
        return True
    try:
        values = asdict(build(TimePlan, plan))
    except ConfigError:
        return False
    numbers = [value for value in values.values() if value is not None]
    return all(math.isfinite(n) and n >= 0 for n in numbers) and plan["step"] <= plan["steps"]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
