"""Pairs of sentences with the same meaning, or single sentences, for sentence embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

from regard.data.columns import Roles
from regard.data.digest import json_digest
from regard.data.tables import Table
from regard.data.text_files import preview, read_lines, scan, stem
from regard.data.validation_split import describe_overlap, split_by_hash
from regard.errors import DataError

Row = tuple[str, str]  # two sentences with the same meaning, or one sentence twice


@dataclass(frozen=True, slots=True)
class Sentences:
    """Pairs of sentences; a single sentence is a pair with itself (SimCSE)."""

    kind: ClassVar[str] = "sentences"
    name: str
    description: str
    rows: Sequence[Row] = field(repr=False)
    columns: Mapping[str, str] = field(default_factory=dict)  # of a table: source and target

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, fraction: float, seed: int) -> tuple["Sentences", "Sentences"]:
        """Training pairs, and about a `fraction` for validation, by a hash of the first text."""
        message = (
            f"{self.name}: all {len(self)} pairs have the same first sentence, so they cannot be "
            "split;\ngive more sentences, or a separate validation file"
        )
        first_texts = [first for first, _ in self.rows]
        return split_by_hash(self, "pairs", first_texts, fraction, seed, message)

    def first_rows(self, count: int) -> list[str]:
        """The first pairs, for a preview."""
        return [f"{preview(a)} ~ {preview(b)}" for a, b in islice(self.rows, count)]

    def note_overlap(self, train: "Sentences") -> "Sentences":
        """These validation pairs; the description says how many are in the training data."""
        train_rows = set(train.rows)
        count = sum(row in train_rows for row in self.rows)
        return describe_overlap(self, count, len(self), "pairs")

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        return json_digest(*self.rows)


def from_lines(path: Path) -> Sentences:
    """The lines of a text file, each a pair with itself."""
    lines = [line for line in read_lines(path, scan(path)) if line.strip()]
    description = f"sentences, {len(lines):,} lines; each is a pair with itself"
    return Sentences(stem(path), description, [(line, line) for line in lines])


def from_table(table: Table, roles: Roles) -> Sentences:
    """The pairs of sentences of a table."""
    first, second = (table.column(roles.columns[role]) for role in ("source", "target"))
    rows = []
    for number, row in table.rows():
        pair = (row[first], row[second])
        if not all(isinstance(cell, str) and cell.strip() for cell in pair):
            raise DataError(f"{table.location(number)}: two sentences are needed, not {pair!r:.80}")
        rows.append((str(pair[0]), str(pair[1])))
    if not rows:
        raise DataError(f"{table.path} has no pair of sentences")
    description = f"pairs of sentences, {len(rows):,} rows, {table.format}{roles.note}"
    return Sentences(table.name, description, rows, roles.columns_to_save)
