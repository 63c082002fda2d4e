"""Profiles of the columns of a table: statistics of their cells, from which roles are inferred."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from regard.data.date_columns import is_date
from regard.data.tables import (
    MIN_NUMERIC_FRACTION,
    Table,
    is_missing,
    is_number,
    is_number_with_comma,
)

PROFILE_ROWS = 50_000  # rows that the profile of a column is computed from
MAX_CLASSES = 1000  # of an inferred label column
MAX_INTEGER_CLASSES = 20  # of an inferred label column of integers


@dataclass(frozen=True, slots=True)
class Profile:
    """Statistics of the cells of a column."""

    name: str
    filled: int  # cells that are not empty
    distinct: int
    is_list: bool
    is_numeric: bool
    numeric_fraction: float  # of the cells
    is_integer: bool  # all numbers are integers
    mean_length: float  # characters of a cell
    mean_words: float  # words of a cell
    letter_fraction: float  # of the characters other than spaces
    is_date: bool  # most cells are dates
    has_missing_numbers: bool  # all cells are numbers or missing values such as NA

    @property
    def is_prose(self) -> bool:
        """Whether the cells are strings, mostly of letters, and mostly distinct."""
        return (
            not (self.is_list or self.is_numeric)
            and self.letter_fraction >= 0.5
            and 2 * self.distinct > self.filled
        )

    @property
    def is_mostly_numeric(self) -> bool:
        """Whether nearly all cells are numbers, but not all."""
        return MIN_NUMERIC_FRACTION <= self.numeric_fraction < 1

    @property
    def is_label(self) -> bool:
        """Whether the column may hold classes: two values, or up to a quarter of the cells."""
        if self.is_list or self.distinct < 2 or self.mean_length > 40:
            return False
        if self.is_numeric and not (self.is_integer and self.distinct <= MAX_INTEGER_CLASSES):
            return False
        return self.distinct <= min(MAX_CLASSES, max(2, self.filled // 4)) < self.filled


def read_profiles(table: Table) -> list[Profile]:
    """The profile of each column, from the first rows of a table."""
    rows = [row for _, row in islice(table.rows(), PROFILE_ROWS)]
    return [_profile(name, [row[i] for row in rows]) for i, name in enumerate(table.columns)]


def _profile(name: str, cells: Sequence[Any]) -> Profile:
    filled = [cell for cell in cells if cell is not None and str(cell).strip()]
    texts = [cell if isinstance(cell, str) else str(cell) for cell in filled]
    sample = texts[:: max(1, len(texts) // 1000)]
    characters = [char for text in sample for char in text[:200] if not char.isspace()]
    numeric = bool(filled) and all(map(is_number, filled))
    return Profile(
        name=name,
        filled=len(filled),
        distinct=len(set(texts)),
        is_list=bool(filled) and all(isinstance(cell, list) for cell in filled),
        is_numeric=numeric,
        numeric_fraction=sum(is_number(cell) or is_number_with_comma(cell) for cell in filled)
        / max(1, len(filled)),
        is_integer=all(float(cell).is_integer() for cell in filled if is_number(cell)),
        mean_length=sum(map(len, sample)) / max(1, len(sample)),
        mean_words=sum(len(text.split()) for text in sample) / max(1, len(sample)),
        letter_fraction=sum(map(str.isalpha, characters)) / max(1, len(characters)),
        is_date=2 * sum(map(is_date, sample)) > len(sample),
        has_missing_numbers=_has_missing_numbers(filled),
    )


def _has_missing_numbers(filled: Sequence[Any]) -> bool:
    missing = [is_missing(cell) for cell in filled]
    pairs = zip(filled, missing, strict=True)
    return 0 < sum(missing) < len(filled) and all(
        is_number(cell) or cell_missing for cell, cell_missing in pairs
    )
