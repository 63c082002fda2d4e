"""`minutes=N`: choose the model size and the number of steps for this machine by timing steps.

The number of steps is a first estimate, and so are the settings that depend on it;
`training.budget` updates the estimate during training.
"""

import inspect
import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch

from regard.accel import training_path
from regard.accel.cuda_graph import WARM_UP_STEPS
from regard.config import RunConfig, TrainConfig, kind_of
from regard.models.build import (
    build_model,
    config_table,
    count_parameters,
    is_fitted_without_gradients,
    resolve,
)
from regard.models.transformer import StackConfig
from regard.pipelines import prepare_training
from regard.pipelines.base import TrainingData
from regard.training.budget import ema_decay
from regard.training.loop import train
from regard.training.optim import SCHEDULES, optimizers
from regard.training.parallel import launch
from regard.training.parallel.ranks import SINGLE, Ranks
from regard.training.parallel.strategy import make_strategy
from regard.training.setup.device import autocast
from regard.training.setup.setting_checks import check_before_data, check_hook_points
from regard.training.storage.initial_weights import initial_tokenizers

SIZES = [(64, 2), (128, 4), (192, 6), (256, 8), (384, 8), (512, 8), (768, 12)]  # dim, layers
HEAD_DIM = 32
TOKENS_PER_PARAMETER = 5  # a quarter of the ratio of Hoffmann et al. 2022 (Chinchilla)
TARGETS_PER_PARAMETER = 1  # where every token is a target, as measured on tiny Shakespeare
TIMED_STEPS = 4
TIMED_FRACTION = 0.02  # of the remaining time, at most, to time the steps of one size
TRAINING_FRACTION = 0.8  # of the remaining time; the rest is for evaluations and checkpoints
WARMUP_FRACTION = 0.05  # of the steps, at most


def fit_to_minutes(
    config: RunConfig,
    *,
    choose_model: bool = True,
    started: float | None = None,
    keep: Collection[str] = (),
    on_timing: Callable[[], object] | None = None,
) -> RunConfig:
    """Choose the largest model that `minutes` suffice to train, and the number of steps.

    The time counts from `started` on (a value of `time.perf_counter`), by default from now.
    A few training steps of each size are timed, smallest first. A larger size is chosen as long as
    the steps that fit read enough tokens per parameter. Without `choose_model`, and for models
    other than Transformers, only the number of steps is chosen.
    Compiled steps are timed for the chosen size only, because compilation is slow.
    Warm-up and EMA are shortened to fit the steps, except the settings of `train` in `keep`.
    `on_timing` is called before the first step is timed, when all settings are checked.
    """
    assert config.minutes is not None
    device = check_before_data(config)
    now = time.perf_counter()
    deadline = 60 * config.minutes + (now if started is None else started)
    data = prepare_training(config, initial_tokenizers(config))
    table = config_table(data.model)
    if is_fitted_without_gradients(table["family"]):  # there are no steps to choose
        return replace(config, minutes=None)
    deadline -= time.perf_counter() - now  # the data is prepared again when the run begins
    tokens_per_step = sum(
        data.task.tokens_read(data.batch(index), data.model.context)
        for index in range(config.train.accumulate)
    )

    def with_steps(candidate: RunConfig, *, compiled: bool) -> RunConfig:
        limit = TIMED_FRACTION * (deadline - time.perf_counter())
        seconds = _seconds_per_step(candidate, data, device, compiled=compiled, limit=limit)
        steps = max(1, int(TRAINING_FRACTION * (deadline - time.perf_counter()) / seconds))
        return replace(candidate, train=replace(config.train, steps=steps))

    check_hook_points(config, data.model)
    if on_timing is not None:
        on_timing()
    every_token_is_target = data.task.tokens_per_target(data.model) == 1
    tokens_per_parameter = TARGETS_PER_PARAMETER if every_token_is_target else TOKENS_PER_PARAMETER
    best: RunConfig | None = None
    choose_model &= isinstance(data.model, StackConfig)  # a Transformer
    for size in SIZES if choose_model else [None]:
        model = table if size is None else _with_size(table, *size)
        min_tokens = tokens_per_parameter * count_parameters(resolve(model))
        if best is not None and best.train.steps * tokens_per_step < min_tokens:
            break  # too few, even with the faster steps of the smaller size
        candidate = with_steps(replace(config, model=model), compiled=False)
        if best is not None and candidate.train.steps * tokens_per_step < min_tokens:
            break
        best = candidate
    assert best is not None
    if training_path(config.train, device).compile:
        best = with_steps(best, compiled=True)
    return replace(best, train=fit_to_steps(best.train, keep))


def _with_size(table: dict[str, Any], dim: int, layers: int) -> dict[str, Any]:
    """A Transformer's settings with another size; `kv_heads` still divides the number of heads."""
    heads, kv_heads = dim // HEAD_DIM, table["kv_heads"]
    kv_heads = None if kv_heads is None else math.gcd(kv_heads, heads)
    return {**table, "dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads}


def long_warmup_warning(settings: TrainConfig) -> list[str]:
    """A line for the heading if the warm-up takes more than half of the steps."""
    _, options = kind_of(settings.schedule)
    warmup = options.get("warmup", 0)
    if 2 * warmup <= settings.steps:
        return []
    suggested = round(WARMUP_FRACTION * settings.steps)
    effect = "is 5 % of the steps" if suggested else "turns it off"
    return [
        f"warm-up    {warmup} steps of {settings.steps}: the learning rate is low for most of the "
        f"run; train.schedule.warmup={suggested} {effect}"
    ]


def fit_to_steps(settings: TrainConfig, keep: Collection[str] = ()) -> TrainConfig:
    """Shorten warm-up and EMA to fit the steps, except the settings in `keep`."""
    if "schedule" not in keep:
        kind, options = kind_of(settings.schedule)
        default = inspect.signature(SCHEDULES[kind]).parameters["warmup"].default
        max_warmup = round(WARMUP_FRACTION * settings.steps)
        warmup = min(options.get("warmup", default), max_warmup)
        settings = replace(settings, schedule={"kind": kind, **options, "warmup": warmup})
    if "ema" not in keep:
        settings = replace(settings, ema=min(settings.ema, round(ema_decay(settings.steps), 4)))
    return settings


def _seconds_per_step(
    config: RunConfig,
    data: TrainingData,
    device: torch.device,
    *,
    compiled: bool,
    limit: float = float("inf"),
) -> float:
    """Time training steps, after a warm-up of one step, or of enough steps to compile every shape.

    Steps are timed for at most about `limit` seconds; if the warm-up step takes longer, only this
    step is timed. With several ranks, the steps of rank 0 are timed, without communication.
    """
    settings = replace(config.train, compile="on" if compiled else "off")
    ranks = Ranks(world_size=launch.world_size())
    model = build_model(resolve(config.model))
    strategy = make_strategy(model, data, settings, SINGLE, device, shard=False)
    accumulate = ranks.local_accumulate(settings.accumulate)
    local_batch = partial(ranks.local_batch, data.batch, settings.accumulate)
    batches = [local_batch(index).to(device) for index in range(TIMED_STEPS * accumulate)]
    warm_up = (WARM_UP_STEPS + 1) * TIMED_STEPS if compiled else 1
    steps = train(
        strategy.objective,
        chain(islice(cycle(batches), warm_up * accumulate), batches),
        optimizers(settings.optimizer, model, settings.lr),
        lambda step: settings.lr,
        accumulate=accumulate,
        autocast=autocast(settings, device),
        strategy=strategy,
        capture=training_path(settings, device, model, ranks=ranks.world_size).cuda_graph,
    )
    started, timed_steps = time.perf_counter(), 0
    for number, step in enumerate(steps, 1):
        float(step.loss)  # wait for the device
        now = time.perf_counter()
        if number < warm_up or (number == warm_up and (compiled or now - started <= limit)):
            started = now
            continue
        timed_steps += 1
        if now - started > limit:
            break
    return (now - started) / timed_steps
