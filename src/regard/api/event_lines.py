"""The events and the progress of a run as lines of text."""

import math
import textwrap
import time

from regard import api
from regard.api.formatting import format_duration, format_number, format_size, terminal_width
from regard.training.events import (
    Evaluated,
    NGramBaselineEvaluated,
    RunStarted,
    SimpleBaselinesEvaluated,
    ThreadsChanged,
)

BARS = "▁▂▃▄▅▆▇█"
LABEL_WIDTH = 11  # width of the labels on the left, as in `RunStarted.description`


class RemainingTime:
    """Estimates the remaining time of a phase of work, from its speed so far."""

    def __init__(self) -> None:
        self.phase, self.started = "", 0.0
        self.done = self.total = 0

    def add(self, phase: str, done: int, total: int) -> None:
        """Record the progress of a phase; a new phase, or the same again, restarts the clock."""
        if phase != self.phase or done < self.done:
            self.phase, self.started = phase, time.monotonic()
        self.done, self.total = done, total

    def __str__(self) -> str:
        elapsed = time.monotonic() - self.started
        if elapsed < 1 or not self.done:
            return ""
        remaining = elapsed * (self.total - self.done) / self.done
        return f", {format_duration(remaining)} left"


def format_progress(phase: str, done: int, total: int) -> str:
    """The progress of a phase of work, in its unit.

    >>> format_progress("tokenizing", 2_000_000, 50_000_000)
    '2 of 50 MB'
    >>> format_progress("evaluating", 2048, 325100)
    '2,048 of 325,100 targets'
    """
    from regard.pipelines.base import UNITS  # imports torch

    if phase in UNITS:
        return f"{done:,} of {total:,} {UNITS[phase]}"
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"


def heading(event: RunStarted) -> list[str]:
    """Lines about the data, the model and the folder of a run, and its settings as `key=value`."""
    device = api.device_of(event.config.device)
    family = event.config.model["family"]
    ranks = f", {api.world_size()} ranks" if api.world_size() > 1 else ""
    lines = [
        *event.description,
        f"{'model':<{LABEL_WIDTH}}{family}, {format_size(event.parameters)}, on {device}{ranks}",
        f"{'run':<{LABEL_WIDTH}}{event.folder}",
    ]
    if event.step:
        return [*lines, f"{'resumed':<{LABEL_WIDTH}}from step {event.step:,}"]
    label = "settings"
    for arguments in api.format_overrides(event.config):
        for line in textwrap.wrap(
            " ".join(arguments),
            max(40, min(terminal_width(), 100) - LABEL_WIDTH),
            break_long_words=False,
            break_on_hyphens=False,
        ):
            lines.append(f"{label:<{LABEL_WIDTH}}{line}")
            label = ""
    return [*lines, f"{'':<{LABEL_WIDTH}}{_how_to_change(event)}"]


def _how_to_change(event: RunStarted) -> str:
    """How to change a setting, with an example that applies to the model."""
    example = ", as in model.order=4" if "order" in event.config.model else ""
    if event.parameters:  # trained by gradients
        example = ", as in train.lr=0.0005"
    return f"(to change a setting, write key=value{example})"


def baseline_line(event: NGramBaselineEvaluated) -> str:
    """The result of the n-gram baseline."""
    bits = format_number(event.metrics["bits_per_byte"])
    model = f"{event.name}, fitted to {event.tokens:,} tokens"
    return f"{'baseline':<{LABEL_WIDTH}}{bits} bits per byte: {model}"


def simple_baseline_lines(event: SimpleBaselinesEvaluated) -> list[str]:
    """The results of the simple baselines, one line each."""
    lines = []
    for index, (name, metrics) in enumerate(event.metrics.items()):
        cells = "  ".join(f"{key} {format_number(value)}" for key, value in metrics.items())
        lines.append(f"{'' if index else 'baselines':<{LABEL_WIDTH}}{cells}  {name}")
    return lines


def threads_line(event: ThreadsChanged) -> str:
    """A line with the new number of threads, and the reason for the change."""
    change = (
        "again"
        if event.threads == event.max_threads
        else f"instead of {event.max_threads}, because the machine is busy,"
    )
    return f"{'threads':<{LABEL_WIDTH}}{event.threads} {change} from step {event.step:,} on"


def activation_lines(event: Evaluated) -> list[str]:
    """A line for each hook point of `train.log` with its statistics."""
    width = max(map(len, event.activations), default=0)
    lines = []
    for name, statistics in event.activations.items():
        cells = [
            f"{key} {'-' if value is None else format_number(value)}"
            for key, value in statistics.items()
        ]
        lines.append(f"{name:<{width}}  {'  '.join(cells)}")
    return lines


def sparkline(values: list[float], limit: int = 24) -> str:
    """The last values as a row of small bars; × for NaN and infinity.

    >>> sparkline([4.0, 2.0, 1.0]), sparkline([4.0, math.nan, 1.0])
    ('█▃▁', '█×▁')
    """
    values = values[-limit:]
    finite = list(filter(math.isfinite, values))
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "×"
        return BARS[round(7 * (value - low) / span)] if span else BARS[0]

    return "".join(map(bar, values))
