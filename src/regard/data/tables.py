"""Tables: columns with names, and rows of cells."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from regard.data.text_files import preview
from regard.errors import DataError

TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
# of images that are not read; SVG files are text
OTHER_IMAGE_SUFFIXES = (".bmp", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".ppm", ".pgm")
MAX_LOCATIONS = 5  # rows that a message names
SAMPLE_ROWS = 1000  # from which the header and the keys of JSON objects are determined
# Names of columns, the more usual ones first.
TEXT_COLUMNS = (
    *("text", "sentence", "review", "content", "document", "message", "tweet", "comment", "body"),
    *("utterance", "headline"),
)
LABEL_COLUMNS = (
    *("label", "class", "labels", "sentiment", "category", "topic", "intent", "emotion"),
    *("polarity", "rating", "stars", "star_rating", "label_text", "label_name", "gold_label"),
)
SCORE_COLUMNS = (  # a number for a text or a pair of texts
    *("score", "similarity", "similarity_score", "relatedness", "relatedness_score"),
)
TEXT_PAIR_COLUMNS = (  # two texts with one class
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "passage"),
    ("question", "sentence"),
    ("question", "context"),
)
WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("tags", "ner_tags", "ner", "pos_tags", "labels")
PAIR_COLUMNS = (("source", "target"), ("src", "tgt"), ("input", "output"), ("prompt", "completion"))
KNOWN_COLUMNS = {
    *TEXT_COLUMNS,
    *LABEL_COLUMNS,
    *SCORE_COLUMNS,
    *WORD_COLUMNS,
    *TAG_COLUMNS,
    *(name for pair in (*PAIR_COLUMNS, *TEXT_PAIR_COLUMNS) for name in pair),
}
MIN_NUMERIC_FRACTION = 0.9  # of cells that are numbers, in a numeric column
MISSING_VALUES = {"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "-", "--", "?"}
DECIMAL_COMMA = re.compile(r"\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?(e[+-]?\d+)?\s*$", re.I)
_THOUSANDS = re.compile(r"\s*[+-]?\d{1,3}(,\d{3})+(,\d{3}|\.\d+)\s*$")  # 1,234,567 and 1,234.5
_GROUPED = re.compile(r"\s*[+-]?(0|[1-9]\d{0,2}(,\d{3})*)(\.\d+)?\s*$")  # 12 and 1,234 and 1,234.5
Row = tuple[int, tuple[Any, ...]]  # line (or row) number, a cell for each column


@dataclass(frozen=True, slots=True)
class Table:
    """Columns with names, and rows of cells; each call of `rows()` reads from the start.

    A cell is a string; in JSON and Parquet also a number, a boolean, a list, or None if missing.
    The columns of a table without a header are named "1", "2", ….
    """

    name: str
    path: str
    format: str  # for descriptions: "comma-separated"
    columns: tuple[str, ...]
    rows: Callable[[], Iterator[Row]] = field(repr=False)
    digest: str  # of the content
    header: bool = True  # False: the columns are named by their numbers
    header_location: str = ""  # file and line of the header, for messages; of delimited text only
    row_unit: str = "line"  # what row numbers count: "line" or "row"
    # columns whose numbers have decimal commas in the file; in `rows` they have decimal points
    decimal_commas: tuple[str, ...] = ()
    # the location of a row by its number, for a table of several files
    locate: Callable[[int], str] | None = field(default=None, repr=False)

    def column(self, name: str) -> int:
        """The index of a column, by its name or its number, from 1."""
        column = self.find(name)
        if column is None:
            raise DataError(
                f"{self.header_location or self.path} has no column {name!r}\n{self.listing()}"
            )
        return self.columns.index(column)

    def find(self, name: str) -> str | None:
        """The name of the column with this name or number, from 1; None if there is none."""
        if name in self.columns:
            return name
        if name.isdecimal() and 1 <= int(name) <= len(self.columns):
            return self.columns[int(name) - 1]
        return None

    def location(self, number: int) -> str:
        """The location of a row, for a message."""
        return self.locate(number) if self.locate else f"{self.path}, {self.row_unit} {number}"

    def short_location(self, number: int) -> str:
        """The location of a row, without the path of the table."""
        return self.location(number).removeprefix(f"{self.path}, ")

    def listing(self) -> str:
        """The columns with the beginning of their first cells, for a message."""
        first = next(self.rows(), None)
        if first is None:
            return f"its columns: {', '.join(self.columns)}; it has no rows"
        cells = zip(self.columns, first[1], strict=True)
        listed = ", ".join(f"{name} ({preview(str(cell))})" for name, cell in islice(cells, 20))
        more = f", … {len(self.columns) - 20} more" if len(self.columns) > 20 else ""
        return f"its columns, with their first row ({self.format}): {listed}{more}"


def empty_cells_error(table: Table, columns: Sequence[str], skipped: Sequence[str]) -> DataError:
    """The error for rows with an empty cell in one of these columns; it names the first rows.

    Rows with an empty cell in a column of `skipped`, which are some of the columns, are not an
    error by themselves: without the others, they would be skipped.
    """
    indices = {name: table.column(name) for name in columns}
    count, incomplete, refused = 0, [], 0
    for number, row in table.rows():
        empty = [name for name, index in indices.items() if is_empty(row[index])]
        if all(map(is_empty, row)):  # an empty line
            continue
        count += 1
        if empty:
            incomplete.append(f"{table.short_location(number)} ({', '.join(empty)})")
            refused += not set(empty) & set(skipped)
    more = ", …" if len(incomplete) > MAX_LOCATIONS else ""
    advice = "fill in the empty cells, or delete these rows"
    if refused < len(incomplete):
        required = " and ".join(name for name in columns if name not in skipped)
        advice = (
            f"fill in the empty cells of {required}, or delete their "
            f"{'row' if refused == 1 else f'{refused:,} rows'}; "
            f"rows with an empty {' or '.join(skipped)} are skipped"
        )
    have = "has" if len(incomplete) == 1 else "have"
    return DataError(
        f"{table.path}: {len(incomplete):,} of {count:,} rows {have} an empty cell: "
        f"{', '.join(incomplete[:MAX_LOCATIONS])}{more}\n{advice}"
    )


def is_empty(cell: Any) -> bool:
    """Whether a cell has no value, or only spaces."""
    return cell is None or not str(cell).strip()


def text_cell(location: str, cell: Any) -> str:
    """The text of a cell, empty if it is missing; raise `DataError` for other values."""
    if cell is not None and not isinstance(cell, str):
        raise DataError(f"{location}: a text is a string, not {preview(str(cell))}")
    return cell or ""


def is_missing(cell: Any) -> bool:
    """Whether a cell of a column of numbers is a missing value: empty, NA, NaN, null, …"""
    return cell is None or str(cell).strip().lower() in MISSING_VALUES


def is_number(cell: Any) -> bool:
    """Whether a cell is a number, or a string that is one; not an integer too large for a float."""
    if not isinstance(cell, str | int | float) or isinstance(cell, bool):
        return False
    with suppress(ValueError, OverflowError):
        float(cell)
        return True
    return False


def has_decimal_commas(cells: Sequence[str], *, if_ambiguous: bool) -> bool:
    """Whether cells are numbers with decimal commas, such as 3,14 and 1.234,5.

    If every number could also have thousands separators (1,234), the result is `if_ambiguous`, but
    False if a cell can only have thousands separators (1,234,567 and 1,234.5).
    """
    numbers = [cell for cell in cells if DECIMAL_COMMA.match(cell)]
    filled = sum(bool(cell.strip()) for cell in cells)
    return (
        any("," in cell for cell in numbers)
        and len(numbers) >= MIN_NUMERIC_FRACTION * filled
        and (
            not all(map(_GROUPED.match, numbers))
            or (if_ambiguous and not any(map(_THOUSANDS.match, cells)))
        )
    )


def has_decimal_point(cell: str) -> bool:
    """Whether a cell is a number whose point is decimal: 3.14 and 0.125, not 1.234 or 12."""
    is_grouped = DECIMAL_COMMA.match(cell) and not re.match(r"\s*[+-]?0", cell)
    return "." in cell and is_number(cell) and not is_grouped


def replace_decimal_commas(table: Table, columns: Sequence[str]) -> Table:
    """A copy of the table with the decimal commas of these columns replaced by points."""
    if not columns:
        return table
    indices = [table.columns.index(name) for name in columns]

    def rows() -> Iterator[Row]:
        for number, row in table.rows():
            cells = list(row)
            for index in indices:
                cell = cells[index]
                if isinstance(cell, str) and DECIMAL_COMMA.match(cell):  # others are refused later
                    cells[index] = cell.replace(".", "").replace(",", ".")
            yield number, tuple(cells)

    return replace(
        table,
        format=f"{table.format}, decimal commas in {', '.join(columns)}",
        rows=rows,
        decimal_commas=(*table.decimal_commas, *columns),
    )


def is_number_with_comma(cell: Any) -> bool:
    """Whether a cell is a number with a decimal comma, or with thousands separators."""
    return (
        isinstance(cell, str)
        and "," in cell
        and any(pattern.match(cell) for pattern in (DECIMAL_COMMA, _GROUPED))
    )
