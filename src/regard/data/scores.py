"""Texts, or pairs of texts, with a number each: data for regression."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regard.data.columns import Roles
from regard.data.labels import LabelledText
from regard.data.tables import Table, empty_cells_error, is_empty, is_number, text_cell
from regard.data.text_files import preview
from regard.errors import DataError


@dataclass(frozen=True, slots=True)
class ScoredText(LabelledText):
    """Texts with a number each, in place of a class."""

    def first_rows(self, count: int) -> list[str]:
        """The first texts with their numbers, for a preview."""
        return [
            f"{' | '.join(map(preview, parts))} → {number:g}"
            for parts, (number,) in self.rows[:count]
        ]

    def numbers(self) -> list[float]:
        """The number of each text."""
        return [number for _, (number,) in self.rows]


def from_table(table: Table, roles: Roles) -> ScoredText:
    """The texts of a table and their numbers; rows without a text are skipped and counted."""
    *text_columns, label_column = (table.column(name) for name in roles.columns.values())
    rows: list[Any] = []
    skipped, first_skipped = 0, ""
    for line, cells in table.rows():
        location = table.location(line)
        parts = tuple(text_cell(location, cells[column]) for column in text_columns)
        if not all(part.strip() for part in parts):
            skipped += 1
            first_skipped = first_skipped or table.short_location(line)
            continue
        if is_empty(cells[label_column]):
            *texts, label = roles.columns.values()
            raise empty_cells_error(table, [*texts, label], texts)
        number = _number(location, roles.columns["label"], cells[label_column])
        rows.append((parts, (number,)))
    if not rows:
        raise DataError(f"{table.path} has no text with a number")
    _check_not_constant(table.path, roles.columns["label"], [number for _, (number,) in rows])
    unit = "pairs of texts" if len(text_columns) == 2 else "texts"
    description = f"scores, {len(rows):,} {unit} with a number, {table.format}{roles.note}"
    if skipped:
        description += f"; skipped: {skipped:,} without a text (the first is {first_skipped})"
    return ScoredText("scores", table.name, description, rows, (), roles.columns_to_save)


def _number(location: str, column: str, cell: Any) -> float:
    if not is_number(cell) or not math.isfinite(float(cell)):
        raise DataError(f"{location}: {column} is {preview(str(cell))}, not a finite number")
    return float(cell)


def _check_not_constant(path: str, column: str, numbers: Sequence[float]) -> None:
    if min(numbers) == max(numbers):
        raise DataError(
            f"{path}: every text has the same number in the column {column!r}, {numbers[0]:g}; "
            "there is nothing to learn"
        )
