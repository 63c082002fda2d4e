"""`minutes=N`: size the model and the steps to this machine, by a short measured probe."""

import time
from dataclasses import replace
from itertools import chain, cycle, islice

import torch

from regard.accel.cuda_graph import WARM
from regard.config import RunConfig
from regard.data.batch import Batch, ImageBatch, MaskedBatch
from regard.errors import ConfigError
from regard.models.build import build_model, count_parameters, describe, is_closed_form, resolve
from regard.nn.head import IGNORED
from regard.pipelines import prepare_training
from regard.pipelines.base import TrainingData
from regard.tasks import Objective
from regard.training.loop import train
from regard.training.optim import optimizers
from regard.training.parallel import launch
from regard.training.parallel.ranks import Ranks
from regard.training.parallel.strategy import SingleProcess
from regard.training.setup.device import (
    autocast,
    captures,
    checkpoint_activations,
    compiles,
    ready_device,
)
from regard.training.setup.setting_checks import check_settings

SIZES = [(64, 2), (128, 4), (192, 6), (256, 8), (384, 8), (512, 8), (768, 12)]  # dim, layers
HEAD_DIM = 32
TOKENS_PER_PARAMETER = 5  # a quarter of what Hoffmann et al. 2022 find best: size pays early
FEWEST_STEPS = 50
PROBE_STEPS = 4


def fit_to_minutes(config: RunConfig, minutes: float, *, model_too: bool = True) -> RunConfig:
    """The largest of a few sizes that can be trained well in the time, and steps to fill it.

    Each size is timed for a few real steps, smallest first. A size is worth its time while it
    can see a few tokens per parameter. Without `model_too` only the steps are chosen. Where
    steps are compiled, the size that was chosen is timed once more: to compile each would take
    longer than to train some.
    """
    if minutes <= 0:
        raise ConfigError(f"minutes={minutes:g} must be more than 0")
    check_settings(config)
    material = prepare_training(config)
    table = describe(material.model)
    if is_closed_form(table["family"]):  # a model that counts takes the time it takes
        return config
    device = ready_device(config)
    tokens = sum(
        _tokens(material.batch(number), material.model.context)
        for number in range(config.train.accumulate)
    )
    budget = 0.9 * 60 * minutes  # evaluations and checkpoints take the rest

    def filled(candidate: RunConfig, *, compiled: bool) -> RunConfig:
        seconds = _seconds(candidate, material, device, compiled=compiled)
        steps = max(FEWEST_STEPS, int(budget / seconds))
        return replace(candidate, train=replace(config.train, steps=steps))

    chosen: RunConfig | None = None
    for size in SIZES if model_too and "layers" in table else [None]:
        model = table
        if size is not None:
            model = {**table, "dim": size[0], "layers": size[1]}
        if size is not None and "heads" in table:
            model["heads"] = size[0] // HEAD_DIM
        candidate = filled(replace(config, model=model), compiled=False)
        enough = TOKENS_PER_PARAMETER * count_parameters(resolve(model))
        if chosen is not None and candidate.train.steps * tokens < enough:
            break
        chosen = candidate
    assert chosen is not None
    return filled(chosen, compiled=True) if compiles(config.train, device) else chosen


def _tokens(batch: Batch, context: int) -> int:
    """What a model learns from in a batch: all tokens where a few are hidden, or all patches."""
    if isinstance(batch, ImageBatch):
        return len(batch.targets) * context
    read = batch.documents > 0 if isinstance(batch, MaskedBatch) else batch.targets != IGNORED
    return int(read.sum())


def _seconds(
    config: RunConfig, material: TrainingData, device: torch.device, *, compiled: bool
) -> float:
    """The seconds of a step, after some to warm up: one, or enough to compile every shape.

    Of several ranks, those of rank 0's share; what they tell each other is not counted.
    """
    model = build_model(resolve(config.model)).to(device)
    settings = config.train
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    objective = Objective(model, material.task)
    strategy = SingleProcess(objective)
    if compiled:
        strategy.compile()
    batch_of, accumulate = Ranks(size=launch.size()).split_batches(
        material.batch, settings.accumulate
    )
    batches = [batch_of(number).to(device) for number in range(PROBE_STEPS * accumulate)]
    warm = (WARM + 1) * PROBE_STEPS if compiled else 1
    steps = train(
        objective,
        chain(islice(cycle(batches), warm * accumulate), batches),
        optimizers(settings.optimizer, model, settings.lr),
        lambda step: settings.lr,
        accumulate=accumulate,
        autocast=autocast(settings, device),
        strategy=strategy,
        capture=compiled and captures(settings, device),
    )
    for step in islice(steps, warm):
        float(step.loss)  # wait for the device
    begin = time.perf_counter()
    for step in steps:
        float(step.loss)
    return (time.perf_counter() - begin) / PROBE_STEPS
