"""What happens in a run, for whoever wants to show it."""

from dataclasses import dataclass
from pathlib import Path

from regard.config import RunConfig


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The data is ready and the model is made."""

    folder: Path
    config: RunConfig
    description: list[str]
    parameters: int
    step: int  # 0, or where a resumed run goes on


@dataclass(frozen=True, slots=True)
class BaselineEvaluated:
    """Before the first step: how well n-grams of the same text do."""

    order: int
    tokens: int  # that were counted
    metrics: dict[str, float]  # of held-out text


@dataclass(frozen=True, slots=True)
class StepLogged:
    """Some steps were taken."""

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    targets_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The held-out data was looked at."""

    step: int
    metrics: dict[str, float]
    best: bool
    sample: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run is finished; `metrics` are those of the model that was kept."""

    folder: Path
    step: int
    metrics: dict[str, float]
    seconds: float
    stopped_early: bool = False


Event = RunStarted | BaselineEvaluated | StepLogged | Evaluated | RunFinished
