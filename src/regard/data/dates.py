"""Dates of the rows of a series: their columns, their order and their step."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.tables import Row, Table
from regard.errors import DataError

DAY_MONTH_YEAR = (  # names of the three columns of a date
    ("day", "month", "year"),
    ("jour", "mois", "année"),
    ("jour", "mois", "annee"),
)
MINUTE, HOUR, DAY, WEEK = 60, 3600, 86400, 7 * 86400  # seconds
STEP_NAMES = {1: "second", MINUTE: "minute", HOUR: "hour", DAY: "day", WEEK: "week"}
MONTH_STEP_NAMES = {1: "month", 3: "quarter", 12: "year"}  # steps in months
SHORTEST_MONTH = 28 * DAY
WEEKDAYS = str.split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MIN_WEEKS = 4  # of daily rows, from which a weekday without any row is absent, not a gap
_ISO = re.compile(r"\s*\d{4}-\d")  # not 20160701, which is a number
_DOTTED = re.compile(r"\s*(\d{1,2})\.(\d{1,2})\.(\d{4})\b(.*)")  # 31.12.2016 23:00


@dataclass(frozen=True, slots=True)
class Dates:
    """A date for each row, in increasing order."""

    columns: tuple[str, ...]  # the columns that they were read from
    values: NDArray[np.datetime64]  # (time), to the second
    lines: tuple[int, ...]  # line number of each row in the file

    @property
    def step(self) -> int | None:
        """The most frequent difference between consecutive rows, in seconds.

        None if the step is in months, or if there is one row only.
        """
        if len(self.values) < 2 or self.step_in_months:
            return None
        steps, counts = np.unique(self._differences, return_counts=True)
        return int(steps[counts.argmax()])

    @property
    def step_in_months(self) -> int | None:
        """The step in months if it is 1, 3 or 12, else None.

        A fixed step such as four weeks is not a month unless the day of the month stays the same.
        """
        steps, counts = np.unique(self._month_differences, return_counts=True)
        step = int(steps[counts.argmax()]) if len(steps) else 0
        if step not in MONTH_STEP_NAMES or steps[0] < 1 or (steps % step).any():
            return None
        same_day = (self._dates_in(self.values.astype("datetime64[M]")) == self.values).all()
        differences = self._differences
        regular = len(steps) == 1 and differences.min() >= step * SHORTEST_MONTH
        fixed = len(set(differences.tolist())) == 1
        return step if same_day or (regular and not fixed) else None

    def _dates_in(self, months: NDArray[np.datetime64]) -> NDArray[np.datetime64]:
        """A date in each of these months, on the day of the month that the rows have.

        In a shorter month, it is the last day.
        """
        starts = self.values.astype("datetime64[M]")
        days = self.values.astype("datetime64[D]")
        at_ends = ((days + 1).astype("datetime64[M]") != starts).all()
        offset = (days - starts.astype("datetime64[D]")).max()  # 0 for the first of the month
        ends = (months + 1).astype("datetime64[D]") - 1
        dates = ends if at_ends else np.minimum(months.astype("datetime64[D]") + offset, ends)
        return dates.astype("datetime64[s]") + (self.values[-1] - days[-1])

    @property
    def _differences(self) -> NDArray[np.int64]:
        return np.diff(self.values).astype(np.int64)

    @property
    def _month_differences(self) -> NDArray[np.int64]:
        return np.diff(self.values.astype("datetime64[M]")).astype(np.int64)

    @property
    def _weekmask(self) -> list[bool]:
        """Whether daily rows have each weekday, from Monday; all if there are too few rows to tell.

        Sales may have no Sundays, and prices no weekends.
        """
        if self.values[-1] - self.values[0] < np.timedelta64(MIN_WEEKS * WEEK, "s"):
            return [True] * len(WEEKDAYS)
        weekdays = (self._days.astype(np.int64) + 3) % 7  # 1970-01-01 was a Thursday
        return np.isin(np.arange(7), weekdays).tolist()

    @property
    def _days(self) -> NDArray[np.datetime64]:
        return self.values.astype("datetime64[D]")

    @property
    def seasonal_period(self) -> int | None:
        """Number of rows in a day, a week or a year: the shortest of these longer than the step."""
        step, months = self.step, self.step_in_months
        if months:
            return {1: 12, 3: 4}.get(months)
        if step is None or step == 0:
            return None
        if step < DAY:
            return DAY // step if DAY % step == 0 else None
        return sum(self._weekmask) if step == DAY else {WEEK: 52}.get(step)

    @property
    def note(self) -> str:
        """The range and the step, and gaps, for a description."""
        first, last = self._format(self.values[[0, -1]])
        span = f"{', '.join(self.columns)}: {first} to {last}"
        step, months = self.step, self.step_in_months
        if months:
            frequency = f"one row per {MONTH_STEP_NAMES[months]}"
            gaps = np.flatnonzero(self._month_differences != months)
        elif step == DAY:
            absent = [
                day for day, has_rows in zip(WEEKDAYS, self._weekmask, strict=True) if not has_rows
            ]
            frequency = "one row every day" + (f" except {', '.join(absent)}" if absent else "")
            counts = np.busday_count(self._days[:-1], self._days[1:], weekmask=self._weekmask)
            gaps = np.flatnonzero(counts != 1)
        elif step is not None:
            frequency = f"one row every {STEP_NAMES.get(step) or f'{step:,} seconds'}"
            gaps = np.flatnonzero(self._differences != step)
        else:
            return f"; {span}"
        if not len(gaps):
            return f"; {span}, {frequency}"
        count, line = len(gaps), self.lines[gaps[0]]
        return (
            f"; {span}, {frequency} with {count:,} gap{'s' * (count > 1)}, the first after line "
            f"{line:,}; the rows are treated as consecutive"
        )

    def next_dates(self, steps: int) -> list[str]:
        """The dates of the next rows; an empty list if the step is not known."""
        last, step, months = self.values[-1], self.step, self.step_in_months
        dates: Iterable[np.datetime64]
        if months:
            dates = self._dates_in(last.astype("datetime64[M]") + months * np.arange(1, steps + 1))
        elif step == DAY:
            time = last - self._days[-1]
            offsets = np.arange(1, steps + 1)
            dates = np.busday_offset(self._days[-1], offsets, weekmask=self._weekmask) + time
        elif step is not None:
            dates = [last + np.timedelta64(step * n, "s") for n in range(1, steps + 1)]
        else:
            return []
        return self._format(dates)

    def _format(self, dates: Iterable[np.datetime64]) -> list[str]:
        """Dates in ISO format; without the time where all rows are at midnight."""
        whole_days = not (self.values.astype(np.int64) % DAY).any()
        return [str(date)[: 10 if whole_days else 19].replace("T", " ") for date in dates]


def read_dates(table: Table, rows: Sequence[Row]) -> tuple[Dates | None, set[int]]:
    """The dates of the rows of a table, and the columns that hold them.

    Dates are in one column (ISO, or 31.12.2016), or in three: the columns called day, month and
    year, or the first three of a table without a header if these are increasing dates. Raises
    `DataError` for a cell that is not a date, and for dates that do not increase.
    """
    first = rows[0][1]
    columns = [index for index, cell in enumerate(first) if _parse_date(cell) is not None]
    if columns:
        column = columns[0]

        def parse_cell(row: Sequence[Any]) -> datetime | None:
            return _parse_date(row[column])

        return _parse_rows(table, rows, (column,), parse_cell), {column}
    day_month_year = _day_month_year(table, rows)
    if day_month_year is None:
        return None, set()

    def parse_parts(row: Sequence[Any]) -> datetime | None:
        return _from_parts(*(row[index] for index in day_month_year))

    return _parse_rows(table, rows, day_month_year, parse_parts), {*day_month_year}


def _day_month_year(table: Table, rows: Sequence[Row]) -> tuple[int, int, int] | None:
    """The columns of day, month and year."""
    lower = [name.lower() for name in table.columns]
    for names in DAY_MONTH_YEAR:
        if all(name in lower for name in names):
            day, month, year = (lower.index(name) for name in names)
            return day, month, year
    if table.header or len(lower) < 4:
        return None
    for order in ((0, 1, 2), (2, 1, 0)):
        dates = [_from_parts(*(row[index] for index in order)) for _, row in rows]
        known = [date for date in dates if date is not None]
        if len(known) == len(dates) > 1 and known == sorted(known) and known[0] < known[-1]:
            return order
    return None


def _parse_rows(table: Table, rows: Sequence[Row], columns: tuple[int, ...], parse: Any) -> Dates:
    names = tuple(table.columns[index] for index in columns)
    dates: list[datetime] = []
    for number, row in rows:
        date = parse(row)
        cells = ", ".join(repr(row[index]) for index in columns)
        if date is None:
            raise DataError(
                f"{table.location(number)}: {', '.join(names)} is {cells}, not a date;\n"
                "correct it, or remove the row"
            )
        if dates and date <= dates[-1]:
            before = table.location(rows[len(dates) - 1][0])
            problem = "has the same date as" if date == dates[-1] else "is earlier than"
            raise DataError(
                f"{table.location(number)}: {cells} {problem} {before};\n"
                "a series has one row for each date, in chronological order: sort the rows, and "
                "remove repeated ones"
            )
        dates.append(date)
    values = np.array([date.replace(tzinfo=None) for date in dates], dtype="datetime64[s]")
    return Dates(names, values, tuple(number for number, _ in rows))


def _parse_date(cell: Any) -> datetime | None:
    if not isinstance(cell, str):
        return None
    if dotted := _DOTTED.match(cell):
        day, month, year, time = dotted.groups()
        cell = f"{year}-{month:0>2}-{day:0>2}{time}"
    if not _ISO.match(cell):
        return None
    with suppress(ValueError, OverflowError):  # conversion to UTC may exceed the year 9999
        return _to_utc(datetime.fromisoformat(cell.strip()))
    return None


def _to_utc(date: datetime) -> datetime:
    return date if date.tzinfo is None else date.astimezone(UTC).replace(tzinfo=None)


def _from_parts(day: Any, month: Any, year: Any) -> datetime | None:
    with suppress(ValueError, TypeError, OverflowError):
        parts = [float(part) for part in (year, month, day)]
        if all(part.is_integer() for part in parts) and 1000 <= parts[0] <= 3000:
            return datetime(*map(int, parts))  # type: ignore[arg-type]
    return None
