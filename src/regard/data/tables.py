"""Tables: delimited text, JSON, Parquet and Hugging Face data sets, as columns and rows."""

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.data.text_files import Scan, open_bytes, preview, read_lines, scan, stem, suffix
from regard.errors import DataError

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
HUB = "hf://datasets/"  # a data set of the Hugging Face hub: hf://datasets/owner/name
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
SAMPLE_ROWS = 1000  # from which the header and the keys of JSON objects are determined
SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
# Names of columns, the more usual ones first.
TEXT = (
    *("text", "sentence", "review", "content", "document", "message", "tweet", "comment", "body"),
    *("utterance", "headline"),
)
LABEL = (
    *(
        "label",
        "class",
        "labels",
        "sentiment",
        "category",
        "topic",
        "intent",
        "emotion",
        "polarity",
    ),
    *("rating", "stars", "star_rating", "label_text", "label_name", "gold_label"),
)
TEXT_PAIRS = (  # two texts that a class belongs to
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "passage"),
    ("question", "sentence"),
    ("question", "context"),
)
WORDS = ("tokens", "words")
TAGS = ("tags", "ner_tags", "ner", "pos_tags", "labels")
PAIRS = (("source", "target"), ("src", "tgt"), ("input", "output"), ("prompt", "completion"))
KNOWN_NAMES = {
    *TEXT,
    *LABEL,
    *WORDS,
    *TAGS,
    *(name for pair in (*PAIRS, *TEXT_PAIRS) for name in pair),
}
_BESIDE_TABLES = re.compile(r"(readme|licen[sc]e|dataset_?(info|dict)s?|state)(\..*)?$", re.I)
_HEADER_NAME = re.compile(r"(?=.*[^\W\d_]).{1,40}$")  # a letter and no more than 40 characters
_PLAIN_NAME = re.compile(r"[^\W\d][\w .()%/:-]*$")  # no sentence
MOSTLY_NUMBERS = 0.9  # of the cells of a column of numbers, at least; the others are errors
_DECIMAL_COMMA = re.compile(r"\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?(e[+-]?\d+)?\s*$", re.I)
_GROUPED = re.compile(r"\s*[+-]?(0|[1-9]\d{0,2}(,\d{3})*)(\.\d+)?\s*$")  # 12 and 1,234 and 1,234.5
_MAX_CELL = 1 << 30  # csv's own limit is 131,072 characters

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
    header: bool = True  # False: the columns have only numbers
    counts: str = "line"  # the unit of row numbers: "line" or "row"
    decimal_commas: tuple[str, ...] = ()  # columns of such numbers; their cells have points

    def column(self, name: str) -> int:
        """The index of a column, by its name or its number, from 1."""
        if name in self.columns:
            return self.columns.index(name)
        if name.isdecimal() and 1 <= int(name) <= len(self.columns):
            return int(name) - 1
        raise DataError(f"{self.path} has no column {name!r}\n{self.listing()}")

    def position(self, number: int) -> str:
        """The location of a row, for a message."""
        return f"{self.path}, {self.counts} {number}"

    def listing(self) -> str:
        """The columns with the beginning of their first cells, for a message."""
        first = next(self.rows(), None)
        if first is None:
            return f"its columns: {', '.join(self.columns)}; it has no rows"
        cells = zip(self.columns, first[1], strict=True)
        listed = ", ".join(f"{name} ({preview(str(cell))})" for name, cell in islice(cells, 20))
        more = f", … {len(self.columns) - 20} more" if len(self.columns) > 20 else ""
        return f"its columns, with their first row ({self.format}): {listed}{more}"


def is_table(path: Path) -> bool:
    """Whether a path is a table by its suffix, or a folder with nothing but tables."""
    if path.is_dir():
        return bool(_folder_files(path))
    return suffix(path) in SUFFIXES


def read_table(path: Path | str) -> Table:
    """The table at a path: a file, a folder of files, or hf://datasets/owner/name.

    Of a folder or a data set with a part called train, that part.
    """
    if isinstance(path, str) and path.startswith(HUB):
        return _from_hub(path, "train")
    path = Path(path)
    if path.is_dir():
        parts = _parts(path)
        files = parts.get("train") or [file for part in parts.values() for file in part]
        if not files:
            raise DataError(
                f"{path} holds no tables ({' '.join(SUFFIXES)}), or other files as well"
            )
        return _join(path, files)
    return _read_file(path)


def read_validation(path: Path | str) -> Table | None:
    """The part of a folder or data set for validation: validation, or else test, or None."""
    if isinstance(path, str) and path.startswith(HUB):
        return _from_hub(path, "validation")
    path = Path(path)
    if not path.is_dir():
        return None
    parts = _parts(path)
    files = parts.get("validation") or parts.get("test") if "train" in parts else None
    return _join(path, files) if files else None


def _folder_files(folder: Path) -> list[Path]:
    """The tables of a folder; none if it also holds other files."""
    files = []
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file() or _BESIDE_TABLES.match(path.name):
            continue
        if suffix(path) not in SUFFIXES:
            return []
        files.append(path)
    return sorted(files)


def _parts(folder: Path) -> dict[str, list[Path]]:
    """The files of a folder by the part of the data that their names or folders say."""
    parts: dict[str, list[Path]] = {}
    for file in _folder_files(folder):
        words = re.split(r"[-_./\\]", str(file.relative_to(folder)).lower())
        named = [SPLITS[word] for word in words if word in SPLITS]
        parts.setdefault(named[-1] if named else "", []).append(file)
    return parts


def _join(folder: Path, files: Sequence[Path]) -> Table:
    tables = [_read_file(file) for file in files]
    first = tables[0]
    for table in tables:
        if table.columns != first.columns:
            raise DataError(
                f"{table.path} has the columns {', '.join(table.columns)},\n"
                f"and {first.path} has {', '.join(first.columns)}; give one of them"
            )
    if len(tables) == 1:
        return first
    digest = hashlib.sha256(" ".join(table.digest for table in tables).encode()).hexdigest()
    return Table(
        name=folder.resolve().name,
        path=str(folder),
        format=f"{len(tables)} files, {first.format}",
        columns=first.columns,
        rows=lambda: ((n, row[1]) for n, row in enumerate(_chain(tables), 1)),
        digest=digest,
        header=first.header,
        counts="row",
    )


def _chain(tables: Sequence[Table]) -> Iterator[Row]:
    for table in tables:
        yield from table.rows()


def _read_file(path: Path) -> Table:
    kind = suffix(path)
    if kind in (".parquet", ".arrow"):
        return _from_arrow(path)
    if kind in (".jsonl", ".ndjson"):
        return _from_json_lines(path)
    if kind == ".json":
        return _from_json(path)
    return _from_delimited(path)


# Delimited text


def _from_delimited(path: Path) -> Table:
    scanned = scan(path)
    delimiter = _delimiter(path)
    quoted = _is_quoted(path, scanned, delimiter)

    def numbered() -> Iterator[tuple[int, list[str]]]:
        if quoted:
            return _quoted_rows(path, delimiter)
        return _plain_rows(path, scanned, delimiter)

    sample = [row for _, row in islice(numbered(), SAMPLE_ROWS) if any(row)]
    if not sample:
        raise DataError(f"{path} has no cell with a value in its first {SAMPLE_ROWS} lines")
    width = len(sample[0])
    header = _is_header(sample[0], sample[1:])
    columns = tuple(
        (sample[0][index].strip() if header else "") or str(index + 1) for index in range(width)
    )
    if len(set(columns)) < width:
        twice = next(name for name in columns if columns.count(name) > 1)
        raise DataError(f"{path} has two columns named {twice!r}; rename one of them")
    word = DELIMITERS[delimiter]
    body = [row for row in sample[header:] if len(row) == width]
    decimal = [i for i in range(width) if has_decimal_commas([row[i] for row in body])]

    def rows() -> Iterator[Row]:
        skip = header
        for number, row in numbered():
            if skip and any(row):
                skip = False
                continue
            if row and len(row) != width:
                hint = f"a cell that contains a {word} needs double quotes"
                raise DataError(
                    f"{path}, line {number} has {len(row)} columns, the first line {width}: "
                    f"{preview(delimiter.join(row))}\n{hint}"
                )
            for index in decimal if row else ():
                if _DECIMAL_COMMA.match(row[index]):  # other cells stay, and are refused
                    row[index] = row[index].replace(".", "").replace(",", ".")
            yield number, tuple(row) if row else ("",) * width  # an empty line

    commas = tuple(columns[index] for index in decimal)
    return Table(
        name=stem(path),
        path=str(path),
        format=f"{word}-separated" + (f", decimal commas in {', '.join(commas)}" if commas else ""),
        columns=columns,
        rows=rows,
        digest=scanned.digest,
        header=header,
        decimal_commas=commas,
    )


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
    splitting = [delimiter for delimiter, counts in widths.items() if counts and counts[0] > 1]
    equal = [delimiter for delimiter in splitting if len(set(widths[delimiter])) == 1]
    if {",", ";"} <= set(equal) and _commas_are_decimal(path):
        return ";"
    return next(iter([*equal, *splitting, *candidates]))


def _commas_are_decimal(path: Path) -> bool:
    """Whether, between semicolons and below the first row, commas are in numbers only."""
    rows = islice(_quoted_rows(path, ";", strict=False), 1, 50)
    cells = [cell for _, row in rows for cell in row if "," in cell]
    return bool(cells) and all(map(_DECIMAL_COMMA.match, cells))


def has_decimal_commas(cells: Sequence[str]) -> bool:
    """Whether cells are numbers with decimal commas, as 3,14 and 1.234,5.

    Not if all of them could have commas between thousands, as 1,234.
    """
    numbers = [cell for cell in cells if _DECIMAL_COMMA.match(cell)]
    filled = sum(bool(cell.strip()) for cell in cells)
    return (
        any("," in cell for cell in numbers)
        and len(numbers) >= MOSTLY_NUMBERS * filled
        and not all(map(_GROUPED.match, numbers))
    )


def has_comma(cell: Any) -> bool:
    """Whether a cell is a number with a comma, decimal or between thousands."""
    return (
        isinstance(cell, str)
        and "," in cell
        and any(pattern.match(cell) for pattern in (_DECIMAL_COMMA, _GROUPED))
    )


def _is_quoted(path: Path, scanned: Scan, delimiter: str) -> bool:
    """Whether double quotes enclose cells (Excel, RFC 4180) or are characters of the text.

    They enclose cells if so read all rows have the same number of columns. If lines split at
    every delimiter have it too, a quoted cell may not contain a line end.
    """
    opening = re.compile(rf'(^|{re.escape(delimiter)})"')
    if not any(opening.search(line) for line in read_lines(path, scanned)):
        return False
    counts = (line.count(delimiter) for line in read_lines(path, scanned) if line)
    same_in_lines = len(set(counts)) == 1
    with suppress(csv.Error):
        widths, line_ends = set(), False
        for _, row in _quoted_rows(path, delimiter):
            if row:
                widths.add(len(row))
                line_ends = line_ends or any("\n" in cell for cell in row)
        if len(widths) == 1:
            return not (same_in_lines and line_ends)
    return not same_in_lines


def _quoted_rows(
    path: Path, delimiter: str, *, strict: bool = True
) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(_MAX_CELL)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=strict)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise _NotDelimited(f"{path}, line {reader.line_num} is not CSV: {error}") from None
            yield reader.line_num, [cell.replace("\r\n", "\n") for cell in row]


class _NotDelimited(DataError, csv.Error):
    """Double quotes that do not enclose cells."""


def _plain_rows(path: Path, scanned: Scan, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(read_lines(path, scanned), 1):
        yield number, line.split(delimiter) if line.strip() else []


def _is_header(first: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names the columns.

    It does if its cells are short, different and no numbers, and if the rows below look different:
    a column of numbers, of image files, or of a few values that its name is not among, or (all
    columns) several words below single ones.
    """
    names = [cell.strip() for cell in first]
    filled = [name for name in names if name]
    if not filled or not all(map(_HEADER_NAME.match, filled)) or any(map(is_number, filled)):
        return False
    known = {name.lower() for name in filled} & KNOWN_NAMES
    if len(known) >= min(2, len(filled)):
        return True
    columns = [[row[index] for row in rows if index < len(row)] for index in range(len(names))]
    several_words = []
    for name, cells in zip(names, columns, strict=True):
        values = set(cells)
        numbers = [is_number(cell) or has_comma(cell) for cell in cells if cell.strip()]
        if numbers and sum(numbers) >= MOSTLY_NUMBERS * len(numbers):
            return True
        if cells and len(values) * 4 <= len(cells) and name not in values:
            return True
        if cells and all(cell.lower().endswith(IMAGE_SUFFIXES) for cell in cells):
            return not name.lower().endswith(IMAGE_SUFFIXES)
        words = sum(len(cell.split()) for cell in cells)
        plain = len(name.split()) == 1 and _PLAIN_NAME.match(name) is not None
        several_words.append(plain and words >= 3 * len(cells) > 0)
    return len(names) > 1 and all(several_words) and len(set(names)) == len(names)


def is_number(cell: Any) -> bool:
    """Whether a cell is a number, or a string that is one."""
    if isinstance(cell, str):
        with suppress(ValueError):
            float(cell)
            return True
        return False
    return isinstance(cell, int | float) and not isinstance(cell, bool)


# JSON


def _from_json_lines(path: Path) -> Table:
    scanned = scan(path)

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(read_lines(path, scanned), 1):
            if not line.strip():
                continue
            value = _parse(f"{path}, line {number}", line)
            if not isinstance(value, dict):
                raise DataError(
                    f"{path}, line {number} is not an object: {preview(line)}"
                    '\na line is one, as in {"text": "…", "label": "…"}'
                )
            yield number, flatten(value)

    return _from_objects(path, "an object a line", scanned.digest, objects, "line")


def _from_json(path: Path) -> Table:
    scanned = scan(path)
    lines = (line for line in read_lines(path, scanned) if line.strip())
    first, second = next(lines), next(lines, None)
    with suppress(ValueError, RecursionError):
        if second is not None and isinstance(json.loads(first), dict):
            return _from_json_lines(path)
    with open_bytes(path) as stream:
        stream.seek(scanned.start)
        content = _parse(str(path), stream.read().decode("utf-8"))
    records, where = _records(path, content)

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        return ((number, flatten(record)) for number, record in enumerate(records, 1))

    return _from_objects(path, f"JSON objects{where}", scanned.digest, objects, "row")


def _parse(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}") from None


def _records(path: Path, content: Any) -> tuple[list[dict[str, Any]], str]:
    """The list of objects in a JSON document, and where it was found."""
    if _is_records(content):
        return content, ""
    if isinstance(content, dict):
        _refuse_squad(path, content)
        lists = {key: value for key, value in content.items() if isinstance(value, list)}
        is_columns = len(lists) == len(content) and not any(map(_is_records, lists.values()))
        if is_columns and len({len(value) for value in lists.values()}) == 1:
            rows = zip(*lists.values(), strict=True)
            return [dict(zip(lists, row, strict=True)) for row in rows], " (a list a column)"
        record_keys = [key for key, value in lists.items() if _is_records(value)]
        if len(record_keys) == 1:
            return content[record_keys[0]], f" under {record_keys[0]!r}"
    keys = (
        f"an object with the keys {', '.join(map(str, content))}"
        if isinstance(content, dict)
        else preview(json.dumps(content)[:100])
    )
    raise DataError(
        f"{path} is JSON, but not a list of objects: {keys[:200]}\n"
        'a table is [{"text": "…", "label": "…"}, …]'
    )


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _refuse_squad(path: Path, content: dict[str, Any]) -> None:
    data = content.get("data")
    if _is_records(data) and all("paragraphs" in article for article in data):  # type: ignore[union-attr]
        raise DataError(
            f"{path} is SQuAD JSON (data, paragraphs, qas): questions with answer spans,\n"
            "which are not a table; task=span learns from it"
        )


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """An object without nested objects: their keys are joined by dots.

    >>> flatten({"id": 1, "translation": {"de": "ja", "en": "yes"}})
    {'id': 1, 'translation.de': 'ja', 'translation.en': 'yes'}
    """
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat |= flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _from_objects(
    path: Path | str,
    format: str,
    digest: str,
    objects: Callable[[], Iterator[tuple[int, dict[str, Any]]]],
    counts: str,
) -> Table:
    """A table with a column for each key of the first objects."""
    keys: dict[str, None] = {}
    for _, item in islice(objects(), SAMPLE_ROWS):
        keys |= dict.fromkeys(item)
    columns = tuple(keys)
    return Table(
        name=stem(Path(path)),
        path=str(path),
        format=format,
        columns=columns,
        rows=lambda: ((n, tuple(map(item.get, columns))) for n, item in objects()),
        digest=digest,
        counts=counts,
    )


# Parquet, Arrow and the Hugging Face hub


def _from_arrow(path: Path) -> Table:
    format = suffix(path)[1:].capitalize()
    what = f"{path} is {format}"
    pyarrow = _optional("pyarrow", "tables", what)
    ipc, parquet = (_optional(f"pyarrow.{name}", "tables", what) for name in ("ipc", "parquet"))

    try:
        if format == "Parquet":
            schema = parquet.read_schema(path)
        else:
            with pyarrow.memory_map(str(path)) as source:
                schema = ipc.open_stream(source).schema
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not {format}: {reason}") from None
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        class_names = _class_names(metadata.get("info", {}).get("features", {}))
    except (ValueError, AttributeError, TypeError, RecursionError):
        class_names = {}  # metadata of another program is ignored

    def batches() -> Iterator[Any]:
        if format == "Parquet":
            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches(SAMPLE_ROWS)
        else:
            with pyarrow.memory_map(str(path)) as source:
                yield from ipc.open_stream(source)

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        rows = (row for batch in batches() for row in batch.to_pylist())
        try:
            for number, row in enumerate(rows, 1):
                yield number, flatten(_named(row, class_names))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{path} is damaged: {reason}") from None

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _from_objects(path, format, digest, objects, "row")


def _from_hub(path: str, part: str) -> Any:
    """The part of a data set that `datasets` loads; None if there is no such part."""
    datasets = _optional("datasets", "datasets", f"{path} is a data set of the hub")
    words = path.removeprefix(HUB).strip("/").split("/")
    try:
        loaded = datasets.load_dataset("/".join(words[:2]), *words[2:3])
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be loaded: {reason}") from None
    parts = {SPLITS.get(name, name): rows for name, rows in loaded.items()}
    if part == "train":
        chosen = parts.get("train") or next(iter(parts.values()))
    else:
        chosen = (parts.get("validation") or parts.get("test")) if "train" in parts else None
    if chosen is None:
        return None
    class_names = _class_names(chosen.features.to_dict())

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        return ((n, flatten(_named(row, class_names))) for n, row in enumerate(chosen, 1))

    digest = hashlib.sha256(str(chosen._fingerprint).encode()).hexdigest()
    return _from_objects(path, "Hugging Face data set", digest, objects, "row")


def _class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of the classes of columns that hold their numbers, singly or in lists."""
    names = {}
    for column, feature in features.items():
        if isinstance(feature, dict):
            inner = feature.get("feature", feature)
            if isinstance(inner, dict) and inner.get("_type") == "ClassLabel":
                names[column] = list(inner.get("names") or [])
    return names


def _named(row: dict[str, Any], class_names: Mapping[str, list[str]]) -> dict[str, Any]:
    """A row with the names of its classes; -1 is Hugging Face's sign for no label."""

    def name(column: str, value: Any) -> Any:
        if isinstance(value, list):
            return [name(column, item) for item in value]
        names = class_names[column]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None

    return {
        column: name(column, value) if class_names.get(column) else value
        for column, value in row.items()
    }


def _optional(module: str, extra: str, what: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError:
        raise DataError(
            f"{what}, which is read with {module}; install it: pip install 'regard[{extra}]'"
        ) from None
