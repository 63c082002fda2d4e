"""Where a run stands: what has been learned, how it is judged, saved and taken up again."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from regard.config import RunConfig, kind_of
from regard.files.fault_injection import fault
from regard.models.build import load_weights, weights
from regard.pipelines import evaluate
from regard.pipelines.base import TrainingData
from regard.tasks.metrics import better
from regard.training.ema import EMA
from regard.training.events import Evaluated, Event
from regard.training.nonfinite import must_be_finite
from regard.training.optim import load_state_tensors, state_tensors
from regard.training.parallel import launch
from regard.training.parallel.strategy import ParallelStrategy
from regard.training.setup.resume_checks import lasting
from regard.training.signals import Interrupted, Interrupts
from regard.training.storage import checkpoint
from regard.training.storage.run_folder import RunFolder

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Best:
    """The best evaluation so far, and how many came after it."""

    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    since: int = 0
    sha256: str | None = None  # of model.safetensors

    def sees(self, step: int, metrics: dict[str, float], name: str) -> bool:
        """Take in an evaluation; whether it is the best one by the metric of this name."""
        is_best = (
            name == "last" or self.step is None or better(name, metrics[name], self.metrics[name])
        )
        if is_best:
            self.step, self.metrics, self.since = step, metrics, 0
        else:
            self.since += 1
        return is_best

    def restored(self, folder: RunFolder) -> "Best":
        """The best at a checkpoint, though model.safetensors may be of a step after it.

        Then it is taken from its own checkpoint; without one, the next to be judged is the best.
        """
        if folder.model.exists() and checkpoint.sha256(folder.model) == self.sha256:
            return self
        kept = checkpoint.whole(folder.checkpoints, self.step)
        if kept is None:
            return Best()
        tensors = {**kept.tensors("model"), **kept.tensors("ema")}
        checkpoint.write_tensors(folder.model, tensors)
        return self


@dataclass(slots=True, kw_only=True)
class TrainState:
    """What a run has between two steps, on one of its ranks; all of them must ask alike."""

    config: RunConfig
    material: TrainingData
    folder: RunFolder
    device: torch.device
    strategy: ParallelStrategy
    optimizers: list[torch.optim.Optimizer]
    ema: EMA
    autocast: Callable[[], AbstractContextManager[Any]]
    best: Best = field(default_factory=Best)
    evaluation_pending: bool = (
        False  # whether the evaluation after the last step is still to be made
    )

    @property
    def stopped_early(self) -> bool:
        """Whether so many evaluations in a row were no better that the run should end."""
        patience = self.config.train.patience
        return patience is not None and self.best.since >= patience

    def restore(self, newest: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint; what the run did after it is undone."""
        strategy, folder, ranks = self.strategy, self.folder, self.strategy.ranks
        state = ranks.all_or_fail(newest.state)
        self.evaluation_pending = state.get("evaluation_pending", False)
        self.best = Best(**state["best"])

        def read() -> None:
            strategy.load(newest.tensors("model", *strategy.cut), str(newest.path))
            remembered = newest.tensors("optimizer", *strategy.cut)
            load_state_tensors(strategy.local_model, self.optimizers, remembered)
            self.ema.load(newest.tensors("ema", *strategy.cut))

        def undo() -> None:
            checkpoint.drop_after(folder.checkpoints, newest.step)
            folder.claim(launch.launch())
            folder.cut_back(state["sizes"])
            self.best = self.best.restored(folder)

        ranks.all_or_fail(read)
        ranks.on_rank0(undo)  # all have read what may be removed now
        self.best = Best(**ranks.broadcast(asdict(self.best)))

    def save(self, step: int) -> None:
        """Write a checkpoint: of shards all ranks do, else the first alone."""
        strategy, folder, ranks = self.strategy, self.folder, self.strategy.ranks
        tensors = {
            "model": strategy.part(),
            "optimizer": dict(state_tensors(strategy.local_model, self.optimizers)),
            "ema": self.ema.tensors(),
        }
        state = {
            "best": asdict(self.best),
            "sizes": folder.sizes(),
            "config": lasting(self.config),
            "data": self.material.fingerprint,
            "evaluation_pending": self.evaluation_pending,
        }
        ranks.all_or_fail(partial(must_be_finite, folder, step, *tensors.values()))
        place, keep = folder.checkpoints, self.config.train.keep
        if strategy.sharded:
            checkpoint.save(place, step, tensors, state, ranks)
        else:
            ranks.on_rank0(partial(checkpoint.save, place, step, tensors, state))
        ranks.on_rank0(partial(checkpoint.prune, place, keep, self.best.step))
        logger.info("saved step %d", step)

    def evaluate(self, step: int, hasty: Interrupts | None = None) -> Iterator[Event]:
        """Evaluate after a step; where `hasty`, a signal puts it off: saving is more urgent."""
        settings, strategy, folder = self.config.train, self.strategy, self.folder
        ranks = strategy.ranks

        def judged(model: nn.Module) -> tuple[dict[str, float], str] | None:
            try:
                with nullcontext() if hasty is None else hasty.hasty():
                    metrics = evaluate.losses(
                        self.material, model, self.device, settings.evaluate_tokens
                    )
                    return metrics, evaluate.sample(self.material, model, settings.seed)
            except Interrupted:
                return None

        kept = (strategy.part(), self.ema.tensors())
        ranks.all_or_fail(partial(must_be_finite, folder, step, *kept))
        with self.ema.applied(), self.autocast():
            found: tuple[dict[str, float], str] | None = ranks.broadcast(
                ranks.all_or_fail(partial(strategy.with_full_weights, judged))
            )
            self.evaluation_pending = found is None
            if found is None:
                return
            metrics, sample = found
            is_best = self.best.sees(step, metrics, settings.best)
            if is_best:
                best_weights = strategy.whole()
                ranks.on_rank0(partial(checkpoint.write_tensors, folder.model, best_weights))
                if ranks.is_rank0:
                    self.best.sha256 = checkpoint.sha256(folder.model)

        def tell() -> None:
            folder.append({"step": step, "validation": metrics})
            fault("log")
            folder.add_sample(step, sample)

        ranks.on_rank0(tell)
        yield Evaluated(step, metrics, is_best, sample)


def start_from(config: RunConfig, model: nn.Module) -> None:
    """Begin with the weights that another run ended with; a head for something else is new."""
    start = RunFolder(cast(str, config.train.start))
    tensors = start.kept_weights()
    if _goal(start.load_config()) != _goal(config):
        own = {name: each for name, each in weights(model).items() if name.startswith("head.")}
        kept = {name: each for name, each in tensors.items() if not name.startswith("head.")}
        tensors = kept | own
    load_weights(model, tensors, str(start.model))


def _goal(config: RunConfig) -> tuple[Any, Any]:
    """What the head of a run reads off, and the names of its classes."""
    return config.model.get("head"), kind_of(config.task)[1].get("names")
