"""What a run is trained and judged on, once its data has been opened."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from regard.config import Choice, RunConfig
from regard.data.batch import Batch, PairBatch, TextBatch
from regard.data.sources import Data
from regard.models.presets import ModelConfig
from regard.tasks import Task
from regard.tasks.scheduled import sampling
from regard.text import PairTokenizers, Tokenizer

Tokenizers = Tokenizer | PairTokenizers
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


@dataclass(frozen=True, kw_only=True)
class Exam:
    """What a model is judged by, ready to be used."""

    task: Task
    choice: Choice  # the task as the run keeps it, with what only the data could tell
    tokenizers: Tokenizers | None  # None: of images
    model: ModelConfig
    held_out: Callable[[int | None], Iterator[Batch]]  # at most so many targets; None: all
    held_out_data: Data
    held_out_size: int  # tokens of text, pairs, or images
    left_out: int = 0  # pairs too long for the model


@dataclass(frozen=True, kw_only=True)
class Material(Exam):
    """Everything a run is trained and judged on."""

    batch: Callable[[int], Batch]  # the micro-batch of this number, a pure function of the seed
    samples: Callable[[int], list[int]]  # what it reads: rows of the data, or tokens it begins at
    train_in_order: Callable[[], Iterator[Batch]]  # all of it once, for models that count
    description: list[str]
    fingerprint: str  # of the data, whatever its tokenizer


def generator_of(config: RunConfig, number: int) -> torch.Generator:
    """The random numbers of a micro-batch: a function of the seed and its number."""
    # hashed, because the CPU's generator looks at the lower half of its seed only
    digest = hashlib.sha256(f"{config.train.seed} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def scheduled(
    config: RunConfig, task: Task, batch: Callable[[int], Batch]
) -> Callable[[int], Batch]:
    """The same batches, with a mark wherever the model is to read its own words (`task.sampled`).

    The marks of a micro-batch are a function of the seed and its number, as all of it is.
    """
    choice = getattr(task, "sampled", 0.0)
    if choice == 0:
        return batch
    share = sampling(choice, config.train.steps)

    def marked(number: int) -> Batch:
        made = batch(number)
        assert isinstance(made, TextBatch | PairBatch)
        chances = torch.rand(made.ids.shape, generator=generator_of(config, number))
        return replace(made, own=chances < share(number // config.train.accumulate))

    return marked
