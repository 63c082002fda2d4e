"""A path is enough: find out what kind of data it holds, and open it."""

import hashlib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from regard.config import Choice, RunConfig, kind_of, make
from regard.data.builtin import BUILTINS
from regard.data.pairs import from_parallel
from regard.errors import ConfigError, DataError
from regard.pipelines.base import Data, Pipeline
from regard.pipelines.table import PIPELINES
from regard.tasks import TASKS


def open_data(
    path: Choice | None,
    source: str | None = None,
    target: str | None = None,
    *,
    lower: bool = False,
    kind: str | None = None,
) -> Any:
    """Open the data at a path with the pipeline that recognizes it.

        a file                    text, one document
        a folder                  text, a document for each text file in it
        a .tsv file               pairs: source, tab, target
        source and target         pairs: two files, line by line
        .csv, .tsv, .jsonl        labels: with columns (or keys) text and label
        a .csv file               series: columns of numbers, a row for each time
        a .conll file             tags: a word and its tag on each line
        a .npz file               images: arrays x and y, or images and labels
        MNIST's IDX files         images: the folder that holds them
        a folder for each class   images: .png and .jpg files, by the name of their folder
        a name in BUILTINS        generated; a table gives its options
                                  (a file of such a name is opened as ./name)

    Each file may be gzip, whatever its name. The `description` of the result says what was read
    and what was skipped. `kind` is the kind of data that the task learns from: with "labels", a
    .tsv file is text, tab, label; with "tags", any file is read as .conll.
    """
    data = _open(path, source, target, kind)
    return PIPELINES[data.kind].lowercase(data) if lower else data


def open_split(config: RunConfig) -> tuple[Any, Any]:
    """The training data and the validation data of a run."""
    data = config.data
    task = TASKS.get(kind_of(config.task)[0])
    kind = None if task is None else task.learns
    whole = open_data(data.path, data.source, data.target, lower=data.lower, kind=kind)
    if not data.validation:
        training, validation = whole.split(data.validation_fraction, config.train.seed)
        return training, validation
    validation = open_validation(data.validation, whole.kind, lower=data.lower)
    return whole, validation.note_overlap(whole)


def open_validation(paths: Sequence[Choice], kind: str, *, lower: bool) -> Any:
    """Validation data of this kind, from one path or from a source and a target."""
    if len(paths) > 2:
        raise ConfigError(f"validation takes one path, or a source and a target, not {len(paths)}")
    if len(paths) == 2:
        data = open_data(None, *map(str, paths), lower=lower)
    else:
        data = open_data(paths[0], lower=lower, kind=kind)
    if data.kind != kind:
        names = ", ".join(map(str, paths))
        raise DataError(f"{names} holds {data.kind}; the run learns from {kind}")
    return PIPELINES[kind].validation_part(data)


def data_fingerprint(training: Data, validation: Data) -> str:
    """A hash of all data that a run is trained and evaluated on."""
    parts = f"{training.fingerprint()} {validation.fingerprint()}"
    return hashlib.sha256(parts.encode()).hexdigest()


def run_name(path: Choice | None, source: str | None) -> str:
    """A name for a run: that of its data file, or of the folder of a file named "train"."""
    if path is not None and not (isinstance(path, str) and Path(path).exists()):
        return kind_of(path)[0]  # a built-in
    place = Path(str(path if path is not None else source)).resolve()
    stem = place.name.lstrip(".").split(".")[0]
    return (place.parent.name if stem in ("input", "train", "data", "") else stem) or "text"


def _open(path: Choice | None, source: str | None, target: str | None, kind: str | None) -> Data:
    if source is not None or target is not None:
        if path is not None:
            raise ConfigError("give data.path, or data.source and data.target, not both")
        if source is None or target is None:
            given = "source" if target is None else "target"
            raise ConfigError(
                f"data.{given} is given alone; data.source and data.target belong together"
            )
        return from_parallel(_existing(source), _existing(target))
    if path is None:
        raise ConfigError("no data; give data.path, or data.source and data.target")
    if not isinstance(path, str) or path in BUILTINS:
        return make(path, BUILTINS, "built-in data set")
    place = _existing(path)
    if place.is_dir() and all((place / name).exists() for name in ("config.json", "metrics.jsonl")):
        raise DataError(
            f"{place} is a run, not data; continue it with regard resume {place},\n"
            f"or start from its weights: regard train DATA train.start={place}"
        )
    data: Data = _pipeline_for(place, kind).open(place)
    return data


def _pipeline_for(path: Path, kind: str | None) -> Pipeline:
    """The pipeline that recognizes a path, or that of `kind` if it may read the path as well."""
    recognized = next(p for p in reversed(PIPELINES.values()) if p.recognizes(path))
    requested = PIPELINES.get(kind) if kind is not None else None
    if requested is None or recognized.certain or not requested.reads_on_request(path):
        return recognized
    return requested


def _existing(path: str) -> Path:
    place = Path(path).expanduser()
    if path and place.exists():  # Path("") would be the working folder
        return place
    siblings = sorted(file.name for file in place.parent.iterdir()) if place.parent.is_dir() else []
    close = get_close_matches(place.name, [*BUILTINS, *siblings], n=1)
    hint = ""
    if close:
        name = close[0] if close[0] in BUILTINS else str(place.parent / close[0])
        hint = f"\ndid you mean {name!r}?"
    raise DataError(
        f"no file, folder or built-in data set {path!r}{hint}\nbuilt in: {', '.join(BUILTINS)}"
    )
