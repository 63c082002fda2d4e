"""Pairs of sentences with the same meaning, or single sentences, for sentence embeddings."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar

from regard.data.columns import find_roles
from regard.data.table_files import is_table, read_table
from regard.data.text_files import preview, read_lines, scan, stem
from regard.data.validation_split import hash_threshold, row_hash
from regard.errors import DataError

Row = tuple[str, str]  # two sentences with the same meaning; a single one twice


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
        """Training pairs, and about a `fraction` for validation, by a hash of the first one."""
        hashes = [row_hash(seed, first) for first, _ in self.rows]
        message = f"{self.name}: all {len(self)} sentences are the same; give more"
        threshold = hash_threshold(hashes, fraction, message)
        pairs = list(zip(self.rows, hashes, strict=True))
        train = [row for row, value in pairs if value >= threshold]
        validation = [row for row, value in pairs if value < threshold]
        described = f"{self.description}; {len(train):,} for training"
        counts = f"{len(validation):,} of the {len(self):,} pairs"
        return (
            replace(self, rows=train, description=described),
            replace(self, rows=validation, description=counts),
        )

    def first_rows(self, count: int) -> list[str]:
        """The first pairs, for a preview."""
        return [f"{preview(a)} ~ {preview(b)}" for a, b in islice(self.rows, count)]

    def note_overlap(self, train: "Sentences") -> "Sentences":
        """These validation pairs; the description says how many are in the training data."""
        known = set(train.rows)
        count = sum(row in known for row in self.rows)
        note = f"; overlap: {count:,} of the {len(self):,} pairs are in the training data"
        return replace(self, description=self.description + note) if count else self

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        return hashlib.sha256(json.dumps(list(self.rows)).encode()).hexdigest()


def from_path(path: Path) -> Sentences:
    """Two columns of a table, or the lines of a text file, each a pair with itself."""
    if not is_table(path):
        lines = [line for line in read_lines(path, scan(path)) if line.strip()]
        described = f"sentences, {len(lines):,} lines; each is a pair with itself"
        return Sentences(stem(path), described, [(line, line) for line in lines])
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
    described = f"pairs of sentences, {len(rows):,} rows of {table.format}{roles.note}"
    return Sentences(table.name, described, rows)
