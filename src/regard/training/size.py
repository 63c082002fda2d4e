"""`minutes=N`: size the model and the steps to this machine, by a short measured probe."""

import time
from dataclasses import replace
from itertools import islice

import torch

from regard.config import RunConfig
from regard.errors import ConfigError
from regard.models.build import build_model, count_parameters, describe, resolve
from regard.models.vision import VisionConfig
from regard.tasks import Objective
from regard.training.device import autocast, pick_device
from regard.training.loop import train
from regard.training.material import Material
from regard.training.optim import optimizers
from regard.training.prepare import prepare

SIZES = [(64, 2), (128, 4), (192, 6), (256, 8), (384, 8), (512, 8), (768, 12)]  # dim, layers
HEAD_DIM = 32
TOKENS_PER_PARAMETER = 5  # a quarter of what Hoffmann et al. 2022 find best: size pays early
FEWEST_STEPS = 50
PROBE_STEPS = 4


def fit_to_minutes(config: RunConfig, minutes: float, *, model_too: bool = True) -> RunConfig:
    """The largest of a few sizes that can be trained well in the time, and steps to fill it.

    Each size is timed for a few real steps, smallest first. A size is worth its time while it
    can see a few tokens per parameter. Without `model_too` only the steps are chosen.
    """
    if minutes <= 0:
        raise ConfigError(f"minutes={minutes:g} must be more than 0")
    material = prepare(config)
    table = describe(material.model)
    if "dim" not in table:  # a model that counts takes the time it takes
        return config
    # an image is one target, and worth its patches
    each = material.model.context if isinstance(material.model, VisionConfig) else 1
    device = pick_device(config.device)
    budget = 0.9 * 60 * minutes  # evaluations and checkpoints take the rest
    chosen: RunConfig | None = None
    for dim, layers in SIZES if model_too else [(table["dim"], table["layers"])]:
        model = {**table, "dim": dim, "layers": layers}
        if "heads" in table and model_too:
            model["heads"] = dim // HEAD_DIM
        candidate = replace(config, model=model)
        seconds, targets = _probe(candidate, material, device)
        steps = max(FEWEST_STEPS, int(budget / seconds))
        parameters = count_parameters(resolve(model))
        if chosen is not None and steps * targets * each < TOKENS_PER_PARAMETER * parameters:
            break
        chosen = replace(candidate, train=replace(config.train, steps=steps))
    assert chosen is not None
    return chosen


def _probe(config: RunConfig, material: Material, device: torch.device) -> tuple[float, float]:
    """Seconds and targets of a step, after one to warm up."""
    model = build_model(resolve(config.model)).to(device)
    settings = config.train
    count = (PROBE_STEPS + 1) * settings.accumulate
    batches = (material.batch(number).to(device) for number in range(count))
    steps = train(
        Objective(model, material.task),
        batches,
        optimizers(settings.optimizer, model, settings.rate),
        lambda step: settings.rate,
        accumulate=settings.accumulate,
        autocast=autocast(settings, device),
    )
    next(steps)
    begin = time.perf_counter()
    taken = [float(step.targets) for step in islice(steps, PROBE_STEPS)]
    return (time.perf_counter() - begin) / len(taken), sum(taken) / len(taken)
