"""What a run is trained and judged on, once its data has been opened."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from regard.config import Choice, RunConfig, TrainConfig
from regard.data.batch import Batch, PairBatch, TextBatch
from regard.data.sources import Data
from regard.models.presets import ModelConfig
from regard.seeds import batch_generator
from regard.tasks import Task
from regard.tasks.scheduled import sampling
from regard.text import PairTokenizers, Tokenizer

Tokenizers = Tokenizer | PairTokenizers
DEFAULT_TOKENS = 4096  # of a step, where neither train.batch nor train.tokens is set
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


@dataclass(frozen=True, kw_only=True)
class EvalData:
    """What a model is judged by, ready to be used."""

    task: Task
    task_choice: Choice  # the task as the run keeps it, with what only the data could tell
    tokenizers: Tokenizers | None  # None: of images
    model: ModelConfig
    validation_batches: Callable[
        [int | None], Iterator[Batch]
    ]  # at most so many targets; None: all
    validation_data: Data
    validation_size: int  # tokens of text, pairs, or images
    dropped: int = 0  # pairs too long for the model


@dataclass(frozen=True, kw_only=True)
class TrainingData(EvalData):
    """Everything a run is trained and judged on."""

    batch: Callable[[int], Batch]  # the micro-batch of this number, a pure function of the seed
    example_ids: Callable[
        [int], list[int]
    ]  # what it reads: rows of the data, or tokens it begins at
    all_batches: Callable[[], Iterator[Batch]]  # all of it once, for models that count
    description: list[str]
    fingerprint: str  # of the data, whatever its tokenizer


def rows_per_step(settings: TrainConfig, context: int) -> int:
    """Rows of `context` tokens in an optimizer step: `train.batch`, or as `train.tokens` allows."""
    return settings.batch or (settings.tokens or DEFAULT_TOKENS) // context


def generator_of(config: RunConfig, number: int) -> torch.Generator:
    """The random numbers of a micro-batch: a function of the seed and its number."""
    return batch_generator(config.train.seed, number)


def scheduled(
    config: RunConfig, task: Task, batch: Callable[[int], Batch]
) -> Callable[[int], Batch]:
    """The same batches, with a mark wherever the model reads its own prediction.

    For scheduled sampling. The marks of a micro-batch are a function of the seed and its number.
    """
    choice = getattr(task, "scheduled_sampling", 0.0)
    if choice == 0:
        return batch
    share = sampling(choice, config.train.steps)

    def marked(number: int) -> Batch:
        made = batch(number)
        assert isinstance(made, TextBatch | PairBatch)
        chances = torch.rand(made.ids.shape, generator=generator_of(config, number))
        return replace(made, use_prediction=chances < share(number // config.train.accumulate))

    return marked
