"""A path is enough: find out what the user's data is, and open it."""

import os
from difflib import get_close_matches
from pathlib import Path

from regard.config import Choice, make
from regard.data import images, pairs, series, text
from regard.data import labels as labelled
from regard.data.builtin import BUILTINS
from regard.data.images import Images
from regard.data.labels import LabelledText
from regard.data.pairs import Pairs
from regard.data.series import Series
from regard.data.text import Text
from regard.errors import ConfigError, DataError

__all__ = ["BUILTINS", "Data", "Images", "LabelledText", "Pairs", "Series", "Text", "open_data"]

Data = Text | Pairs | Images | LabelledText | Series


def open_data(
    path: Choice | None,
    source: str | None = None,
    target: str | None = None,
    *,
    lower: bool = False,
    kind: str | None = None,
) -> Data:
    """Open text, pairs, images, labels or series, whatever the path turns out to be.

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
        a name in BUILTINS        made here; a table gives its options
                                  (a file of such a name is opened as ./name)

    Each file may be gzip, whatever its name. What was found, and what was left out, is told by
    the `description` of the result. What a file does not tell is told by its `kind`: of
    "labels", a .tsv file is a text, tab, label; of "tags", any file is as .conll.
    """
    opened = _open(path, source, target, kind)
    if not lower:
        return opened
    if isinstance(opened, Images | Series):
        raise ConfigError(f"data.lower folds the case of text; {opened.name} holds {opened.kind}")
    return opened.lowercase()


def _open(path: Choice | None, source: str | None, target: str | None, kind: str | None) -> Data:
    if source is not None or target is not None:
        if path is not None:
            raise ConfigError("give data.path, or data.source and data.target, not both")
        if source is None or target is None:
            given = "source" if target is None else "target"
            raise ConfigError(
                f"data.{given} is given alone; data.source and data.target belong together"
            )
        return pairs.from_parallel(_existing(source), _existing(target))
    if path is None:
        raise ConfigError("no data; give data.path, or data.source and data.target")
    if not isinstance(path, str) or path in BUILTINS:
        return make(path, BUILTINS, "built-in data set")
    place = _existing(path)
    if place.is_dir():
        if all((place / name).exists() for name in ("config.json", "metrics.jsonl")):
            raise DataError(
                f"{place} is a run, not data; go on with it by regard resume {place},\n"
                f"or begin from its weights: regard train DATA train.start={place}"
            )
        if any(images.IDX.fullmatch(each.name) for each in place.iterdir()):
            return images.from_idx(place)
        if any(map(images.class_folders, (place, place / "train"))):
            return images.from_folder(place)
        return _folder(place)
    endings = [ending.lower() for ending in place.suffixes if ending.lower() != ".gz"]
    ending = endings[-1] if endings else ""
    if ending == ".conll" or kind == "tags":
        return labelled.from_conll(place)
    if ending == ".npz":
        return images.from_npz(place)
    if kind == "labels" or (ending in labelled.READERS and labelled.has_labels(place)):
        return labelled.READERS.get(ending, labelled.from_tsv)(place)
    if kind == "series" or (ending == ".csv" and series.is_series(place)):
        return series.from_csv(place)
    if ending == ".tsv":
        return pairs.from_tsv(place)
    return text.from_file(place)


def _folder(folder: Path) -> Text:
    paths: list[Path] = []
    skipped: dict[str, list[str]] = {}
    for here, folders, files in os.walk(folder):
        hidden = [name for name in folders + files if name.startswith(".")]
        folders[:] = [name for name in folders if name not in hidden]
        linked = [name for name in folders if (Path(here) / name).is_symlink()]
        for reason, names in (("hidden", hidden), ("linked folder", linked)):
            if names:
                skipped.setdefault(reason, []).extend(sorted(names))
        paths += [Path(here) / name for name in files if name not in hidden]
    return text.from_files(folder.resolve().name, sorted(paths), skipped)


def _existing(path: str) -> Path:
    place = Path(path).expanduser()
    if path and place.exists():  # Path("") would be the folder we are in
        return place
    near = sorted(each.name for each in place.parent.iterdir()) if place.parent.is_dir() else []
    close = get_close_matches(place.name, [*BUILTINS, *near], n=1)
    hint = ""
    if close:
        found = close[0] if close[0] in BUILTINS else str(place.parent / close[0])
        hint = f"\ndid you mean {found!r}?"
    raise DataError(
        f"no file, folder or built-in data set {path!r}{hint}\nbuilt in: {', '.join(BUILTINS)}"
    )
