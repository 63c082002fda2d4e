"""`Pipeline`, the base class of all code that depends on the kind of data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from regard.config import Choice, RunConfig, TrainConfig, merge
from regard.data.batch import Batch
from regard.data.columns import Roles
from regard.data.tables import Table
from regard.errors import ConfigError
from regard.generate import Search
from regard.models.build import resolve
from regard.models.presets import ModelConfig
from regard.pipelines.by_length import MetricsByLength
from regard.seeds import batch_generator
from regard.tasks import Task
from regard.tasks.scheduled_sampling import sampling_schedule
from regard.text import PairTokenizers, Tokenizer
from regard.text.pair_tokenizers import JOINT, SOURCE

Tokenizers = Tokenizer | PairTokenizers
Progress = Callable[[str, int, int], None]  # description, bytes (or UNITS) done, in total
EVALUATING, TRANSLATING, CAPTIONING = "evaluating", "translating", "captioning"
# units of progress where it is not in bytes
UNITS = {EVALUATING: "targets", TRANSLATING: "sentences", CAPTIONING: "images"}
DEFAULT_TOKENS = 4096  # per step, if neither train.batch nor train.tokens is set


class Data(Protocol):
    """A dataset of some kind, opened but not yet tokenized."""

    @property
    def kind(self) -> str:
        """The key of its pipeline in PIPELINES."""

    @property
    def name(self) -> str:
        """A short name, for messages and run folders."""

    @property
    def description(self) -> str:
        """A line that says what was read and what was skipped."""

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """The training split, and about a `fraction` of the data for validation."""

    def note_overlap(self, train: Any) -> Self:
        """The same validation data; its description says how much is also training data."""

    def fingerprint(self) -> str:
        """A hash that is equal for equal content."""


class TrainedModel(Protocol):
    """The parts of a run that a prediction needs; `regard.api.Run` has them."""

    @property
    def config(self) -> RunConfig:
        """The settings of the run."""

    @property
    def model(self) -> nn.Module:
        """The model, on its device."""

    @property
    def tokenizers(self) -> Tokenizers | None:
        """The tokenizers; None for data without text."""


@dataclass(frozen=True, kw_only=True)
class EvalData:
    """The data that a model is evaluated on: a task, and batches of validation data."""

    task: Task
    task_choice: Choice  # the task as config.json saves it, with the settings derived from the data
    tokenizers: Tokenizers | None  # None for data without text
    model: ModelConfig
    validation_batches: Callable[[int | None], Iterator[Batch]]  # limit of targets → batches
    validation_data: Any  # a `Data`, of the class that the pipeline opens
    validation_size: int  # in tokens of text, pairs, images, …
    validation_targets: int  # number of targets, the unit of `validation_batches`' limit
    stride: int | None = None  # of the windows that a language model is evaluated on
    too_long: int = 0  # validation examples that were truncated or dropped, since they are too long
    unknown_tokens: int = 0  # tokens of a validation text that are not in the vocabulary

    def targets(self, limit: int | None) -> int:
        """How many targets an evaluation with this limit has."""
        total = self.validation_targets
        return total if limit is None else min(limit, total)


@dataclass(frozen=True, kw_only=True)
class TrainingData(EvalData):
    """Everything a run is trained and evaluated on."""

    batch: Callable[[int], Batch]  # micro-batch index → batch, a pure function of the seed
    example_ids: Callable[[int], list[int]]  # micro-batch index → rows, or token offsets
    all_batches: Callable[[], Iterator[Batch]]  # the data once, not shuffled, for `fit`
    description: list[str]  # lines of the heading: data, validation, tokenizer, …
    # metrics of simple predictions on the validation data, by name: of a series, of a regression
    baselines: Callable[[], dict[str, dict[str, float]]] | None = None
    # the settings that train a baseline, by its name; of those that are models
    baseline_settings: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""  # of the data without its tokenizer; set by `prepare_training`


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs to predict from: the rows of a file, each with its input."""

    description: str  # the file that was read, and the column
    rows: Iterator[tuple[dict[str, Any], Any]]  # the columns of a row, and its input


class TextWithSvg(str):
    """A sample as text for a terminal, with the same sample as SVG."""

    svg: str

    def __new__(cls, text: str, svg: str) -> "TextWithSvg":
        """The text, and its SVG as an attribute."""
        sample = super().__new__(cls, text)
        sample.svg = svg
        return sample


class Pipeline:
    """One kind of data, or one more file format of a kind.

    A new kind of data: a subclass that defines `open`, `training_data` and `evaluation_data`, with
    an instance in `PIPELINES` under its `name`. The other methods have defaults.

    A new file format: a subclass of the pipeline of its kind that overrides `recognizes` and
    `open`, with an instance under any other key. It keeps `name`; after `open`, the pipeline in
    `PIPELINES[name]` does the rest.
    """

    name: ClassVar[str]  # `Data.kind` of its data and `Task.data_kind` of its tasks
    data_description: ClassVar[str] = "data of its own kind"  # for messages
    tokenizer_type: ClassVar[type | None] = None  # Tokenizer, PairTokenizers or None
    exclusive: ClassVar[bool] = False  # it opens every path that it recognizes, whatever the task
    predicts_from_files: ClassVar[bool] = False  # an input is an image file, not a text
    evaluates_with_search: ClassVar[bool] = False  # metrics of texts that a search generates
    # options of the default task that apply only to the default model
    model_task_options: ClassVar[tuple[str, ...]] = ()

    def recognizes(self, path: Path) -> bool:
        """Whether a file or folder is of this kind, by its name or content."""
        return False

    def reads_on_request(self, path: Path) -> bool:
        """Whether, for a task of this kind, it may open a path that it does not recognize."""
        return True

    def reads_as_table(self, path: Path, columns: Mapping[str, Any], kind: str | None) -> bool:
        """Whether to read a path as a table, by default if the class does not define `open`.

        `columns` are the settings that name columns, `kind` is the kind of data that the task
        learns from, None if no task is given.
        """
        return type(self).open is Pipeline.open

    def open(self, path: Path) -> Any:
        """The `Data` at a path."""
        raise NotImplementedError

    def from_table(self, table: Table, roles: Roles) -> Any:
        """The `Data` of a table, whose columns have these roles."""
        raise NotImplementedError

    def lowercase(self, data: Any) -> Any:
        """The data in lower case (`data.lower`)."""
        raise ConfigError(f"data.lower lowercases text; {data.name} holds {data.kind}")

    def validation_split(self, data: Any) -> Any:
        """The validation split of data that was opened as validation data."""
        return data

    def defaults(self, data: Any, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """Default settings for this data: tables `task`, `data`, `model` and `train`."""
        return {"task": task}

    def train_defaults(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of the table `train` for a model that the user chose by preset or family."""
        return {}

    def smallest_model(self, config: RunConfig) -> ModelConfig:
        """The model with the smallest vocabulary and head, for checks before the data is read."""
        return resolve(config.model, vocab_size=1)

    def complete_settings(self, config: RunConfig, data: Any) -> RunConfig:
        """The settings, completed with those derived from the untokenized training data."""
        return config

    def preview(
        self, config: RunConfig, train: Any, validation: Any, tokenizers: Any
    ) -> dict[str, str]:
        """Lines of `train --dry-run` that show how the data is read, by their labels.

        `tokenizers` are those of `train.start`; None if they are trained later.
        """
        return {}

    def check_splits(self, config: RunConfig, train: Any, validation: Any) -> None:
        """Raise `DataError` if a split of the data is too small for training."""

    def text_bytes(self, data: Any) -> int | None:
        """The number of bytes of a text, an upper bound on its targets; None for other data."""
        return None

    def train_tokenizers(
        self, config: RunConfig, train: Any, validation: Any, progress: Progress | None
    ) -> Tokenizers | None:
        """Train the tokenizers of a run; None for data without text."""
        return None

    def check_tokenizers(self, config: RunConfig, tokenizers: Any) -> None:
        """Raise `ConfigError` if the tokenizers of a new run cannot encode its data."""

    def load_tokenizers(self, folder: Path) -> Tokenizers | None:
        """The tokenizers that a run folder holds."""
        if (folder / SOURCE).exists():
            return PairTokenizers.load(folder)
        return Tokenizer.load(folder / JOINT)

    def training_data(
        self,
        config: RunConfig,
        train: Any,
        validation: Any,
        tokenizers: Any,
        progress: Progress | None,
    ) -> TrainingData:
        """Training and validation batches of a run."""
        raise NotImplementedError

    def evaluation_data(
        self, config: RunConfig, data: Any, tokenizers: Any, progress: Progress | None
    ) -> EvalData:
        """Validation batches of a trained run, from validation data alone."""
        raise NotImplementedError

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """Sample output of a model for some validation data, shown at each evaluation."""
        return data.task.sample(model, data.validation_batches(data.model.context))

    def evaluate(
        self,
        data: EvalData,
        model: nn.Module,
        device: torch.device,
        *,
        search: Search,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """All metrics on the validation data; `search` is for models that generate text."""
        return validation_metrics(data, model, device, None, progress)

    def evaluate_by_length(
        self, data: EvalData, model: nn.Module, *, search: Search
    ) -> MetricsByLength:
        """Metrics for short and for long texts."""
        raise ConfigError(f"there is no evaluation by length for {self.name}")

    def input_names(self, config: RunConfig) -> tuple[str, ...]:
        """The names of the inputs of a prediction: a text, or two, such as question and context."""
        return ("text",)

    def read_inputs(self, config: RunConfig, path: Path) -> Inputs | None:
        """The inputs in a file, if its format is specific to this kind of data.

        None for other files, which have a text in each row or line.
        """
        return None

    def input_column(self, config: RunConfig) -> str | int | None:
        """The column of the training data that holds the inputs."""
        return config.data.text

    def cell_text(self, cell: Any) -> Any:
        """The text of a cell of a table."""
        return cell

    def predict(self, run: TrainedModel, input: Any, *, top: int) -> Any:
        """The prediction of a trained model for one input (`Run.predict`)."""
        raise ConfigError(f"there is no prediction for {self.name}")

    def predict_batch(self, run: TrainedModel, inputs: Sequence[Any], *, top: int) -> list[Any]:
        """The predictions for several inputs, each as `predict` gives it."""
        return [self.predict(run, input, top=top) for input in inputs]


def validation_metrics(
    data: EvalData,
    model: nn.Module,
    device: torch.device,
    limit: int | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """The task's metrics on the validation data, or on about `limit` of its targets."""
    total = data.targets(limit)

    def batches() -> Iterator[Batch]:
        done = 0
        for batch in data.validation_batches(limit):
            yield batch.to(device)
            if progress is not None:
                done += data.task.evaluation_count(batch)
                progress(EVALUATING, min(done, total), total)

    return data.task.metrics(model, batches())


def with_task_options(task: Choice, options: Mapping[str, Any]) -> Choice:
    """The task as config.json saves it, with these options, which are derived from the data."""
    choice: Choice = merge({"task": task}, {"task": options})["task"]
    return choice


def first_rows(data: Any) -> list[str]:
    """Lines for the heading: the first three rows of the data, as they are interpreted."""
    return [f"row {number}      {row}" for number, row in enumerate(data.first_rows(3), 1)]


def require_texts(texts: Sequence[str]) -> None:
    """Raise `ConfigError` if one of the texts is empty."""
    for number, text in enumerate(texts, 1):
        if not text.strip():
            which = f"text {number} of {len(texts)}" if len(texts) > 1 else "the text"
            raise ConfigError(f"nothing to predict: {which} is empty")


def best_classes(
    logits: Tensor, names: list[str], top: int, predicted: Tensor | None = None
) -> list[list[tuple[str, float]]]:
    """The most probable classes of each row of logits with their probabilities, best first.

    The class that is `predicted` for a row comes first, even where it is not the most probable.
    """
    probabilities = logits.float().softmax(-1)
    scores = probabilities
    if predicted is not None:
        # 2 is larger than any probability
        scores = probabilities.scatter(-1, predicted.unsqueeze(-1), 2.0)
    best = scores.topk(min(top, len(names))).indices
    rows = zip(best.tolist(), probabilities.gather(-1, best).tolist(), strict=True)
    return [[(names[id], p) for id, p in zip(*row, strict=True)] for row in rows]


def rows_per_step(settings: TrainConfig, context: int) -> int:
    """Rows of `context` tokens in an optimizer step: `train.batch`, or `train.tokens` / context."""
    return settings.batch or (settings.tokens or DEFAULT_TOKENS) // context


def with_scheduled_sampling(
    config: RunConfig, task: Task, batch: Callable[[int], Batch]
) -> Callable[[int], Batch]:
    """The batches with the mask `use_prediction`, if the task has scheduled sampling.

    The mask is True where the model reads its own prediction. It is random, a function of the seed
    and the index of the micro-batch.
    """
    choice = getattr(task, "scheduled_sampling", 0.0)
    if choice == 0:
        return batch
    probability = sampling_schedule(choice, config.train.steps)

    def batch_with_mask(index: int) -> Batch:
        teacher_forced: Any = batch(index)
        generator = batch_generator(config.train.seed, index)
        random = torch.rand(teacher_forced.ids.shape, generator=generator)
        mask = random < probability(index // config.train.accumulate)
        result: Batch = replace(teacher_forced, use_prediction=mask)
        return result

    return batch_with_mask
