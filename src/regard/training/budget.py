"""The length of a run: a number of steps, or as many as fit into a number of minutes."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from regard.config import RunConfig, kind_of
from regard.training.evaluation_plan import EvaluationPlan
from regard.training.optim import Schedule, schedule
from regard.training.parallel.ranks import Ranks
from regard.training.storage.checkpoint import Checkpoint

# time constant of the moving average of the speed, as a fraction of the time budget
SPEED_TIME_CONSTANT = 0.1
EVALUATION_FRACTION = 0.15  # of the time budget, at most, for evaluations while training
START_FRACTION = 0.05  # of the steps, at most, for an evaluation before training
FINAL_FRACTION = 0.2  # of the time budget, at most, for the evaluation of all data at the end
# without a time budget, the final evaluation may take this long, or as long as the training
MIN_FINAL_SECONDS = 30.0
MIN_CHECKPOINTS = 10  # of a run with a time budget
EPSILON = 1e-9  # tolerance for rounding errors in the progress; also avoids a division by 0


class StepBudget:
    """A run of `train.steps` steps."""

    def __init__(self, config: RunConfig, evaluations: EvaluationPlan, save_every: int) -> None:
        self.config, self.settings, self.steps = config, config.train, config.train.steps
        self.evaluate_every, self.save_every = evaluations.every, save_every
        self.lr_factor: Schedule = schedule(self.settings.schedule, self.steps)
        self.evaluates_at_start = evaluations.at_start
        self.next_pause = 0  # no step before this one is followed by an evaluation or a checkpoint

    @property
    def max_steps(self) -> int:
        """An upper bound on the number of steps."""
        return self.steps

    @property
    def ema(self) -> float:
        """The decay of the EMA."""
        return self.settings.ema

    def is_last(self, step: int) -> bool:
        """Whether the run ends after `step` steps."""
        return step >= self.steps

    def should_evaluate(self, step: int) -> bool:
        """Whether to evaluate after `step` steps."""
        return self.is_last(step) or step % self.evaluate_every == 0

    def should_save(self, step: int) -> bool:
        """Whether to save after `step` steps."""
        return self.is_last(step) or step % self.save_every == 0

    def actions_after(self, step: int) -> tuple[bool, bool, bool]:
        """Whether, after `step` steps, the run ends, is evaluated, and is saved."""
        return self.is_last(step), self.should_evaluate(step), self.should_save(step)

    def start_clock(self, step: int) -> None:
        """Compute `next_pause`; called when training continues after `step` steps."""
        evaluation, save = (
            every - step % every for every in (self.evaluate_every, self.save_every)
        )
        self.next_pause = min(step + evaluation, step + save, self.steps)

    def replan(self, step: int, final_seconds: float = 0.0) -> None:
        """Update the estimated number of steps, after `step` steps; here it is fixed."""

    def mark_evaluated(self, step: int) -> None:
        """Record that the run was evaluated after `step` steps."""

    def mark_saved(self, step: int) -> None:
        """Record that the run was saved after `step` steps."""

    def time_evaluation(self) -> None:
        """Record the duration of an evaluation and its checkpoint: the time since `start_clock`."""

    def max_final_seconds(self, training_seconds: float) -> float:
        """How long the evaluation of all validation data may take at the end of the run."""
        return max(MIN_FINAL_SECONDS, training_seconds)

    def state(self) -> dict[str, Any]:
        """The entries of state.json that restore the budget."""
        return {}

    def summary_lines(self) -> list[str]:
        """Lines for the heading of the run."""
        return []


@dataclass(frozen=True, slots=True)
class TimePlan:
    """The steps and the progress of a run with a time budget, as estimated after step t.

    The progress p, from 0 to 1, is linear from step t on, so that it never jumps and is 1 at the
    last step:

        p(s) = p(t) + (1 - p(t)) (s - t) / (steps - t)
    """

    steps: int  # estimated number of steps of the run
    step: int = 0  # t
    progress: float = 0.0  # p(t)
    last_evaluation: float = 0.0  # progress at the last evaluation
    last_save: float = 0.0  # progress at the last checkpoint
    evaluation_seconds: float | None = None  # of the last evaluation
    seconds: float = 0.0  # seconds of the time budget that were used when the plan was saved

    def progress_at(self, step: int) -> float:
        """The progress after `step` steps."""
        if step >= self.steps:
            return 1.0
        return self.progress + (1 - self.progress) * (step - self.step) / (self.steps - self.step)

    def step_at(self, progress: float) -> int:
        """The first step after which the progress is at least `progress`."""
        if progress >= 1 or self.progress >= 1:
            return self.steps
        fraction = max(progress - self.progress, 0) / (1 - self.progress)
        return self.step + math.ceil(fraction * (self.steps - self.step) - EPSILON)


class TimeBudget(StepBudget):
    """A run of `minutes` from `started` on; `train.steps` is a first estimate.

    Steps and evaluations are timed. Whenever the log is written, the number of steps that fit into
    the remaining time is estimated again. Learning rate, evaluations and checkpoints depend on the
    progress (`TimePlan`), so that warm-up and decay keep their fractions of the run, whatever the
    number of steps.
    """

    def __init__(
        self,
        config: RunConfig,
        evaluations: EvaluationPlan,
        save_every: int,
        ranks: Ranks,
        started: float,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(config, evaluations, save_every)
        assert config.minutes is not None
        self.evaluation_cost = evaluations.cost  # in steps
        self.evaluates_at_start &= evaluations.cost <= START_FRACTION * self.steps
        self.initial_schedule, self.lr_factor = self.lr_factor, self._lr_factor
        self.ranks = ranks
        self.plan = TimePlan(self.steps) if saved is None else TimePlan(**saved)
        self.steps = self.plan.steps
        self.timed_steps = self.timed_seconds = 0.0
        self.seconds = 60 * config.minutes
        self.deadline = started + self.seconds - self.plan.seconds
        # reserved to print the results and to exit; more where the process was slow to start
        startup_seconds = time.perf_counter() - started
        self.exit_seconds = min(0.3 + 0.15 * startup_seconds, 0.05 * self.seconds)
        self.start_clock(self.plan.step)

    def _lr_factor(self, step: float) -> float:
        """The factor of the learning rate: the initial schedule at the progress after `step`."""
        return self.initial_schedule(self.plan.progress_at(int(step)) * self.settings.steps)

    @property
    def max_steps(self) -> int:
        """An upper bound on the number of steps."""
        return 1 << 40

    @property
    def ema(self) -> float:
        """The decay of the EMA."""
        return min(self.settings.ema, ema_decay(self.steps))

    def should_evaluate(self, step: int) -> bool:
        """Whether to evaluate after `step` steps; not shortly before the end."""
        if self.is_last(step):
            return True
        if self.settings.evaluate_every is not None:
            return step % self.settings.evaluate_every == 0
        return step >= self._next_evaluation()

    def should_save(self, step: int) -> bool:
        """Whether to save after `step` steps: by default at evaluations, and ten times a run."""
        if self.settings.save_every is not None:
            return super().should_save(step)
        return self.should_evaluate(step) or step >= self._next_save()

    def _next_evaluation(self) -> int:
        progress = self.plan.last_evaluation + self.interval
        return self.steps if progress > 1 - self.interval / 2 else self.plan.step_at(progress)

    def _next_save(self) -> int:
        return self.plan.step_at(self.plan.last_save + 1 / MIN_CHECKPOINTS)

    @property
    def interval(self) -> float:
        """The progress between two evaluations: larger if evaluations are slow."""
        min_interval = self.evaluation_seconds / (EVALUATION_FRACTION * self.seconds)
        return max(self.evaluate_every / self.settings.steps, min_interval)

    @property
    def evaluation_seconds(self) -> float:
        """How long an evaluation takes, including the checkpoint after it."""
        if self.plan.evaluation_seconds is not None:
            return self.plan.evaluation_seconds
        seconds_per_step = self.timed_seconds / self.timed_steps if self.timed_steps else 0.0
        return self.evaluation_cost * seconds_per_step

    def start_clock(self, step: int) -> None:
        """Begin to time steps, after `step` of them."""
        self.clock, self.clock_step = time.perf_counter(), step
        settings = self.settings
        evaluation, save = (
            step + every - step % every if every is not None else planned
            for every, planned in (
                (settings.evaluate_every, self._next_evaluation()),
                (settings.save_every, self._next_save()),
            )
        )
        self.next_pause = min(evaluation, save, self.steps)

    def replan(self, step: int, final_seconds: float = 0.0) -> None:
        """Estimate how many steps fit into the remaining time, after `step` steps.

        `final_seconds` is the duration of the evaluation of all data after the last step.
        """
        now = time.perf_counter()
        seconds, steps = now - self.clock, step - self.clock_step
        weight = math.exp(-seconds / (SPEED_TIME_CONSTANT * self.seconds))
        self.timed_seconds = weight * self.timed_seconds + seconds
        self.timed_steps = weight * self.timed_steps + steps
        remaining_seconds = self.deadline - now - self._end_seconds(final_seconds)
        remaining_seconds -= self._remaining_evaluations(step) * self.evaluation_seconds
        remaining_steps = int(
            remaining_seconds * self.timed_steps / max(self.timed_seconds, EPSILON)
        )
        progress = self.plan.progress_at(step)
        self._broadcast_plan(
            replace(self.plan, steps=step + max(remaining_steps, 0), step=step, progress=progress)
        )
        self.start_clock(step)

    def _remaining_evaluations(self, step: int) -> int:
        """The number of evaluations that remain before the last one."""
        if self.settings.evaluate_every is not None:
            return max(self.steps - step - 1, 0) // self.settings.evaluate_every
        latest_progress = 1 - self.interval / 2  # as in `_next_evaluation`
        return max(0, int((latest_progress - self.plan.last_evaluation) / self.interval))

    def _end_seconds(self, final_seconds: float) -> float:
        """The seconds from the last step to the end of the process."""
        if final_seconds > FINAL_FRACTION * self.seconds:
            final_seconds = 0.0  # this evaluation will be skipped
        return self.evaluation_seconds + final_seconds + self.exit_seconds

    def mark_evaluated(self, step: int) -> None:
        """Record that the run was evaluated after `step` steps."""
        self.plan = replace(self.plan, last_evaluation=self.plan.progress_at(step))

    def mark_saved(self, step: int) -> None:
        """Record that the run was saved after `step` steps."""
        self.plan = replace(self.plan, last_save=self.plan.progress_at(step))

    def time_evaluation(self) -> None:
        """Record the duration of an evaluation and its checkpoint: the time since `start_clock`."""
        seconds = time.perf_counter() - self.clock
        self._broadcast_plan(replace(self.plan, evaluation_seconds=seconds))

    def _broadcast_plan(self, plan: TimePlan) -> None:
        """Use the plan of rank 0 on all ranks, whose clocks differ."""
        self.plan = TimePlan(**self.ranks.broadcast(asdict(plan)))
        self.steps = self.plan.steps

    def max_final_seconds(self, training_seconds: float) -> float:
        """How long the evaluation of all validation data may take: until the deadline.

        It may always take 2 % of the time budget.
        """
        remaining = self.deadline - time.perf_counter() - self.exit_seconds
        return max(remaining, 0.02 * self.seconds)

    def state(self) -> dict[str, Any]:
        """The entries of state.json that restore the budget, with the time used so far."""
        used_seconds = self.seconds - (self.deadline - time.perf_counter())
        return {"time_plan": asdict(replace(self.plan, seconds=used_seconds))}

    def summary_lines(self) -> list[str]:
        """A line for the heading of the run: its steps, warm-up, EMA and evaluations."""
        settings = self.settings
        every = round(self.interval * self.steps)
        parts = [f"about {self.steps:,} steps"]
        if warmup := kind_of(settings.schedule)[1].get("warmup"):
            parts.append(f"warm-up {warmup:,}")
        if settings.ema:
            parts.append(f"EMA {self.ema:.3g}")
        parts.append(
            f"an evaluation every {every:,} steps" if every < self.steps else "one evaluation"
        )
        return [f"minutes    {self.config.minutes:g}: {', '.join(parts)}; adapted during training"]


def ema_decay(steps: int) -> float:
    """The decay of an EMA over about the last tenth of a run: 1 - 10 / steps, at least 0.5."""
    return 1 - 10 / max(steps, 20)


def make_budget(
    config: RunConfig,
    evaluations: EvaluationPlan,
    save_every: int,
    ranks: Ranks,
    started: float,
    saved: Checkpoint | None,
) -> StepBudget:
    """The budget of a run: `minutes` from `started` on, or `train.steps`."""
    if config.minutes is None:
        return StepBudget(config, evaluations, save_every)
    time_plan = None if saved is None else saved.state().get("time_plan")
    return TimeBudget(config, evaluations, save_every, ranks, started, time_plan)
