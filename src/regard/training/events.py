"""The events that a training run yields; nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from regard.config import RunConfig

ActivationStatistics = Mapping[str, Mapping[str, float | None]]  # hook point → mean, norm, zeros


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The data is prepared and the model is built."""

    folder: Path
    config: RunConfig
    description: list[str]
    parameters: int
    step: int  # 0, or the checkpoint that a resumed run starts from


@dataclass(frozen=True, slots=True)
class BaselineEvaluated:
    """The n-gram baseline of the same text was fitted and evaluated, before the first step."""

    order: int
    tokens: int  # number of tokens it was fitted to
    metrics: dict[str, float]  # of the validation text


@dataclass(frozen=True, slots=True)
class SeriesBaselines:
    """The baselines of a series were fitted and evaluated, before the first step."""

    metrics: dict[str, dict[str, float]]  # of the validation data, by the name of the baseline


@dataclass(frozen=True, slots=True)
class StepLogged:
    """Steps were taken and logged."""

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    targets_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True)
class ThreadsChanged:
    """Training goes on with another number of CPU threads, since other programs use the cores."""

    step: int
    threads: int
    max_threads: int  # the number on a free machine


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The model was evaluated on the validation data."""

    step: int
    metrics: dict[str, float]
    best: bool
    sample: str
    activations: ActivationStatistics = field(default_factory=dict)  # of `train.log`
    part: str = ""  # of the validation data, as "first 200,000 of 325,100 tokens"; "": all of it


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run is finished; `metrics` are those of the model in `model.safetensors`."""

    folder: Path
    step: int
    metrics: dict[str, float]
    seconds: float
    stopped_early: bool = False
    evaluated: str = ""  # what the metrics were computed on, as "all 3,000 tokens"
    seconds_for_all: float | None = None  # of an evaluation of all data, where it was left out
    best_step: int | None = None  # after which the saved weights were evaluated; 0: untrained


Event = (
    RunStarted
    | BaselineEvaluated
    | SeriesBaselines
    | StepLogged
    | ThreadsChanged
    | Evaluated
    | RunFinished
)
