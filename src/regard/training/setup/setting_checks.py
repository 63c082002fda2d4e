"""Checks of the settings of a run that can be made before its data is read."""

import math

from torch import nn

from regard.config import RunConfig, TrainConfig
from regard.errors import ConfigError
from regard.pipelines import smallest_model
from regard.pipelines.base import DEFAULT_TOKENS, rows_per_step
from regard.training.optim import optimizers
from regard.training.schedule import schedule
from regard.training.setup.device import memory, pick_device


def check_settings(config: RunConfig) -> None:
    """Refuse training settings, a schedule, an optimizer or a step size that cannot work."""
    check_train_config(config.train)
    schedule(config.train.schedule, config.train.steps)
    optimizers(config.train.optimizer, _TinyModel(), config.train.lr)
    _check_step_memory(config)


def check_train_config(settings: TrainConfig) -> None:
    """Refuse values with which nothing could be learned."""
    for name in (
        *("steps", "batch", "tokens", "accumulate", "keep", "patience"),
        *("evaluate_every", "evaluate_tokens", "save_every", "timeout"),
    ):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"train.{name}={value} must be at least 1")
    for name, below in (("lr", math.inf), ("clip", math.inf), ("ema", 1)):
        value = getattr(settings, name)
        if not 0 <= value < below:
            raise ConfigError(f"train.{name}={value} must be at least 0 and below {below}")
    if settings.batch is not None and settings.batch % settings.accumulate:
        raise ConfigError(
            f"train.accumulate={settings.accumulate} must divide train.batch={settings.batch}"
        )
    if settings.accumulate > (most := settings.batch or settings.tokens or DEFAULT_TOKENS):
        raise ConfigError(
            f"train.accumulate={settings.accumulate} must not be more than the {most:,} of a step"
        )
    if settings.patience is not None and settings.best == "last":
        raise ConfigError(
            "train.patience waits for a better model, and by train.best='last' every one is;\n"
            "give train.best=loss, or train.patience=none"
        )


class _TinyModel(nn.Module):
    """A model to try an optimizer on before the real one exists: one matrix, one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])


def _check_step_memory(config: RunConfig) -> None:
    """Refuse a step of which not even one vector for each token fits into memory."""
    model = smallest_model(config)
    context, dim = model.context, getattr(model, "dim", 1)
    rows = rows_per_step(config.train, context)
    device = pick_device(config.device)
    needed, free = 4 * dim * context * rows // config.train.accumulate, memory(device)
    if needed > free:
        raise ConfigError(
            f"{rows:,} rows of {context:,} tokens a step need {needed / 1e9:,.1f} GB for one layer "
            f"alone; {device.type} has {free / 1e9:,.1f} GB\n"
            "lower train.batch, train.tokens or model.context, or raise train.accumulate"
        )
