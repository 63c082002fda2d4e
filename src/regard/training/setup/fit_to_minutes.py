"""`minutes=N`: choose the model size and the number of steps for this machine by timing steps.

The steps are a first estimate, with the settings that depend on them; `training.budget` estimates
them again while the run trains.
"""

import inspect
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice

import torch

from regard.accel import attach_window_blocks, training_path
from regard.accel.cuda_graph import WARM_UP_STEPS
from regard.config import RunConfig, TrainConfig, kind_of
from regard.models.build import (
    build_model,
    config_table,
    count_parameters,
    is_fitted_without_gradients,
    resolve,
)
from regard.pipelines import prepare_training
from regard.pipelines.base import TrainingData
from regard.training.budget import ema_decay
from regard.training.loop import train
from regard.training.optim import SCHEDULES, optimizers
from regard.training.parallel import launch
from regard.training.parallel.ranks import Ranks
from regard.training.parallel.strategy import Objective, SingleProcess
from regard.training.setup.device import autocast, checkpoint_activations
from regard.training.setup.setting_checks import check_before_data, check_hook_points

SIZES = [(64, 2), (128, 4), (192, 6), (256, 8), (384, 8), (512, 8), (768, 12)]  # dim, layers
HEAD_DIM = 32
TOKENS_PER_PARAMETER = 5  # a quarter of Hoffmann et al. 2022: favours larger models
TARGETS_PER_PARAMETER = 1  # where every token is a target, as measured on tiny Shakespeare
TIMED_STEPS = 4
TIMED_SHARE = 0.02  # of the time, at most, to time the steps of one size
TRAINING_SHARE = 0.8  # of the time after the start; the rest is for evaluations and checkpoints
WARMUP_SHARE = 0.05  # of the steps, at most


def fit_to_minutes(
    config: RunConfig,
    *,
    choose_model: bool = True,
    started: float | None = None,
    keep: Collection[str] = (),
    on_measure: Callable[[], object] | None = None,
) -> RunConfig:
    """Choose the largest model that can be trained well in its minutes, and as many steps as fit.

    The time counts from `started` on (a value of `time.perf_counter`), by default from now.
    A few real steps of each size are timed, smallest first. A larger size is taken as long as
    the time allows a few tokens per parameter. Without `choose_model`, and for models that are no
    Transformers, only the steps are chosen.
    Compiled steps are timed for the chosen size only: compiling takes longer than these steps.
    Warm-up and EMA are shortened to fit the steps, but for the settings of `train` in `keep`.
    `on_measure` is called before the first step, when all settings are checked.
    """
    assert config.minutes is not None
    device = check_before_data(config)
    now = time.perf_counter()
    deadline = 60 * config.minutes + (now if started is None else started)
    data = prepare_training(config)
    table = config_table(data.model)
    if is_fitted_without_gradients(table["family"]):  # there are no steps to choose
        return replace(config, minutes=None)
    deadline -= time.perf_counter() - now  # the data is prepared again when the run begins
    tokens = sum(
        data.task.tokens_read(data.batch(number), data.model.context)
        for number in range(config.train.accumulate)
    )

    def with_steps(candidate: RunConfig, *, compiled: bool) -> RunConfig:
        limit = TIMED_SHARE * (deadline - time.perf_counter())
        seconds = _seconds_per_step(candidate, data, device, compiled=compiled, limit=limit)
        left = TRAINING_SHARE * (deadline - time.perf_counter())
        return replace(candidate, train=replace(config.train, steps=max(1, int(left / seconds))))

    check_hook_points(config, data.model)
    if on_measure is not None:
        on_measure()
    all_targets = data.task.tokens_per_target(data.model) == 1
    tokens_needed = TARGETS_PER_PARAMETER if all_targets else TOKENS_PER_PARAMETER
    chosen: RunConfig | None = None
    for size in SIZES if choose_model and "heads" in table else [None]:  # of a Transformer
        model = table
        if size is not None:
            dim, layers = size
            model = {**table, "dim": dim, "layers": layers, "heads": dim // HEAD_DIM}
        enough = tokens_needed * count_parameters(resolve(model))
        if chosen is not None and chosen.train.steps * tokens < enough:
            break  # even with the steps of the smaller size, which are faster
        candidate = with_steps(replace(config, model=model), compiled=False)
        if chosen is not None and candidate.train.steps * tokens < enough:
            break
        chosen = candidate
    assert chosen is not None
    if training_path(config.train, device).compile:
        chosen = with_steps(chosen, compiled=True)
    return replace(chosen, train=fit_to_steps(chosen.train, keep))


def long_warmup(settings: TrainConfig) -> list[str]:
    """A line for the reader if the warm-up takes more than half of the steps."""
    _, options = kind_of(settings.schedule)
    warmup = options.get("warmup", 0)
    if 2 * warmup <= settings.steps:
        return []
    return [
        f"warm-up    {warmup} steps of {settings.steps}: the learning rate is low for most of the "
        f"run; train.schedule.warmup={round(WARMUP_SHARE * settings.steps)} makes it a twentieth"
    ]


def fit_to_steps(settings: TrainConfig, keep: Collection[str] = ()) -> TrainConfig:
    """Shorten warm-up and EMA to fit the steps, but for the settings in `keep`."""
    if "schedule" not in keep:
        kind, options = kind_of(settings.schedule)
        default = inspect.signature(SCHEDULES[kind]).parameters["warmup"].default
        most = round(WARMUP_SHARE * settings.steps)
        warmup = min(options.get("warmup", default), most)
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
    """The seconds of a step after a warm-up: one step, or enough to compile every shape.

    Steps are timed for at most about `limit` seconds; if the warm-up step takes longer, it is the
    only one. With several ranks: of rank 0's micro-batches, without communication.
    """
    settings, ranks = config.train, Ranks(world_size=launch.world_size())
    model = build_model(resolve(config.model)).to(device)
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    if device.type == "cpu":
        attach_window_blocks(model)
    objective = Objective(model, data.task)
    strategy = SingleProcess(objective)
    if compiled:
        strategy.compile()
    accumulate = ranks.local_accumulate(settings.accumulate)
    batch_of = partial(ranks.local_batch, data.batch, settings.accumulate)
    batches = [batch_of(number).to(device) for number in range(TIMED_STEPS * accumulate)]
    warm_up = (WARM_UP_STEPS + 1) * TIMED_STEPS if compiled else 1
    steps = train(
        objective,
        chain(islice(cycle(batches), warm_up * accumulate), batches),
        optimizers(settings.optimizer, model, settings.lr),
        lambda step: settings.lr,
        accumulate=accumulate,
        autocast=autocast(settings, device),
        strategy=strategy,
        capture=compiled
        and training_path(settings, device, model, ranks=ranks.world_size).cuda_graph,
    )
    started, timed = time.perf_counter(), 0
    for number, step in enumerate(steps, 1):
        float(step.loss)  # wait for the device
        now = time.perf_counter()
        if number < warm_up or (number == warm_up and (compiled or now - started <= limit)):
            started = now
            continue
        timed += 1
        if now - started > limit:
            break
    return (now - started) / timed
