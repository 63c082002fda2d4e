"""Labelled texts (a class per text) and tagged texts (a class per word)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from regard.config import Choice, RunConfig, make, merge
from regard.data.batch import Batch
from regard.data.columns import Roles
from regard.data.conll import SUFFIXES
from regard.data.labels import LabelKind, LabelledText, from_conll, from_table
from regard.data.loader import PairIndices, PairLoader
from regard.data.tables import Table
from regard.data.text_files import suffix
from regard.data.token_store import PairStore
from regard.errors import ConfigError
from regard.generate import Search
from regard.models.bag import BagConfig
from regard.models.build import describe, resolve
from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.nn.loss import IGNORED
from regard.pipelines.base import (
    EvalData,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
    best_classes,
    first_rows,
)
from regard.pipelines.by_length import ByLength, by_length
from regard.pipelines.pairs import pair_loader
from regard.pipelines.tokenizer_cache import cached_tokenizer
from regard.seeds import batch_generator
from regard.tasks import TASKS, Label, Tag
from regard.text import Tokenizer, train_tokenizer
from regard.text.pair_tokenizers import JOINT

SAMPLE_TEXTS = 4
EVALUATION_ROWS = 128  # texts in a batch of an evaluation by length


class LabelsPipeline(Pipeline):
    """Texts with a class each, in batches of similar length."""

    name: ClassVar[str] = "labels"
    tokenizer_type: ClassVar[type | None] = Tokenizer

    def from_table(self, table: Table, roles: Roles) -> LabelledText:
        """The texts of a table and their classes."""
        return from_table(table, roles)

    def lowercase(self, data: LabelledText) -> LabelledText:
        """The texts with case folded."""
        return data.lowercase()

    def defaults(self, data: LabelledText, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A bidirectional LSTM with max pooling."""
        settings = _defaults(data, gpu)
        settings["model"]["head"] = {"kind": "classify", "pool": "max"}
        return {"task": "label", **settings}

    def smallest_model(self, config: RunConfig) -> ModelConfig:
        """With a head for two classes."""
        return add_head(config.model, label_task(config.task), classes=2, vocab_size=1)

    def train_tokenizers(
        self,
        config: RunConfig,
        train: LabelledText,
        validation: LabelledText,
        progress: Progress | None,
    ) -> Tokenizer:
        """Train on the texts of the training data."""
        choice = config.data.tokenizer

        def write(folder: Path) -> None:
            train_tokenizer(choice, train.texts()).save(folder / JOINT)

        return Tokenizer.load(cached_tokenizer(choice, [train], write) / JOINT)

    def training_data(
        self,
        config: RunConfig,
        train: LabelledText,
        validation: LabelledText,
        tokenizers: Tokenizer,
        progress: Progress | None,
    ) -> TrainingData:
        """Batches of texts of similar length, in random order."""
        task = label_task(config.task)
        names = task.class_names(train.class_names)
        choice = merge({"task": config.task}, {"task": {"names": names}})["task"]
        model = add_head(config.model, task, classes=len(names), vocab_size=tokenizers.size)
        config = replace(config, task=choice, model=describe(model))
        data = self.evaluation_data(config, validation, tokenizers)
        task = label_task(choice)
        store, truncated = _token_store(task, train.with_class_names(names), tokenizers, model)
        loader = _loader(config, model, store)
        description = [
            f"data       {train.description}",
            *first_rows(train),
            f"validation {validation.description}",
            f"tokenizer  {tokenizers.kind}, {tokenizers.size:,} tokens",
            f"classes    {', '.join(names[:12])}{', …' if len(names) > 12 else ''}",
        ]
        if truncated or data.dropped:
            description.append(
                f"truncated  {truncated:,} training texts and {data.dropped:,} validation texts, "
                f"to {model.context} tokens"
            )
        return TrainingData(
            **vars(data),
            batch=lambda number: _collate(config, task, store, loader.examples(number), number),
            example_ids=lambda number: loader.examples(number).indices.tolist(),
            all_batches=lambda: (
                _collate(config, task, store, rows, 0) for rows in loader.sequential()
            ),
            description=description,
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: LabelledText,
        tokenizers: Tokenizer,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation texts in order; the task must know the names of the classes."""
        task, model = label_task(config.task), resolve(config.model)
        texts = data.with_class_names(task.names)
        store, truncated = _token_store(task, texts, tokenizers, model)
        loader = _loader(config, model, store)

        targets = sum(len(classes) for _, classes in texts.rows)

        def validation_batches(limit: int | None) -> Iterator[Batch]:
            max_rows = None if limit is None else max(1, limit * len(texts) // targets)
            return (_collate(config, task, store, rows, 0) for rows in loader.sequential(max_rows))

        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=validation_batches,
            validation_data=texts,
            validation_size=len(texts),
            validation_targets=targets,
            dropped=truncated,
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The predicted and the true classes of a few validation texts."""
        task, tokenizer = cast(Label, data.task), cast(Tokenizer, data.tokenizers)
        lines = []
        for parts, classes in data.validation_data.rows[:SAMPLE_TEXTS]:
            text, true = " ".join(parts), [task.names[number] for number in classes]
            predictions = predict_classes(model, task, tokenizer, text)
            predicted = [name for ((name, _),) in predictions]
            lines.append(f"{text}\n→ {' '.join(predicted)}\n= {' '.join(true)}")
        return "\n".join(lines)

    def evaluate_by_length(self, data: EvalData, model: nn.Module, *, search: Search) -> ByLength:
        """Accuracy for short and for long texts."""
        task, tokenizer = cast(Label, data.task), cast(Tokenizer, data.tokenizers)
        rows = list(encode(data.validation_data, tokenizer, data.model, _tagged_token(task)))
        in_order = sorted(range(len(rows)), key=lambda row: len(rows[row][0]))
        accuracy = np.empty(len(rows))
        device = next(model.parameters()).device
        model.eval()
        for start in range(0, len(rows), EVALUATION_ROWS):
            chosen = in_order[start : start + EVALUATION_ROWS]
            texts, classes, _ = zip(*(rows[row] for row in chosen), strict=True)
            batch = task.collate((texts, classes, max(map(len, texts))), torch.Generator())
            accuracy[chosen] = task.accuracy_per_text(model, batch.to(device)).cpu()
        return by_length(
            data.validation_data.texts(),
            lambda chosen: {"accuracy": float(accuracy[list(chosen)].mean())},
        )

    def predict(self, run: TrainedModel, what: str, *, top: int) -> list[list[tuple[str, float]]]:
        """The likeliest classes of a text, or of each of its words, with their probabilities."""
        task, tokenizer = label_task(run.config.task), cast(Tokenizer, run.tokenizers)
        return predict_classes(run.model, task, tokenizer, str(what), top)


class TagsPipeline(LabelsPipeline):
    """Texts with a class for each word."""

    name: ClassVar[str] = "tags"
    exclusive: ClassVar[bool] = True

    def recognizes(self, path: Path) -> bool:
        """A file with a suffix of CoNLL files."""
        return not path.is_dir() and suffix(path) in SUFFIXES

    def reads_on_request(self, path: Path) -> bool:
        """Any file, read as CoNLL."""
        return not path.is_dir()

    def open(self, path: Path, columns: Sequence[int] = ()) -> LabelledText:
        """A word and its tag on each line, in these columns, empty lines between texts."""
        return from_conll(path, columns)

    def defaults(self, data: LabelledText, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A bidirectional LSTM."""
        return {"task": "tag", **_defaults(data, gpu)}


def label_task(choice: Choice) -> Label:
    """The task of a run on labels or tags."""
    return cast(Label, make(choice, TASKS, "task"))


def add_head(
    table: Mapping[str, Any], task: Label, *, classes: int, vocab_size: int
) -> ModelConfig:
    """The model that a table describes, with the head of the task for this number of classes.

    By default a classification head reads the vector that has seen the whole text: the first of
    an encoder (<cls>), both ends of a bidirectional network, otherwise the last.
    """
    model = resolve(table, vocab_size=vocab_size)
    if not hasattr(model, "head"):
        raise ConfigError(
            f"{type(model).__name__.removesuffix('Config')} models have no head for classes; "
            "choose another model.preset or model.family"
        )
    setting = table.get("head", {})
    setting = {"kind": setting} if isinstance(setting, str) else setting
    same_kind = setting.get("kind", task.head) == task.head
    options = setting if same_kind else {}  # those of another kind of head do not apply
    pool = {"pool": _default_pool(model)} if task.head == "classify" else {}
    head = {"kind": task.head, **pool, **options, "classes": classes}
    return resolve(table, vocab_size=vocab_size, head=head)


def _default_pool(model: ModelConfig) -> str:
    if isinstance(model, BagConfig):
        return "first"
    if getattr(model, "shape", "decoder") != "encoder":
        return "last"
    return "first" if isinstance(model, TransformerConfig) else "ends"


def special_tokens(model: ModelConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special ids before and after a text: <cls> … <sep> for a Transformer encoder."""
    if isinstance(model, TransformerConfig) and model.shape == "encoder":
        return [tokenizer.cls_id], [tokenizer.sep_id]
    return tokenizer.prefix_ids, []


def _tagged_token(task: Label) -> str:
    return task.token if isinstance(task, Tag) else "last"


def encode(
    data: LabelledText, tokenizer: Tokenizer, model: ModelConfig, token: str = "last"
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], bool]]:
    """For each text its ids, its classes, and whether it was truncated to fit the model.

    A labelled text has one class. In a tagged text the first or the last `token` of a word has the
    class of the word, and the other tokens have -1.
    """
    before, after = special_tokens(model, tokenizer)
    room = model.context - len(before) - len(after)
    if room < 1:
        raise ConfigError(
            f"model.context={model.context} has no room for text beside special tokens; "
            "set a larger model.context"
        )
    words = [
        f" {part}" if index else part for parts, _ in data.rows for index, part in enumerate(parts)
    ]
    encoded = iter(tokenizer.encode_batch(words))
    for parts, classes in data.rows:
        ids: list[int] = []
        targets: list[int] = []
        for _, number in zip(parts, classes, strict=True):
            word = next(encoded) or [tokenizer.stop_id]  # for characters that encode to nothing
            ids += word
            others = [IGNORED] * (len(word) - 1)
            targets += [number, *others] if token == "first" else [*others, number]
        whole = np.array([*before, *ids[:room], *after])
        if data.kind == "labels":
            yield whole, np.array(classes), len(ids) > room
        else:
            padding = ([IGNORED] * len(before), [IGNORED] * len(after))
            tags = np.array([*padding[0], *targets[:room], *padding[1]])
            yield whole, tags, len(ids) > room


@torch.no_grad()
def predict_classes(
    model: nn.Module, task: Label, tokenizer: Tokenizer, text: str, top: int = 1
) -> list[list[tuple[str, float]]]:
    """The likeliest classes of a text, or of each of its words, with their probabilities."""
    parts = text.split() if task.predicts_words else [text]
    if not text.strip():
        raise ConfigError("nothing to predict: the text is empty")
    kind = cast(LabelKind, task.data_kind)
    row = (tuple(parts), (0,) * len(parts))
    unlabelled = LabelledText(kind, "text", "", [row], tuple(task.names))
    config, token = cast(ModelConfig, model.config), _tagged_token(task)
    ((ids, classes, _),) = encode(unlabelled, tokenizer, config, token)
    device = next(model.parameters()).device
    batch = task.collate(([ids], [classes], len(ids)), torch.Generator()).to(device)
    model.eval()
    logits = task.logits(model, batch)[batch.targets != IGNORED]
    return best_classes(logits, task.names, top)


def _token_store(
    task: Label, data: LabelledText, tokenizer: Tokenizer, model: ModelConfig
) -> tuple[PairStore, int]:
    """Texts and their classes as the two sides of pairs, and how many texts were truncated."""
    texts, classes, truncated = zip(
        *encode(data, tokenizer, model, _tagged_token(task)), strict=True
    )

    def side(rows: tuple[NDArray[np.int64], ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.concatenate(rows), np.cumsum([0, *map(len, rows)])

    return PairStore(*side(texts), *side(classes), data.fingerprint()), sum(truncated)


def _loader(config: RunConfig, model: ModelConfig, store: PairStore) -> PairLoader:
    return pair_loader(config, store, longest=model.context + 1)  # pairs have one for STOP


def _collate(
    config: RunConfig, task: Label, store: PairStore, rows: PairIndices, number: int
) -> Batch:
    texts = [store.source(row) for row in rows.indices]
    classes = [store.target(row) for row in rows.indices]
    generator = batch_generator(config.train.seed, number)
    return task.collate((texts, classes, rows.width - 1), generator)


def _defaults(data: LabelledText, gpu: bool) -> dict[str, Any]:
    """A bidirectional LSTM over words, or over characters if no text has two words."""
    texts = data.texts()
    longest = max(len(text.split()) for text in texts)
    has_words = longest > 1
    context = min(512, max(8, 2 * longest if has_words else max(map(len, texts))))
    return {
        "data": {"tokenizer": {"kind": "word", "lower": True} if has_words else "char"},
        "model": {
            "preset": "lstm",
            "bidirectional": True,
            "layers": 1,
            "dim": 256 if gpu else 128,
            "dropout": 0.5,
            "context": context,
        },
        "train": {
            "steps": 3000 if gpu else 1000,
            "batch": 64,
            "lr": 2e-3,
            "ema": 0.99,
            "schedule": {"kind": "linear", "warmup": 50},
        },
    }
