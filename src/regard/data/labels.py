"""Labelled text: one class per text (labels) or per word (tags)."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from regard.data.columns import Roles
from regard.data.conll import read_conll
from regard.data.tables import Table, empty_cells_error, is_empty, text_cell
from regard.data.tag_scheme import check_classes, to_iob2
from regard.data.text_files import preview, stem
from regard.data.validation_split import describe_overlap, row_hash, split_by_hash
from regard.errors import DataError

LabelKind = Literal["labels", "tags", "scores"]
Row = tuple[tuple[str, ...], tuple[Any, ...]]  # the parts of a text, and their classes
LocatedRow = tuple[str, Sequence[str], Sequence[str]]  # location in a file, parts, labels


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Texts in parts, each part with its class.

    Of kind "labels", a text has one part, or two (premise and hypothesis) that share one class; of
    kind "tags", each word is a part. `data.scores.ScoredText` has numbers in place of classes.
    """

    kind: LabelKind
    name: str
    description: str
    rows: Sequence[Row] = field(repr=False)
    class_names: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)  # of a table, by role: `data.text`, …

    def __len__(self) -> int:
        return len(self.rows)

    def first_rows(self, count: int) -> list[str]:
        """The first texts with their classes, for a preview."""
        lines = []
        for parts, classes in self.rows[:count]:
            names = [self.class_names[id] for id in classes]
            if self.kind == "labels":
                lines.append(f"{' | '.join(map(preview, parts))} → {names[0]}")
                continue
            tagged = " ".join(f"{part}/{name}" for part, name in zip(parts, names, strict=True))
            lines.append(preview(tagged))
        return lines

    @property
    def is_paired(self) -> bool:
        """Whether a class or number belongs to two texts."""
        return self.kind != "tags" and len(self.rows[0][0]) == 2

    def texts(self) -> list[str]:
        """The texts, their parts joined by spaces."""
        return [" ".join(parts) for parts, _ in self.rows]

    def split(self, fraction: float, seed: int) -> tuple["LabelledText", "LabelledText"]:
        """Training texts, and about a `fraction` for validation; equal texts are in one split."""
        message = (
            f"{self.name}: all {len(self)} texts are the same, so they cannot be split;"
            "\ngive more texts, or a separate validation file"
        )
        return split_by_hash(self, "texts", self.texts(), fraction, seed, message)

    def lowercase(self) -> "LabelledText":
        """The same texts in lower case."""
        rows = [(tuple(map(str.lower, parts)), classes) for parts, classes in self.rows]
        return replace(self, rows=rows, description=f"{self.description}, in lower case")

    def note_overlap(self, train: "LabelledText") -> "LabelledText":
        """These validation texts; the description says how many are in the training data."""
        train_hashes = {row_hash(0, text) for text in train.texts()}
        count = sum(row_hash(0, text) in train_hashes for text in self.texts())
        return describe_overlap(self, count, len(self), "texts")

    def with_class_names(self, names: Sequence[str]) -> "LabelledText":
        """The same texts; a class is its index in `names`."""
        new_ids = class_ids(self.class_names, names, self.name)
        rows = [(parts, tuple(new_ids[id] for id in classes)) for parts, classes in self.rows]
        return replace(self, rows=rows, class_names=tuple(names))

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        digest = hashlib.sha256(json.dumps([self.kind, self.class_names]).encode())
        for row in self.rows:
            digest.update(json.dumps(row).encode())
        return digest.hexdigest()


def class_ids(data_names: Sequence[str], names: Sequence[str], dataset: str) -> list[int]:
    """The index in `names` of each class of a dataset.

    The dataset may also name its classes 0, 1, …, if none of `names` is a number.
    """
    ids = {name: id for id, name in enumerate(names)}
    if not any(map(str.isdecimal, names)):
        ids |= {str(id): id for id in range(len(names))}
    unknown = [name for name in data_names if name not in ids]
    if unknown:
        raise DataError(
            f"{dataset} has a class {unknown[0]!r} that the model does not have;"
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
    examples = [(tuple(parts), tuple(labels)) for parts, labels in rows]
    distinct = {label for _, labels in examples for label in labels}
    if len(distinct) < 2:
        raise DataError(
            f"{name}: every {'text' if kind == 'labels' else 'word'} has the same class, "
            f"{min(distinct)!r}; classification needs two or more"
        )
    paired = kind == "labels" and len(examples[0][0]) == 2
    names = tuple(sorted(distinct, key=lambda label: (_number_or_minus_1(label), label)))
    ids = {label: id for id, label in enumerate(names)}
    encoded = [(parts, tuple(ids[label] for label in labels)) for parts, labels in examples]
    texts = "pairs of texts" if paired else "texts"
    description = f"{kind}, {len(examples):,} {texts}, {len(names)} classes, {source_format}"
    return LabelledText(kind, name, description, encoded, names)


def _number_or_minus_1(label: str) -> int:
    return int(label) if label.isdecimal() else -1


def from_table(table: Table, roles: Roles) -> LabelledText:
    """The texts of a table and their labels, or the words of a table and their tags."""
    kind: LabelKind = "labels" if roles.kind == "labels" else "tags"
    *text_columns, label_column = (table.column(name) for name in roles.columns.values())

    def rows() -> Iterator[LocatedRow]:
        for number, row in table.rows():
            location = table.location(number)
            if kind == "tags":
                words, tags = row[text_columns[0]], row[label_column]
                yield location, _words(location, words), _words(location, tags)
            else:
                parts = [text_cell(location, row[column]) for column in text_columns]
                if all(part.strip() for part in parts) and is_empty(row[label_column]):
                    *texts, label = roles.columns.values()
                    raise empty_cells_error(table, [*texts, label], texts)
                yield location, parts, [_label(location, row[label_column])]

    # Two columns that have the usual names need no mention.
    has_usual_names = roles.columns == {"text": "text", "label": "label"}
    note = "" if has_usual_names and not roles.unused else roles.note
    hint = f"{table.listing()}\nchoose another: data.tags=COLUMN"
    data = _from_located_rows(kind, table.name, table.path, f"{table.format}{note}", rows(), hint)
    return replace(data, columns=roles.columns_to_save)


def _label(location: str, cell: Any) -> str:
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    if cell is not None and not isinstance(cell, str | int):
        raise DataError(f"{location}: a label is a string or an integer, not {preview(str(cell))}")
    return "" if cell is None else str(cell)


def _words(location: str, cell: Any) -> list[str]:
    """The words or tags of a cell: a list, or a string with spaces between them."""
    parts = cell.split() if isinstance(cell, str) else cell
    if not isinstance(parts, list):
        raise DataError(f"{location}: words and tags are lists, not {preview(str(cell))}")
    return ["" if part is None else str(part) for part in parts]


def from_conll(path: Path, columns: Sequence[int] = ()) -> LabelledText:
    """A word on each line with its tag, and an empty line after each text.

    `columns` are the numbers of the columns of words and of tags, from 1; see `read_conll`.
    """
    file = read_conll(path, columns)
    rows = ((f"{path}, line {line}", words, tags) for line, words, tags in file.rows)
    return _from_located_rows("tags", stem(path), str(path), file.description, rows, file.hint)


def _from_located_rows(
    kind: LabelKind,
    name: str,
    path: str,
    source_format: str,
    rows: Iterable[LocatedRow],
    hint: str = "",
) -> LabelledText:
    """Check all rows; skip and count those without a text, refuse those without a label.

    `hint` tells how to choose other tags, where these have too many classes.
    """
    examples: list[tuple[Sequence[str], Sequence[str]]] = []
    locations: list[str] = []
    skipped, first_skipped = 0, ""
    for location, parts, labels in rows:
        empty = [not part.strip() for part in parts]
        if all(empty) or (kind == "labels" and any(empty)):
            skipped += 1
            first_skipped = first_skipped or location
            continue
        if kind == "tags" and len(parts) != len(labels):
            raise DataError(f"{location} has {len(parts)} words and {len(labels)} tags")
        if not all(label.strip() for label in labels):
            raise DataError(f"{location} has no tag: {preview(' '.join(parts))}")
        examples.append((parts, [label.strip() for label in labels]))
        locations.append(location)
    if not examples:
        raise DataError(f"{path} has no text with a label; at least two classes are needed")
    note = ""
    if kind == "tags":
        check_classes(path, [tags for _, tags in examples], hint)
        scheme = to_iob2([tags for _, tags in examples])
        note = scheme.note(locations)
        examples = [(words, tags) for (words, _), tags in zip(examples, scheme.tags, strict=True)]
    data = from_rows(kind, name, source_format, examples)
    if skipped:
        location = first_skipped.removeprefix(f"{path}, ")
        note += f"; skipped: {skipped:,} without a text (the first is {location})"
    return replace(data, description=f"{data.description}{note}")
