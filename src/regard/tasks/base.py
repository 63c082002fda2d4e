"""What a task is: four methods between examples and numbers."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.data.batch import Batch
from regard.errors import ConfigError

Learns = Literal["text", "pairs", "images", "labels", "tags", "series"]


class Task(Protocol):
    """What to learn. The loss is a sum and a count, so that any split of a batch is exact."""

    learns: ClassVar[Learns]  # from what: `Data.kind`
    verb: ClassVar[str]  # what its models do: the command and the method of `Run`
    measures: ClassVar[tuple[str, ...]]  # the keys of its metrics

    def collate(self, examples: Any, generator: torch.Generator) -> Batch:
        """Make a batch; all randomness comes from the generator."""

    def loss(self, model: nn.Module, batch: Any) -> Float[Tensor, ""]:
        """The loss summed over the scored targets."""

    def count(self, batch: Any) -> Int[Tensor, ""]:
        """How many targets are scored."""

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """What a held-out set says of the model."""


def check_label_smoothing(smoothing: float) -> None:
    """Refuse label smoothing that leaves nothing to learn."""
    if not 0 <= smoothing < 1:
        raise ConfigError(f"task.label_smoothing={smoothing} must be at least 0 and below 1")


def class_names(given: list[str], own: Sequence[str]) -> list[str]:
    """The names of classes: the data's own, or those given for numbers from 0 on."""
    if not given or given == list(own):
        return list(own)
    if len(given) != len(own) or list(own) != [str(number) for number in range(len(own))]:
        raise ConfigError(
            f"task.names has {len(given)} names, and the data {len(own)} classes: "
            f"{', '.join(own[:5])}{', …' if len(own) > 5 else ''};\n"
            "names are for classes that are numbered from 0 on, one for each"
        )
    return given


class Objective(nn.Module):
    """A model and what it is trained for, in one module: compile and wrappers see one call."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Batch) -> Float[Tensor, ""]:
        """The summed loss."""
        return self.task.loss(self.model, batch)
