"""Labelled texts (a class per text) and tagged texts (a class per word)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from regard.config import Choice, RunConfig, make, merge
from regard.data.batch import Batch, LabelBatch, TagBatch
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
from regard.models.build import describe, family_of, resolve
from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.nn.characters import BYTES, word_bytes
from regard.nn.loss import IGNORED
from regard.pipelines.base import (
    EvalData,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
    best_classes,
    first_rows,
    require_texts,
)
from regard.pipelines.by_length import ByLength, by_length
from regard.pipelines.pairs import pair_loader
from regard.pipelines.text_pairs import pair_template
from regard.pipelines.tokenizer_cache import joint_tokenizer
from regard.seeds import batch_generator
from regard.tasks import TASKS, Label, Tag
from regard.text import Tokenizer

SAMPLE_TEXTS = 4
EVALUATION_ROWS = 128  # texts in a batch of predictions

Classes = list[list[tuple[str, float]]]  # the likeliest of a text or of each of its words


class LabelsPipeline(Pipeline):
    """Texts with a class each, in batches of similar length."""

    name: ClassVar[str] = "labels"
    needs: ClassVar[str] = (
        "texts and their classes: two columns of a table (data.text=… data.label=…)"
    )
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

    def train_defaults(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """A bag of words, which has one layer, converges with a higher learning rate."""
        return {"lr": 1e-2} if "bag" in (model.get("preset"), model.get("family")) else {}

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
        return joint_tokenizer(config.data.tokenizer, train, train.texts)

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
        named = train.with_class_names(names)
        weights = task.balance((c for _, classes in named.rows for c in classes), names)
        resolved: dict[str, Any] = {"names": names}
        resolved |= {"class_weights": weights} if weights else {}
        resolved |= {"paired": True} if train.is_paired else {}
        choice = merge({"task": config.task}, {"task": resolved})["task"]
        model = add_head(config.model, task, classes=len(names), vocab_size=tokenizers.size)
        config = replace(config, task=choice, model=describe(model))
        data = self.evaluation_data(config, validation, tokenizers)
        task = label_task(choice)
        texts = _Texts.encode(task, named, tokenizers, model)
        loader = _loader(config, model, texts.store)
        special = [*_template(train, model, tokenizers)]
        unk_id = tokenizers.special_id("unk")
        if task.word_dropout and unk_id is None:
            raise ConfigError(
                f"task.word_dropout={task.word_dropout} needs a vocabulary with <unk>, which a "
                f"{tokenizers.kind} tokenizer has not; leave it out, or set data.tokenizer=word"
            )

        def batch(number: int) -> Batch:
            collated = texts.collate(config, task, loader.examples(number), number)
            if not task.word_dropout:
                return collated
            generator = batch_generator(config.train.seed, number)
            dropped: Batch = task.drop_words(collated, cast(int, unk_id), special, generator)
            return dropped

        description = [
            f"data       {train.description}",
            *first_rows(train),
            f"validation {validation.description}",
            f"tokenizer  {tokenizers.kind}, {tokenizers.size:,} tokens",
            f"classes    {', '.join(names[:12])}{', …' if len(names) > 12 else ''}",
        ]
        if weights:
            description.append(f"weights    {', '.join(f'{w:.3g}' for w in weights[:12])}")
        if texts.truncated or data.dropped:
            description.append(
                f"truncated  {texts.truncated:,} training texts and {data.dropped:,} validation "
                f"texts, to {model.context} tokens"
            )
        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=lambda number: loader.examples(number).indices.tolist(),
            all_batches=lambda: (
                texts.collate(config, task, rows, 0) for rows in loader.sequential()
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
        labelled = data.with_class_names(task.names)
        texts = _Texts.encode(task, labelled, tokenizers, model)
        loader = _loader(config, model, texts.store)
        targets = sum(len(classes) for _, classes in labelled.rows)

        def validation_batches(limit: int | None) -> Iterator[Batch]:
            max_rows = None if limit is None else max(1, limit * len(labelled) // targets)
            return (texts.collate(config, task, rows, 0) for rows in loader.sequential(max_rows))

        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=validation_batches,
            validation_data=labelled,
            validation_size=len(labelled),
            validation_targets=targets,
            dropped=texts.truncated,
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The predicted and the true classes of a few validation texts."""
        task, tokenizer = cast(Label, data.task), cast(Tokenizer, data.tokenizers)
        lines = []
        rows = data.validation_data.rows[:SAMPLE_TEXTS]
        texts = [" ".join(parts) for parts, _ in rows]
        inputs = [parts for parts, _ in rows] if data.validation_data.is_paired else texts
        predictions = predict_classes(model, task, tokenizer, inputs)
        for text, (_, classes), answers in zip(texts, rows, predictions, strict=True):
            predicted = [name for ((name, _),) in answers]
            true = [task.names[number] for number in classes]
            lines.append(f"{text}\n→ {' '.join(predicted)}\n= {' '.join(true)}")
        return "\n".join(lines)

    def evaluate_by_length(self, data: EvalData, model: nn.Module, *, search: Search) -> ByLength:
        """Accuracy for short and for long texts."""
        task, tokenizer = cast(Label, data.task), cast(Tokenizer, data.tokenizers)
        texts = _Texts.encode(task, data.validation_data, tokenizer, data.model)
        accuracy = np.empty(len(texts.store))
        model.eval()
        for chosen, batch in texts.by_length(task, next(model.parameters()).device):
            accuracy[chosen] = task.accuracy_per_text(model, batch).cpu()
        return by_length(
            data.validation_data.texts(),
            lambda chosen: {"accuracy": float(accuracy[list(chosen)].mean())},
        )

    def predict(self, run: TrainedModel, what: str, *, top: int) -> Classes:
        """The likeliest classes of a text, or of each of its words, with their probabilities."""
        return self.predict_batch(run, [what], top=top)[0]

    def predict_batch(self, run: TrainedModel, inputs: Sequence[Any], *, top: int) -> list[Classes]:
        """The classes of several texts, in batches of similar length."""
        task, tokenizer = label_task(run.config.task), cast(Tokenizer, run.tokenizers)
        texts = [item if isinstance(item, tuple) else str(item) for item in inputs]
        return predict_classes(run.model, task, tokenizer, texts, top)

    def inputs(self, config: RunConfig) -> tuple[str, ...]:
        """A text, or two if the classes of the training data belong to two."""
        if not label_task(config.task).paired:
            return ("text",)
        return str(config.data.text or "text"), str(config.data.text2 or "text2")


class TagsPipeline(LabelsPipeline):
    """Texts with a class for each word."""

    name: ClassVar[str] = "tags"
    needs: ClassVar[str] = "words and their tags: CoNLL files, or two columns of a table"
    exclusive: ClassVar[bool] = True
    model_task_options: ClassVar[tuple[str, ...]] = ("word_dropout",)

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
        """A bidirectional LSTM over words and their characters, with a conditional random field.

        Word dropout trains the vector of unknown words. Lample et al. 2016; figures in
        docs/results.md.
        """
        settings = _defaults(data, gpu)
        settings["model"] |= {"characters": 64, "head": "crf"}
        if not gpu:
            settings["train"] |= {"steps": 2000, "batch": 32, "lr": 5e-3}
        return {"task": {"kind": "tag", "word_dropout": 0.25}, **settings}

    def train_defaults(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Larger batches and a lower learning rate for other models."""
        return {"steps": 1000, "batch": 64, "lr": 2e-3}


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
            f"a model of the family {family_of(model)} has no head for classes; "
            "choose another model.preset or model.family"
        )
    setting = table.get("head", {})
    setting = {"kind": setting} if isinstance(setting, str) else setting
    default = task.heads[0]
    suitable = setting.get("kind", default) in task.heads
    options = setting if suitable else {}  # those of a head for another task do not apply
    pool = {"pool": _default_pool(model)} if default == "classify" else {}
    head = {"kind": default, **pool, **options, "classes": classes}
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


def placeholder(tokenizer: Tokenizer) -> int:
    """The id of a text that encodes to nothing, as an invisible character: <stop>, or else <unk>.

    BERT's vocabulary has no <stop>.
    """
    stop, unk = tokenizer.special_id("stop"), tokenizer.special_id("unk")
    return tokenizer.stop_id if unk is None or stop is not None else unk


def _tagged_token(task: Label) -> str:
    return task.token if isinstance(task, Tag) else "last"


def _template(data: LabelledText, model: ModelConfig, tokenizer: Tokenizer) -> set[int]:
    """The special ids around the texts."""
    if data.is_paired:
        template = pair_template(model, tokenizer)
        return {*template.before, *template.between, *template.after}
    before, after = special_tokens(model, tokenizer)
    return {*before, *after}


class Encoded(NamedTuple):
    """A text as a model reads it."""

    ids: NDArray[np.int64]
    classes: NDArray[np.int64]
    truncated: bool  # to fit the model
    characters: NDArray[np.uint8] | None = None  # of the word of each token, if a model reads them
    begin: int = 0  # of two texts, the position at which the second begins


def encode(
    data: LabelledText, tokenizer: Tokenizer, model: ModelConfig, token: str = "last"
) -> Iterator[Encoded]:
    """The ids of each text and its classes.

    A labelled text has one class. In a tagged text the first or the last `token` of a word has the
    class of the word, and the other tokens have -1.
    """
    if data.is_paired:
        yield from _encode_pairs(data, tokenizer, model)
        return
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
    reads_characters = getattr(model, "characters", 0)
    none = [word_bytes("")]
    for parts, classes in data.rows:
        ids: list[int] = []
        targets: list[int] = []
        letters: list[list[int]] = []
        for part, number in zip(parts, classes, strict=True):
            word = next(encoded) or [placeholder(tokenizer)]
            ids += word
            letters += [word_bytes(part)] * len(word) if reads_characters else []
            others = [IGNORED] * (len(word) - 1)
            targets += [number, *others] if token == "first" else [*others, number]
        whole = np.array([*before, *ids[:room], *after])
        if data.kind == "labels":
            yield Encoded(whole, np.array(classes), len(ids) > room)
            continue
        tags = np.array([*[IGNORED] * len(before), *targets[:room], *[IGNORED] * len(after)])
        characters = None
        if reads_characters:
            rows = [*none * len(before), *letters[:room], *none * len(after)]
            characters = np.array(rows, dtype=np.uint8)
        yield Encoded(whole, tags, len(ids) > room, characters)


def _encode_pairs(
    data: LabelledText, tokenizer: Tokenizer, model: ModelConfig
) -> Iterator[Encoded]:
    """Both texts of each row; the longer one is truncated first."""
    template = pair_template(model, tokenizer)
    room = model.context - template.special
    if room < 2:
        raise ConfigError(
            f"model.context={model.context} has no room for two texts beside special tokens; "
            "set a larger model.context"
        )
    sides = [tokenizer.encode_batch([parts[side] for parts, _ in data.rows]) for side in (0, 1)]
    for a, b, (_, classes) in zip(*sides, data.rows, strict=True):
        a, b = a or [placeholder(tokenizer)], b or [placeholder(tokenizer)]
        kept = min(len(a), max(room - len(b), (room + 1) // 2))
        ids, begin = template.join(a[:kept], b[: room - kept])
        yield Encoded(ids, np.array(classes), len(a) + len(b) > room, begin=begin)


@torch.no_grad()
def predict_classes(
    model: nn.Module,
    task: Label,
    tokenizer: Tokenizer,
    texts: Sequence[str | tuple[str, ...]],
    top: int = 1,
) -> list[Classes]:
    """For each text, or pair of texts, the likeliest classes of it or of each of its words."""
    whole = [(text,) if isinstance(text, str) else text for text in texts]
    if len({len(row) for row in whole}) > 1 or any(len(row) > 2 for row in whole):
        raise ConfigError("an input is a text, or a tuple of two texts; give only one of these")
    if task.paired and len(whole[0]) == 1:
        raise ConfigError(f"an input of this run is a tuple of two texts, not {texts[0]!r}")
    require_texts([part for row in whole for part in row])
    parts = [tuple(row[0].split()) for row in whole] if task.predicts_words else whole
    rows = [(row, (0,) * (len(row) if task.predicts_words else 1)) for row in parts]
    kind = cast(LabelKind, task.data_kind)
    unlabelled = LabelledText(kind, "text", "", rows, tuple(task.names))
    encoded = _Texts.encode(task, unlabelled, tokenizer, cast(ModelConfig, model.config))
    predictions: list[Classes] = [[] for _ in rows]
    model.eval()
    for chosen, batch in encoded.by_length(task, next(model.parameters()).device):
        predicted, log_probs = task.probabilities(model, batch)
        scored = batch.targets != IGNORED
        answers = iter(best_classes(log_probs[scored], task.names, top, predicted[scored]))
        for row, count in zip(chosen, scored.view(len(chosen), -1).sum(1).tolist(), strict=True):
            predictions[row] = list(islice(answers, count))
    return predictions


@dataclass(frozen=True, slots=True)
class _Texts:
    """Encoded texts and their classes, as the two sides of pairs."""

    store: PairStore
    characters: list[NDArray[np.uint8]] | None  # of the words of each text
    truncated: int  # how many texts
    begins: list[int] | None  # of pairs, where the second text begins, if the model has segments

    @classmethod
    def encode(
        cls, task: Label, data: LabelledText, tokenizer: Tokenizer, model: ModelConfig
    ) -> "_Texts":
        """The texts of a data set, for a model."""
        rows = list(encode(data, tokenizer, model, _tagged_token(task)))

        def side(parts: list[NDArray[np.int64]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
            return np.concatenate(parts), np.cumsum([0, *map(len, parts)])

        sides = *side([row.ids for row in rows]), *side([row.classes for row in rows])
        characters = [row.characters for row in rows if row.characters is not None]
        truncated = sum(row.truncated for row in rows)
        segmented = data.is_paired and pair_template(model, tokenizer).segmented
        begins = [row.begin for row in rows] if segmented else None
        return cls(PairStore(*sides, data.fingerprint()), characters or None, truncated, begins)

    def batch(
        self, task: Label, rows: Sequence[int], width: int, generator: torch.Generator
    ) -> Batch:
        """A batch of some of the texts."""
        texts = [self.store.source(row) for row in rows]
        classes = [self.store.target(row) for row in rows]
        batch = task.collate((texts, classes, width), generator)
        if self.begins is not None:
            begins = torch.tensor([self.begins[row] for row in rows]).unsqueeze(1)
            lengths = cast(LabelBatch, batch).lengths.unsqueeze(1)
            positions = torch.arange(width)
            segments = ((positions >= begins) & (positions < lengths)).long()
            return replace(cast(LabelBatch, batch), segments=segments)
        if self.characters is None:
            return batch
        characters = torch.zeros(len(rows), width, BYTES, dtype=torch.uint8)
        for row, number in zip(characters, rows, strict=True):
            row[: len(self.characters[number])] = torch.from_numpy(self.characters[number])
        return replace(cast(TagBatch, batch), characters=characters)

    def collate(self, config: RunConfig, task: Label, rows: PairIndices, number: int) -> Batch:
        """A micro-batch of a run."""
        generator = batch_generator(config.train.seed, number)
        return self.batch(task, rows.indices.tolist(), rows.width - 1, generator)

    def by_length(self, task: Label, device: torch.device) -> Iterator[tuple[list[int], Any]]:
        """All texts in batches of similar length: their rows, and the batch."""
        lengths = self.store.source_lengths
        order = np.argsort(lengths, kind="stable").tolist()
        for start in range(0, len(order), EVALUATION_ROWS):
            rows = order[start : start + EVALUATION_ROWS]
            width = int(lengths[rows].max())
            yield rows, self.batch(task, rows, width, torch.Generator()).to(device)


def _loader(config: RunConfig, model: ModelConfig, store: PairStore) -> PairLoader:
    return pair_loader(config, store, longest=model.context + 1)  # pairs have one for STOP


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
