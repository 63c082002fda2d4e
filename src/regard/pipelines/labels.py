"""The path of preparing for labels and tags: from texts with known answers to batches."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from regard.config import Choice, RunConfig, make, merge
from regard.data.batch import Batch
from regard.data.labels import LabelKind, LabelledText
from regard.data.loader import PairIndices, PairLoader
from regard.data.token_store import PairStore
from regard.errors import ConfigError
from regard.models.bag import BagConfig
from regard.models.build import describe, resolve
from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.nn.loss import IGNORED
from regard.pipelines.base import DEFAULT_TOKENS, EvalData, TrainingData, generator_of
from regard.pipelines.by_length import ByLength, by_length
from regard.tasks import TASKS
from regard.tasks.label import Label
from regard.text import Tokenizer

SHOWN = 4  # texts whose answers are told at each evaluation
AT_ONCE = 128  # texts that are judged together


def prepare_labels(
    config: RunConfig,
    train: LabelledText,
    held: LabelledText,
    tokenizer: Tokenizer,
    fingerprint: str,
) -> TrainingData:
    """Everything a run on labels or tags is trained and judged on."""
    task = label_task(config.task)
    names = task.named(train.class_names)
    choice = merge({"task": config.task}, {"task": {"names": names}})["task"]
    model = reader(config.model, task, classes=len(names), vocab_size=tokenizer.size)
    config = replace(config, task=choice, model=describe(model))
    exam = examine_labels(config, held, tokenizer)
    task = label_task(choice)
    store, cut = _store(train.with_class_names(names), tokenizer, model)
    loader = _loader(config, model, store)
    description = [
        f"data       {train.description}",
        f"held out   {held.description}",
        f"tokenizer  {tokenizer.kind}, {tokenizer.size:,} tokens",
        f"classes    {', '.join(names[:12])}{', …' if len(names) > 12 else ''}",
    ]
    if cut or exam.dropped:
        description.append(
            f"cut        {cut:,} texts to learn from and {exam.dropped:,} held out, to the first "
            f"{model.context} tokens"
        )
    return TrainingData(
        **vars(exam),
        batch=lambda number: _batch(task, store, loader.examples(number), config, number),
        example_ids=lambda number: loader.examples(number).indices.tolist(),
        all_batches=lambda: (_batch(task, store, r, config, 0) for r in loader.sequential()),
        description=description,
        fingerprint=fingerprint,
    )


def examine_labels(config: RunConfig, held: LabelledText, tokenizer: Tokenizer) -> EvalData:
    """What a model is judged by; the task must know its classes, as that of a run does."""
    task, model = label_task(config.task), resolve(config.model)
    held = held.with_class_names(task.names)
    store, cut = _store(held, tokenizer, model)
    loader = _loader(config, model, store)

    def validation_batches(limit: int | None) -> Iterator[Batch]:
        targets = sum(len(classes) for _, classes in held.rows)
        most = None if limit is None else max(1, limit * len(held) // targets)
        return (_batch(task, store, rows, config, 0) for rows in loader.sequential(most))

    return EvalData(
        task=task,
        task_choice=config.task,
        tokenizers=tokenizer,
        model=model,
        validation_batches=validation_batches,
        validation_data=held,
        validation_size=len(held),
        dropped=cut,
    )


def label_task(choice: Choice) -> Label:
    """The task of a run on labels or tags."""
    task = make(choice, TASKS, "task")
    assert isinstance(task, Label)
    return task


def reader(table: Mapping[str, Any], task: Label, *, classes: int, vocab_size: int) -> ModelConfig:
    """The model that a table describes, with a head for so many classes in place of another.

    Where nothing says what the head reads, it is the vector that has seen the whole text: the
    first of an encoder (its <cls>), both ends where a text is read both ways, else the last.
    """
    model = resolve(table, vocab_size=vocab_size)
    if not hasattr(model, "head"):
        raise ConfigError(
            f"{type(model).__name__.removesuffix('Config')} models have no head for classes; "
            "choose another model.preset or model.family"
        )
    given = table.get("head", {})
    given = {"kind": given} if isinstance(given, str) else given
    options = given if given.get("kind", task.head) == task.head else {}  # else for something else
    read = {"pool": _whole(model)} if task.head == "classify" else {}
    head = {"kind": task.head, **read, **options, "classes": classes}
    return resolve(table, vocab_size=vocab_size, head=head)


def _whole(model: ModelConfig) -> str:
    if isinstance(model, BagConfig):
        return "first"
    if getattr(model, "shape", "decoder") != "encoder":
        return "last"
    return "first" if isinstance(model, TransformerConfig) else "ends"


def frame(model: ModelConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special ids before and after a text: <cls> … <sep> for a Transformer's encoder."""
    if isinstance(model, TransformerConfig) and model.shape == "encoder":
        return [tokenizer.cls_id], [tokenizer.sep_id]
    return tokenizer.prefix_ids, []


def encode(
    data: LabelledText, tokenizer: Tokenizer, model: ModelConfig
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], bool]]:
    """Of each text its ids, its classes, and whether it had to be cut to fit the model.

    A text has its class; of tags, each token has one, those before the last of a word -1.
    """
    before, after = frame(model, tokenizer)
    room = model.context - len(before) - len(after)
    if room < 1:
        raise ConfigError(f"model.context={model.context} has no room for text between specials")
    spaced = [
        f" {part}" if place else part for parts, _ in data.rows for place, part in enumerate(parts)
    ]
    encoded = iter(tokenizer.encode_batch(spaced))
    for parts, classes in data.rows:
        ids: list[int] = []
        targets: list[int] = []
        for _, each in zip(parts, classes, strict=True):
            more = next(encoded) or [tokenizer.stop_id]  # of characters nobody can see
            ids += more
            targets += [*[IGNORED] * (len(more) - 1), each]
        whole = np.array([*before, *ids[:room], *after])
        if data.kind == "labels":
            yield whole, np.array(classes), len(ids) > room
        else:
            around = ([IGNORED] * len(before), [IGNORED] * len(after))
            yield whole, np.array([*around[0], *targets[:room], *around[1]]), len(ids) > room


def _store(data: LabelledText, tokenizer: Tokenizer, model: ModelConfig) -> tuple[PairStore, int]:
    """Texts and their classes as two sides of pairs, and how many texts were cut."""
    texts, classes, cut = zip(*encode(data, tokenizer, model), strict=True)

    def side(rows: tuple[NDArray[np.int64], ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.concatenate(rows), np.cumsum([0, *map(len, rows)])

    return PairStore(*side(texts), *side(classes), data.fingerprint()), sum(cut)


def _loader(config: RunConfig, model: ModelConfig, store: PairStore) -> PairLoader:
    settings = config.train
    batch = None if settings.batch is None else max(1, settings.batch // settings.accumulate)
    tokens = None if batch else (settings.tokens or DEFAULT_TOKENS) // settings.accumulate
    longest = model.context + 1  # pairs have a place more, for start or stop
    return PairLoader(store, tokens, settings.seed, longest=longest, batch=batch)


def _batch(
    task: Label, store: PairStore, rows: PairIndices, config: RunConfig, number: int
) -> Batch:
    texts = [store.source(row) for row in rows.indices]
    classes = [store.target(row) for row in rows.indices]
    return task.collate((texts, classes, rows.width - 1), generator_of(config, number))


@torch.no_grad()
def answers(
    model: nn.Module, task: Label, tokenizer: Tokenizer, text: str, top: int = 1
) -> list[list[tuple[str, float]]]:
    """The likeliest classes of a text, or of each of its words, with their probabilities."""
    parts = [text] if task.learns == "labels" else text.split()
    if not text.strip():
        raise ConfigError("nothing to predict: the text is empty")
    asked = LabelledText(
        cast(LabelKind, task.learns),
        "text",
        "",
        [(tuple(parts), (0,) * len(parts))],
        tuple(task.names),
    )
    ((ids, classes, _),) = encode(asked, tokenizer, cast(ModelConfig, model.config))
    device = next(model.parameters()).device
    batch = task.collate(([ids], [classes], len(ids)), torch.Generator()).to(device)
    model.eval()
    logits = task.logits(model, batch)[batch.targets != IGNORED]
    found = logits.float().softmax(-1).topk(min(top, len(task.names)))
    return [
        [(task.names[number], share) for number, share in zip(numbers, shares, strict=True)]
        for numbers, shares in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]


def rights_by_length(exam: EvalData, model: nn.Module) -> ByLength:
    """The share of right answers, for short texts and for long ones."""
    task, data, tokenizer = _told(exam)
    rows = list(encode(data, tokenizer, exam.model))
    order = sorted(range(len(rows)), key=lambda row: len(rows[row][0]))
    right = np.empty(len(rows))
    device = next(model.parameters()).device
    model.eval()
    for start in range(0, len(rows), AT_ONCE):
        chosen = order[start : start + AT_ONCE]
        texts, classes, _ = zip(*(rows[row] for row in chosen), strict=True)
        batch = task.collate((texts, classes, max(map(len, texts))), torch.Generator())
        right[chosen] = task.right(model, batch.to(device)).cpu()
    return by_length(data.texts(), lambda some: {"accuracy": float(right[list(some)].mean())})


def sample(exam: EvalData, model: nn.Module) -> str:
    """What the model says of a few held-out texts, and what is right."""
    task, data, tokenizer = _told(exam)
    lines = []
    for parts, classes in data.rows[:SHOWN]:
        text, right = " ".join(parts), [task.names[each] for each in classes]
        said = [name for ((name, _),) in answers(model, task, tokenizer, text)]
        lines.append(f"{text}\n→ {' '.join(said)}\n= {' '.join(right)}")
    return "\n".join(lines)


def _told(exam: EvalData) -> tuple[Label, LabelledText, Tokenizer]:
    task, data, tokenizer = exam.task, exam.validation_data, exam.tokenizers
    assert isinstance(task, Label)
    assert isinstance(data, LabelledText)
    assert isinstance(tokenizer, Tokenizer)
    return task, data, tokenizer
