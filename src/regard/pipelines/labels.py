"""Labelled texts (a class per text) and tagged texts (a class per word)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from regard.config import Choice, RunConfig, kind_of, make
from regard.data.batch import Batch
from regard.data.columns import Roles
from regard.data.conll import CONLL_SUFFIXES, read_conll
from regard.data.labels import LabelKind, LabelledText, from_conll, from_table
from regard.data.table_files import is_table
from regard.data.tables import Table
from regard.data.text_files import suffix
from regard.errors import ConfigError
from regard.generate import Search
from regard.models.bag_of_words import BagOfWordsConfig
from regard.models.build import config_table, family_of, resolve
from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.nn.loss import IGNORE_INDEX
from regard.pipelines.base import (
    EvalData,
    Inputs,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
    best_classes,
    require_texts,
    with_task_options,
)
from regard.pipelines.batching import (
    class_warnings,
    describe_classes,
    describe_data,
    describe_truncated,
    encoded_text_loader,
    seeded_batches,
    sequential_batches,
)
from regard.pipelines.by_length import MetricsByLength, metrics_by_length
from regard.pipelines.encoded_texts import EncodedTexts, special_ids
from regard.pipelines.tokenizer_cache import train_cached_tokenizer
from regard.seeds import batch_generator
from regard.tasks import TASKS, TextClassification, TextRegression
from regard.text import Tokenizer

SAMPLE_TEXTS = 4

# the most probable classes of a text or of each of its words
Classes = list[list[tuple[str, float]]]


class LabelsPipeline(Pipeline):
    """Texts with a class each, in batches of similar length."""

    name: ClassVar[str] = "labels"
    data_description: ClassVar[str] = (
        "texts and their classes: two columns of a table (data.text=… data.label=…)"
    )
    tokenizer_type: ClassVar[type | None] = Tokenizer

    def from_table(self, table: Table, roles: Roles) -> LabelledText:
        """The texts of a table and their classes."""
        return from_table(table, roles)

    def lowercase(self, data: LabelledText) -> LabelledText:
        """The texts in lower case."""
        return data.lowercase()

    def defaults(self, data: LabelledText, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A bidirectional LSTM with max pooling."""
        settings = _defaults(data, gpu)
        settings["model"]["head"] = {"kind": "classification", "pool": "max"}
        return {"task": "text_classification", **settings}

    def train_defaults(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """A higher learning rate for a bag of words, which has one layer only."""
        return {"lr": 1e-2} if "bag" in (model.get("preset"), model.get("family")) else {}

    def smallest_model(self, config: RunConfig) -> ModelConfig:
        """With a head for two classes."""
        return add_head(config.model, label_task(config.task), classes=2, vocab_size=1)

    def preview(
        self,
        config: RunConfig,
        train: LabelledText,
        validation: LabelledText,
        tokenizers: Tokenizer | None,
    ) -> dict[str, str]:
        """Warnings about the classes."""
        names = label_task(config.task).resolve_class_names(train.class_names)
        warnings = _warnings(*(data.with_class_names(names) for data in (train, validation)))
        return {"warning": "; ".join(warnings)} if warnings else {}

    def train_tokenizers(
        self,
        config: RunConfig,
        train: LabelledText,
        validation: LabelledText,
        progress: Progress | None,
    ) -> Tokenizer:
        """Train on the texts of the training data."""
        return train_cached_tokenizer(config.data.tokenizer, train, train.texts)

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
        names = task.resolve_class_names(train.class_names)
        labelled = train.with_class_names(names)
        weights = task.resolve_class_weights(
            (c for _, classes in labelled.rows for c in classes), names
        )
        derived: dict[str, Any] = {"class_names": names}
        derived |= {"class_weights": weights} if weights else {}
        derived |= {"paired": True} if train.is_paired else {}
        choice = with_task_options(config.task, derived)
        model = add_head(config.model, task, classes=len(names), vocab_size=tokenizers.vocab_size)
        config = replace(config, task=choice, model=config_table(model))
        data = self.evaluation_data(config, validation, tokenizers)
        task = label_task(choice)
        texts = EncodedTexts.encode(task, labelled, tokenizers, model)
        loader = encoded_text_loader(config, model, texts.store)
        special = [*special_ids(train, model, tokenizers)]
        unk_id = tokenizers.special_id("unk")
        if task.word_dropout and unk_id is None:
            raise ConfigError(
                f"task.word_dropout={task.word_dropout} needs a vocabulary with <unk>, which the "
                f"{tokenizers.kind} tokenizer does not have; leave it out, or set "
                "data.tokenizer=word"
            )

        seed, collate = config.train.seed, partial(texts.collate, task)

        def batch(index: int) -> Batch:
            collated = seeded_batches(seed, loader, collate)(index)
            if not task.word_dropout:
                return collated
            generator = batch_generator(seed, index)
            dropped: Batch = task.drop_words(collated, cast(int, unk_id), special, generator)
            return dropped

        description = [
            *describe_data(train, validation, tokenizers),
            describe_classes(names),
            *(f"warning    {line}" for line in _warnings(labelled, data.validation_data)),
            *([f"weights    {', '.join(f'{w:.3g}' for w in weights[:12])}"] if weights else []),
            *describe_truncated(texts.truncated, data.too_long, model.context),
        ]
        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=loader.example_ids,
            all_batches=lambda: sequential_batches(seed, loader, collate),
            description=description,
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: LabelledText,
        tokenizers: Tokenizer,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation texts, shortest first; `task.class_names` must be set."""
        task, model = label_task(config.task), resolve(config.model)
        labelled = data.with_class_names(task.class_names)
        texts = EncodedTexts.encode(task, labelled, tokenizers, model)
        loader = encoded_text_loader(config, model, texts.store)
        targets = sum(len(classes) for _, classes in labelled.rows)

        def validation_batches(limit: int | None) -> Iterator[Batch]:
            max_rows = None if limit is None else max(1, limit * len(labelled) // targets)
            collate = partial(texts.collate, task)
            return sequential_batches(config.train.seed, loader, collate, max_rows)

        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=validation_batches,
            validation_data=labelled,
            validation_size=len(labelled),
            validation_targets=targets,
            too_long=texts.truncated,
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The predicted and the true classes of a few validation texts."""
        task, tokenizer = cast(TextClassification, data.task), cast(Tokenizer, data.tokenizers)
        lines = []
        rows = data.validation_data.rows[:SAMPLE_TEXTS]
        texts = [" ".join(parts) for parts, _ in rows]
        inputs = [parts for parts, _ in rows] if data.validation_data.is_paired else texts
        predictions = predict_classes(model, task, tokenizer, inputs)
        for text, (_, classes), outputs in zip(texts, rows, predictions, strict=True):
            predicted = [name for ((name, _),) in outputs]
            true = [task.class_names[id] for id in classes]
            lines.append(f"{text}\n→ {' '.join(predicted)}\n= {' '.join(true)}")
        return "\n".join(lines)

    def evaluate_by_length(
        self, data: EvalData, model: nn.Module, *, search: Search
    ) -> MetricsByLength:
        """Accuracy for short and for long texts."""
        task, tokenizer = cast(TextClassification, data.task), cast(Tokenizer, data.tokenizers)
        texts = EncodedTexts.encode(task, data.validation_data, tokenizer, data.model)
        accuracy = np.empty(len(texts.store))
        model.eval()
        for indices, batch in texts.batches_by_length(task, next(model.parameters()).device):
            accuracy[indices] = task.accuracy_per_text(model, batch).cpu()
        return metrics_by_length(
            data.validation_data.texts(),
            lambda indices: {"accuracy": float(accuracy[list(indices)].mean())},
        )

    def predict(self, run: TrainedModel, input: str, *, top: int) -> Classes:
        """The most probable classes of a text or of each of its words, with their probabilities."""
        return self.predict_batch(run, [input], top=top)[0]

    def predict_batch(self, run: TrainedModel, inputs: Sequence[Any], *, top: int) -> list[Classes]:
        """The classes of several texts, in batches of similar length."""
        task, tokenizer = label_task(run.config.task), cast(Tokenizer, run.tokenizers)
        texts = [item if isinstance(item, tuple) else str(item) for item in inputs]
        return predict_classes(run.model, task, tokenizer, texts, top)

    def input_names(self, config: RunConfig) -> tuple[str, ...]:
        """A text, or two texts if the classes of the training data belong to pairs."""
        if not kind_of(config.task)[1].get("paired"):
            return ("text",)
        return str(config.data.text or "text"), str(config.data.text2 or "text2")


class TagsPipeline(LabelsPipeline):
    """Texts with a class for each word."""

    name: ClassVar[str] = "tags"
    data_description: ClassVar[str] = "words and their tags: CoNLL files, or two columns of a table"
    exclusive: ClassVar[bool] = True
    model_task_options: ClassVar[tuple[str, ...]] = ("word_dropout",)

    def recognizes(self, path: Path) -> bool:
        """A file with a suffix of CoNLL files."""
        return not path.is_dir() and suffix(path) in CONLL_SUFFIXES

    def reads_on_request(self, path: Path) -> bool:
        """Any file, read as CoNLL."""
        return not path.is_dir()

    def reads_as_table(self, path: Path, columns: Mapping[str, Any], kind: str | None) -> bool:
        """A table whose columns are named, or that is not delimited text.

        Without named columns, delimited text is read as CoNLL: a word and its tag on each line.
        """
        return bool(columns) or (is_table(path) and suffix(path) not in (".csv", ".tsv"))

    def open(self, path: Path, columns: Sequence[int] = ()) -> LabelledText:
        """A word and its tag on each line, in these columns, empty lines between texts."""
        return from_conll(path, columns)

    def defaults(self, data: LabelledText, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A bidirectional LSTM over words and their characters, with a conditional random field.

        Word dropout trains the embedding of `<unk>`. Lample et al. 2016; measured in
        docs/results.md.
        """
        settings = _defaults(data, gpu)
        settings["model"] |= {"char_dim": 64, "head": "crf"}
        if not gpu:
            settings["train"] |= {"steps": 2000, "batch": 32, "lr": 5e-3}
        return {"task": {"kind": "tag", "word_dropout": 0.25}, **settings}

    def read_inputs(self, config: RunConfig, path: Path) -> Inputs | None:
        """The texts of a CoNLL file."""
        if suffix(path) not in CONLL_SUFFIXES:
            return None
        file = read_conll(path, config.data.columns or ())
        texts = (" ".join(words) for _, words, _ in file.rows)
        return Inputs(file.description, (({"text": text}, text) for text in texts))

    def cell_text(self, cell: Any) -> Any:
        """A text, or a list of its words."""
        return " ".join(map(str, cell)) if isinstance(cell, list) else cell

    def train_defaults(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Larger batches and a lower learning rate than those of the default model."""
        return {"steps": 1000, "batch": 64, "lr": 2e-3}


def _warnings(train: LabelledText, validation: LabelledText) -> list[str]:
    """Warnings about the classes of two splits, which have the same `class_names`."""
    training, evaluated = (
        [id for _, classes in data.rows for id in classes] for data in (train, validation)
    )
    unit = "word" if train.kind == "tags" else "text"
    return class_warnings(train.class_names, training, evaluated, unit)


def label_task(choice: Choice) -> TextClassification:
    """The task of a run on labels or tags."""
    return cast(TextClassification, make(choice, TASKS, "task"))


def add_head(
    table: Mapping[str, Any],
    task: TextClassification | TextRegression,
    *,
    classes: int,
    vocab_size: int,
) -> ModelConfig:
    """The model that a table describes, with the head of the task for this number of classes.

    By default a classification head reads the state that depends on the whole text: the first of
    an encoder (<cls>), the last of each direction of a bidirectional network, else the last.
    """
    model = resolve(table, vocab_size=vocab_size)
    if not hasattr(model, "head"):
        raise ConfigError(
            f"a model of the family {family_of(model)} has no head for classes; "
            "choose another model.preset or model.family"
        )
    setting = table.get("head", {})
    setting = {"kind": setting} if isinstance(setting, str) else setting
    default = task.heads[0]
    suitable = setting.get("kind", default) in task.heads
    options = setting if suitable else {}  # options of a head for another task do not apply
    pool = {"pool": _default_pool(model)} if default == "classification" else {}
    head = {"kind": default, **pool, **options, "classes": classes}
    return resolve(table, vocab_size=vocab_size, head=head)


def _default_pool(model: ModelConfig) -> str:
    if isinstance(model, BagOfWordsConfig):
        return "first"
    if getattr(model, "architecture", "decoder") != "encoder":
        return "last"
    return "first" if isinstance(model, TransformerConfig) else "ends"


def input_parts(texts: Sequence[str | tuple[str, ...]], *, paired: bool) -> list[tuple[str, ...]]:
    """The texts of each input: one, or the two of a pair; raises `ConfigError` for a mixture."""
    rows = [(text,) if isinstance(text, str) else text for text in texts]
    if len({len(row) for row in rows}) > 1 or any(len(row) > 2 for row in rows):
        raise ConfigError("all inputs must be texts, or all must be tuples of two texts")
    if paired and len(rows[0]) == 1:
        raise ConfigError(f"an input of this run must be a tuple of two texts, not {texts[0]!r}")
    require_texts([part for row in rows for part in row])
    return rows


@torch.no_grad()
def predict_classes(
    model: nn.Module,
    task: TextClassification,
    tokenizer: Tokenizer,
    texts: Sequence[str | tuple[str, ...]],
    top: int = 1,
) -> list[Classes]:
    """For each text or pair of texts, its most probable classes, or those of each of its words."""
    parts = input_parts(texts, paired=task.paired)
    if task.predicts_words:
        parts = [tuple(row[0].split()) for row in parts]
    rows = [(row, (0,) * (len(row) if task.predicts_words else 1)) for row in parts]
    kind = cast(LabelKind, task.data_kind)
    unlabelled = LabelledText(kind, "text", "", rows, tuple(task.class_names))
    encoded = EncodedTexts.encode(task, unlabelled, tokenizer, cast(ModelConfig, model.config))
    predictions: list[Classes] = [[] for _ in rows]
    model.eval()
    for indices, batch in encoded.batches_by_length(task, next(model.parameters()).device):
        predicted, log_probs = task.predictions_and_log_probs(model, batch)
        scored = batch.targets != IGNORE_INDEX
        best = iter(best_classes(log_probs[scored], task.class_names, top, predicted[scored]))
        for row, count in zip(indices, scored.view(len(indices), -1).sum(1).tolist(), strict=True):
            predictions[row] = list(islice(best, count))
    return predictions


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
