"""A run from beginning to end: everything is wired here, once, in plain sight.

`begin` and `resume` are generators of events; whoever iterates shows them. Nothing is printed.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, cast

import torch
from torch import nn

from regard.config import RunConfig, TrainConfig, merge, to_table
from regard.config import build as build_config
from regard.data.batch import Batch, pin_memory
from regard.data.loader import prefetch
from regard.errors import ConfigError, Stopped
from regard.files.disk_space import check_room
from regard.models.build import (
    build_model,
    count_parameters,
    describe,
    on_meta,
    weights,
)
from regard.pipelines import (
    evaluate,
    prepare_training,
    smallest_model,
    tokenizer_fingerprint,
)
from regard.pipelines.base import Progress, TrainingData
from regard.tasks import Causal, Objective
from regard.training.baseline import count
from regard.training.ema import EMA
from regard.training.events import Evaluated, Event, RunFinished, RunStarted
from regard.training.log import Log
from regard.training.loop import train
from regard.training.nonfinite import Skips
from regard.training.optim import optimizers
from regard.training.parallel import launch
from regard.training.parallel.ranks import LaunchPlan, Ranks, give, joined, receive
from regard.training.parallel.strategy import make_strategy, should_shard
from regard.training.schedule import schedule
from regard.training.setup.device import (
    autocast,
    captures,
    check_memory,
    checkpoint_activations,
    compiles,
    environment,
    packs,
    ready_device,
)
from regard.training.setup.resume_checks import must_be_as_saved, must_have_more, must_stay
from regard.training.setup.setting_checks import check_settings
from regard.training.signals import Interrupts
from regard.training.storage import checkpoint
from regard.training.storage.run_folder import ReadOnly, RunFolder
from regard.training.tracking.trackers import check_trackers, watching
from regard.training.train_state import TrainState, start_from

logger = logging.getLogger(__name__)


def begin(config: RunConfig, path: Path, progress: Progress | None = None) -> Iterator[Event]:
    """Train a new run in a folder that does not exist yet."""
    if launch.rank():
        yield from run_worker()
        return
    folder = RunFolder(path)
    if launch.attempt() and folder.is_of(launch.launch()):
        yield from resume(path, progress=progress)
        return
    folder.must_be_new()
    check_trackers(config.train.trackers)
    tokenizers = None
    if config.train.start is not None:
        start = RunFolder(config.train.start)
        tokenizers = start.load_tokenizers(start.load_config())
    device = ready_device(config)
    if "preset" in config.model:  # refuse the impossible before the data is read
        check_memory(count_parameters(smallest_model(config)), config.train, device)
    check_settings(config)
    material = prepare_training(config, tokenizers, progress)
    config = replace(config, model=describe(material.model), task=material.task_choice)
    parameters = count_parameters(material.model)
    check_memory(parameters, config.train, device)
    _check_room(path, config, parameters)
    if config.train.activation_checkpointing:
        checkpoint_activations(
            on_meta(material.model)
        )  # what cannot be done leaves no folder behind
    if config.train.start is not None:
        # weights that do not fit leave no folder behind
        start_from(config, on_meta(material.model))
    facts = environment(device) | {
        "data": material.fingerprint,
        "tokenizer": tokenizer_fingerprint(material.tokenizers),
        "launch": launch.launch(),
    }
    folder.create(config, facts, material.tokenizers)
    with folder.locked():
        yield from _lead(config, material, folder, device, None)


def resume(
    path: Path,
    overrides: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Event]:
    """Go on with a run from its newest checkpoint (or that of `step`), bit for bit."""
    if launch.rank():
        yield from run_worker()
        return
    folder = RunFolder(path)
    before = folder.load_config()
    if before.data.path is None and before.data.source is None:
        raise ConfigError(
            f"{path} was not trained here, so there is nothing to go on with;\n"
            f"train it on your own data: regard train DATA train.start={path}"
        )
    config = build_config(RunConfig, merge(to_table(before), overrides or {}))
    must_stay(before, config, path)
    with folder.locked():
        if launch.attempt() and folder.is_of(launch.launch()):
            step = None  # an earlier attempt has gone on from there
        newest = checkpoint.latest(folder.checkpoints, step)
        try:
            must_have_more(folder, config, newest)
        except ConfigError:
            if not launch.attempt():
                raise
            give(None)  # a rank died after the end
            yield RunFinished(path, config.train.steps, folder.kept_metrics(), 0.0)
            return
        if newest is not None:
            must_be_as_saved(folder, config, newest)
        check_settings(config)
        material = prepare_training(config, folder.load_tokenizers(config), progress)
        folder.must_have(tokenizer_fingerprint(material.tokenizers))
        folder.must_be_of(material.fingerprint)
        _check_room(path, config, count_parameters(material.model))
        yield from _lead(config, material, folder, ready_device(config), newest)


def _lead(
    config: RunConfig,
    material: TrainingData,
    folder: RunFolder,
    device: torch.device,
    newest: checkpoint.Checkpoint | None,
) -> Iterator[Event]:
    """Train alone, or as rank 0 of several, which are told what to do."""
    order = LaunchPlan(
        folder=str(folder.path),
        config=to_table(config),
        step=None if newest is None else newest.step,
        shard=should_shard(count_parameters(material.model), config.train, device),
        device=device.type,
        timeout=config.train.timeout,
    )
    with watching(folder, config, order.step or 0), joined(order, give(order)) as ranks:
        ranks.all_or_fail(lambda: None)  # the others make their material ready
        yield from _run(config, material, folder, device, newest, ranks, shard=order.shard)


def run_worker() -> Iterator[Event]:
    """Train as another rank than 0: do what that one says, when it has prepared the data."""
    order, store = receive()
    if order is None:
        return
    config, folder = build_config(RunConfig, order.config), ReadOnly(order.folder)
    with joined(order, store) as ranks:
        device, material = ranks.all_or_fail(
            lambda: (
                ready_device(config),
                prepare_training(config, folder.load_tokenizers(config)),
            )
        )
        newest = None
        if order.step is not None:
            newest = checkpoint.of_step(folder.checkpoints, order.step)
        yield from _run(config, material, folder, device, newest, ranks, shard=order.shard)


def _rhythm(settings: TrainConfig) -> tuple[int, int]:
    """After how many steps each to evaluate and to save."""
    every = settings.evaluate_every or -(-settings.steps // 10)
    return every, settings.save_every or every


def _check_room(path: Path, config: RunConfig, parameters: int) -> None:
    """Refuse a run that would fill the disk: with the newest checkpoints, the best and the next."""
    settings = config.train
    saves = -(-settings.steps // _rhythm(settings)[1])
    checkpoints = min(settings.keep + 2, saves)
    check_room(path, parameters, checkpoints=checkpoints, averaged=settings.ema > 0)


def _run(
    config: RunConfig,
    material: TrainingData,
    folder: RunFolder,
    device: torch.device,
    newest: checkpoint.Checkpoint | None,
    ranks: Ranks,
    *,
    shard: bool,
) -> Iterator[Event]:
    settings = config.train
    torch.manual_seed(settings.seed)
    model = build_model(material.model)
    device = torch.device("cpu") if hasattr(model, "fit") else device  # counting is in float64
    parameters = sum(p.numel() for p in model.parameters())
    start = 0 if newest is None else newest.step
    yield RunStarted(folder.path, config, material.description, parameters, start)
    if settings.start is not None and newest is None:
        ranks.all_or_fail(partial(start_from, config, model))
    if hasattr(model, "count_words") and newest is None:
        ranks.all_or_fail(lambda: cast(Any, model).count_words(material.all_batches()))
    if hasattr(model, "fit"):
        if ranks.is_rank0:
            yield from _fit(model, material, folder, device)
        return

    if settings.activation_checkpointing:
        checkpoint_activations(model)
    objective = Objective(model, material.task)
    cast_up = autocast(settings, device)
    strategy = make_strategy(
        objective, ranks, device, material.batch, shard=shard, half=cast_up is not nullcontext
    )
    all_optimizers = optimizers(settings.optimizer, strategy.local_model, settings.lr)
    strategy.attach(all_optimizers)
    state = TrainState(
        config=config,
        material=material,
        folder=folder,
        device=device,
        strategy=strategy,
        optimizers=all_optimizers,
        ema=EMA(strategy.local_model, settings.ema),
        autocast=cast_up,
    )
    if newest is None:
        ranks.on_rank0(partial(folder.cut_back, dict.fromkeys(folder.sizes(), 0)))
    else:
        state.restore(newest)
    ranks.on_rank0(partial(folder.save_config, config))  # only now is it known to fit

    if settings.baseline and newest is None and isinstance(material.task, Causal):
        counting = partial(count, material, folder, settings.evaluate_tokens)
        counted = ranks.all_or_fail(counting if ranks.is_rank0 else lambda: None)
        if counted is not None:
            yield counted

    factor = schedule(settings.schedule, settings.steps)
    if compiles(settings, device):
        strategy.compile()
    every, save_every = _rhythm(settings)
    own_batch, accumulate = ranks.split_batches(material.batch, settings.accumulate)

    def batch_of(number: int) -> Batch:
        return pin_memory(own_batch(number)) if device.type == "cuda" else own_batch(number)

    batches = prefetch(batch_of, start * accumulate, settings.steps * accumulate)
    steps = train(
        objective,
        (batch.to(device) for batch in batches),
        all_optimizers,
        lambda number: settings.lr * factor(number),
        accumulate=accumulate,
        clip=settings.clip,
        seed=settings.seed,
        start=start,
        autocast=cast_up,
        strategy=strategy,
        capture=captures(settings, device) and ranks.size == 1 and not packs(model),
    )
    log = Log(folder, settings.steps, Skips(folder, material.example_ids, settings.accumulate))
    began = time.perf_counter()
    done = start
    with Interrupts() as interrupts:
        if state.evaluation_pending:
            yield from state.evaluate(start)
        for step in () if state.stopped_early else steps:
            done = step.number + 1
            state.ema.update(step.number)
            last = done == settings.steps
            judging = last or done % every == 0
            log.add(step)
            stopping, due = ranks.all_reduce_max(interrupts.received or 0, judging or log.due)
            event = ranks.all_or_fail(log.flush) if due else None
            if event is not None:
                logger.info("step %d, loss %.6g", event.step, event.loss)
                yield event
            if judging:
                # of shards, all ranks evaluate, and must do it to the end
                patient = last or strategy.sharded
                yield from state.evaluate(done, None if patient else interrupts)
                (stopping,) = ranks.all_reduce_max(interrupts.received or 0)
            if last or done % save_every == 0 or state.stopped_early or stopping:
                ranks.all_or_fail(log.flush)
                state.save(done)
            if stopping and not last:
                interrupts.received = Signals(stopping)  # whichever rank it was sent to
                raise Stopped(
                    f"stopped by {interrupts.received.name} at step {done:,} of "
                    f"{settings.steps:,}, and saved;\ngo on with: regard resume {folder.path}",
                    interrupts.exit_code,
                )
            if state.stopped_early:
                break
    yield RunFinished(
        folder.path, done, state.best.metrics, time.perf_counter() - began, state.stopped_early
    )


def _fit(
    model: nn.Module, material: TrainingData, folder: RunFolder, device: torch.device
) -> Iterator[Event]:
    """Models that count need no steps: look at everything once, judge, save."""
    began = time.perf_counter()
    folder.cut_back(dict.fromkeys(folder.sizes(), 0))
    cast(Any, model).fit(material.all_batches())
    metrics = evaluate.losses(material, model, device)
    sample = evaluate.sample(material, model, 1)
    folder.append({"step": 1, "validation": metrics})
    folder.add_sample(1, sample)
    checkpoint.write_tensors(folder.model, weights(model))  # last: where it is, all is done
    yield Evaluated(1, metrics, True, sample)
    yield RunFinished(folder.path, 1, metrics, time.perf_counter() - began)
