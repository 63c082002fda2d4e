"""Metrics of every step, written without making the device wait at every step."""

import time
from typing import Any

import torch

from regard.training.events import StepLogged
from regard.training.loop import Step
from regard.training.nonfinite import Skips
from regard.training.storage.run_folder import RunFolder

FLUSH_STEPS, FLUSH_SECONDS = 64, 0.5


class Log:
    """Keeps steps as tensors until it is worth waiting for the device, then writes them all."""

    def __init__(self, folder: RunFolder, steps: int, skips: Skips) -> None:
        self.folder, self.steps, self.skips = folder, steps, skips
        self.pending: list[Step] = []
        self.at = time.perf_counter()
        self.speed: float | None = None
        self.pace: float | None = None  # seconds per step
        self.smooth: float | None = None

    def add(self, step: Step) -> None:
        """Take in a step."""
        self.pending.append(step)

    @property
    def due(self) -> bool:
        """Whether it is time to write: by this rank's clock, so ranks must agree on it."""
        waited = time.perf_counter() - self.at
        return waited >= FLUSH_SECONDS or len(self.pending) >= FLUSH_STEPS

    def flush(self) -> StepLogged | None:
        """Write all pending steps, and tell of them; too many skipped in a row end the training."""
        if not self.pending:
            return None
        rows = torch.stack(
            [
                torch.stack([s.loss.float(), s.grad_norm.float(), s.targets.float(), s.skipped])
                for s in self.pending
            ]
        ).tolist()
        seconds = time.perf_counter() - self.at
        targets = sum(row[2] for row in rows)
        self.speed = _mixed(self.speed, targets / seconds)
        self.pace = _mixed(self.pace, seconds / len(rows))
        for step, (loss, norm, count, skipped) in zip(self.pending, rows, strict=True):
            row: dict[str, Any] = {
                "step": step.number + 1,
                "loss": loss,
                "rate": step.lr,
                "grad_norm": norm,
                "targets": int(count),
            }
            if skipped:
                row |= {"loss": None, "grad_norm": None, "skipped": True}
            self.folder.append(row)
            self.skips.see(step.number, loss, norm, step.lr, skipped=bool(skipped))
            if not skipped:
                self.smooth = _mixed(self.smooth, loss)
        last = self.pending[-1]
        self.pending = []
        self.at = time.perf_counter()
        return StepLogged(
            last.number + 1,
            self.steps,
            float("nan") if self.smooth is None else self.smooth,
            last.lr,
            rows[-1][1],
            self.speed,
            self.pace * (self.steps - last.number - 1),
        )


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else 0.7 * old + 0.3 * new
