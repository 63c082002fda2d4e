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
    description: list[str]  # lines for the heading
    parameters: int
    step: int  # 0, or the step of the checkpoint that a resumed run continues from


@dataclass(frozen=True, slots=True)
class NGramBaselineEvaluated:
    """An n-gram baseline was fitted to the training text and evaluated, before the first step."""

    order: int
    tokens: int  # number of tokens it was fitted to
    metrics: dict[str, float]  # on the validation text

    @property
    def name(self) -> str:
        """The model in words."""
        return f"{self.order}-grams, modified Kneser–Ney"

    @property
    def settings(self) -> str:
        """The settings that train this model."""
        return f"model.family=ngram model.order={self.order} model.smoothing=kneser_ney"


@dataclass(frozen=True, slots=True)
class SimpleBaselinesEvaluated:
    """Simple predictions of numbers were evaluated before the first step.

    Naive, seasonal naive and linear forecasts of a time series; the mean in a text regression.
    """

    metrics: dict[str, dict[str, float]]  # on the validation data, by the name of the baseline
    # the settings that train a baseline, by its name; of those that are models
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepLogged:
    """Steps were taken and logged."""

    step: int  # the last of them
    steps: int  # of the whole run
    loss: float  # moving average
    lr: float
    grad_norm: float
    targets_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True)
class ThreadsChanged:
    """The number of CPU threads changed: other programs have begun or stopped using the cores."""

    step: int
    threads: int
    max_threads: int  # the number on an idle machine


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The model was evaluated on the validation data."""

    step: int
    metrics: dict[str, float]
    is_best: bool
    sample: str
    activations: ActivationStatistics = field(default_factory=dict)  # of `train.log`
    evaluated_on: str = ""  # the targets, as "the first 200 of 325 tokens"; "": all of them


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run is finished; `metrics` are those of the model in `model.safetensors`."""

    folder: Path
    step: int
    metrics: dict[str, float]
    seconds: float
    stopped_early: bool = False
    evaluated_on: str = ""  # the targets of the metrics, as "all 3,000 tokens"
    seconds_for_all: float | None = None  # of the evaluation of all data, if it was skipped
    best_step: int | None = None  # step of the saved weights; 0: untrained


Event = (
    RunStarted
    | NGramBaselineEvaluated
    | SimpleBaselinesEvaluated
    | StepLogged
    | ThreadsChanged
    | Evaluated
    | RunFinished
)
