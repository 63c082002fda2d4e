"""The log of a run: metrics of every step, skipped steps, and checks for non-finite values.

The training loop leaves weights and optimizer unchanged in a step whose loss or gradient is not
finite. The host detects such steps here, when it writes the log.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from regard.errors import DivergedError
from regard.training.events import StepLogged
from regard.training.loop import Step
from regard.training.storage.run_folder import RunFolder

FLUSH_STEPS, FLUSH_SECONDS = 64, 0.5
MAX_SKIPPED = 3  # consecutive non-finite steps that end the training

logger = logging.getLogger(__name__)


class Log:
    """Buffers steps as device tensors and writes many at once, to synchronize rarely.

    `example_ids(n)` returns the ids of the examples in micro-batch n; a step has `accumulate`
    micro-batches.
    """

    def __init__(
        self,
        folder: RunFolder,
        example_ids: Callable[[int], list[int]],
        accumulate: int,
    ) -> None:
        self.folder = folder
        self.example_ids, self.accumulate = example_ids, accumulate
        self.pending: list[Step] = []
        self.flushed_at = time.perf_counter()
        self.targets_per_second = self.seconds_per_step = math.nan  # until the first flush
        self.smoothed_loss = math.nan  # until the first finite step
        self.consecutive_skips = 0
        self.last: Step | None = None
        self.grad_norm = math.nan

    def restart_clock(self) -> None:
        """Begin to time steps again, after an evaluation or a checkpoint."""
        self.flushed_at = time.perf_counter()

    def add(self, step: Step) -> None:
        """Add a step without waiting for its values."""
        self.pending.append(step)

    @property
    def should_flush(self) -> bool:
        """Whether to write now; this depends on the clock of the rank, so the ranks must agree."""
        seconds_since_flush = time.perf_counter() - self.flushed_at
        return seconds_since_flush >= FLUSH_SECONDS or len(self.pending) >= FLUSH_STEPS

    def flush(self) -> None:
        """Write all pending steps; raises `DivergedError` after too many non-finite ones."""
        if not self.pending:
            return
        values = torch.stack(
            [
                torch.stack([s.loss.float(), s.grad_norm.float(), s.num_targets.float(), s.skipped])
                for s in self.pending
            ]
        ).tolist()
        seconds = time.perf_counter() - self.flushed_at
        targets = sum(row[2] for row in values)
        self.targets_per_second = _smooth(self.targets_per_second, targets / seconds)
        self.seconds_per_step = _smooth(self.seconds_per_step, seconds / len(values))
        for step, (loss, norm, count, skipped) in zip(self.pending, values, strict=True):
            row: dict[str, Any] = {
                "step": step.index + 1,
                "loss": loss,
                "lr": step.lr,
                "grad_norm": norm,
                "targets": int(count),
            }
            if skipped:
                row |= {"loss": None, "grad_norm": None, "skipped": True}
            self.folder.append(row)
            if skipped:
                self._record_skipped(step, loss, norm)
            else:
                self.consecutive_skips = 0
                self.smoothed_loss = _smooth(self.smoothed_loss, loss)
        self.last, self.grad_norm = self.pending[-1], values[-1][1]
        self.pending = []
        self.flushed_at = time.perf_counter()
        logger.info("step %d, loss %.6g", self.last.index + 1, self.smoothed_loss)

    def event(self, steps: int) -> StepLogged:
        """The event of the last step that was written, in a run of `steps` steps."""
        last = self.last
        assert last is not None
        return StepLogged(
            last.index + 1,
            steps,
            self.smoothed_loss,
            last.lr,
            self.grad_norm,
            self.targets_per_second,
            self.seconds_per_step * (steps - last.index - 1),
        )

    def _record_skipped(self, step: Step, loss: float, norm: float) -> None:
        """Record the examples of a skipped step; raise after too many in a row."""
        first = step.index * self.accumulate
        micro_batches = range(first, first + self.accumulate)
        self.folder.append_skipped(
            {
                "step": step.index + 1,
                "loss": _to_json(loss),
                "grad_norm": _to_json(norm),
                "examples": [i for batch in micro_batches for i in self.example_ids(batch)],
            }
        )
        self.consecutive_skips += 1
        if self.consecutive_skips >= MAX_SKIPPED:
            raise DivergedError(
                f"loss or gradient was not finite in {MAX_SKIPPED} steps in a row, up to step "
                f"{step.index + 1:,}; these steps did not change the weights\n"
                f"their examples are listed in {self.folder.skipped}\n"
                f"{_advice(self.folder)} (now {step.lr:.2g})"
            )


def check_finite(folder: RunFolder, step: int, *groups: Mapping[str, Tensor]) -> None:
    """Raise if a tensor is not finite, so that it is neither evaluated nor saved."""
    named = ((name, tensor) for group in groups for name, tensor in group.items())
    non_finite = [name for name, tensor in named if not tensor.isfinite().all()]
    if non_finite:
        more = f" and {len(non_finite) - 1} more are" if len(non_finite) > 1 else " is"
        raise DivergedError(
            f"{non_finite[0]}{more} not finite at step {step:,}; nothing was "
            f"saved\n{_advice(folder)}"
        )


def _advice(folder: RunFolder) -> str:
    return (
        f"resume from the last checkpoint with a lower learning rate: "
        f"regard resume {folder.path} train.lr=…"
    )


def _to_json(value: float) -> float | str:
    """A number for JSON, which has no non-finite numbers: "nan", "inf" or "-inf" as strings."""
    return value if math.isfinite(value) else str(value)


def _smooth(average: float, value: float) -> float:
    return value if math.isnan(average) else 0.7 * average + 0.3 * value
