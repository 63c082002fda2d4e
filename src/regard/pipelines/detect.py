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
from regard.data.arrow_files import HUB
from regard.data.builtin import BUILTINS
from regard.data.columns import ROLES, ambiguous_table, find_roles
from regard.data.pairs import from_parallel
from regard.data.table_files import is_table, read_table, read_validation
from regard.data.tables import Table
from regard.data.text import Text
from regard.data.text_files import suffix
from regard.errors import ConfigError, DataError
from regard.pipelines.base import Data, Pipeline
from regard.pipelines.labels import TagsPipeline
from regard.pipelines.table import PIPELINES
from regard.tasks import TASKS


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
                                  hf://datasets/owner/name): labels, pairs, tags, series or
                                  text, by its columns (`data.columns.find_roles`)
        a .conll file             tags: a word and its tag on each line
        SQuAD's JSON              spans: questions, contexts and answers; also a table of these
        a .npz file               images: arrays x and y, or images and labels
        MNIST's IDX files         images: the folder that holds them
        images and a table        captions: a folder with the table of file names and captions
        a folder for each class   images: .png and .jpg files, by the name of their folder
        a name in BUILTINS        generated; a table gives its options
                                  (a file of such a name is opened as ./name)

    Each file may be gzip, with any name. The `description` of the result says what was read
    and what was skipped. `kind` is the kind of data that the task learns from: with "tags", any
    file is read as .conll; with "labels", "scores" or "series", as a table; with "text", a table
    that is ambiguous is read as plain text. `columns` are the settings that name columns (`text`,
    `text2`, `label`, `tags`, and `columns` of a .conll file); with a path, `source` and `target`
    name columns too.
    """
    data = _open(path, source, target, kind, columns or {})
    return PIPELINES[data.kind].lowercase(data) if lower else data


def open_split(config: RunConfig) -> tuple[Any, Any]:
    """The training data and the validation data of a run."""
    data = config.data
    task = TASKS.get(kind_of(config.task)[0])
    kind = None if task is None else task.data_kind
    columns = column_settings(data)
    whole = open_data(
        data.path, data.source, data.target, lower=data.lower, kind=kind, columns=columns
    )
    columns |= {role: str(name) for role, name in getattr(whole, "columns", {}).items()}
    if data.split:
        if whole.kind != "series":
            raise ConfigError(f"data.split is for series; {whole.name} holds {whole.kind}")
        for name in ("validation", "validation_fraction"):
            value = getattr(data, name)
            if value != getattr(DataConfig(), name):
                raise ConfigError(
                    f"data.split gives the validation rows, so data.{name}={value} would not be "
                    "used; leave one of them out"
                )
        splits: tuple[Any, Any] = whole.split_rows(data.split)
        return splits
    if data.validation:
        validation = open_validation(data.validation, whole.kind, lower=data.lower, columns=columns)
        return whole, validation.note_overlap(whole)
    table = _validation_table(data.path)
    if table is not None:
        validation = _interpret_table(table, columns, whole.kind)
        validation = PIPELINES[whole.kind].lowercase(validation) if data.lower else validation
        return whole, validation.note_overlap(whole)
    training, validation = whole.split(data.validation_fraction, config.train.seed)
    return training, validation


def column_settings(data: DataConfig) -> dict[str, Any]:
    """The settings that name columns; `source` and `target` do where there is a path."""
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
    paths: Sequence[Choice], kind: str, *, lower: bool, columns: Mapping[str, Any] | None = None
) -> Any:
    """Validation data of this kind, from one path or from a source and a target."""
    if len(paths) > 2:
        raise ConfigError(f"validation takes one path, or a source and a target, not {len(paths)}")
    if len(paths) == 2:
        data = open_data(None, *map(str, paths), lower=lower)
    else:
        columns = _applicable_columns(paths[0], columns or {})
        data = open_data(paths[0], lower=lower, kind=kind, columns=columns)
    if data.kind != kind:
        names = ", ".join(map(str, paths))
        raise DataError(f"{names} holds {data.kind}; the run learns from {kind}")
    return PIPELINES[kind].validation_split(data)


def _applicable_columns(path: Choice, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns of the training data; none if they are names and the table has no header."""
    file_path = Path(os.path.expanduser(path)) if isinstance(path, str) else None
    named = any(not str(name).isdecimal() for name in columns.values())
    if (
        not named
        or "columns" in columns
        or not (file_path and file_path.exists() and is_table(file_path))
    ):
        return columns
    return columns if read_table(file_path).header else {}


def is_data_set_name(path: str) -> bool:
    """Whether a data set has a name instead of a path: built in, or on the Hugging Face hub."""
    return path in BUILTINS or path.startswith(HUB)


def data_fingerprint(training: Data, validation: Data) -> str:
    """A hash of all data that a run is trained and evaluated on."""
    fingerprints = f"{training.fingerprint()} {validation.fingerprint()}"
    return hashlib.sha256(fingerprints.encode()).hexdigest()


def run_name(path: Choice | None, source: str | None) -> str:
    """A name for a run: that of its data file, or of the folder of a file named "train"."""
    if isinstance(path, str) and path.startswith(HUB):
        return path.rstrip("/").rsplit("/", 1)[-1]
    if path is not None and not (isinstance(path, str) and Path(path).exists()):
        return kind_of(path)[0]  # a built-in
    file_path = Path(str(path if path is not None else source)).resolve()
    stem = file_path.name.lstrip(".").split(".")[0]
    return (file_path.parent.name if stem in ("input", "train", "data", "") else stem) or "text"


def _open(
    path: Choice | None,
    source: str | int | None,
    target: str | int | None,
    kind: str | None,
    columns: Mapping[str, Any],
) -> Data:
    if path is not None:
        sides = {"source": source, "target": target}
        columns = {**columns, **{side: name for side, name in sides.items() if name is not None}}
    elif source is not None or target is not None:
        if source is None or target is None:
            given = "source" if target is None else "target"
            raise ConfigError(f"data.{given} is set alone; set both data.source and data.target")
        return from_parallel(_existing_path(str(source)), _existing_path(str(target)))
    if path is None:
        raise ConfigError("no data; give data.path, or data.source and data.target")
    if not isinstance(path, str) or path in BUILTINS:
        if columns:
            raise ConfigError(f"data.{next(iter(columns))} is for tables; {path} is built in")
        return make(path, BUILTINS, "built-in data set")
    if path.startswith(HUB):
        return _interpret_table(read_table(path), columns, kind)
    file_path = _existing_path(path)
    if file_path.is_dir() and all(
        (file_path / name).exists() for name in ("config.json", "metrics.jsonl")
    ):
        raise DataError(
            f"{file_path} is a run, not data; continue it with regard resume {file_path},\n"
            f"or start from its weights: regard train DATA train.start={file_path}"
        )
    if {"source", "target"} & set(columns) and not is_table(file_path):
        raise ConfigError(
            f"give data.path, or data.source and data.target, not both; {file_path.name} is no "
            "table, whose columns they could name"
        )
    if "columns" in columns:
        return TagsPipeline().open(file_path, columns["columns"])
    pipeline = _pipeline_for(file_path, kind)
    if _reads_table(pipeline, file_path, columns):
        return _open_table(file_path, columns, kind)
    if columns:
        name = next(iter(columns))
        raise ConfigError(f"data.{name} is a column of a table; {file_path} holds {pipeline.name}")
    data: Data = pipeline.open(file_path)
    return data


def _reads_table(pipeline: Pipeline, path: Path, columns: Mapping[str, str]) -> bool:
    """Whether to read a path as a table: by its suffix, by column settings, or by the task."""
    if pipeline.name == "tags":
        delimited = suffix(path) in (".csv", ".tsv")  # lines of a word and a tag, unless named
        return bool(columns) or (is_table(path) and not delimited)
    if pipeline.name == "text":
        return bool(columns) or is_table(path)
    if pipeline.name in ("spans", "captions"):
        return is_table(path) and not pipeline.recognizes(path)
    return pipeline.name in ("labels", "scores", "series")


def _open_table(path: Path, columns: Mapping[str, str], kind: str | None) -> Data:
    """A table; for language modelling, an ambiguous table is read as plain text."""
    if kind != "text" or columns or path.is_dir():
        return _interpret_table(read_table(path), columns, kind)
    with suppress(DataError):
        return _interpret_table(read_table(path), columns, kind)
    with suppress(DataError):
        # raises later: the task needs another kind of data
        return _interpret_table(read_table(path), columns, None)
    text: Text = PIPELINES["text"].open(path)
    note = "; read as it is, not as a table (data.text=COLUMN reads a column)"
    return replace(text, description=text.description + note)


def _interpret_table(table: Table, columns: Mapping[str, str], kind: str | None) -> Data:
    """The data of a table, of the kind that its columns determine."""
    table_kind = kind if kind in ROLES else None
    roles = find_roles(table, columns, table_kind)
    if roles is None:
        raise ambiguous_table(table, table_kind)
    data: Data = PIPELINES[roles.kind].from_table(table, roles)
    return data


def _validation_table(path: Choice | None) -> Table | None:
    """The validation split of a folder of tables, or of a data set of the hub."""
    if not isinstance(path, str) or path in BUILTINS:
        return None
    if path.startswith(HUB):
        return read_validation(path)
    file_path = Path(os.path.expanduser(path))
    return read_validation(file_path) if file_path.is_dir() and is_table(file_path) else None


def _pipeline_for(path: Path, kind: str | None) -> Pipeline:
    """The pipeline that recognizes a path, or that of `kind` if it may read the path as well."""
    recognized = next(p for p in reversed(PIPELINES.values()) if p.recognizes(path))
    requested = PIPELINES.get(kind) if kind is not None else None
    if requested is None or recognized.exclusive or not requested.reads_on_request(path):
        return recognized
    return requested


def _check_readable(folder: Path) -> None:
    """Raise for a folder inside that cannot be read: its files would be missing silently."""
    for parent, folders, _ in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent), *(Path(parent, name) for name in folders)):
            if not os.access(path, os.R_OK | os.X_OK):
                raise DataError(f"{path} cannot be read: Permission denied")


def _existing_path(path: str) -> Path:
    try:
        file_path = Path(os.path.expanduser(path))
        if path and file_path.exists():  # Path("") would be the working folder
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
    close = get_close_matches(file_path.name, [*BUILTINS, *siblings], n=1)
    hint = ""
    if close:
        name = close[0] if close[0] in BUILTINS else str(file_path.parent / close[0])
        hint = f"\ndid you mean {name!r}?"
    raise DataError(
        f"no file, folder or built-in data set {path!r}{hint}\nbuilt in: {', '.join(BUILTINS)}"
    )
