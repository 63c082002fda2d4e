"""Time series: one or several columns of numbers, with dates if there are any."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from regard.data.dates import Dates, read_dates
from regard.data.tables import Table, is_number_with_comma
from regard.data.validation_split import check_fraction
from regard.errors import ConfigError, DataError, unknown
from regard.units import count_noun

MIN_SERIES_FRACTION = 0.5  # of cells that are numbers; the other cells of such a column are errors


@dataclass(frozen=True, slots=True)
class Series:
    """Numeric columns; rows are in chronological order.

    A validation or test split has the rows before it as `history`, since a forecast of its first
    values reads them; the first `training_rows` of them are the training data.
    """

    kind: ClassVar[Literal["series"]] = "series"
    name: str
    description: str
    values: NDArray[np.float64] = field(repr=False)  # (time, columns)
    column_names: tuple[str, ...]
    dates: Dates | None = field(default=None, repr=False)  # of all rows of the file
    history: NDArray[np.float64] | None = field(default=None, repr=False)  # (time, columns)
    training_rows: int = 0
    test: "Series | None" = field(default=None, repr=False)  # the test split, of validation data
    path: str = ""  # of the file, for messages
    header_location: str = ""  # file and line of the header, for messages
    first_row_location: str = ""  # file and line of the first row, for messages

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str | None) -> NDArray[np.float64]:
        """The values of a column, by default of the last."""
        return self.values[:, -1 if name is None else self.index(name)]

    def index(self, name: str) -> int:
        """The index of a column."""
        if name not in self.column_names:
            location = self.header_location or self.path or self.name
            raise ConfigError(f"{location}: {unknown('column', name, self.column_names)}")
        return self.column_names.index(name)

    def indices(self, names: Sequence[str]) -> list[int]:
        """The indices of columns."""
        return [self.index(name) for name in names]

    def split(self, fraction: float, seed: int = 0) -> tuple["Series", "Series"]:
        """Training rows, and the last `fraction` of the rows for validation; `seed` is not used."""
        check_fraction(fraction)
        count = min(max(1, round(fraction * len(self))), len(self) - 1)
        if count < 1:
            raise DataError(
                f"{self.first_row_location or self.name}: this is the only row of numbers; none is "
                "left for validation"
            )
        train = len(self) - count
        description = f"{self.description}; the first {train:,} rows for training"
        training = replace(self, values=self.values[:train], description=description)
        return training, self._slice(train, count, train, f"the last {count_noun(count, 'row')}")

    def split_by_sizes(self, sizes: Sequence[float]) -> tuple["Series", "Series"]:
        """Training and validation rows, the latter with a test split if there are three sizes.

        Sizes above 1 are rows, others fractions of all rows; rows after the last split are unused.
        """
        counts = [round(size if size > 1 else size * len(self)) for size in sizes]
        if len(counts) not in (2, 3) or min(sizes) <= 0 or min(counts) < 1:
            raise ConfigError(
                f"data.split={list(sizes)} must be two or three numbers above 0: rows, or "
                "fractions, of training, validation and test"
            )
        if sum(counts) > len(self):
            raise ConfigError(
                f"data.split={list(sizes)} needs {sum(counts):,} rows; {self.name} has "
                f"{len(self):,}"
            )
        train, count = counts[:2]
        description = f"{self.description}; the first {train:,} rows for training"
        training = replace(self, values=self.values[:train], description=description)
        validation = self._slice(train, count, train, f"the next {count:,} rows")
        if len(counts) == 3:
            test = self._slice(train + count, counts[2], train, f"{counts[2]:,} rows for testing")
            note = f"{validation.description}; then {counts[2]:,} rows for testing"
            validation = replace(validation, test=test, description=note)
        return training, validation

    def _slice(self, start: int, count: int, training_rows: int, description: str) -> "Series":
        return replace(
            self,
            values=self.values[start : start + count],
            history=self.values[:start],
            training_rows=training_rows,
            description=description,
        )

    def note_overlap(self, train: "Series") -> "Series":
        """This series; overlap is not checked."""
        return self

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        digest = hashlib.sha256("\n".join(self.column_names).encode("utf-8", "surrogatepass"))
        digest.update(np.ascontiguousarray(self.values).tobytes())
        return digest.hexdigest()


def from_columns(name: str, note: str, columns: Mapping[str, Sequence[float]]) -> Series:
    """Series in memory; `note` is added to the description."""
    values = np.array(list(columns.values()), dtype=np.float64).T
    count = f"{len(columns)} columns" if len(columns) > 1 else "1 column"
    return Series(name, f"series, {len(values):,} rows, {count}{note}", values, tuple(columns))


def from_table(table: Table) -> Series:
    """The numeric columns of a table and the dates of its rows; other columns are ignored."""
    rows = [
        (number, row) for number, row in table.rows() if any(cell not in ("", None) for cell in row)
    ]
    if not rows:
        raise DataError(f"{table.path} has no row after its first line")
    dates, date_columns = read_dates(table, rows)
    numeric = [
        index
        for index in range(len(table.columns))
        if index not in date_columns
        and sum(_number(row[index]) is not None for _, row in rows)
        > MIN_SERIES_FRACTION * len(rows)
    ]
    for index, name in enumerate(table.columns):
        cells = [row[index] for _, row in rows]
        ambiguous = [cell for cell in cells if is_number_with_comma(cell)]
        if index not in numeric and 2 * len(ambiguous) > len(cells):
            raise DataError(
                f"{table.path}: {name} holds numbers with commas, such as {ambiguous[0]!r}, which "
                "may be decimal or between thousands;\nwrite them with a decimal point and "
                "without commas, or remove the column"
            )
    columns: dict[str, list[float]] = {table.columns[index]: [] for index in numeric}
    if not columns:
        raise DataError(f"{table.path} has no column of numbers\n{table.listing()}")
    for number, row in rows:
        for index in numeric:
            value = _number(row[index])
            if value is None:
                raise DataError(
                    f"{table.location(number)}: {table.columns[index]} is {row[index]!r}, not a "
                    "number;\nfill in missing values, or remove the column"
                )
            columns[table.columns[index]].append(value)
    known = [*columns, *(() if dates is None else dates.columns)]
    ignored = [name for name in table.columns if name not in known]
    commas = [name for name in columns if name in table.decimal_commas]
    note = f"; decimal commas in {', '.join(commas)}" if commas else ""
    note += f"; left out: {', '.join(ignored)}" if ignored else ""
    series = from_columns(table.name, note + ("" if dates is None else dates.note), columns)
    return replace(
        series,
        dates=dates,
        path=table.path,
        header_location=table.header_location,
        first_row_location=table.location(rows[0][0]),
    )


def _number(cell: Any) -> float | None:
    with suppress(ValueError, TypeError):
        value = float(cell)
        return value if math.isfinite(value) and not isinstance(cell, bool) else None
    return None
