"""Learning rates over time: a schedule is a function from step to a factor of the lr."""

import math
from collections.abc import Callable

from regard.config import Choice, make
from regard.errors import ConfigError

Schedule = Callable[[int], float]


def _after_warmup(warmup: int, then: Schedule) -> Schedule:
    if warmup < 0:
        raise ConfigError(f"schedule: warmup={warmup} must be at least 0")
    return lambda step: (step + 1) / warmup if step < warmup else then(step)


def constant(steps: int, warmup: int = 0) -> Schedule:
    """1, after a linear warm-up: (s + 1) / warmup at step s, counted from 0."""
    return _after_warmup(warmup, lambda step: 1.0)


def linear(steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A line from 1 after warm-up to `floor` when all is done: 1 - (1 - floor) u.

    u = (s - warmup) / (steps - warmup), at step s counted from 0.
    """
    span = max(steps - warmup, 1)
    return _after_warmup(warmup, lambda step: 1 - (1 - floor) * min((step - warmup) / span, 1))


def cosine(steps: int, warmup: int = 0, floor: float = 0.1) -> Schedule:
    """Half a cosine from 1 to `floor`: floor + (1 - floor) (1 + cos(pi u)) / 2, u as in `linear`.

    Loshchilov & Hutter 2017, without their restarts.
    """
    span = max(steps - warmup, 1)

    def wave(step: int) -> float:
        share = min((step - warmup) / span, 1)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return _after_warmup(warmup, wave)


def inverse_sqrt(steps: int, warmup: int = 4000) -> Schedule:
    """min(t / warmup, sqrt(warmup / t)), t = s + 1: Vaswani et al. 2017, its peak scaled to 1."""
    peak = max(warmup, 1)
    return lambda step: min((step + 1) / peak, math.sqrt(peak / (step + 1)))


def stable_decay(steps: int, warmup: int = 0, decay: float = 0.2, floor: float = 0.0) -> Schedule:
    """Warm up, stay, then fall in a line over the last `decay` of the steps (Hu et al. 2024)."""
    begin = steps - int(decay * steps)
    span = max(steps - begin, 1)
    return _after_warmup(warmup, lambda step: 1 - (1 - floor) * min(max(step - begin, 0) / span, 1))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "inverse_sqrt": inverse_sqrt,
    "stable_decay": stable_decay,
}


def schedule(choice: Choice, steps: int) -> Schedule:
    """The schedule of this name for a run of `steps` steps."""
    return make(choice, SCHEDULES, "schedule", steps=steps)
