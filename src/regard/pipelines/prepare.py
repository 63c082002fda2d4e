"""From the user's data to batches: open, split, tokenize, store, shuffle, collate."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from regard.config import Choice, RunConfig, kind_of, make, to_table
from regard.data.batch import Batch
from regard.data.loader import PairIndices, PairLoader
from regard.data.sources import Data, Images, LabelledText, Pairs, Series, Text, open_data
from regard.data.token_store import PairStore, pair_store
from regard.errors import ConfigError, DataError, unknown
from regard.files.cache import cache_key, cached_folder
from regard.models.build import family_of, is_closed_form, resolve
from regard.models.presets import ModelConfig
from regard.models.recurrent import RecurrentConfig
from regard.models.transformer import TransformerConfig
from regard.models.vision import VisionConfig
from regard.pipelines.base import (
    DEFAULT_TOKENS,
    EvalData,
    Progress,
    Tokenizers,
    TrainingData,
    generator_of,
    scheduled,
)
from regard.pipelines.images import examine_images, prepare_images
from regard.pipelines.labels import examine_labels, label_task, prepare_labels, reader
from regard.pipelines.series import examine_series, prepare_series
from regard.pipelines.text import examine_text, must_hide, prepare_text
from regard.tasks import TASKS, Seq2Seq, Task
from regard.text import PairTokenizers, Tokenizer, train_pair, train_tokenizer
from regard.text.pair_tokenizers import JOINT, SOURCE, TARGET

SHAPES: dict[str, tuple[str, ...]] = {
    "causal": ("decoder",),
    "masked": ("encoder",),
    "seq2seq": ("encoder-decoder",),
    "cbow": ("cbow",),
    "label": ("encoder", "decoder", "bag"),
    "tag": ("encoder", "decoder"),
    "forecast": ("series",),
}


def open_split(config: RunConfig) -> tuple[Data, Data]:
    """The data to learn from and the data to judge by."""
    data = config.data
    task = TASKS.get(kind_of(config.task)[0])
    kind = None if task is None else task.learns
    whole = open_data(data.path, data.source, data.target, lower=data.lower, kind=kind)
    if not data.validation:
        if isinstance(whole, Text | Series):
            return whole.split(data.validation_fraction)
        return whole.split(data.validation_fraction, config.train.seed)
    held = open_validation(data.validation, whole.kind, lower=data.lower)
    return whole, held.note_overlap(cast(Any, whole))


def data_fingerprint(train: Data, held: Data) -> str:
    """A hash of all that a run learns from and is judged by."""
    return hashlib.sha256(f"{train.fingerprint()} {held.fingerprint()}".encode()).hexdigest()


def tokenizer_fingerprint(tokenizers: Tokenizers | None) -> str:
    """A hash of all that the ids of a run depend on; "none" where there are no ids."""
    if tokenizers is None:
        return "none"
    if isinstance(tokenizers, PairTokenizers):
        return f"{tokenizers.source.fingerprint()} {tokenizers.target.fingerprint()}"
    return tokenizers.fingerprint()


def open_validation(paths: Sequence[Choice], holding: str, *, lower: bool) -> Data:
    """Data to judge by, of the same kind as that which was learned from."""
    if len(paths) > 2:
        raise ConfigError(f"validation takes one path, or a source and a target, not {len(paths)}")
    if len(paths) == 2:
        held = open_data(None, *map(str, paths), lower=lower)
    else:
        held = open_data(paths[0], lower=lower, kind=holding)
    if held.kind != holding:
        named = ", ".join(map(str, paths))
        raise DataError(f"{named} holds {held.kind}; the run learns from {holding}")
    if isinstance(held, Images) and held.test is not None:
        return held.test
    return held


def prepare_training(
    config: RunConfig, tokenizers: Tokenizers | None = None, progress: Progress | None = None
) -> TrainingData:
    """Open the data of a run and make its task; tokenizers are trained unless given."""
    train, held = open_split(config)
    fingerprint = data_fingerprint(train, held)
    _must_fit(config, train, tokenizers)
    if isinstance(train, Images):
        assert isinstance(held, Images)
        return prepare_images(config, train, held, fingerprint)
    if isinstance(train, Series):
        assert isinstance(held, Series)
        return prepare_series(config, train, held, fingerprint)
    if isinstance(train, LabelledText):
        assert isinstance(held, LabelledText)
        assert not isinstance(tokenizers, PairTokenizers)
        tokenizer = _label_tokenizer(config, train) if tokenizers is None else tokenizers
        return prepare_labels(config, train, held, tokenizer, fingerprint)
    if isinstance(train, Text):
        assert isinstance(held, Text)
        assert not isinstance(tokenizers, PairTokenizers)
        tokenizer = _text_tokenizer(config, train, held) if tokenizers is None else tokenizers
        return prepare_text(config, train, held, tokenizer, fingerprint, progress)
    assert isinstance(held, Pairs)
    assert not isinstance(tokenizers, Tokenizer)
    return _prepare_pairs(config, train, held, tokenizers, fingerprint)


def smallest_model(config: RunConfig) -> ModelConfig:
    """The model of a run before its data is read: with as few ids and classes as there can be."""
    task = TASKS.get(kind_of(config.task)[0])
    if task is not None and task.learns in ("labels", "tags"):
        return reader(config.model, label_task(config.task), classes=2, vocab_size=1)
    return resolve(config.model, vocab_size=1)


def _must_fit(config: RunConfig, data: Data, tokenizers: Tokenizers | None) -> None:
    """Refuse data, a task, a model and given tokenizers that are not for each other."""
    kind = kind_of(config.task)[0]
    if kind not in TASKS:
        raise ConfigError(unknown("task", kind, TASKS))
    if config.train.best not in ("last", *TASKS[kind].measures):
        known = ", ".join(["last", *TASKS[kind].measures])
        raise ConfigError(
            f"train.best={config.train.best!r} is not measured here; choose among {known}"
        )
    wanted, found = TASKS[kind].learns, data.kind
    if wanted != found:
        fitting = ", ".join(name for name, task in TASKS.items() if task.learns == found)
        raise ConfigError(
            f"task={kind!r} learns from {wanted}, and {data.name} holds {found}; "
            f"for {found} there is: {fitting}"
        )
    if tokenizers is not None and (known := _learned_from(tokenizers)) != _read_as(found):
        raise ConfigError(
            f"train.start={config.train.start} has learned from {known}; {data.name} holds {found}"
        )
    model = smallest_model(config)
    if (found == "images") != isinstance(model, VisionConfig):
        wrong = "does not read images" if found == "images" else "reads images only"
        raise ConfigError(
            f"task={kind!r} learns from {found}, and this model {wrong}; "
            "choose another model.preset or model.family"
        )
    if isinstance(model, VisionConfig):
        return
    if kind == "causal" and isinstance(model, RecurrentConfig) and model.bidirectional:
        raise ConfigError(
            "model.bidirectional=true also reads a text from its end, where the next token to "
            "predict stands;\nit is for task='label' and task='tag'"
        )
    shape = getattr(model, "shape", "decoder")
    needed = SHAPES[kind]
    if shape not in needed:
        fitting = " or ".join(map(repr, needed))
        raise ConfigError(
            f"task={kind!r} needs a model of shape {fitting}, not {shape!r}; "
            "choose another model.preset or model.shape"
        )
    if kind_of(config.task)[1].get("scheduled_sampling") and is_closed_form(family_of(model)):
        raise ConfigError(
            "task.scheduled_sampling lets a model read its own predictions while it learns; "
            f"{family_of(model)!r} counts the text as it is\nleave it out, or choose another model"
        )
    if kind == "masked":
        assert isinstance(model, TransformerConfig)
        must_hide(config.task, model)


def _learned_from(tokenizers: Tokenizers) -> str:
    return "pairs" if isinstance(tokenizers, PairTokenizers) else "text"


def _read_as(found: str) -> str:
    """Labels and tags are of texts, which need one tokenizer."""
    return "text" if found in ("labels", "tags") else found


def prepare_evaluation(
    config: RunConfig,
    held: Data,
    tokenizers: Tokenizers | None,
    progress: Progress | None = None,
) -> EvalData:
    """Make the task of a run, and what its model is judged by, from held-out data alone."""
    if isinstance(held, Images):
        return examine_images(config, held)
    if isinstance(held, Series):
        return examine_series(config, held)
    if isinstance(held, LabelledText):
        assert isinstance(tokenizers, Tokenizer)
        return examine_labels(config, held, tokenizers)
    if isinstance(held, Text):
        assert isinstance(tokenizers, Tokenizer)
        return examine_text(config, held, tokenizers, progress)
    assert isinstance(tokenizers, PairTokenizers)
    return _examine_pairs(config, held, tokenizers)


def _text_tokenizer(config: RunConfig, train: Text, held: Text) -> Tokenizer:
    """Learned from the whole of the user's text, so that no letter of it is unknown.

    From the training part alone where the held-out text is a file of its own.
    """
    texts = [train] if config.data.validation else [train, held]
    choice = config.data.tokenizer

    def write(folder: Path) -> None:
        pieces = (piece for text in texts for piece, _ in text.chunks())
        tokenizer = train_tokenizer(choice, pieces, total=sum(text.size for text in texts))
        tokenizer.save(folder / JOINT)

    return Tokenizer.load(_cached_tokenizer(choice, texts, write) / JOINT)


def _label_tokenizer(config: RunConfig, train: LabelledText) -> Tokenizer:
    """Trained on the texts of the training data."""
    choice = config.data.tokenizer

    def write(folder: Path) -> None:
        train_tokenizer(choice, train.texts()).save(folder / JOINT)

    return Tokenizer.load(_cached_tokenizer(choice, [train], write) / JOINT)


def _pair_tokenizers(config: RunConfig, train: Pairs) -> PairTokenizers:
    choice = config.data.tokenizer

    def write(folder: Path) -> None:
        train_pair(choice, train.rows).save(folder)

    return PairTokenizers.load(_cached_tokenizer(choice, [train], write))


def _cached_tokenizer(
    choice: Choice, data: Sequence[Text | Pairs | LabelledText], write: Callable[[Path], None]
) -> Path:
    """The folder of the cache with the tokenizer of this kind for this data."""
    key = cache_key(to_table(choice), [part.fingerprint() for part in data])
    return cached_folder("tokenizers", key, write)[0]


def _examine_pairs(config: RunConfig, held: Pairs, tokenizers: PairTokenizers) -> EvalData:
    source, target = tokenizers.source, tokenizers.target
    sizes = {"source_vocab_size": None if tokenizers.shared else source.size}
    model = resolve(config.model, vocab_size=target.size, **sizes)
    task = pair_task(config, tokenizers)
    store = pair_store(held, source, target)
    loader = _pair_loader(config, model, task, store)

    def validation_batches(limit: int | None) -> Iterator[Batch]:
        rows = None if limit is None else max(1, limit * len(store) // len(store.target_ids))
        return (_collate(config, task, store, each, 0) for each in loader.sequential(rows))

    return EvalData(
        task=task,
        task_choice=config.task,
        tokenizers=tokenizers,
        model=model,
        validation_batches=validation_batches,
        validation_data=held,
        validation_size=len(loader),
        dropped=loader.dropped,
    )


def pair_task(config: RunConfig, tokenizers: PairTokenizers) -> Task:
    """The task of a run on pairs, with the ids that begin and end its sentences."""
    return make(
        config.task,
        TASKS,
        "task",
        start_id=tokenizers.target.start_id,
        stop_id=tokenizers.target.stop_id,
        source_stop_id=tokenizers.source.stop_id,
        opening=tuple(tokenizers.target.prefix_ids),
        source_opening=tuple(tokenizers.source.prefix_ids),
    )


def _prepare_pairs(
    config: RunConfig,
    train: Pairs,
    held: Pairs,
    tokenizers: PairTokenizers | None,
    fingerprint: str,
) -> TrainingData:
    if tokenizers is None:
        tokenizers = _pair_tokenizers(config, train)
    source, target = tokenizers.source, tokenizers.target
    exam = _examine_pairs(config, held, tokenizers)
    task = exam.task
    store = pair_store(train, source, target)
    loader = _pair_loader(config, exam.model, task, store)
    sizes = f"{target.size:,} tokens, joint"
    if not tokenizers.shared:
        sizes = f"{source.size:,} and {target.size:,} tokens"
    description = [
        f"data       {train.description}",
        f"held out   {held.description}",
        f"tokenizer  {target.kind}, {sizes}",
    ]
    if loader.dropped or exam.dropped:
        longest = exam.model.context - 1 - cast(Seq2Seq, task).wider
        description.append(
            f"left out   {loader.dropped:,} pairs to learn from and {exam.dropped:,} "
            f"held out, longer than {longest} tokens"
        )
    return TrainingData(
        **vars(exam),
        batch=scheduled(
            config,
            task,
            lambda number: _collate(config, task, store, loader.examples(number), number),
        ),
        example_ids=lambda number: loader.examples(number).indices.tolist(),
        all_batches=lambda: (
            _collate(config, task, store, rows, 0) for rows in loader.sequential()
        ),
        description=description,
        fingerprint=fingerprint,
    )


def _pair_loader(config: RunConfig, model: ModelConfig, task: Task, store: PairStore) -> PairLoader:
    """What the openings of sentences need is taken from the places that pairs may have."""
    longest = model.context - cast(Seq2Seq, task).wider
    settings = config.train
    batch = None if settings.batch is None else settings.batch // settings.accumulate
    tokens = None if batch else (settings.tokens or DEFAULT_TOKENS) // settings.accumulate
    return PairLoader(store, tokens, settings.seed, longest=longest, batch=batch)


def _collate(
    config: RunConfig, task: Task, store: PairStore, rows: PairIndices, number: int
) -> Batch:
    sources = [store.source(row) for row in rows.indices]
    targets = [store.target(row) for row in rows.indices]
    return task.collate((sources, targets, rows.width), generator_of(config, number))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the file of any tokenizer."""
    return any((folder / name).exists() for name in (JOINT, SOURCE, TARGET))


def load_tokenizers(folder: Path, config: RunConfig) -> Tokenizers:
    """The tokenizer of a run folder, or those of its two sides."""
    kind = kind_of(config.task)[0]
    learns = TASKS[kind].learns if kind in TASKS else "text"
    if learns == "pairs" or (folder / SOURCE).exists():
        return PairTokenizers.load(folder)
    return Tokenizer.load(folder / JOINT)
