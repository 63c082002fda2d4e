"""Pairs of sentences with the same meaning, or single sentences, for sentence embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

from regard.data.columns import find_roles
from regard.data.digest import json_digest
from regard.data.table_files import is_table, read_table
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

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, fraction: float, seed: int) -> tuple["Sentences", "Sentences"]:
        """Training pairs, and about a `fraction` for validation, by a hash of the first text."""
        message = f"{self.name}: all {len(self)} sentences are the same; give more"
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


def from_path(path: Path) -> Sentences:
    """Two columns of a table, or the lines of a text file, each a pair with itself."""
    if not is_table(path):
        lines = [line for line in read_lines(path, scan(path)) if line.strip()]
        description = f"sentences, {len(lines):,} lines; each is a pair with itself"
        return Sentences(stem(path), description, [(line, line) for line in lines])
    table = read_table(path)
    roles = find_roles(table, {}, "pairs")
    if roles is None:
        raise DataError(
            f"{path} has the columns {', '.join(table.columns)}; pairs of sentences are two "
            "columns of texts"
        )
    first, second = (table.column(roles.columns[role]) for role in ("source", "target"))
    rows = []
    for number, row in table.rows():
        pair = (row[first], row[second])
        if not all(isinstance(cell, str) and cell.strip() for cell in pair):
            raise DataError(f"{table.location(number)}: two sentences are needed, not {pair!r:.80}")
        rows.append((str(pair[0]), str(pair[1])))
    description = f"pairs of sentences, {len(rows):,} rows of {table.format}{roles.note}"
    return Sentences(table.name, description, rows)
