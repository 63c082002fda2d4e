"""The text path of preparing: from documents to blocks, and from blocks to batches."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from regard.config import Choice, RunConfig, kind_of, make
from regard.data.batch import Batch
from regard.data.loader import TextLoader, sequential_blocks
from regard.data.text import Text
from regard.data.token_store import TokenStore, text_store
from regard.errors import ConfigError, DataError
from regard.models.build import resolve
from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.pipelines.base import (
    EvalData,
    Progress,
    TrainingData,
    generator_of,
    rows_per_step,
    scheduled,
)
from regard.tasks import TASKS, Causal, Masked, Task
from regard.text import Tokenizer

JUDGED = 1  # the seed of what is random in judging: the same for every run


def prepare_text(
    config: RunConfig,
    train: Text,
    held: Text,
    tokenizer: Tokenizer,
    fingerprint: str,
    progress: Progress | None,
) -> TrainingData:
    """Everything a run on text is trained and judged on."""
    exam = examine_text(config, held, tokenizer, progress)
    task, model = exam.task, exam.model
    store = _store(task, train, tokenizer, _named(progress, "tokenizing"))
    rows = _rows(config, model)
    if isinstance(task, Masked) and task.next_sentence and rows < 2:
        raise ConfigError(
            "task.next_sentence takes the other half of its pairs from other rows, and there is "
            "only one;\nraise train.batch or train.tokens, or lower train.accumulate"
        )
    loader = TextLoader(store, model.context, rows, config.train.seed, reserved=_frame(task))

    def batch(number: int) -> Batch:
        block = loader.examples(number)
        return task.collate((block[:, :-1], block[:, 1:]), generator_of(config, number))

    return TrainingData(
        **vars(exam),
        batch=scheduled(config, task, batch),
        example_ids=lambda number: loader.starts(number).tolist(),
        all_batches=lambda: _blocks(config, task, model, store, None),
        description=[
            f"data       {train.description}",
            f"held out   {held.description}",
            f"tokenizer  {tokenizer.kind}, {tokenizer.size:,} tokens; "
            f"{len(store):,} to learn from, {exam.validation_size:,} held out",
        ],
        fingerprint=fingerprint,
    )


def examine_text(
    config: RunConfig, held: Text, tokenizer: Tokenizer, progress: Progress | None
) -> EvalData:
    """What a model is judged by."""
    task = text_task(config, tokenizer)
    store = _store(task, held, tokenizer, _named(progress, "tokenizing held-out text"))
    if len(store) < 2:
        raise DataError(
            f"the held-out text has {len(store)} token, so there is nothing to predict in it;"
            "\ngive more text, a larger data.validation_fraction, or a data.validation of its own"
        )
    if isinstance(task, Causal):
        first = len(tokenizer.decode([int(store.tokens[0])]).encode())
        task = replace(task, bytes_per_token=(store.bytes - first) / (len(store) - 1))
    model = resolve(config.model, vocab_size=tokenizer.size)
    return EvalData(
        task=task,
        task_choice=config.task,
        tokenizers=tokenizer,
        model=model,
        validation_batches=lambda limit: _blocks(config, task, model, store, limit),
        validation_data=held,
        validation_size=len(store),
    )


def text_task(config: RunConfig, tokenizer: Tokenizer) -> Task:
    """The task of a run on text; those that must know the vocabulary are told."""
    return make(config.task, TASKS, "task", tokenizer=tokenizer, bytes_per_token=None)


def must_hide(choice: Choice, model: TransformerConfig) -> None:
    """Refuse a model that cannot learn to fill in what is hidden."""
    task = make(choice, TASKS, "task")
    assert isinstance(task, Masked)
    head, options = kind_of(model.head)
    wanted: Choice = "masked"
    if task.next_sentence:
        wanted = {"kind": "masked", "next_sentence": True}
    if head != "masked" or (task.next_sentence and not options.get("next_sentence")):
        raise ConfigError(f"task={choice!r} needs model.head={wanted!r}, not {model.head!r}")
    if task.next_sentence and model.segments < 2:
        raise ConfigError(
            f"task.next_sentence needs model.segments=2, not {model.segments}: "
            "it tells two sentences apart"
        )
    if model.context <= task.frame:
        raise ConfigError(
            f"model.context={model.context} has no room for text between special tokens; "
            f"give {task.frame + 1} or more"
        )


def _store(
    task: Task, text: Text, tokenizer: Tokenizer, progress: Callable[[int, int], None] | None
) -> TokenStore:
    between = task.between if isinstance(task, Masked) else None
    return text_store(text, tokenizer, separator=between, progress=progress)


def _frame(task: Task) -> int:
    return task.frame if isinstance(task, Masked) else 0


def _rows(config: RunConfig, model: ModelConfig) -> int:
    """The rows of a micro-batch."""
    settings = config.train
    rows = rows_per_step(settings, model.context)
    return max(1, rows // settings.accumulate)


def _blocks(
    config: RunConfig, task: Task, model: ModelConfig, store: TokenStore, limit: int | None
) -> Iterator[Batch]:
    rows = max(_rows(config, model), 16)
    generator = torch.Generator().manual_seed(JUDGED)
    for examples in sequential_blocks(store.tokens, model.context - _frame(task), rows, limit):
        yield task.collate(examples, generator)


def _named(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else (lambda done, of: progress(name, done, of))
