"""Texts whose class is known, or the class of each of their words."""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from regard.data.pairs import border, hashed, lines, shown
from regard.data.text import stem
from regard.data.text_files import open_bytes, scan
from regard.errors import DataError

LabelKind = Literal["labels", "tags"]
Row = tuple[tuple[str, ...], tuple[int, ...]]  # the parts of a text, and the class of each
Named = tuple[int, Sequence[str], Sequence[str]]  # line number, parts, names of their classes
TEXT, LABEL = ("text", "sentence"), ("label", "class")  # what columns may be called


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Texts in parts, each with the number of its class.

    Where texts are told apart ("labels"), a text is one part; where words are ("tags"), each is.
    """

    kind: LabelKind
    name: str
    description: str
    rows: Sequence[Row] = field(repr=False)
    class_names: tuple[str, ...]  # of the classes

    def __len__(self) -> int:
        return len(self.rows)

    def texts(self) -> list[str]:
        """The texts as one reads them."""
        return [" ".join(parts) for parts, _ in self.rows]

    def split(self, fraction: float, seed: int) -> tuple["LabelledText", "LabelledText"]:
        """The texts to learn from, and about a `fraction` share of them for validation.

        A text is held out if hash(seed, text) < fraction · 2^64, so that equal texts never stand
        on both sides; each side gets at least one.
        """
        hashes = [hashed(seed, text) for text in self.texts()]
        limit = border(
            hashes,
            fraction,
            f"{self.name}: all {len(self)} texts are the same, so none can be held out;"
            "\ngive more texts, or a validation file of its own",
        )
        held = [row for row, each in zip(self.rows, hashes, strict=True) if each < limit]
        kept = [row for row, each in zip(self.rows, hashes, strict=True) if each >= limit]
        told = f"{self.description}; {len(kept):,} to learn from"
        return (
            replace(self, rows=kept, description=told),
            replace(self, rows=held, description=f"{len(held):,} of the {len(self):,} texts"),
        )

    def lowercase(self) -> "LabelledText":
        """The same texts with case folded."""
        rows = [(tuple(map(str.lower, parts)), classes) for parts, classes in self.rows]
        return replace(self, rows=rows, description=f"{self.description}, in lower case")

    def note_overlap(self, learned: "LabelledText") -> "LabelledText":
        """These texts to judge by; how many of them are learned from too is told."""
        known = {hashed(0, text) for text in learned.texts()}
        count = sum(hashed(0, text) in known for text in self.texts())
        if not count:
            return self
        told = f"overlap: {count:,} of the {len(self):,} texts are among those learned from"
        return replace(self, description=f"{self.description}; {told}")

    def with_class_names(self, names: Sequence[str]) -> "LabelledText":
        """The same with the numbers that classes have in `names`."""
        numbers = class_ids(self.class_names, names, self.name)
        rows = [(parts, tuple(numbers[each] for each in classes)) for parts, classes in self.rows]
        return replace(self, rows=rows, class_names=tuple(names))

    def fingerprint(self) -> str:
        """A sha256 that is equal for equal content."""
        digest = hashlib.sha256(json.dumps([self.kind, self.class_names]).encode())
        for row in self.rows:
            digest.update(json.dumps(row).encode())
        return digest.hexdigest()


def class_ids(own: Sequence[str], names: Sequence[str], where: str) -> list[int]:
    """Which number each class of some data has among `names`.

    Data may also call the classes 0, 1, …, where none of the names is a number.
    """
    known = {name: number for number, name in enumerate(names)}
    if not any(map(str.isdecimal, names)):
        known |= {str(number): number for number in range(len(names))}
    strange = [name for name in own if name not in known]
    if strange:
        raise DataError(
            f"{where} has a class {strange[0]!r} that was not learned;"
            f"\nlearned were: {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"
        )
    return [known[name] for name in own]


def from_rows(
    kind: LabelKind, name: str, how: str, rows: Iterable[tuple[Sequence[str], Sequence[str]]]
) -> LabelledText:
    """Texts that are already in memory: their parts, and the names of their classes."""
    kept = [(tuple(parts), tuple(answers)) for parts, answers in rows]
    found = {answer for _, answers in kept for answer in answers}
    if len(found) < 2:
        raise DataError(
            f"{name}: every {'text' if kind == 'labels' else 'word'} has the same class, "
            f"{min(found)!r}; there is nothing to tell apart"
        )
    names = tuple(sorted(found, key=lambda each: (int(each) if each.isdecimal() else -1, each)))
    number = {each: place for place, each in enumerate(names)}
    numbered = [(parts, tuple(number[each] for each in answers)) for parts, answers in kept]
    description = f"{kind}, {len(kept):,} texts, {len(names)} classes, {how}"
    return LabelledText(kind, name, description, numbered, names)


def from_csv(path: Path) -> LabelledText:
    """A .csv file whose first line names a column of texts and one of labels."""
    return _checked("labels", path, "comma-separated", lambda: _csv(path))


def from_tsv(path: Path) -> LabelledText:
    """A text, a tab and a label on each line; a first line that names them is not a row."""
    return _checked("labels", path, "tab-separated", lambda: _tsv(path))


def from_jsonl(path: Path) -> LabelledText:
    """An object on each line, with a text and a label."""
    return _checked("labels", path, "an object a line", lambda: _jsonl(path))


def from_conll(path: Path) -> LabelledText:
    """A word on each line, its tag in the last column, and an empty line after each text.

    Columns are parted by tabs, or by spaces where there is no tab. A line that begins with # is a
    word like any other.
    """
    return _checked("tags", path, "a word a line", lambda: _conll(path))


TABLES = {".csv": from_csv, ".tsv": from_tsv, ".jsonl": from_jsonl}


def has_labels(path: Path) -> bool:
    """Whether the first line of a table names a column (or a key) of texts and one of labels."""
    first = next(lines(path, scan(path)))
    with suppress(ValueError, RecursionError):
        return isinstance(row := json.loads(first), dict) and _columns(list(row)) is not None
    return _columns(first.split("\t") if "\t" in first else first.split(",")) is not None


def _columns(header: Sequence[str]) -> tuple[int, int] | None:
    words = [word.strip(' "').lower() for word in header]
    found = [next((words.index(n) for n in known if n in words), None) for known in (TEXT, LABEL)]
    text, label = found
    return None if text is None or label is None else (text, label)


def _checked(
    kind: LabelKind, path: Path, how: str, rows: Callable[[], Iterator[Named]]
) -> LabelledText:
    """Read all rows: those without a text are counted and skipped, without a label refused."""
    scan(path)
    kept: list[tuple[Sequence[str], Sequence[str]]] = []
    skipped = first = 0
    for line, parts, answers in rows():
        if not any(part.strip() for part in parts):
            skipped += 1
            first = first or line
            continue
        if not all(answer.strip() for answer in answers):
            raise DataError(f"{path}, line {line} has no label: {shown(' '.join(parts))}")
        kept.append((parts, [answer.strip() for answer in answers]))
    if not kept:
        raise DataError(f"{path} has no text with a label in it")
    opened = from_rows(kind, stem(path), how, kept)
    if not skipped:
        return opened
    told = f"{opened.description}; skipped: {skipped:,} without a text (the first is line {first})"
    return replace(opened, description=told)


def _csv(path: Path) -> Iterator[Named]:
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader)
            columns = _columns(header)
            if columns is None:
                raise DataError(
                    f"{path} names no columns of texts and of labels in its first line: "
                    f"{shown(', '.join(header))}\ncall them {TEXT[0]!r} and {LABEL[0]!r}"
                )
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(
                        f"{path}, line {reader.line_num} has {len(row)} columns, the first line "
                        f"{len(header)};\na text with a comma in it stands in double quotes"
                    )
                text, label = (row[column] for column in columns)
                yield reader.line_num, [text], [label]
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num} is not CSV: {error}") from None


def _tsv(path: Path) -> Iterator[Named]:
    columns: tuple[int, int] | None = None
    width = 2
    for number, line in enumerate(lines(path, scan(path)), 1):
        row = line.split("\t")
        if number == 1:
            columns = _columns(row)
            if columns is not None:
                width = len(row)
                continue
        if not line.strip():
            continue
        if len(row) != width:
            raise DataError(
                f"{path}, line {number} has {len(row) - 1} tabs, not {width - 1}: {shown(line)}"
                "\na row is a text, one tab and a label, or what the first line names"
            )
        text, label = (row[column] for column in columns or (0, 1))
        yield number, [text], [label]


def _jsonl(path: Path) -> Iterator[Named]:
    for number, line in enumerate(lines(path, scan(path)), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from None
        keys = [] if not isinstance(row, dict) else list(row)
        columns = _columns(keys)
        if columns is None:
            raise DataError(
                f"{path}, line {number} has no {TEXT[0]!r} and {LABEL[0]!r}: {shown(line)}"
                f'\na line is an object, as in {{"text": "…", "label": "…"}}'
            )
        text, label = (row[keys[column]] for column in columns)
        if not isinstance(text, str) or not isinstance(label, str | int):
            raise DataError(
                f"{path}, line {number}: a text is a string, and a label a string or a whole "
                f"number: {shown(line)}"
            )
        yield number, [text], [str(label)]


def _conll(path: Path) -> Iterator[Named]:
    words: list[str] = []
    tags: list[str] = []
    begun = number = 0
    for number, line in enumerate(lines(path, scan(path)), 1):
        if not line.strip():
            if words:
                yield begun, words, tags
            words, tags = [], []
            continue
        row = line.split("\t") if "\t" in line else line.split()
        if len(row) < 2:
            raise DataError(
                f"{path}, line {number} has one column: {shown(line)}"
                "\na line is a word and, in the last column, its tag"
            )
        begun = begun if words else number
        words.append(row[0])
        tags.append(row[-1])
    if words:
        yield begun, words, tags
