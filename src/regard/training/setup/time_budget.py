"""`minutes=N`: choose the model size and the number of steps for this machine by timing steps."""

import time
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice

import torch

from regard.accel import training_path
from regard.accel.cuda_graph import WARM_UP_STEPS
from regard.config import RunConfig
from regard.errors import ConfigError
from regard.models.build import build_model, count_parameters, describe, is_closed_form, resolve
from regard.pipelines import prepare_training
from regard.pipelines.base import TrainingData
from regard.training.loop import train
from regard.training.optim import optimizers
from regard.training.parallel import launch
from regard.training.parallel.ranks import Ranks
from regard.training.parallel.strategy import Objective, SingleProcess
from regard.training.setup.device import (
    autocast,
    checkpoint_activations,
    prepare_device,
)
from regard.training.setup.setting_checks import check_settings

SIZES = [(64, 2), (128, 4), (192, 6), (256, 8), (384, 8), (512, 8), (768, 12)]  # dim, layers
HEAD_DIM = 32
TOKENS_PER_PARAMETER = 5  # a quarter of Hoffmann et al. 2022: favours larger models
MIN_STEPS = 50
TIMED_STEPS = 4


def fit_to_minutes(config: RunConfig, minutes: float, *, choose_model: bool = True) -> RunConfig:
    """Choose the largest model that can be trained well in the time, and as many steps as fit.

    A few real steps of each size are timed, smallest first. A larger size is taken as long as
    the time allows a few tokens per parameter. Without `choose_model` only the steps are chosen.
    Compiled steps are timed for the chosen size only: compiling takes longer than these steps.
    """
    if minutes <= 0:
        raise ConfigError(f"minutes={minutes:g} must be more than 0")
    check_settings(config)
    data = prepare_training(config)
    table = describe(data.model)
    if is_closed_form(table["family"]):  # there are no steps to choose
        return config
    device = prepare_device(config)
    tokens = sum(
        data.task.tokens_read(data.batch(number), data.model.context)
        for number in range(config.train.accumulate)
    )
    budget = 0.9 * 60 * minutes  # the rest is for evaluations and checkpoints

    def with_steps(candidate: RunConfig, *, compiled: bool) -> RunConfig:
        seconds = _seconds_per_step(candidate, data, device, compiled=compiled)
        steps = max(MIN_STEPS, int(budget / seconds))
        return replace(candidate, train=replace(config.train, steps=steps))

    chosen: RunConfig | None = None
    for size in SIZES if choose_model and "layers" in table else [None]:
        model = table
        if size is not None:
            model = {**table, "dim": size[0], "layers": size[1]}
        if size is not None and "heads" in table:
            model["heads"] = size[0] // HEAD_DIM
        candidate = with_steps(replace(config, model=model), compiled=False)
        enough = TOKENS_PER_PARAMETER * count_parameters(resolve(model))
        if chosen is not None and candidate.train.steps * tokens < enough:
            break
        chosen = candidate
    assert chosen is not None
    return (
        with_steps(chosen, compiled=True) if training_path(config.train, device).compile else chosen
    )


def _seconds_per_step(
    config: RunConfig, data: TrainingData, device: torch.device, *, compiled: bool
) -> float:
    """The seconds of a step after a warm-up: one step, or enough to compile every shape.

    With several ranks: of rank 0's micro-batches, without communication.
    """
    settings, ranks = config.train, Ranks(world_size=launch.world_size())
    model = build_model(resolve(config.model)).to(device)
    if settings.activation_checkpointing:
        checkpoint_activations(model)
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
    for step in islice(steps, warm_up):
        float(step.loss)  # wait for the device
    started = time.perf_counter()
    for step in steps:
        float(step.loss)
    return (time.perf_counter() - started) / TIMED_STEPS
