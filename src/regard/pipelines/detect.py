"""Detect the kind of data at a path, and open it."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from regard.config import Choice, DataConfig, RunConfig, kind_of, make
from regard.data.ambiguous_columns import ambiguous_table_error, single_line
from regard.data.arrow_files import HUB_PREFIX
from regard.data.builtin import BUILTINS
from regard.data.captions import caption_table, caption_tables, count_images, image_folder_error
from regard.data.columns import ROLES, find_roles
from regard.data.pairs import from_parallel
from regard.data.table_files import is_table, read_table, read_validation
from regard.data.tables import Table
from regard.data.text import Text
from regard.data.text_files import suffix
from regard.errors import ConfigError, DataError
from regard.pipelines.all_pipelines import PIPELINES
from regard.pipelines.base import Data, Pipeline
from regard.pipelines.labels import TagsPipeline
from regard.tasks import TASKS

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def open_data(
    path: Choice | None,
    source: str | int | None = None,
    target: str | int | None = None,
    *,
    lower: bool = False,
    kind: str | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Any:
    """Open the data at a path with the pipeline that recognizes it.

        a file                    text, one document
        a folder                  text, a document for each text file in it
        source and target         pairs: two files, line by line
        .csv .tsv .json .jsonl    a table (also .parquet, a folder of such files, and
                                  hf://datasets/owner/name): labels, scores, pairs, tags, spans,
                                  series or text, by its columns (`data.columns.find_roles`)
        .jsonl of messages        dialogues; also of prompts and responses, and .json arrays
        a .conll file             tags: a word and its tag on each line
        SQuAD's JSON              spans: questions, contexts and answers
        a .npz file               images: arrays x and y, or images and labels;
                                  strokes: arrays xyp and off
        MNIST's IDX files         images: the folder that holds them
        images and a table        captions: a folder with the table of file names and captions
                                  (also COCO's JSON and Flickr8k's captions.txt)
        a folder for each class   images: .png, .jpg, .webp and .gif, by the name of their folder
        a name in BUILTINS        generated; a table gives its options
                                  (a file of such a name is opened as ./name)

    A run, a model, and a folder of images with neither a table nor classes are refused. Each file
    may be gzip, with any name. The `description` of the result says what was read and what was
    skipped. `kind` is the kind of data that the task learns from: with "tags", a file is read as
    .conll, unless columns are named or it is a table other than .csv and .tsv; with "labels",
    "scores" or "series", as a table; with "dialogues" or "sentences", as dialogues or as pairs of
    sentences; with "text", a table that is ambiguous is read as plain text. `columns` are the
    settings that name columns (`text`, `text2`, `label`, `tags`, and `columns` of a .conll file);
    with a path, `source` and `target` name columns too.
    """
    data, _ = _open(path, source, target, kind, columns or {})
    return _lowercase(data, lower)


def open_split(config: RunConfig, *, is_new: bool = True) -> tuple[Any, Any]:
    """The training data and the validation data of a run.

    For a new run, a `data.validation_fraction` that would not be used is an error; run folders of
    earlier versions may have one.
    """
    data = config.data
    task = TASKS.get(kind_of(config.task)[0])
    kind = None if task is None else task.data_kind
    columns = column_settings(data)
    dataset, table = _open(data.path, data.source, data.target, kind, columns)
    dataset = _lowercase(dataset, data.lower)
    columns |= {role: str(name) for role, name in getattr(dataset, "columns", {}).items()}
    if data.split:
        if dataset.kind != "series":
            raise ConfigError(f"data.split is for series; {dataset.name} holds {dataset.kind}")
        _reject_validation(data, "data.split gives the validation rows", "validation")
        _reject_validation(data, "data.split gives the validation rows", "validation_fraction")
        splits: tuple[Any, Any] = (
            dataset.split_as_ett() if data.split == "ett" else dataset.split_by_sizes(data.split)
        )
        return splits
    if data.validation:
        if is_new:
            reason = "data.validation is all validation data"
            _reject_validation(data, reason, "validation_fraction")
        validation = open_validation(
            data.validation, dataset.kind, lower=data.lower, columns=columns, training=table
        )
        return dataset, validation.note_overlap(dataset)
    validation_table = _validation_table(data.path, table, columns)
    if validation_table is not None:
        if is_new:
            reason = f"{data.path} has its own validation split"
            _reject_validation(data, reason, "validation_fraction")
        validation = _interpret_table(validation_table, columns, dataset.kind)
        return dataset, _lowercase(validation, data.lower).note_overlap(dataset)
    if table is not None and (line := single_line(table)) is not None:
        raise DataError(f"{table.path} {line}")
    training, validation = dataset.split(data.validation_fraction, config.train.seed)
    return training, validation


def _reject_validation(data: DataConfig, reason: str, name: str) -> None:
    """Raise if a setting of the validation data is given that would not be used."""
    value = getattr(data, name)
    if value != getattr(DataConfig(), name):
        raise ConfigError(f"{reason}, so data.{name}={value} would not be used; leave it out")


def column_settings(data: DataConfig) -> dict[str, Any]:
    """The settings that name columns; with a path, `source` and `target` are among them."""
    names = (
        "text",
        "text2",
        "label",
        "tags",
        "columns",
        *(("source", "target") if data.path else ()),
    )
    return {name: value for name in names if (value := getattr(data, name))}


def open_validation(
    paths: Sequence[Choice],
    kind: str,
    *,
    lower: bool,
    columns: Mapping[str, Any] | None = None,
    training: Table | None = None,
) -> Any:
    """Validation data of this kind, from one path or from a source and a target.

    `training` is the table of the training data, if it is one: a column that has decimal commas
    there has them here too.
    """
    if len(paths) > 2:
        raise ConfigError(
            f"validation data is one path, or a source and a target, not {len(paths)} paths"
        )
    if len(paths) == 2:
        data = open_data(None, *map(str, paths), lower=lower)
    else:
        columns = _applicable_columns(paths[0], columns or {})
        data, _ = _open(paths[0], None, None, kind, columns, training)
        data = _lowercase(data, lower)
    if data.kind != kind:
        names = ", ".join(map(str, paths))
        raise DataError(f"{names} holds {data.kind}; the run learns from {kind}")
    return PIPELINES[kind].validation_split(data)


def _applicable_columns(path: Choice, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns of the training data; none if they are names and the table has no header."""
    file_path = _expand(path) if isinstance(path, str) else None
    named = any(not str(name).isdecimal() for name in columns.values())
    if (
        not named
        or "columns" in columns
        or not (file_path and file_path.exists() and is_table(file_path))
    ):
        return columns
    return columns if read_table(file_path, names=list(columns.values())).header else {}


def is_dataset_name(path: str) -> bool:
    """Whether a dataset has a name instead of a path: built in, or on the Hugging Face hub."""
    return path in BUILTINS or path.startswith(HUB_PREFIX)


def data_fingerprint(training: Data, validation: Data) -> str:
    """A hash of all data that a run is trained and evaluated on."""
    fingerprints = f"{training.fingerprint()} {validation.fingerprint()}"
    return hashlib.sha256(fingerprints.encode()).hexdigest()


def run_name(path: Choice | None, source: str | None) -> str:
    """A name for a run: that of its data file, or of the folder of a file named train or data."""
    if isinstance(path, str) and path.startswith(HUB_PREFIX):
        return path.rstrip("/").rsplit("/", 1)[-1]
    if path is not None and not (isinstance(path, str) and _expand(path).exists()):
        return kind_of(path)[0]  # a built-in
    file_path = _expand(str(path if path is not None else source)).resolve()
    stem = file_path.name.lstrip(".").split(".")[0]
    return (file_path.parent.name if stem in ("input", "train", "data", "") else stem) or "text"


def _open(
    path: Choice | None,
    source: str | int | None,
    target: str | int | None,
    kind: str | None,
    columns: Mapping[str, Any],
    training: Table | None = None,
) -> tuple[Any, Table | None]:
    """The data of `open_data`, and its table if it is one; `training` as in `open_validation`."""
    if path is not None:
        sides = {"source": source, "target": target}
        columns = {**columns, **{side: name for side, name in sides.items() if name is not None}}
    elif source is not None or target is not None:
        if source is None or target is None:
            side = "source" if target is None else "target"
            raise ConfigError(f"data.{side} is set alone; set both data.source and data.target")
        return from_parallel(_existing_path(str(source)), _existing_path(str(target))), None
    if path is None:
        raise ConfigError("no data; give data.path, or data.source and data.target")
    if not isinstance(path, str) or path in BUILTINS:
        if columns:
            raise ConfigError(f"data.{next(iter(columns))} is for tables; {path} is built in")
        return make(path, BUILTINS, "built-in dataset"), None
    if path.startswith(HUB_PREFIX):
        table = read_table(path)
        return _interpret_table(table, columns, kind), table
    file_path = _existing_path(path)
    if file_path.is_dir() and all(
        (file_path / name).exists() for name in ("config.json", "metrics.jsonl")
    ):
        raise DataError(
            f"{file_path} is a run, not data; continue it with regard resume {file_path},\n"
            f"or start from its weights: regard train DATA train.start={file_path}"
        )
    if (file_path / "config.json").exists() and any(
        suffix(file) in WEIGHT_SUFFIXES for file in file_path.iterdir()
    ):
        raise DataError(
            f"{file_path} is a model, not data: it has config.json and weights;\n"
            f"start from its weights: regard train DATA train.start={file_path}\n"
            f"or make it a run: regard import {file_path} RUN"
        )
    if {"source", "target"} & set(columns) and caption_tables(file_path):
        file_path = Path(caption_table(file_path).path)
    if {"source", "target"} & set(columns) and not is_table(file_path):
        raise ConfigError(
            f"data.source and data.target name columns of a table, but {file_path.name} is not a "
            "table;\ngive data.path alone, or two parallel files as data.source and data.target"
        )
    if "columns" in columns:
        others = [f"data.{name}" for name in columns if name != "columns"]
        is_conll = not is_table(file_path) or suffix(file_path) in (".csv", ".tsv")
        if others or not is_conll:
            raise ConfigError(
                f"data.columns is for CoNLL files; leave it out, and name the columns "
                f"of the table: {' '.join(f'{name}=…' for name in others or ['data.text'])}"
            )
        return TagsPipeline().open(file_path, columns["columns"]), None
    pipeline = _pipeline_for(file_path, kind)
    if pipeline.name == "text" and kind is None and count_images(file_path).mostly_images:
        raise image_folder_error(file_path)
    if pipeline.reads_as_table(file_path, columns, kind):
        return _open_table(file_path, columns, kind, training)
    if columns:
        name = next(iter(columns))
        raise ConfigError(
            f"data.{name} names a column of a table; {file_path} holds {pipeline.name}"
        )
    return pipeline.open(file_path), None


def _open_table(
    path: Path, columns: Mapping[str, str], kind: str | None, training: Table | None
) -> tuple[Data, Table | None]:
    """The data of a table; for language modelling, an ambiguous table is read as plain text."""
    if kind != "text" or columns or path.is_dir():
        table = read_table(path, training, [str(name) for name in columns.values()])
        return _interpret_table(table, columns, kind), table
    for table_kind in (kind, None):  # with None, the caller refuses the data of another kind
        with suppress(DataError):
            table = read_table(path, training)
            return _interpret_table(table, columns, table_kind), table
    text: Text = PIPELINES["text"].open(path)
    note = "; read as plain text, not as a table (data.text=COLUMN reads a column)"
    return replace(text, description=text.description + note), None


def _lowercase(data: Any, lower: bool) -> Any:
    return PIPELINES[data.kind].lowercase(data) if lower else data


def _interpret_table(table: Table, columns: Mapping[str, str], kind: str | None) -> Data:
    """The data of a table, of the kind that its columns determine."""
    if next(table.rows(), None) is None:
        names = ", ".join(table.columns)
        raise DataError(f"{table.path} has no rows, only the names of its columns: {names}")
    table_kind = kind if kind in ROLES else None
    roles = find_roles(table, columns, table_kind)
    if roles is None:
        raise ambiguous_table_error(table, table_kind, columns)
    data: Data = PIPELINES[roles.kind].from_table(table, roles)
    return data


def _validation_table(
    path: Choice | None, training: Table | None, columns: Mapping[str, Any]
) -> Table | None:
    """The validation split of a folder of tables, or of a dataset of the hub."""
    if not isinstance(path, str) or path in BUILTINS:
        return None
    if path.startswith(HUB_PREFIX):
        return read_validation(path, training)
    file_path = _expand(path)
    if not file_path.is_dir() or not is_table(file_path):
        return None
    return read_validation(file_path, training, [str(name) for name in columns.values()])


def _pipeline_for(path: Path, kind: str | None) -> Pipeline:
    """The pipeline that recognizes a path, or that of `kind` if it may open the path too."""
    recognized = next((p for p in reversed(PIPELINES.values()) if p.recognizes(path)), None)
    if recognized is None:  # only if a caller has replaced "text", which recognizes every path
        raise DataError(f"no pipeline recognizes {path}; pipelines: {', '.join(PIPELINES)}")
    requested = PIPELINES.get(kind) if kind is not None else None
    if requested is None or recognized.exclusive or not requested.reads_on_request(path):
        return recognized
    return requested


def _check_readable(folder: Path) -> None:
    """Raise `DataError` for an unreadable subfolder, which `os.walk` would skip silently."""
    for parent, folders, _ in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent), *(Path(parent, name) for name in folders)):
            if not os.access(path, os.R_OK | os.X_OK):
                raise DataError(f"{path} cannot be read: Permission denied")


def _expand(path: str) -> Path:
    """A path whose leading ~ is the home folder."""
    return Path(os.path.expanduser(path))


def _existing_path(path: str) -> Path:
    try:
        file_path = _expand(path)
        if path and file_path.exists():  # Path("") is the working directory
            if file_path.is_dir():
                _check_readable(file_path)
            return file_path
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    siblings = (
        sorted(file.name for file in file_path.parent.iterdir())
        if file_path.parent.is_dir()
        else []
    )
    stems = {Path(name).stem: name for name in [*siblings, *BUILTINS]}  # suffixes are often equal
    close = get_close_matches(file_path.stem, stems, n=1, cutoff=0.75)
    hint = ""
    if close:
        name = stems[close[0]]
        name = name if name in BUILTINS else str(file_path.parent / name)
        hint = f"\ndid you mean {name!r}?"
    raise DataError(
        f"no file, folder or built-in dataset {path!r}{hint}\nbuilt in: {', '.join(BUILTINS)}"
    )
