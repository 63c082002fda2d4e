"""Time series: one or several columns of numbers, with dates if there are any."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from regard.data.date_columns import TIME_NAME, read_dates, row_number_reason
from regard.data.dates import Dates
from regard.data.tables import Row, Table, is_missing, is_number_with_comma
from regard.data.text_files import preview
from regard.data.validation_split import check_fraction
from regard.errors import ConfigError, DataError, unknown
from regard.units import count_noun

MIN_SERIES_FRACTION = 0.5  # of cells that are numbers; the other cells of such a column are errors
# 12, 4 and 4 months of 30 days, by the number of rows of the table: ETTh (hourly) and ETTm (every
# 15 minutes) (Zhou et al. 2021)
ETT_SPLITS = {17_420: (8640, 2880, 2880), 69_680: (34_560, 11_520, 11_520)}
OTHER_SPLIT = (0.6, 0.2, 0.2)  # of other tables, the same proportions


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
    # columns that are forecast only if the user names them: dates as numbers, row numbers
    not_forecast: tuple[str, ...] = ()
    dates: Dates | None = field(default=None, repr=False)  # of all rows of the file
    history: NDArray[np.float64] | None = field(default=None, repr=False)  # (time, columns)
    training_rows: int = 0
    test: "Series | None" = field(default=None, repr=False)  # the test split, of validation data
    path: str = ""  # of the file, for messages
    header_location: str = ""  # file and line of the header, for messages
    first_row_location: str = ""  # file and line of the first row, for messages

    def __len__(self) -> int:
        return len(self.values)

    @property
    def forecast_columns(self) -> list[str]:
        """The columns that are forecast if the user names none."""
        return [name for name in self.column_names if name not in self.not_forecast]

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

    def split_as_ett(self) -> tuple["Series", "Series"]:
        """The usual splits of an ETT table; for other tables, the same proportions."""
        sizes = ETT_SPLITS.get(len(self))
        known = " or ".join(f"{rows:,}" for rows in ETT_SPLITS)
        reason = ", the usual split of ETT"
        if sizes is None:
            reason = f", 60 %, since these are not the {known} rows of ETT"
        training, validation = self.split_by_sizes(sizes or OTHER_SPLIT)
        return replace(training, description=training.description + reason), validation

    def split_by_sizes(self, sizes: Sequence[float]) -> tuple["Series", "Series"]:
        """Training and validation rows, the latter with a test split if there are three sizes.

        Sizes above 1 are rows, others fractions of all rows; rows after the last split are unused.
        """
        formatted = f"data.split=[{', '.join(f'{size:.10g}' for size in sizes)}]"
        is_valid = len(sizes) in (2, 3) and all(0 < size < math.inf for size in sizes)
        counts = [round(size if size > 1 else size * len(self)) for size in sizes if is_valid]
        if not is_valid or min(counts) < 1:
            raise ConfigError(
                f"{formatted} must be two or three numbers above 0: rows, or "
                "fractions, of training, validation and test"
            )
        if max(sizes) <= 1 and math.fsum(sizes) <= 1:
            # each count is rounded, so that their sum may exceed the rows
            counts[-1] = max(1, min(counts[-1], len(self) - sum(counts[:-1])))
        if sum(counts) > len(self):
            raise ConfigError(
                f"{formatted} needs {sum(counts):,} rows, and {self.path or self.name} has "
                f"{len(self):,};\ngive fewer rows, or fractions, as in 'data.split=[0.6,0.2,0.2]'"
            )
        train, count = counts[:2]
        description = f"{self.description}; the first {train:,} rows for training"
        training = replace(self, values=self.values[:train], description=description)
        validation = self._slice(train, count, train, f"the next {count:,} rows")
        if len(counts) == 3:
            test = self._slice(train + count, counts[2], train, f"{counts[2]:,} rows for testing")
            note = f"{validation.description}; then {counts[2]:,} rows for testing"
            validation = replace(validation, test=test, description=note)
        if unused := len(self) - sum(counts):
            note = f"{validation.description}; the last {count_noun(unused, 'row')} are not used"
            validation = replace(validation, description=note)
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
    description = f"series, {len(values):,} rows, {count_noun(len(columns), 'column')}{note}"
    return Series(name, description, values, tuple(columns))


def from_table(table: Table) -> Series:
    """The numeric columns of a table and the dates of its rows; other columns are left out."""
    rows = [
        (number, row) for number, row in table.rows() if any(cell not in ("", None) for cell in row)
    ]
    if not rows:
        raise DataError(f"{table.path} has no row with a value")
    dates, reasons = read_dates(table, rows)
    # Day, month and year are not columns of the series. Other columns of dates as numbers are, if
    # the user names them, as in earlier versions.
    date_parts = () if dates is None or len(dates.columns) < 3 else dates.columns[:3]
    counts = [
        0 if name in date_parts else sum(_number(row[index]) is not None for _, row in rows)
        for index, name in enumerate(table.columns)
    ]
    numeric = [i for i, count in enumerate(counts) if count > MIN_SERIES_FRACTION * len(rows)]
    for index, name in enumerate(table.columns):
        cells = [row[index] for _, row in rows]
        ambiguous = [cell for cell in cells if is_number_with_comma(cell)]
        if index not in numeric and 2 * len(ambiguous) > len(cells):
            raise DataError(
                f"{table.path}: {name} holds numbers with commas, such as {ambiguous[0]!r}, which "
                "may be decimal commas or thousands separators;\nwrite them with a decimal point "
                "and without commas, or remove the column"
            )
    date_names = () if dates is None else dates.columns
    value_columns = [i for i in numeric if i not in reasons and table.columns[i] not in date_names]
    if not value_columns:  # reading a column with missing values reports the first of them
        value_columns = [i for i, count in enumerate(counts) if count and i not in numeric]
        numeric = sorted({*numeric, *value_columns})
    if not value_columns:
        raise DataError(f"{table.path} has no column of numbers to forecast\n{table.listing()}")
    columns = {table.columns[index]: _numbers(table, rows, index) for index in numeric}
    indexes = {
        index: reason
        for index in value_columns
        if (reason := row_number_reason(table, np.array(columns[table.columns[index]]), index))
    }
    if len(indexes) < len(value_columns):  # there is something else to forecast
        reasons |= indexes
    left_out = {
        name: reasons.get(index) or _left_out_reason(table, rows, index)
        for index, name in enumerate(table.columns)
        if (index in reasons or index not in numeric) and name not in date_names
    }
    commas = [name for name in columns if name in table.decimal_commas]
    note = f"; decimal commas in {', '.join(commas)}" if commas else ""
    if left_out:
        note += f"; left out: {', '.join(f'{name} ({why})' for name, why in left_out.items())}"
    not_forecast = tuple(name for name in columns if name in left_out or name in date_names)
    count = count_noun(len(columns) - len(not_forecast), "column")
    note += "" if dates is None else dates.note
    return replace(
        from_columns(table.name, "", columns),
        description=f"series, {len(rows):,} rows, {count}{note}",
        not_forecast=not_forecast,
        dates=dates,
        path=table.path,
        header_location=table.header_location,
        first_row_location=table.location(rows[0][0]),
    )


def _numbers(table: Table, rows: Sequence[Row], column: int) -> list[float]:
    """The numbers of a column; raises `DataError` for a cell that is not a number."""
    numbers = []
    for number, row in rows:
        value = _number(row[column])
        if value is None:
            count = sum(_number(row[column]) is None for _, row in rows)
            others = f" (as {count:,} of its {len(rows):,} cells)" if count > 1 else ""
            raise DataError(
                f"{table.location(number)}: {table.columns[column]} is {row[column]!r}, not a "
                f"number{others};\nfill in missing values, or remove the column"
            )
        numbers.append(value)
    return numbers


def _left_out_reason(table: Table, rows: Sequence[Row], column: int) -> str:
    """The reason why a column is not in the series: missing values, or text."""
    cells = [row[column] for _, row in rows]
    missing = sum(map(is_missing, cells))
    numbers = sum(_number(cell) is not None for cell in cells)
    if missing and (missing + numbers == len(cells) or 2 * missing > len(cells)):
        return f"{missing:,} of {len(cells):,} values are missing"
    number, cell = next((n, row[column]) for n, row in rows if _number(row[column]) is None)
    kind = "not a date that is understood" if TIME_NAME.search(table.columns[column]) else "text"
    return f"{kind}: {preview(str(cell))} in {table.short_location(number)}"


def _number(cell: Any) -> float | None:
    with suppress(ValueError, TypeError, OverflowError):
        value = float(cell)
        return value if math.isfinite(value) and not isinstance(cell, bool) else None
    return None
