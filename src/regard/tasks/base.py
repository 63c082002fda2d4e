"""`Task`, the base class of all tasks: batches from examples, the loss, and the metrics."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.errors import ConfigError
from regard.models.presets import ModelConfig
from regard.tasks.metrics import mean_loss


class Task:
    """A task that models are trained on. Subclass it, and add the class to `TASKS`.

    A subclass declares its kind of data and the architectures of models that it is for, and defines
    `collate`, `loss` and `count`; the other methods have defaults. The loss is a sum and a count,
    so that splitting a batch into micro-batches changes nothing.
    """

    data_kind: ClassVar[str]  # the kind of data: a key of pipelines.PIPELINES
    architectures: ClassVar[tuple[str, ...]]  # of models that can be trained on it
    input_kinds: ClassVar[tuple[str, ...]] = ("text",)  # inputs that these models read
    methods: ClassVar[tuple[str, ...]] = ("predict",)  # methods of `Run` that apply, main one first
    metric_names: ClassVar[tuple[str, ...]] = ("loss",)  # keys of `metrics` always present
    unit: ClassVar[str] = ""  # of the metrics, for messages, where it is not obvious
    loss_unit: ClassVar[str] = "nats per target"  # the unit of `loss`, as an axis label
    # whether an evaluation on a part of the targets takes the first ones instead of a sample
    evaluates_beginning: ClassVar[bool] = False
    # whether it is evaluated on overlapping windows, which advance by `train.evaluate_stride`
    uses_evaluation_stride: ClassVar[bool] = False
    reads_characters: ClassVar[bool] = False  # whether a batch may have the characters of words
    target_name: ClassVar[str] = "targets"  # the targets of an evaluation, in messages
    best_metric: ClassVar[str] = "loss"  # the metric that picks the best weights by default
    predicts_words: ClassVar[bool] = False  # `Run.predict` gives one prediction per word of a text
    # `Run.predict` gives the `top` most probable predictions
    supports_top: ClassVar[bool] = False

    def collate(self, examples: Any, generator: torch.Generator) -> Batch:
        """Make a batch; all randomness comes from the generator."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Float[Tensor, ""]:
        """The loss summed over the scored targets."""
        raise NotImplementedError

    def count(self, batch: Any) -> Int[Tensor, ""]:
        """How many targets are scored.

        The count may be a CPU tensor only if it depends on the shapes of the batch alone, because
        a CUDA graph would replay an outdated value (see `count_on_device`).
        """
        raise NotImplementedError

    def evaluation_count(self, batch: Any) -> int:
        """The targets of a batch that count towards `train.evaluate_targets`: by default, all."""
        return int(self.count(batch))

    @classmethod
    def describe_part(cls, targets: int, total: int) -> str:
        """The part of the validation data that an evaluation used; "" for all of it."""
        if targets >= total:
            return ""
        first = "the first " if cls.evaluates_beginning else ""
        return f"{first}{targets:,} of {total:,} {cls.target_name}"

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """The validation metrics of a model; `loss` is among them."""
        return {"loss": mean_loss(self, model, batches)}

    def check_model(self, model: ModelConfig) -> None:
        """Raise `ConfigError` for an unsuitable model; the caller prepends "task=…: "."""
        input_kind = getattr(model, "input_kind", "text")
        if input_kind not in self.input_kinds:
            raise ConfigError(
                f"needs a model that reads {' or '.join(self.input_kinds)}, not {input_kind}; "
                "choose another model.preset or model.family"
            )
        architecture = getattr(model, "architecture", "decoder")
        if architecture not in self.architectures:
            accepted = " or ".join(map(repr, self.architectures))
            is_recurrent = architecture == "decoder" and hasattr(model, "bidirectional")
            setting = "architecture"
            if is_recurrent and "encoder" in self.architectures:
                setting = "bidirectional=true"
            raise ConfigError(
                f"needs a model of architecture {accepted}, not {architecture!r}; "
                f"choose another model.preset or model.{setting}"
            )
        if getattr(model, "char_dim", 0) and not self.reads_characters:
            raise ConfigError(
                f"model.char_dim={cast(Any, model).char_dim} reads the characters of tagged "
                f"words, but the task learns from {self.data_kind}; leave it out"
            )

    def sample(self, model: nn.Module, batches: Iterable[Any]) -> str:
        """Sample output of the model for the first validation batches, shown at an evaluation."""
        return ""

    def predict(self, model: nn.Module, text: str, *, top: int) -> Any:
        """The prediction of the model for one text, for tasks on text (`Run.predict`)."""
        raise ConfigError(f"the task has no prediction for a text; use `{self.methods[0]}` instead")

    def tokens_per_target(self, model: ModelConfig) -> int | None:
        """How many tokens a model reads for each target; None where that varies between rows."""
        return None

    def tokens_read(self, batch: Any, context: int) -> int:
        """The number of tokens or patches of a batch that a model reads.

        The setting `minutes` uses it to estimate the speed of models and to choose one.
        """
        return int(self.count(batch))


def check_label_smoothing(label_smoothing: float) -> None:
    """Raise `ConfigError` if label smoothing leaves no probability for the target."""
    if not 0 <= label_smoothing < 1:
        raise ConfigError(f"task.label_smoothing={label_smoothing} must be at least 0 and below 1")


def resolve_class_names(setting: list[str], dataset_names: Sequence[str]) -> list[str]:
    """The names of the classes: those of the data, or names given for classes 0, 1, 2, …

    `setting` is `task.class_names`. It may also list the names of the data and further ones, in any
    order, as in a run that starts from a classifier.
    """
    if not setting:
        return list(dataset_names)
    if repeated := [name for name, count in Counter(setting).items() if count > 1]:
        raise ConfigError(
            f"task.class_names has {repeated[0]!r} twice; give each class its own name"
        )
    if {*dataset_names} <= {*setting}:
        return setting
    numbers = [str(number) for number in range(len(dataset_names))]
    if len(setting) != len(dataset_names) or list(dataset_names) != numbers:
        raise ConfigError(
            f"task.class_names has {len(setting)} names, and the data {len(dataset_names)} "
            f"classes: {', '.join(dataset_names[:5])}{', …' if len(dataset_names) > 5 else ''};\n"
            "give one name for each class if the data numbers its classes from 0; else leave it out"
        )
    return setting
