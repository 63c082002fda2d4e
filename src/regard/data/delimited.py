"""Delimited text: comma-, tab-, semicolon- and pipe-separated files."""

import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from regard.data.tables import (
    DECIMAL_COMMA,
    IMAGE_SUFFIXES,
    KNOWN_COLUMNS,
    MIN_NUMERIC_FRACTION,
    SAMPLE_ROWS,
    Row,
    Table,
    has_decimal_commas,
    has_decimal_point,
    is_missing,
    is_number,
    is_number_with_comma,
    replace_decimal_commas,
)
from regard.data.text_files import Scan, open_bytes, preview, read_lines, scan, stem, suffix
from regard.errors import DataError

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
_HEADER_NAME = re.compile(r"(?=.*[^\W\d_]).{1,40}$")  # a letter and no more than 40 characters
_PLAIN_NAME = re.compile(r"[^\W\d][\w .()%/:-]*$")  # a name, not a sentence
_MAX_CELL_SIZE = 1 << 30  # characters; the default of csv is 131,072


def from_delimited(path: Path, training: Table | None = None, names: Collection[str] = ()) -> Table:
    """The table in a file of delimited text; the delimiter and the header are inferred.

    The first row is a header if it has one of the column `names` that the user has given; those
    that are numbers of columns, from 1, do not count. For validation data, the table of the
    `training` data decides which of its columns have decimal commas; in other columns they are
    inferred.
    """
    scanned = scan(path)
    delimiter = _delimiter(path)
    quoted = _is_quoted(path, scanned, delimiter)

    def numbered_rows() -> Iterator[tuple[int, list[str]]]:
        if quoted:
            return _quoted_rows(path, delimiter)
        return _plain_rows(path, scanned, delimiter)

    numbered_sample = [
        (number, row) for number, row in islice(numbered_rows(), SAMPLE_ROWS) if any(row)
    ]
    if not numbered_sample:
        raise DataError(f"{path} has no cell with a value in its first {SAMPLE_ROWS} lines")
    sample = [row for _, row in numbered_sample]
    width = len(sample[0])
    column_numbers = {str(number) for number in range(1, width + 1)}  # not names of a header
    is_named = not {cell.strip() for cell in sample[0]}.isdisjoint({*names} - column_numbers)
    header = is_named or _is_header(sample[0], sample[1:])
    columns = tuple(
        (sample[0][index].strip() if header else "") or str(index + 1) for index in range(width)
    )
    if len(set(columns)) < width:
        duplicate = next(name for name in columns if columns.count(name) > 1)
        raise DataError(f"{path} has two columns named {duplicate!r}; rename one of them")
    delimiter_name = DELIMITERS[delimiter]
    body = [(number, row) for number, row in numbered_sample[header:] if len(row) == width]
    semicolons = delimiter == ";"  # the usual delimiter where commas are decimal
    decimal_commas = [
        name
        for index, name in enumerate(columns)
        if _has_decimal_commas(
            path, name, [(n, row[index]) for n, row in body], semicolons, training
        )
    ]

    def rows() -> Iterator[Row]:
        skip = header
        for number, row in numbered_rows():
            if skip and any(row):
                skip = False
                continue
            if row and len(row) != width:
                hint = (
                    f"a cell that contains a {delimiter_name} needs double quotes"
                    if len(row) > width
                    else f"each line needs {width} cells, with a {delimiter_name} between them; "
                    "a cell may be empty"
                )
                raise DataError(
                    f"{path}, line {number} has {len(row)} column{'s' * (len(row) != 1)}, "
                    f"the first line {width}: "
                    f"{preview(delimiter.join(row))}\n{hint}"
                )
            yield number, tuple(row) if row else ("",) * width  # an empty line

    table = Table(
        name=stem(path),
        path=str(path),
        format=f"{delimiter_name}-separated",
        columns=columns,
        rows=rows,
        digest=scanned.digest,
        header=header,
        header_location=f"{path}, line {numbered_sample[0][0]}" if header else "",
    )
    return replace_decimal_commas(table, decimal_commas)


def _has_decimal_commas(
    path: Path,
    column: str,
    cells: Sequence[tuple[int, str]],
    semicolons: bool,
    training: Table | None,
) -> bool:
    """Whether a column has decimal commas, by its cells (with line numbers) or the training data.

    Raises `DataError` for a decimal point where the training data has decimal commas.
    """
    if training is None or column not in training.columns:
        return has_decimal_commas([cell for _, cell in cells], if_ambiguous=semicolons)
    if column not in training.decimal_commas:
        return False
    for number, cell in cells:
        if has_decimal_point(cell):
            raise DataError(
                f"{path}, line {number}: {column} is {cell!r}, with a decimal point, and has "
                f"decimal commas in the training data, {training.path};\n"
                "use the same decimal separator in both files"
            )
    return True


def _delimiter(path: Path) -> str:
    """The delimiter that gives the first rows the same number of columns, and more than one."""
    candidates = [*DELIMITERS]
    if suffix(path) != ".csv":
        candidates = ["\t", *(delimiter for delimiter in candidates if delimiter != "\t")]
    widths: dict[str, list[int]] = {}
    for candidate in candidates:
        with suppress(csv.Error):  # the next one may fit
            rows = islice(_quoted_rows(path, candidate, strict=False), 50)
            widths[candidate] = [len(row) for _, row in rows if row]
    splitting_delimiters = [
        delimiter for delimiter, counts in widths.items() if counts and counts[0] > 1
    ]
    consistent_delimiters = [
        delimiter for delimiter in splitting_delimiters if len(set(widths[delimiter])) == 1
    ]
    if {",", ";"} <= set(consistent_delimiters) and _commas_are_decimal(path):
        return ";"
    return next(iter([*consistent_delimiters, *splitting_delimiters, *candidates]))


def _commas_are_decimal(path: Path) -> bool:
    """Whether, between semicolons and below the first row, commas are in numbers only."""
    rows = islice(_quoted_rows(path, ";", strict=False), 1, 50)
    cells = [cell for _, row in rows for cell in row if "," in cell]
    return bool(cells) and all(map(DECIMAL_COMMA.match, cells))


def _is_quoted(path: Path, scanned: Scan, delimiter: str) -> bool:
    """Whether double quotes enclose cells (Excel, RFC 4180) or are characters of the text.

    They enclose cells if all rows then have the same number of columns. If all lines also have the
    same number of delimiters, quoted cells must not contain a newline.
    """
    opening = re.compile(rf'(^|{re.escape(delimiter)})"')
    if not any(opening.search(line) for line in read_lines(path, scanned)):
        return False
    counts = (line.count(delimiter) for line in read_lines(path, scanned) if line)
    lines_have_same_count = len(set(counts)) == 1
    with suppress(csv.Error):
        widths, has_newlines = set(), False
        for _, row in _quoted_rows(path, delimiter):
            if row:
                widths.add(len(row))
                has_newlines = has_newlines or any("\n" in cell for cell in row)
        if len(widths) == 1:
            return not (lines_have_same_count and has_newlines)
    return not lines_have_same_count


def _quoted_rows(
    path: Path, delimiter: str, *, strict: bool = True
) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(_MAX_CELL_SIZE)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=strict)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise _QuoteError(f"{path}, line {reader.line_num} is not CSV: {error}") from None
            yield reader.line_num, [cell.replace("\r\n", "\n") for cell in row]


class _QuoteError(DataError, csv.Error):
    """Raised if double quotes do not enclose cells."""


def _plain_rows(path: Path, scanned: Scan, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(read_lines(path, scanned), 1):
        yield number, line.split(delimiter) if line.strip() else []


def _is_header(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names the columns.

    Its cells must be short, distinct and not numeric, and differ from the rows below in one of
    these ways: a column holds numbers, image files, or few values that do not include the cell of
    the first row; or the cells of all columns have several words, and those of the first row one.
    """
    names = [cell.strip() for cell in first]
    filled = [name for name in names if name]
    if not filled or not all(map(_HEADER_NAME.match, filled)) or any(map(is_number, filled)):
        return False
    known = {name.lower() for name in filled} & KNOWN_COLUMNS
    if len(known) >= min(2, len(filled)):
        return True
    columns = [[row[index] for row in rows if index < len(row)] for index in range(len(names))]
    several_words = []
    for name, cells in zip(names, columns, strict=True):
        values = set(cells)
        filled_cells = [cell for cell in cells if not is_missing(cell)]
        numbers = [is_number(cell) or is_number_with_comma(cell) for cell in filled_cells]
        if numbers and sum(numbers) >= MIN_NUMERIC_FRACTION * len(numbers):
            return True
        if cells and len(values) * 4 <= len(cells) and name not in values:
            return True
        files = [cell.lower() for cell in cells if cell.strip()]
        if 2 * sum(file.endswith(IMAGE_SUFFIXES) for file in files) > len(files):
            return not name.lower().endswith(IMAGE_SUFFIXES)
        words = sum(len(cell.split()) for cell in cells)
        plain = len(name.split()) == 1 and _PLAIN_NAME.match(name) is not None
        several_words.append(plain and words >= 3 * len(cells) > 0)
    return len(names) > 1 and all(several_words) and len(set(names)) == len(names)
