"""Columns of a table that are not forecast: dates of the rows, and row numbers."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.dates import MONTH_LENGTH, YEAR_LENGTH, Dates
from regard.data.tables import SAMPLE_ROWS, Row, Table, is_missing
from regard.errors import DataError

PARTS = (  # names of the columns of a date, from the longest part to the shortest
    ("year", "année", "annee"),
    ("month", "mois"),
    ("day", "jour"),
    ("hour", "heure"),
    ("minute",),
)
TIME_NAME = re.compile(r"date|time|epoch|unix|^(ts|ds|t)$", re.I)  # of a column of numbers
ONLY_TIME_NAME = re.compile(r"(date|time|stamp|epoch|unix|utc|ts|ds|t|ms|s|[\W_])+", re.I)
INDEX_NAME = re.compile(
    r"(index|idx|id|row|no|nr|step|t|time|date|datetime|timestamp|year|unnamed: \d+)$", re.I
)
EPOCH_UNITS = {
    "seconds": 1,
    "milliseconds": 10**3,
    "microseconds": 10**6,
    "nanoseconds": 10**9,
}
MAX_DISORDER = 0.1  # fraction of rows with an earlier date than the previous row; they are errors
EPOCH_RANGE = (10**8, 10**10)  # in seconds: 1973 to 2286
DAY_FIRST, MONTH_FIRST = "day/month/year", "month/day/year"
_YEAR_FIRST = re.compile(r"(\d{4})[-/](\d{1,2})(?:[-/](\d{1,2}))?(?!\d)(.*)")  # 2016-12-31, 2016-12
_YEAR_LAST = re.compile(r"(\d{1,2})([./-])(\d{1,2})\2(\d{4})(?!\d)(.*)")  # 31.12.2016 23:00
_SHORT_HOUR = re.compile(r"[T ]\s*(\d:.*)")  # 9:00
_TIME_OF_DAY = re.compile(r"\s*(\d{1,2}:\d{2}(:\d{2})?)\s*$")
_INTEGER = re.compile(r"\s*(\d+)(\.0*)?\s*$")


@dataclass(frozen=True, slots=True)
class _DateParser:
    """How to parse the date of a row; `cell_format` and `iso_length` are those of `Dates`."""

    columns: tuple[int, ...]
    parse: Callable[[Sequence[Any]], datetime | None]  # the date of a row of cells
    cell_format: str = ""
    iso_length: int | None = None


def read_dates(table: Table, rows: Sequence[Row]) -> tuple[Dates | None, dict[int, str]]:
    """The dates of the rows, and by column the reason why other dates are not used.

    Dates are in one column, as text (2016-12-31, 2016-12, 31.12.2016, 31/12/2016, 12/31/2016, also
    with a time, or with a column of times of day) or as numbers (20161231, or seconds,
    milliseconds, … since 1970), or in the columns year, month, day, hour and minute, of which the
    first are enough; in a table without a header, also in its first three columns, if these are
    increasing dates. Raises `DataError` for a cell that is not a date, and for dates that do not
    increase.
    """
    columns = range(len(table.columns))
    texts = [_text_parser(rows, column) for column in columns]
    candidates = [
        *texts,
        _parts_parser(table, rows),
        *(_number_parser(table, rows, column) for column in columns),
    ]
    parsers = [parser for parser in candidates if isinstance(parser, _DateParser)]
    if not parsers:
        unnamed = (_number_parser(table, rows, column, named=False) for column in columns)
        parsers = [parser for parser in unnamed if parser is not None][:1]
    reasons = {
        column: reason
        for refusal in candidates
        if isinstance(refusal, dict)
        for column, reason in refusal.items()
    }
    if not parsers:
        return None, reasons
    parser = _with_time_of_day(table, rows, parsers[0])
    dates = _parse_rows(table, rows, parser)
    for other in parsers[1:]:
        if other not in texts and not _is_in_order([other.parse(row) for _, row in rows]):
            continue  # values such as the year of manufacture
        unused = [column for column in other.columns if column not in parser.columns]
        reasons |= dict.fromkeys(unused, f"dates as in {dates.columns[0]}")
    return dates, reasons


def row_number_reason(table: Table, numbers: NDArray[np.float64], column: int) -> str:
    """The reason why a column of numbers is an index of the rows; "" if it is a value.

    The numbers of an index increase from row to row, and its name says what it is; the first column
    may also be without a name, if it counts the rows.
    """
    name = table.columns[column]
    steps = np.diff(numbers)
    if len(numbers) < 2 or not (steps > 0).all():
        return ""
    counts_rows = numbers[0] in (0, 1) and bool((steps == 1).all())
    if column == 0 and name == "1" and counts_rows:
        return "has no name and counts the rows"
    if not INDEX_NAME.match(name):
        return ""
    return "counts the rows" if counts_rows else "increases from row to row, as an index"


def is_date(cell: Any) -> bool:
    """Whether a cell is a date, as text."""
    return parse_date(cell) is not None or parse_date(cell, month_first=True) is not None


def parse_date(cell: Any, *, month_first: bool = False) -> datetime | None:
    """The date of a cell; None for a number, such as 20161231, and for other text.

    >>> parse_date("31/12/2016 9:30")
    datetime.datetime(2016, 12, 31, 9, 30)
    >>> parse_date("12/31/2016", month_first=True)
    datetime.datetime(2016, 12, 31, 0, 0)
    """
    if not isinstance(cell, str | date):
        return None
    text = str(cell).strip()
    if match := _YEAR_FIRST.match(text):
        year, month, day, rest = match.groups()
        if day is None and rest:
            return None
    elif match := _YEAR_LAST.match(text):
        day, separator, month, year, rest = match.groups()
        if month_first and separator != ".":
            day, month = month, day
    else:
        return None
    if hour := _SHORT_HOUR.match(rest):
        rest = f" 0{hour[1]}"
    with suppress(ValueError, OverflowError):  # conversion to UTC may exceed the year 9999
        return _to_utc(datetime.fromisoformat(f"{year}-{month:0>2}-{day or '1':0>2}{rest}"))
    return None


def _to_utc(date: datetime) -> datetime:
    return date if date.tzinfo is None else date.astimezone(UTC).replace(tzinfo=None)


def _text_parser(rows: Sequence[Row], column: int) -> _DateParser | dict[int, str] | None:
    """How to read a column of dates as text; the reason if day and month cannot be told apart."""
    sample = [row[column] for _, row in rows[:SAMPLE_ROWS] if not is_missing(row[column])]
    if 2 * sum(map(is_date, sample)) <= len(sample):
        return None
    texts = [str(cell).strip() for cell in sample]
    if any((match := _YEAR_LAST.match(text)) and match[2] != "." for text in texts):
        form, reason = _day_or_month_first([row[column] for _, row in rows])
        if not form:
            return {column: reason}
        month_first = form.startswith(MONTH_FIRST)
        return _DateParser(
            (column,), lambda row: parse_date(row[column], month_first=month_first), form
        )
    years_first = [match for text in texts if (match := _YEAR_FIRST.match(text))]
    has_days = any(match[3] is not None for match in years_first)
    length = None if has_days or len(years_first) < len(texts) else MONTH_LENGTH
    return _DateParser((column,), lambda row: parse_date(row[column]), iso_length=length)


def _day_or_month_first(cells: Sequence[Any]) -> tuple[str, str]:
    """The order of day and month in a column, or "" and the reason why it is not known.

    A cell such as 31/12/2016 decides it, or else the order and the step of the rows.
    """
    day_first = [parse_date(cell) for cell in cells]
    month_first = [parse_date(cell, month_first=True) for cell in cells]
    by_form = {
        DAY_FIRST: [date for date in day_first if date is not None],
        MONTH_FIRST: [date for date in month_first if date is not None],
    }
    if day_first == month_first:
        return DAY_FIRST, ""
    counts = {form: len(dates) for form, dates in by_form.items()}
    if counts[DAY_FIRST] != counts[MONTH_FIRST]:
        return max(counts, key=lambda form: counts[form]), ""
    in_order = [form for form, dates in by_form.items() if dates == sorted(dates)]
    if len(in_order) == 1:
        return f"{in_order[0]}, since the rows are then in order", ""
    gaps = {form: len(Dates((), _to_array(by_form[form])).gaps) for form in in_order}
    if len(set(gaps.values())) == 2:
        return f"{min(gaps, key=lambda form: gaps[form])}, since fewer rows are then missing", ""
    example = next(cell for cell, date in zip(cells, day_first, strict=True) if date is not None)
    return "", f"{example} may be {DAY_FIRST} or {MONTH_FIRST}: write 2016-12-31"


def _parts_parser(table: Table, rows: Sequence[Row]) -> _DateParser | dict[int, str] | None:
    """How to read dates of several columns: year, month, …; the reason if most dates repeat."""
    lower = [name.lower() for name in table.columns]
    columns: list[int] = []
    for names in PARTS:
        column = next((lower.index(name) for name in names if name in lower), None)
        if column is None:
            break
        columns.append(column)
    if not columns:
        return None if table.header or len(lower) < 4 else _first_columns_parser(rows)

    def parse(row: Sequence[Any]) -> datetime | None:
        return _from_parts(*(row[column] for column in columns))

    dates = [date for _, row in rows if (date := parse(row)) is not None]
    if 2 * len(dates) <= len(rows):
        return None
    if 2 * sum(first == second for first, second in pairwise(dates)) > len(rows):
        return dict.fromkeys(columns, "repeats, so it is not the date of a row")
    in_order = (*columns[2::-1], *columns[3:])  # day, month, year, hour, minute
    return _DateParser(
        in_order, parse, iso_length={1: YEAR_LENGTH, 2: MONTH_LENGTH}.get(len(columns))
    )


def _first_columns_parser(rows: Sequence[Row]) -> _DateParser | None:
    """How to read dates of the first three columns: day, month, year, or the reverse."""
    parsers = (
        _DateParser((0, 1, 2), lambda row: _from_parts(row[2], row[1], row[0])),
        _DateParser((2, 1, 0), lambda row: _from_parts(row[0], row[1], row[2])),
    )
    for parser in parsers:
        dates = [date for _, row in rows if (date := parser.parse(row)) is not None]
        if len(dates) == len(rows) > 1 and dates == sorted(dates) and dates[0] < dates[-1]:
            return parser
    return None


def _number_parser(
    table: Table, rows: Sequence[Row], column: int, *, named: bool = True
) -> _DateParser | None:
    """How to read a column of dates as numbers.

    Its name is that of a time, or (`named=False`) it increases by the same step in all rows. A name
    with other words, as runtime_ns, is that of a time only if the numbers are in order.
    """
    if named and not TIME_NAME.search(table.columns[column]):
        return None
    first = next((n for _, row in rows[:SAMPLE_ROWS] if (n := _integer(row[column]))), 0)
    unit = next((unit for unit in EPOCH_UNITS if _in_epoch_range(first, unit)), None)
    if unit is None and not (named and _from_digits(first)):
        return None
    numbers = [n for _, row in rows if (n := _integer(row[column])) is not None]
    if not ONLY_TIME_NAME.fullmatch(table.columns[column]) and not _is_in_order(numbers):
        return None
    is_regular = len(numbers) == len(rows) and len({b - a for a, b in pairwise(numbers)}) == 1
    if not named and not (is_regular and numbers[0] < numbers[-1]):
        return None
    if unit is None:
        if 2 * sum(_from_digits(number) is not None for number in numbers) <= len(rows):
            return None
        return _DateParser((column,), lambda row: _from_digits(_integer(row[column])), "YYYYMMDD")
    if 2 * sum(_in_epoch_range(number, unit) for number in numbers) <= len(rows):
        return None
    form = f"{unit} since 1970"
    return _DateParser((column,), lambda row: _from_epoch(_integer(row[column]), unit), form)


def _is_in_order(values: Sequence[Any]) -> bool:
    """Whether values do not decrease from row to row, apart from a few rows."""
    known = [value for value in values if value is not None]
    decreases = sum(first > second for first, second in pairwise(known))
    return decreases <= MAX_DISORDER * len(known)


def _in_epoch_range(number: int, unit: str) -> bool:
    low, high = (limit * EPOCH_UNITS[unit] for limit in EPOCH_RANGE)
    return low <= number < high


def _from_epoch(number: int | None, unit: str) -> datetime | None:
    if number is None or not _in_epoch_range(number, unit):
        return None
    seconds, fraction = divmod(number, EPOCH_UNITS[unit])
    microseconds = fraction * 10**6 // EPOCH_UNITS[unit]
    return datetime(1970, 1, 1) + timedelta(seconds=seconds, microseconds=microseconds)


def _from_digits(number: int | None) -> datetime | None:
    """The date of a number such as 20161231."""
    with suppress(ValueError):
        if number is not None and 1000_00_00 <= number <= 3000_99_99:
            return datetime.strptime(str(number), "%Y%m%d")
    return None


def _integer(cell: Any) -> int | None:
    if isinstance(cell, str):
        match = _INTEGER.match(cell)
        return int(match[1]) if match and len(match[1]) < 20 else None
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    return cell if isinstance(cell, int) and not isinstance(cell, bool) else None


def _with_time_of_day(table: Table, rows: Sequence[Row], parser: _DateParser) -> _DateParser:
    """The parser with a column of times of day, if dates without a time repeat."""
    dates = [parser.parse(row) for _, row in rows]
    known = [date for date in dates if date is not None]
    repeats = any(first == second for first, second in pairwise(known))
    if not repeats or any(date.time() != time() for date in known):
        return parser
    sample = rows[:SAMPLE_ROWS]
    for column, name in enumerate(table.columns):
        is_hour = name.lower() in PARTS[3]
        times = [_parse_time(row[column], is_hour) for _, row in sample]
        if column in parser.columns or 2 * sum(t is not None for t in times) <= len(sample):
            continue

        def parse(row: Sequence[Any], column: int = column, is_hour: bool = is_hour) -> Any:
            date, time = parser.parse(row), _parse_time(row[column], is_hour)
            return None if date is None or time is None else datetime.combine(date, time)

        return replace(parser, columns=(*parser.columns, column), parse=parse)
    return parser


def _parse_time(cell: Any, is_hour: bool) -> time | None:
    """A time of day, such as 9:30, or an hour from 0 to 23."""
    if isinstance(cell, time):
        return cell
    with suppress(ValueError):
        if is_hour and (hour := _integer(cell)) is not None:
            return time(hour)
        if isinstance(cell, str) and (match := _TIME_OF_DAY.match(cell)):
            return time.fromisoformat(match[1].zfill(5 if match[2] is None else 8))
    return None


def _from_parts(
    year: Any, month: Any = 1, day: Any = 1, hour: Any = 0, minute: Any = 0
) -> datetime | None:
    with suppress(ValueError, TypeError, OverflowError):
        parts = [float(part) for part in (year, month, day, hour, minute)]
        if all(part.is_integer() for part in parts) and 1000 <= parts[0] <= 3000:
            return datetime(*map(int, parts))  # type: ignore[arg-type]
    return None


def _parse_rows(table: Table, rows: Sequence[Row], parser: _DateParser) -> Dates:
    names = tuple(table.columns[column] for column in parser.columns)
    dates: list[datetime] = []
    for number, row in rows:
        date = parser.parse(row)
        cells = ", ".join(repr(row[column]) for column in parser.columns)
        if date is None:
            form = f" ({parser.cell_format})" if parser.cell_format else ""
            raise DataError(
                f"{table.location(number)}: {', '.join(names)} is {cells}, not a date{form};\n"
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
    numbers = [number for number, _ in rows]

    def location(index: int) -> str:
        return table.short_location(numbers[index])

    return Dates(names, _to_array(dates), location, parser.cell_format, parser.iso_length)


def _to_array(dates: Sequence[datetime]) -> NDArray[np.datetime64]:
    return np.array(dates, dtype="datetime64[ms]")
