"""Labelled text: one class per text (labels) or per word (tags)."""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from regard.data.text import stem
from regard.data.text_files import open_bytes, preview, read_lines, scan
from regard.data.validation_split import hash_threshold, row_hash
from regard.errors import DataError

LabelKind = Literal["labels", "tags"]
Row = tuple[tuple[str, ...], tuple[int, ...]]  # the parts of a text, and their classes
NumberedRow = tuple[int, Sequence[str], Sequence[str]]  # line number, parts, their labels
TEXT, LABEL = ("text", "sentence"), ("label", "class")  # accepted column names


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Texts in parts, each part with its class.

    Of kind "labels", a text has one part; of kind "tags", each word is a part.
    """

    kind: LabelKind
    name: str
    description: str
    rows: Sequence[Row] = field(repr=False)
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def texts(self) -> list[str]:
        """The texts, their parts joined by spaces."""
        return [" ".join(parts) for parts, _ in self.rows]

    def split(self, fraction: float, seed: int) -> tuple["LabelledText", "LabelledText"]:
        """Training texts, and about a `fraction` of the texts for validation.

        A text is for validation if hash(seed, text) < fraction · 2^64, so equal texts are on the
        same side; each side gets at least one.
        """
        hashes = [row_hash(seed, text) for text in self.texts()]
        threshold = hash_threshold(
            hashes,
            fraction,
            f"{self.name}: all {len(self)} texts are the same, so they cannot be split;"
            "\ngive more texts, or a separate validation file",
        )
        hashed_rows = list(zip(self.rows, hashes, strict=True))
        train = [row for row, value in hashed_rows if value >= threshold]
        validation = [row for row, value in hashed_rows if value < threshold]
        counts = f"{len(validation):,} of the {len(self):,} texts"
        return (
            replace(
                self, rows=train, description=f"{self.description}; {len(train):,} for training"
            ),
            replace(self, rows=validation, description=counts),
        )

    def lowercase(self) -> "LabelledText":
        """The same texts in lower case."""
        rows = [(tuple(map(str.lower, parts)), classes) for parts, classes in self.rows]
        return replace(self, rows=rows, description=f"{self.description}, in lower case")

    def note_overlap(self, train: "LabelledText") -> "LabelledText":
        """These validation texts; the description says how many are in the training data."""
        train_hashes = {row_hash(0, text) for text in train.texts()}
        count = sum(row_hash(0, text) in train_hashes for text in self.texts())
        if not count:
            return self
        note = f"overlap: {count:,} of the {len(self):,} texts are in the training data"
        return replace(self, description=f"{self.description}; {note}")

    def with_class_names(self, names: Sequence[str]) -> "LabelledText":
        """The same texts with classes numbered as in `names`."""
        new_ids = class_ids(self.class_names, names, self.name)
        rows = [(parts, tuple(new_ids[id] for id in classes)) for parts, classes in self.rows]
        return replace(self, rows=rows, class_names=tuple(names))

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        digest = hashlib.sha256(json.dumps([self.kind, self.class_names]).encode())
        for row in self.rows:
            digest.update(json.dumps(row).encode())
        return digest.hexdigest()


def class_ids(data_names: Sequence[str], names: Sequence[str], data_set: str) -> list[int]:
    """The index in `names` of each class of a data set.

    The data set may also name its classes 0, 1, …, if none of `names` is a number.
    """
    ids = {name: id for id, name in enumerate(names)}
    if not any(map(str.isdecimal, names)):
        ids |= {str(id): id for id in range(len(names))}
    unknown = [name for name in data_names if name not in ids]
    if unknown:
        raise DataError(
            f"{data_set} has a class {unknown[0]!r} that the model does not know;"
            f"\nits classes: {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
        )
    return [ids[name] for name in data_names]


def from_rows(
    kind: LabelKind,
    name: str,
    source_format: str,
    rows: Iterable[tuple[Sequence[str], Sequence[str]]],
) -> LabelledText:
    """Texts in memory: their parts and labels."""
    labelled = [(tuple(parts), tuple(labels)) for parts, labels in rows]
    distinct = {label for _, labels in labelled for label in labels}
    if len(distinct) < 2:
        raise DataError(
            f"{name}: every {'text' if kind == 'labels' else 'word'} has the same class, "
            f"{min(distinct)!r}; classification needs two or more"
        )
    names = tuple(sorted(distinct, key=lambda label: (_number_or_minus_1(label), label)))
    ids = {label: id for id, label in enumerate(names)}
    numbered = [(parts, tuple(ids[label] for label in labels)) for parts, labels in labelled]
    description = f"{kind}, {len(labelled):,} texts, {len(names)} classes, {source_format}"
    return LabelledText(kind, name, description, numbered, names)


def _number_or_minus_1(label: str) -> int:
    return int(label) if label.isdecimal() else -1


def from_csv(path: Path) -> LabelledText:
    """A .csv file whose first line names a column of texts and one of labels."""
    return _from_numbered("labels", path, "comma-separated", lambda: _csv_rows(path))


def from_tsv(path: Path) -> LabelledText:
    """A text, a tab and a label on each line, after an optional header."""
    return _from_numbered("labels", path, "tab-separated", lambda: _tsv_rows(path))


def from_jsonl(path: Path) -> LabelledText:
    """A JSON object with a text and a label on each line."""
    return _from_numbered("labels", path, "an object a line", lambda: _jsonl_rows(path))


def from_conll(path: Path) -> LabelledText:
    """A word on each line, its tag in the last column, and an empty line after each text.

    Columns are separated by tabs, or by spaces if there is no tab. Lines that begin with # are not
    comments.
    """
    return _from_numbered("tags", path, "a word a line", lambda: _conll_rows(path))


READERS = {".csv": from_csv, ".tsv": from_tsv, ".jsonl": from_jsonl}


def has_labels(path: Path) -> bool:
    """Whether the first line of a table has columns (or keys) for texts and labels."""
    first = next(read_lines(path, scan(path)))
    with suppress(ValueError, RecursionError):
        return (
            isinstance(row := json.loads(first), dict)
            and _text_and_label_columns(list(row)) is not None
        )
    return (
        _text_and_label_columns(first.split("\t") if "\t" in first else first.split(","))
        is not None
    )


def _text_and_label_columns(header: Sequence[str]) -> tuple[int, int] | None:
    words = [word.strip(' "').lower() for word in header]
    text, label = (
        next((words.index(name) for name in names if name in words), None)
        for names in (TEXT, LABEL)
    )
    return None if text is None or label is None else (text, label)


def _from_numbered(
    kind: LabelKind, path: Path, source_format: str, rows: Callable[[], Iterator[NumberedRow]]
) -> LabelledText:
    """Read all rows; skip and count those without a text, refuse those without a label."""
    scan(path)
    labelled: list[tuple[Sequence[str], Sequence[str]]] = []
    skipped = first = 0
    for line, parts, labels in rows():
        if not any(part.strip() for part in parts):
            skipped += 1
            first = first or line
            continue
        if not all(label.strip() for label in labels):
            raise DataError(f"{path}, line {line} has no label: {preview(' '.join(parts))}")
        labelled.append((parts, [label.strip() for label in labels]))
    if not labelled:
        raise DataError(f"{path} has no text with a label in it")
    data = from_rows(kind, stem(path), source_format, labelled)
    if not skipped:
        return data
    note = f"skipped: {skipped:,} without a text (the first is line {first})"
    return replace(data, description=f"{data.description}; {note}")


def _csv_rows(path: Path) -> Iterator[NumberedRow]:
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader)
            columns = _text_and_label_columns(header)
            if columns is None:
                raise DataError(
                    f"{path} has no columns for text and label in its first line: "
                    f"{preview(', '.join(header))}\nname them {TEXT[0]!r} and {LABEL[0]!r}"
                )
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(
                        f"{path}, line {reader.line_num} has {len(row)} columns, the first line "
                        f"{len(header)};\na text that contains a comma needs double quotes"
                    )
                text, label = (row[column] for column in columns)
                yield reader.line_num, [text], [label]
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num} is not CSV: {error}") from None


def _tsv_rows(path: Path) -> Iterator[NumberedRow]:
    columns: tuple[int, int] | None = None
    width = 2
    for number, line in enumerate(read_lines(path, scan(path)), 1):
        row = line.split("\t")
        if number == 1:
            columns = _text_and_label_columns(row)
            if columns is not None:
                width = len(row)
                continue
        if not line.strip():
            continue
        if len(row) != width:
            raise DataError(
                f"{path}, line {number} has {len(row) - 1} tabs, not {width - 1}: {preview(line)}"
                "\na row is a text, one tab and a label, or the columns of the first line"
            )
        text, label = (row[column] for column in columns or (0, 1))
        yield number, [text], [label]


def _jsonl_rows(path: Path) -> Iterator[NumberedRow]:
    for number, line in enumerate(read_lines(path, scan(path)), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from None
        keys = [] if not isinstance(row, dict) else list(row)
        columns = _text_and_label_columns(keys)
        if columns is None:
            raise DataError(
                f"{path}, line {number} has no {TEXT[0]!r} and {LABEL[0]!r}: {preview(line)}"
                f'\na line is an object, as in {{"text": "…", "label": "…"}}'
            )
        text, label = (row[keys[column]] for column in columns)
        if not isinstance(text, str) or not isinstance(label, str | int):
            raise DataError(
                f"{path}, line {number}: a text is a string, and a label a string or a whole "
                f"number: {preview(line)}"
            )
        yield number, [text], [str(label)]


def _conll_rows(path: Path) -> Iterator[NumberedRow]:
    words: list[str] = []
    tags: list[str] = []
    start_line = number = 0
    for number, line in enumerate(read_lines(path, scan(path)), 1):
        if not line.strip():
            if words:
                yield start_line, words, tags
            words, tags = [], []
            continue
        row = line.split("\t") if "\t" in line else line.split()
        if len(row) < 2:
            raise DataError(
                f"{path}, line {number} has one column: {preview(line)}"
                "\na line is a word and, in the last column, its tag"
            )
        start_line = start_line if words else number
        words.append(row[0])
        tags.append(row[-1])
    if words:
        yield start_line, words, tags
