"""Train a run from beginning to end.

`begin` and `resume` are generators of events; the caller displays them. Nothing is printed.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from regard import pipelines
from regard.accel import training_path
from regard.accel.cpu_memory import keep_freed_memory
from regard.config import RunConfig, build, merge, to_table
from regard.data.batch import Batch, pin_memory
from regard.data.loader import prefetch
from regard.models.build import (
    build_model,
    config_table,
    count_parameters,
    is_fitted_without_gradients,
    weights,
)
from regard.pipelines import prepare_training, tokenizer_fingerprint
from regard.pipelines.base import Progress, TrainingData
from regard.training.baseline import evaluate_baselines
from regard.training.budget import make_budget
from regard.training.evaluation_plan import plan_evaluations, with_best_metric
from regard.training.events import Evaluated, Event, RunFinished, RunStarted
from regard.training.fine_tuning import cast_frozen_weights, describe_tuning, lr_scales, tuning
from regard.training.log import Log
from regard.training.loop import Step, train
from regard.training.optim import EMA, optimizers
from regard.training.parallel import launch
from regard.training.parallel.ranks import (
    LaunchPlan,
    Ranks,
    process_group,
    receive_plan,
    send_plan,
)
from regard.training.parallel.strategy import make_strategy, should_shard
from regard.training.setup.device import autocast, environment, prepare_device
from regard.training.setup.fit_to_minutes import long_warmup_warning
from regard.training.setup.resume_checks import (
    changed_machine,
    changed_settings,
    check_fixed_settings,
    check_resumable,
    is_finished,
    read_state,
)
from regard.training.setup.setting_checks import (
    check_before_data,
    check_disk,
    check_model,
    save_interval,
)
from regard.training.signals import Interrupts
from regard.training.storage import checkpoint
from regard.training.storage.evaluation import few_targets_warning, make_evaluation
from regard.training.storage.initial_weights import initial_tokenizers, load_initial_weights
from regard.training.storage.run_folder import LOST, RunFolder, WorkerFolder
from regard.training.threads import Threads
from regard.training.tracking.trackers import attach_trackers
from regard.training.train_state import TrainState


def begin(
    config: RunConfig,
    path: Path,
    progress: Progress | None = None,
    started: float | None = None,
    notes: Sequence[str] = (),
) -> Iterator[Event]:
    """Train a new run in a folder that does not exist yet.

    `minutes` counts from `started` on, a value of `time.perf_counter`; by default from now.
    `notes` are lines for the heading.
    """
    started = time.perf_counter() if started is None else started
    if launch.rank():
        yield from run_worker()
        return
    folder = RunFolder(path)
    if launch.restart_count() and folder.belongs_to(launch.launch_id()):
        yield from resume(path, progress=progress, started=started)
        return
    folder.require_new_path()
    device = check_before_data(config)
    data = prepare_training(config, initial_tokenizers(config), progress)
    config = replace(config, model=config_table(data.model), task=data.task_choice)
    config = with_best_metric(config)
    check_model(config, data.model, device, path)
    run_environment = environment(device) | {
        "data": data.fingerprint,
        "tokenizer": tokenizer_fingerprint(data.tokenizers),
        "launch": launch.launch_id(),
    }
    folder.create(config, run_environment, data.tokenizers)
    warnings = (
        []
        if is_fitted_without_gradients(config.model["family"])
        else long_warmup_warning(config.train)
    )
    data = replace(data, description=[*data.description, *notes, *warnings])
    with folder.hold_lock():
        yield from _run_rank0(config, data, folder, device, None, started, progress)


def resume(
    path: Path,
    overrides: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    progress: Progress | None = None,
    started: float | None = None,
) -> Iterator[Event]:
    """Continue a run from its newest checkpoint (or that of `step`), bit for bit.

    A run with a time budget continues with its remaining time, from `started` on; `train.steps` in
    `overrides` replaces it.
    """
    started = time.perf_counter() if started is None else started
    if launch.rank():
        yield from run_worker()
        return
    folder = RunFolder(path)
    before = folder.load_config()
    config = with_best_metric(build(RunConfig, merge(to_table(before), overrides or {})))
    if "steps" in (overrides or {}).get("train", {}):
        config = replace(config, minutes=None)
    check_fixed_settings(before, config, path)
    with folder.hold_lock():
        if launch.restart_count() and folder.belongs_to(launch.launch_id()):
            step = None  # before the restart, this launch has already resumed from `step`
        saved = checkpoint.latest(folder.checkpoints, step)
        if launch.restart_count() and is_finished(folder, config, saved):
            send_plan(None)  # a rank was lost after the last step
            result, steps = folder.load_evaluation(), config.train.steps
            yield RunFinished(path, steps, result.metrics, 0.0, evaluated_on=result.evaluated_on)
            return
        if saved is not None and step is None and is_finished(folder, config, saved):
            # a run that was killed after its last save may have old checkpoints left
            best_step = read_state(saved)["best"]["step"]
            checkpoint.prune(folder.open_checkpoints(), before.train.keep_checkpoints, best_step)
        check_resumable(folder, config, saved)
        device = check_before_data(config)
        data = prepare_training(config, folder.load_tokenizers(config), progress, is_new=False)
        folder.check_tokenizer(tokenizer_fingerprint(data.tokenizers))
        folder.check_data(data.fingerprint)
        check_disk(path, config, count_parameters(data.model))
        changed = [*changed_settings(before, config, saved), *changed_machine(folder, device)]
        data = replace(data, description=[*data.description, *changed])
        yield from _run_rank0(config, data, folder, device, saved, started, progress)


def _run_rank0(
    config: RunConfig,
    data: TrainingData,
    folder: RunFolder,
    device: torch.device,
    saved: checkpoint.Checkpoint | None,
    started: float,
    progress: Progress | None,
) -> Iterator[Event]:
    """Train in one process, or as rank 0, which sends the other ranks the launch plan."""
    launch_plan = LaunchPlan(
        folder=str(folder.path),
        config=to_table(config),
        step=None if saved is None else saved.step,
        shard=should_shard(count_parameters(data.model), config.train, device),
        device=device.type,
        timeout=config.train.timeout,
    )
    with (
        attach_trackers(folder, config, launch_plan.step or 0),
        process_group(launch_plan, send_plan(launch_plan)) as ranks,
    ):
        ranks.all_or_fail(lambda: None)  # wait until the other ranks have prepared the data
        yield from _train(
            config,
            data,
            folder,
            device,
            saved,
            ranks,
            started,
            shard=launch_plan.shard,
            progress=progress,
        )


def run_worker() -> Iterator[Event]:
    """Train as rank > 0: wait for rank 0's launch plan, prepare the same data, join the run."""
    launch_plan, store = receive_plan()
    if launch_plan is None:
        return
    config, folder = build(RunConfig, launch_plan.config), WorkerFolder(launch_plan.folder)

    def prepare() -> tuple[torch.device, TrainingData]:
        tokenizers = folder.load_tokenizers(config)
        return prepare_device(config), prepare_training(config, tokenizers, is_new=False)

    with process_group(launch_plan, store) as ranks:
        device, data = ranks.all_or_fail(prepare)
        step = launch_plan.step
        saved = None if step is None else checkpoint.of_step(folder.checkpoints, step)
        started = time.perf_counter()  # rank 0 broadcasts its time plan
        yield from _train(
            config, data, folder, device, saved, ranks, started, shard=launch_plan.shard
        )


def _train(
    config: RunConfig,
    data: TrainingData,
    folder: RunFolder,
    device: torch.device,
    saved: checkpoint.Checkpoint | None,
    ranks: Ranks,
    started: float,
    *,
    shard: bool,
    progress: Progress | None = None,
) -> Iterator[Event]:
    """Build the model, initialize or restore it, and train it."""
    settings, start = config.train, 0 if saved is None else saved.step
    evaluations = plan_evaluations(settings, data)
    budget = make_budget(config, evaluations, save_interval(settings), ranks, started, saved)
    torch.manual_seed(settings.seed)
    model = build_model(data.model)
    parameters = sum(p.numel() for p in model.parameters())
    initialize = partial(_initialize, model, config, data, device, saved)
    tuning_lines = ranks.all_or_fail(initialize)
    warnings = few_targets_warning(type(data.task), data.validation_targets)
    description = [*data.description, *warnings, *tuning_lines, *budget.summary_lines()]
    yield RunStarted(folder.path, config, description, parameters, start)
    if saved is None:
        yield from evaluate_baselines(config, data, folder, ranks)
    if is_fitted_without_gradients(config.model["family"]):
        yield from _fit(model, data, folder) if ranks.is_rank0 else ()
        return
    if device.type == "cpu":
        keep_freed_memory()
    strategy = make_strategy(model, data, settings, ranks, device, shard=shard)
    scales = lr_scales(strategy.local_model, settings.layer_decay)
    all_optimizers = optimizers(settings.optimizer, strategy.local_model, settings.lr, scales)
    strategy.attach(all_optimizers)
    ema = EMA(strategy.local_model, settings.ema)
    threads = Threads(settings, device, ranks.world_size)
    state = TrainState(
        config, data, folder, device, strategy, all_optimizers, ema, evaluations, budget, threads
    )
    state.restore(saved)
    yield from _train_from(start, state, progress)


def _train_from(start: int, state: TrainState, progress: Progress | None) -> Iterator[Event]:
    """Train step by step; log, evaluate and save as the budget says, and stop on signals."""
    folder, strategy, budget = state.folder, state.strategy, state.budget
    log = Log(folder, state.data.example_ids, state.config.train.accumulate)
    started, step_count = time.perf_counter(), start
    with Interrupts() as interrupts:
        state.start_clocks(start)
        if state.evaluation_pending or (start == 0 and budget.evaluates_at_start):
            yield from state.evaluate(start)
            state.restart_clocks(start, evaluated=True)
        for step in () if state.stopped_early else _steps(start, state):
            step_count = step.index + 1
            state.ema.update(step.index)
            log.add(step)
            signal, pause = strategy.all_reduce_max(
                interrupts.received or 0, step_count >= budget.next_pause or log.should_flush
            )
            if not (pause or signal):
                continue
            (status,) = strategy.all_reduce_max(folder.status())
            if status == LOST:
                raise folder.status_error(step_count)
            strategy.ranks.all_or_fail(log.flush)
            yield from state.replan(step_count)
            yield log.event(budget.steps)
            is_last, should_evaluate, should_save = budget.actions_after(step_count)
            if should_evaluate:
                can_postpone = not (is_last or strategy.is_sharded)  # sharded: all ranks take part
                yield from state.evaluate(step_count, interrupts if can_postpone else None)
                signal, status = strategy.all_reduce_max(interrupts.received or 0, folder.status())
                if status == LOST:
                    raise folder.status_error(step_count)
            stopping = should_evaluate and state.stopped_early
            if should_save or stopping or signal or status:
                state.save(step_count)
            if status:
                raise folder.status_error(step_count)
            if signal and not is_last:
                raise interrupts.stop_error(signal, step_count, budget.steps, folder.path)
            if is_last or stopping:
                break
            if should_evaluate or should_save:
                state.restart_clocks(step_count, evaluated=should_evaluate)
                log.restart_clock()
        yield state.finish(step_count, started, interrupts, progress)


def _steps(start: int, state: TrainState) -> Iterator[Step]:
    """The training steps of this rank from `start` on; batches are prefetched."""
    settings, data, device, strategy = state.config.train, state.data, state.device, state.strategy
    ranks = strategy.ranks
    accumulate = ranks.local_accumulate(settings.accumulate)

    def local_batch(index: int) -> Batch:
        batch = strategy.local_batch(data.batch, settings.accumulate, index)
        return pin_memory(batch) if device.type == "cuda" else batch

    batches = prefetch(local_batch, start * accumulate, state.budget.max_steps * accumulate)
    model, tuning_method = strategy.objective.model, tuning(settings.tune)
    path = training_path(settings, device, model, ranks=ranks.world_size)

    def before_step(index: int) -> None:
        if tuning_method.depends_on_step:
            tuning_method.prepare(model, index)

    return train(
        strategy.objective,
        (batch.to(device) for batch in batches),
        state.optimizers,
        lambda step: settings.lr * state.budget.lr_factor(step),
        accumulate=accumulate,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        start=start,
        autocast=autocast(settings, device),
        strategy=strategy,
        capture=path.cuda_graph and not tuning_method.depends_on_step,
        before_step=before_step,
    )


def _initialize(
    model: nn.Module,
    config: RunConfig,
    data: TrainingData,
    device: torch.device,
    saved: checkpoint.Checkpoint | None,
) -> list[str]:
    """Load the weights of `train.start` and freeze parameters (`train.tune`).

    For negative sampling (CBOW), also compute the noise distribution from the training data.
    Returns lines for the heading that count the trainable parameters.
    """
    tuning_method = tuning(config.train.tune)
    if config.train.start is not None and (saved is None or not tuning_method.saves_full_model):
        load_initial_weights(config, model)
    if saved is None and hasattr(model, "set_noise_distribution"):
        cast(Any, model).set_noise_distribution(data.all_batches())
    if is_fitted_without_gradients(config.model["family"]):
        return []
    tuning_method.prepare(model, 0 if saved is None else saved.step)
    if not tuning_method.saves_full_model and autocast(config.train, device) is not nullcontext:
        cast_frozen_weights(model, torch.bfloat16)
    lines = describe_tuning(config, model)
    if tuning_method.depends_on_step:
        model.requires_grad_(True)  # the optimizers get all parameters; `before_step` freezes some
    return lines


def _fit(model: nn.Module, data: TrainingData, folder: RunFolder) -> Iterator[Event]:
    """Fit a model that takes no training steps, such as an n-gram model, on the CPU."""
    started = time.perf_counter()
    folder.truncate_logs(dict.fromkeys(folder.log_sizes(), 0))
    cast(Any, model).fit(data.all_batches())
    metrics = pipelines.validation_metrics(data, model, torch.device("cpu"))
    evaluation = make_evaluation(data, metrics, None)
    sample = pipelines.sample(data, model, 1)
    total = evaluation.total
    row = {"validation": metrics, "validation_targets": total, "validation_total": total}
    folder.append({"step": 1, **row})
    folder.append_sample(1, sample)
    folder.save_weights(weights(model), folder.load_config())  # marks the run as finished
    folder.save_evaluation(evaluation)
    yield Evaluated(1, metrics, True, sample)
    seconds = time.perf_counter() - started
    yield RunFinished(folder.path, 1, metrics, seconds, evaluated_on=evaluation.evaluated_on)
