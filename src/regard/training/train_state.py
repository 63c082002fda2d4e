"""The training state: evaluate, save and restore the model, the optimizers and the EMA."""

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard import pipelines
from regard.accel import cublaslt
from regard.config import Choice, RunConfig, to_table
from regard.files.fault_injection import inject_fault
from regard.models.build import build_on_meta, load_weights, weights
from regard.models.presets import ModelConfig
from regard.pipelines.base import Progress, TrainingData
from regard.tasks.metrics import is_better
from regard.training.activation_log import activation_statistics
from regard.training.budget import StepBudget
from regard.training.evaluation_plan import EvaluationPlan
from regard.training.events import (
    ActivationStatistics,
    Evaluated,
    Event,
    RunFinished,
    ThreadsChanged,
)
from regard.training.fine_tuning import tuning
from regard.training.log import check_finite
from regard.training.loop import ParallelStrategy
from regard.training.optim import (
    EMA,
    expected_state,
    load_state_tensors,
    parameters_without_state,
    state_tensors,
)
from regard.training.parallel import launch
from regard.training.setup.device import autocast
from regard.training.setup.resume_checks import fixed_settings, read_state
from regard.training.signals import Interrupted, Interrupts
from regard.training.storage import checkpoint
from regard.training.storage.evaluation import Evaluation, make_evaluation
from regard.training.storage.run_folder import RunFolder
from regard.training.threads import Threads

logger = logging.getLogger(__name__)
# metrics, a sample, statistics of activations
Results = tuple[dict[str, float], str, ActivationStatistics]


@dataclass(slots=True)
class BestEvaluation:
    """The best evaluation so far."""

    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    num_bad_evaluations: int = 0  # since the best one
    sha256: str | None = None  # of model.safetensors
    targets: int | None = None  # number of validation targets evaluated; None: unknown

    def update(self, step: int, metrics: dict[str, float], name: str, targets: int) -> bool:
        """Update the best evaluation if this one is better by `name`; return whether it is."""
        is_best = name == "last" or self.step is None or is_better(name, metrics, self.metrics)
        if is_best:
            self.step, self.metrics, self.targets = step, metrics, targets
            self.num_bad_evaluations = 0
        else:
            self.num_bad_evaluations += 1
        return is_best

    def is_stored(self, folder: RunFolder) -> bool:
        """Whether model.safetensors holds the weights of this evaluation, not of a later one."""
        return folder.model.exists() and checkpoint.sha256(folder.model) == self.sha256

    def read_model(
        self, folder: RunFolder, model: ModelConfig, tune: Choice
    ) -> dict[str, Tensor] | None:
        """The weights in the checkpoint of this evaluation; None if it was removed."""
        saved = checkpoint.find_valid(folder.checkpoints, self.step)
        if saved is None:
            return None
        tensors = {**saved.tensors("model"), **saved.tensors("ema")}
        expected = build_on_meta(model)
        tuning(tune).prepare(expected)
        checkpoint.check_fit(str(saved.path), weights(expected), tensors)
        return tensors


@dataclass(slots=True)
class TrainState:
    """Model, optimizers and EMA on one rank; all ranks must call the same methods."""

    config: RunConfig
    data: TrainingData
    folder: RunFolder
    device: torch.device
    strategy: ParallelStrategy
    optimizers: list[torch.optim.Optimizer]
    ema: EMA
    plan: EvaluationPlan
    budget: StepBudget
    threads: Threads
    best: BestEvaluation = field(default_factory=BestEvaluation)
    evaluation_pending: bool = False  # a signal postponed the evaluation after the last step
    seconds_per_target: float | None = None  # of the last evaluation in this session

    @property
    def stopped_early(self) -> bool:
        """Whether `train.patience` evaluations in a row were not better than the best."""
        patience = self.config.train.patience
        return patience is not None and self.best.num_bad_evaluations >= patience

    def restore(self, saved: checkpoint.Checkpoint | None) -> None:
        """Load model, optimizers and EMA from a checkpoint and truncate the logs to its step.

        Without a checkpoint only the logs are truncated. In both cases config.json is written
        last, when the settings are known to fit.
        """
        folder, ranks = self.folder, self.strategy.ranks
        if saved is None:
            ranks.on_rank0(partial(folder.truncate_logs, dict.fromkeys(folder.log_sizes(), 0)))
        else:
            self._load(saved)
        ranks.on_rank0(partial(folder.save_config, self.config))

    def _load(self, saved: checkpoint.Checkpoint) -> None:
        strategy, folder, ranks = self.strategy, self.folder, self.strategy.ranks
        state = ranks.all_or_fail(partial(read_state, saved))
        cublaslt.prefer_algorithms(state.get("matmuls", {}))
        model, optimizer, ema = ranks.all_or_fail(partial(self._read_tensors, saved, state))
        self.best = BestEvaluation(**state["best"])
        best_model = ranks.all_or_fail(self._read_best if ranks.is_rank0 else lambda: None)
        strategy.load(model, str(saved.path))
        load_state_tensors(strategy.local_model, self.optimizers, optimizer)
        self.ema.load(ema)
        self.evaluation_pending = state.get("evaluation_pending", False)
        self.threads.restore(state.get("threads"))

        def discard_later_steps() -> None:
            checkpoint.drop_after(folder.open_checkpoints(), saved.step)
            folder.set_launch(launch.launch_id())
            folder.truncate_logs(state["sizes"])
            if best_model is not None:
                folder.save_weights(best_model, self.config)

        ranks.on_rank0(discard_later_steps)  # after every rank has read its tensors
        self.best = BestEvaluation(**ranks.broadcast(asdict(self.best)))

    def _read_tensors(
        self, saved: checkpoint.Checkpoint, state: dict[str, Any]
    ) -> tuple[dict[str, Tensor], ...]:
        """Read the tensors of model, optimizers and EMA, and check that they fit the run."""
        strategy = self.strategy
        model, optimizer, ema = (
            saved.tensors(name, *strategy.shard) for name in ("model", "optimizer", "ema")
        )
        stateless = state.get("without_state")
        if stateless is None:  # saved by an earlier version
            known = {name.rpartition("/")[0] for name in optimizer}
            stateless = [n for n, _ in strategy.local_model.named_parameters() if n not in known]
        expected = {
            "model": strategy.local_weights(),
            "optimizer": expected_state(
                strategy.local_model, self.optimizers, optimizer, stateless
            ),
            "ema": self.ema.tensors() if ema or state.get("ema") else {},
        }
        if not self.ema.decay:  # train.ema was set to 0 on resuming: ignore the averages
            ema = {}
        for name, tensors in {"model": model, "optimizer": optimizer, "ema": ema}.items():
            path = str(saved.path / f"{name}.safetensors")
            checkpoint.check_fit(path, expected[name], tensors)
        return model, optimizer, ema

    def _read_best(self) -> dict[str, Tensor] | None:
        """The weights of the best evaluation, if model.safetensors holds those of a later one.

        If they were removed, the next evaluation becomes the best. If evaluations now have
        another number of targets, the best weights are evaluated again.
        """
        tensors = None
        if not self.best.is_stored(self.folder):
            tensors = self.best.read_model(self.folder, self.data.model, self.config.train.tune)
            if tensors is None:
                self.best = BestEvaluation()
        targets = self.data.targets(self.plan.limit)
        if self.best.targets in (None, targets):
            return tensors
        if self.strategy.is_sharded:
            logger.warning(
                "the best evaluation so far used %d targets, the next ones use %d",
                self.best.targets,
                targets,
            )
            return tensors
        model = self.strategy.objective.model
        stored = self.folder.load_weights() if tensors is None else tensors
        load_weights(model, stored, str(self.folder.model))
        with autocast(self.config.train, self.device)():
            self.best.metrics = pipelines.validation_metrics(
                self.data, model, self.device, self.plan.limit
            )
        self.best.targets = targets
        return tensors

    def start_clocks(self, step: int) -> None:
        """Begin to time steps, after `step` of them."""
        self.budget.start_clock(step)
        self.threads.start_clock(step)

    def restart_clocks(self, step: int, *, evaluated: bool) -> None:
        """Begin to time steps again, after an evaluation or a checkpoint."""
        if evaluated:
            self.budget.time_evaluation()
        self.start_clocks(step)

    def replan(self, step: int) -> Iterator[ThreadsChanged]:
        """Adapt the number of steps, the EMA decay and the number of threads to the speed."""
        self.budget.replan(step, self.final_seconds())
        self.ema.decay = self.budget.ema
        if (threads := self.threads.adapt(step)) is not None:
            yield ThreadsChanged(step, threads, self.threads.max_threads)

    def save(self, step: int) -> None:
        """Write a checkpoint.

        With sharded weights, every rank writes its shards; otherwise rank 0 writes everything.
        After the last step the number of steps, if it was an estimate, is updated in config.json.
        """
        strategy, folder, ranks = self.strategy, self.folder, self.strategy.ranks
        self.budget.mark_saved(step)
        if self.budget.is_last(step) and step != self.config.train.steps:
            self.config = replace(self.config, train=replace(self.config.train, steps=step))
            ranks.on_rank0(partial(folder.save_config, self.config))
        tensors = {
            "model": strategy.local_weights(),
            "optimizer": dict(state_tensors(strategy.local_model, self.optimizers)),
            "ema": self.ema.tensors(),
        }
        state = {
            "best": asdict(self.best),
            "sizes": folder.log_sizes(),
            "config": fixed_settings(self.config),
            "settings": to_table(self.config),
            "data": self.data.fingerprint,
            "evaluation_pending": self.evaluation_pending,
            "without_state": parameters_without_state(strategy.local_model, self.optimizers),
            "ema": bool(self.ema.decay),
            "matmuls": cublaslt.chosen_algorithms(),
            **self.budget.state(),
            **({"threads": self.threads.current_threads} if self.threads.adapts else {}),
        }
        ranks.all_or_fail(partial(check_finite, folder, step, *tensors.values()))
        checkpoints, keep = folder.open_checkpoints(), self.config.train.keep_checkpoints
        if strategy.is_sharded:
            checkpoint.save(checkpoints, step, tensors, state, ranks)
        else:
            ranks.on_rank0(partial(checkpoint.save, checkpoints, step, tensors, state))
        ranks.on_rank0(partial(checkpoint.prune, checkpoints, keep, self.best.step))
        logger.info("saved step %d", step)

    def evaluate(self, step: int, interrupts: Interrupts | None = None) -> Iterator[Event]:
        """Evaluate with the EMA weights, and save the model if it is the best so far.

        With `interrupts`, a signal postpones the evaluation, so that a checkpoint is saved first.
        """
        strategy, folder = self.strategy, self.folder
        ranks = strategy.ranks
        tensors = (strategy.local_weights(), self.ema.tensors())
        ranks.all_or_fail(partial(check_finite, folder, step, *tensors))
        with self.ema.average_parameters(), autocast(self.config.train, self.device)():
            evaluate_model = partial(self._evaluate_model, interrupts)
            results: Results | None = ranks.broadcast(
                ranks.all_or_fail(partial(strategy.with_full_weights, evaluate_model))
            )
            self.evaluation_pending = results is None
            if results is None:
                return
            metrics, sample, activations = results
            targets, total = self.data.targets(self.plan.limit), self.data.validation_targets
            is_best = self.best.update(
                step, metrics, cast(str, self.config.train.best_metric), targets
            )
            if is_best:
                best_weights = strategy.full_weights()

                def save_weights() -> None:
                    self.best.sha256 = folder.save_weights(best_weights, self.config)

                ranks.on_rank0(save_weights)

        def write_logs() -> None:
            row = {"validation": metrics, "validation_targets": targets, "validation_total": total}
            folder.append(
                {"step": step, **row} | ({"activations": activations} if activations else {})
            )
            inject_fault("log")
            folder.append_sample(step, sample)

        ranks.on_rank0(write_logs)
        self.budget.mark_evaluated(step)
        evaluated_on = self.data.task.describe_part(targets, total)
        yield Evaluated(step, metrics, is_best, sample, activations, evaluated_on)

    def seconds_for_all(self) -> float | None:
        """The estimated seconds of an evaluation of all data; None before the first evaluation."""
        if self.seconds_per_target is None:
            return None
        return self.seconds_per_target * self.data.validation_targets

    def finish(
        self, step: int, started: float, interrupts: Interrupts, progress: Progress | None
    ) -> RunFinished:
        """Evaluate the best weights on all data, if the budget allows; return the final event.

        `started` is the time at which the training of this session began.
        """
        max_seconds = self.budget.max_final_seconds(time.perf_counter() - started)
        if self.strategy.ranks.world_size > 1:  # the other ranks wait for rank 0
            max_seconds = min(max_seconds, self.config.train.timeout / 2)
        evaluation = self.evaluate_best(max_seconds, interrupts, progress)
        return RunFinished(
            self.folder.path,
            step,
            evaluation.metrics,
            time.perf_counter() - started,
            self.stopped_early,
            evaluation.evaluated_on,
            None if evaluation.is_complete else self.seconds_for_all(),
            self.best.step,
        )

    def final_seconds(self) -> float:
        """The estimated seconds of the evaluation of all data after the last step."""
        return 0.0 if self.plan.limit is None else self.seconds_for_all() or 0.0

    def evaluate_best(
        self, seconds: float, interrupts: Interrupts, progress: Progress | None
    ) -> Evaluation:
        """Evaluate the best weights on all validation data, once, at the end of a run.

        If that takes longer than `seconds`, a signal interrupts it, or the weights are sharded,
        the result is the partial evaluation that selected the best weights. All ranks must call
        this; the model then has the best weights.
        """
        folder, data, ranks = self.folder, self.data, self.strategy.ranks

        def evaluate_all(model: nn.Module) -> dict[str, float] | None:
            load_weights(model, folder.load_weights(), str(folder.model))
            try:
                with interrupts.raise_on_signal(), autocast(self.config.train, self.device)():
                    return pipelines.validation_metrics(data, model, self.device, None, progress)
            except Interrupted:
                return None

        def evaluate() -> dict[str, Any]:
            evaluation = make_evaluation(data, self.best.metrics, self.plan.limit)
            stored, estimate = folder.load_evaluation(), self.seconds_for_all()
            if stored == make_evaluation(data, stored.metrics, None):
                return asdict(stored)  # the weights were evaluated before the run was resumed
            is_affordable = estimate is not None and estimate <= seconds
            if is_affordable and not evaluation.is_complete and not self.strategy.is_sharded:
                metrics = evaluate_all(self.strategy.objective.model)
                if metrics is not None:
                    evaluation = make_evaluation(data, metrics, None)
            folder.save_evaluation(evaluation)
            return asdict(evaluation)

        evaluation = ranks.all_or_fail(evaluate if ranks.is_rank0 else dict)
        return Evaluation(**ranks.broadcast(evaluation))

    def _evaluate_model(self, interrupts: Interrupts | None, model: nn.Module) -> Results | None:
        """Evaluate the unsharded model; None if a signal interrupted the evaluation."""
        settings, data, limit = self.config.train, self.data, self.plan.limit
        try:
            with nullcontext() if interrupts is None else interrupts.raise_on_signal():
                started = time.perf_counter()
                metrics = pipelines.validation_metrics(data, model, self.device, limit)
                seconds = time.perf_counter() - started
                self.seconds_per_target = seconds / data.targets(limit)
                sample = pipelines.sample(data, model, settings.seed)
                batches = data.validation_batches(limit)
                return (
                    metrics,
                    sample,
                    activation_statistics(model, data.task, batches, settings.log),
                )
        except Interrupted:
            return None
