"""Checks of the settings of a run, before its folder is created."""

import math
from pathlib import Path

import torch
from torch import nn

from regard.config import RunConfig, TrainConfig
from regard.errors import ConfigError
from regard.files.disk_space import check_disk_space
from regard.models.build import build_on_meta, count_parameters
from regard.models.presets import ModelConfig
from regard.pipelines import smallest_model
from regard.pipelines.base import DEFAULT_TOKENS, rows_per_step
from regard.pipelines.prepare import check_task
from regard.training.activation_log import find_hook_points
from regard.training.fine_tuning import check_tuning, has_adapter, tuning
from regard.training.optim import optimizers, schedule
from regard.training.parallel import launch
from regard.training.setup.device import (
    check_memory,
    checkpoint_activations,
    free_memory,
    pick_device,
    prepare_device,
)
from regard.training.storage.initial_weights import load_initial_weights
from regard.training.tracking.trackers import check_trackers
from regard.units import format_bytes

MAX_MINUTES = 366 * 24 * 60  # a year


def check_before_data(config: RunConfig) -> torch.device:
    """Check all settings that do not depend on the data, and return the device of the run."""
    check_trackers(config.train.trackers)
    device = prepare_device(config)
    if "preset" in config.model:
        trainable = 0 if has_adapter(config) else None
        check_memory(count_parameters(smallest_model(config)), config.train, device, trainable)
    check_settings(config)
    check_task(config)
    return device


def check_model(config: RunConfig, model: ModelConfig, device: torch.device, path: Path) -> None:
    """Raise if the model does not fit into memory or on the disk, or contradicts the settings."""
    meta_model = build_on_meta(model)
    tuning(config.train.tune).prepare(meta_model)
    trainable = sum(p.numel() for p in meta_model.parameters() if p.requires_grad)
    check_memory(count_parameters(model), config.train, device, trainable)
    check_disk(path, config, trainable if has_adapter(config) else count_parameters(model))
    check_hook_points(config, model)
    if config.train.activation_checkpointing:
        checkpoint_activations(build_on_meta(model))
    if config.train.start is not None:
        load_initial_weights(config, build_on_meta(model))


def check_hook_points(config: RunConfig, model: ModelConfig) -> None:
    """Raise if a pattern of `train.log` matches no hook point."""
    if config.train.log:
        find_hook_points(build_on_meta(model), config.train.log)


def check_disk(path: Path, config: RunConfig, parameters: int) -> None:
    """Raise if the disk is too small for `keep_checkpoints`, the best one and the next one."""
    settings = config.train
    saves = -(-settings.steps // save_interval(settings))
    checkpoints = min(settings.keep_checkpoints + 2, saves)
    check_disk_space(path, parameters, checkpoints=checkpoints, ema=settings.ema > 0)


def save_interval(settings: TrainConfig) -> int:
    """The steps between two checkpoints: by default `evaluate_every`, or a tenth of the run."""
    return settings.save_every or settings.evaluate_every or -(-settings.steps // 10)


def check_settings(config: RunConfig) -> None:
    """Check the training settings, the schedule, the optimizer and the memory of a step."""
    check_values(config)
    _check_step_memory(config)


def check_values(config: RunConfig) -> None:
    """Check the settings that depend neither on this machine nor on the data."""
    check_minutes(config.minutes)
    check_train_config(config.train)
    check_tuning(config, launch.world_size())
    if config.model.get("norm") == "batch":
        _check_batch_norm(config.train, launch.world_size())
    schedule(config.train.schedule, config.train.steps)
    optimizers(config.train.optimizer, _TinyModel(), config.train.lr)


def check_minutes(minutes: float | None) -> None:
    """Raise if `minutes` is out of range."""
    if minutes is not None and not 0 < minutes < MAX_MINUTES:
        raise ConfigError(f"minutes={minutes:g} must be more than 0 and below {MAX_MINUTES:,}")


def check_train_config(settings: TrainConfig) -> None:
    """Check the ranges of the training settings."""
    for name in (
        *("steps", "batch", "tokens", "accumulate", "keep_checkpoints", "patience"),
        *("evaluate_every", "evaluate_targets", "evaluate_stride", "save_every", "timeout"),
    ):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"train.{name}={value} must be at least 1")
    for name, below in (
        ("lr", math.inf),
        ("max_grad_norm", math.inf),
        ("ema", 1),
        ("layer_decay", 2),
    ):
        value = getattr(settings, name)
        if not 0 <= value < below:
            raise ConfigError(f"train.{name}={value} must be at least 0 and below {below}")
    if settings.batch is not None and settings.batch % settings.accumulate:
        raise ConfigError(
            f"train.accumulate={settings.accumulate} must divide train.batch={settings.batch}"
        )
    if settings.accumulate > (limit := settings.batch or settings.tokens or DEFAULT_TOKENS):
        raise ConfigError(
            f"train.accumulate={settings.accumulate} must be at most the rows or tokens of a "
            f"step, {limit:,}"
        )
    if settings.patience is not None and settings.best_metric == "last":
        raise ConfigError(
            "train.patience has no effect with train.best_metric='last', by which every "
            "evaluation is the best so far;\nset train.best_metric=loss, or train.patience=none"
        )


def _check_batch_norm(settings: TrainConfig, world_size: int) -> None:
    """Raise if the running statistics of BatchNorm would not belong to the trained weights."""
    if settings.activation_checkpointing:
        raise ConfigError(
            "model.norm=batch with train.activation_checkpointing would count every batch twice "
            "in its running statistics; leave out one of them"
        )
    if world_size > 1:
        raise ConfigError(
            f"model.norm=batch with {world_size} ranks would compute its statistics on each rank "
            "alone; train with one rank, or set model.norm=layer"
        )
    if settings.ema > 0:
        raise ConfigError(
            f"model.norm=batch with train.ema={settings.ema:g} would evaluate averaged weights "
            "with the running statistics of other weights; set train.ema=0, or model.norm=layer"
        )


class _TinyModel(nn.Module):
    """A tiny model for checking the optimizer's settings: one matrix, one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])


def _check_step_memory(config: RunConfig) -> None:
    """Raise if the activations of one layer in one micro-batch do not fit into memory."""
    model = smallest_model(config)
    context, dim = model.context, getattr(model, "dim", 1)
    rows, accumulate = rows_per_step(config.train, context), config.train.accumulate
    device = pick_device(config.device)
    needed, free = 4 * dim * context * rows // accumulate, free_memory(device)
    if needed > free:
        micro_batches = f", in {accumulate:,} micro-batches," if accumulate > 1 else ""
        raise ConfigError(
            f"{rows:,} rows of {context:,} tokens per step{micro_batches} need "
            f"{format_bytes(needed)} for one layer alone; {device.type} has {format_bytes(free)}\n"
            "lower train.batch, train.tokens or model.context, or raise train.accumulate"
        )
