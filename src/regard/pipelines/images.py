"""The image path of preparing: from images and their classes to batches."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import Choice, RunConfig, kind_of, make, merge
from regard.data.batch import Batch, ImageBatch
from regard.data.images import Images
from regard.data.loader import RowLoader
from regard.errors import ConfigError, DataError
from regard.models.build import describe, resolve
from regard.models.vision import VisionConfig
from regard.pipelines.base import EvalData, TrainingData, generator_of
from regard.tasks import TASKS
from regard.tasks.classify import Classify

ROWS = 128  # of a step, where train.batch is not given
SHOWN = 6  # images whose classes are told at each evaluation


def prepare_images(
    config: RunConfig, train: Images, held: Images, fingerprint: str
) -> TrainingData:
    """Everything a run on images is trained and judged on."""
    settings = config.train
    if settings.tokens is not None:
        raise ConfigError("train.tokens counts tokens, and images have none; give train.batch")
    task = image_task(config.task)
    names = task.named(train.class_names)
    model = resolve(config.model, channels=train.channels, head={"classes": len(names)})
    assert isinstance(model, VisionConfig)
    if (kind := kind_of(model.head)[0]) != "classify":
        raise ConfigError(f"to tell classes apart, model.head is 'classify', not {kind!r}")
    size = model.image_size
    if task.crop >= size:
        raise ConfigError(f"task.crop={task.crop} shifts all of an image of {size} pixels away")
    mean, std = (task.mean, task.std) if task.mean else train.statistics(size)
    facts = {"task": {"names": names, "mean": mean, "std": std}}
    choice = merge({"task": config.task}, facts)["task"]
    config = replace(config, task=choice, model=describe(model))
    exam = examine_images(config, held)
    task = image_task(choice)
    rows = max(1, (settings.batch or ROWS) // settings.accumulate)
    loader = RowLoader(len(train), rows, settings.seed)

    def batch(number: int) -> Batch:
        chosen = loader.examples(number)
        examples = train.read(chosen, size), train.labels[chosen], True
        return task.collate(examples, generator_of(config, number))

    as_is = train.square and train.side == size
    resized = "" if as_is else f"; resized to {size} × {size}"
    return TrainingData(
        **vars(exam),
        batch=batch,
        example_ids=lambda number: loader.examples(number).tolist(),
        all_batches=lambda: _in_order(task, train, size, rows, None),
        description=[
            f"data       {train.description}{resized}",
            f"held out   {held.description}",
            f"classes    {', '.join(names[:12])}{', …' if len(names) > 12 else ''}",
        ],
        fingerprint=fingerprint,
    )


def examine_images(config: RunConfig, held: Images) -> EvalData:
    """What a model is judged by; the task must know its classes, as that of a run does."""
    task = image_task(config.task)
    held = held.with_class_names(task.names)
    model = resolve(config.model)
    assert isinstance(model, VisionConfig)
    if held.channels != model.channels:
        raise DataError(
            f"{held.name} has images of {held.channels} channels; the model reads {model.channels}"
        )
    if len(task.mean) != model.channels:
        raise ConfigError(
            f"task.mean={task.mean} must have a number for each of {model.channels} channels"
        )
    rows = max(ROWS, config.train.batch or 0)
    return EvalData(
        task=task,
        task_choice=config.task,
        tokenizers=None,
        model=model,
        validation_batches=lambda limit: _in_order(task, held, model.image_size, rows, limit),
        validation_data=held,
        validation_size=len(held),
    )


def image_task(choice: Choice) -> Classify:
    """The task of a run on images."""
    task = make(choice, TASKS, "task")
    assert isinstance(task, Classify)
    return task


def _in_order(
    task: Classify, images: Images, size: int, rows: int, limit: int | None
) -> Iterator[Batch]:
    """All images once, or about `limit` of them, evenly spread: neighbours may be of one class."""
    count = len(images)
    chosen = np.arange(count)
    if limit is not None and limit < count:
        chosen = np.arange(limit) * count // limit
    for start in range(0, len(chosen), rows):
        some = chosen[start : start + rows]
        yield task.collate((images.read(some, size), images.labels[some], False), torch.Generator())


@torch.no_grad()
def classify(
    model: nn.Module, images: Tensor, names: list[str], top: int = 1
) -> list[list[tuple[str, float]]]:
    """The likeliest classes of each image with their probabilities, best first."""
    model.eval()
    logits: Tensor = model.head(model(images))  # type: ignore[operator]
    found = logits.float().softmax(-1).topk(min(top, len(names)))
    return [
        [(names[number], share) for number, share in zip(numbers, shares, strict=True)]
        for numbers, shares in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]


def sample(exam: EvalData, model: nn.Module) -> str:
    """What the model says of a few held-out images, and what they are."""
    assert isinstance(exam.task, Classify)
    batch = next(iter(exam.validation_batches(SHOWN))).to(next(model.parameters()).device)
    assert isinstance(batch, ImageBatch)
    names = exam.task.names
    lines = [
        f"{names[target]} → {said} ({share:.0%})"
        for target, ((said, share),) in zip(
            batch.targets.tolist(), classify(model, batch.images, names), strict=True
        )
    ]
    return "\n".join(lines)
