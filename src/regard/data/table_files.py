"""Reading tables: a file, a folder of files, or a dataset of the Hugging Face hub."""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from regard.data.arrow_files import HUB_PREFIX, SPLITS, from_arrow, from_hub
from regard.data.delimited import from_delimited
from regard.data.json_files import from_json, from_json_lines
from regard.data.tables import TABLE_SUFFIXES, Row, Table, replace_decimal_commas
from regard.data.text_files import suffix
from regard.errors import DataError

_IGNORED_FILES = re.compile(r"(readme|licen[sc]e|dataset_?(info|dict)s?|state)(\..*)?$", re.I)


def is_table(path: Path) -> bool:
    """Whether a path is a table by its suffix, or a folder of tables and no other files."""
    if path.is_dir():
        return bool(_folder_files(path))
    return suffix(path) in TABLE_SUFFIXES


def read_table(
    path: Path | str, training: Table | None = None, names: Collection[str] = ()
) -> Table:
    """The table at a path: a file, a folder of files, or hf://datasets/owner/name.

    If a folder or dataset has a split called train, only that split is read. `training` is the
    table of the training data, if this one is validation data, and `names` are columns that the
    user has named; see `from_delimited`.
    """
    if isinstance(path, str) and path.startswith(HUB_PREFIX):
        table = from_hub(path, "train")
        assert table is not None  # the first split, if none is called train
        return table
    path = Path(path)
    if path.is_dir():
        splits = _files_by_split(path)
        files = splits.get("train") or [file for split in splits.values() for file in split]
        if not files:
            raise DataError(
                f"{path} holds no tables ({' '.join(TABLE_SUFFIXES)}), or holds other files too"
            )
        return _concatenate(path, files, training, names)
    return _read_file(path, training, names)


def read_validation(
    path: Path | str, training: Table | None, names: Collection[str] = ()
) -> Table | None:
    """The validation split of a folder or dataset: validation, or else test, or None.

    `training` is the table of the training split, and `names` are columns of it that are read; see
    `from_delimited`.
    """
    if isinstance(path, str) and path.startswith(HUB_PREFIX):
        return from_hub(path, "validation")
    path = Path(path)
    if not path.is_dir():
        return None
    splits = _files_by_split(path)
    files = splits.get("validation") or splits.get("test") if "train" in splits else None
    return _concatenate(path, files, training, names) if files else None


def _folder_files(folder: Path) -> list[Path]:
    """The table files of a folder; an empty list if it also holds other files."""
    files = []
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file() or _IGNORED_FILES.match(path.name):
            continue
        if suffix(path) not in TABLE_SUFFIXES:
            return []
        files.append(path)
    return sorted(files)


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """The files of a folder by split, according to the names of files and folders."""
    splits: dict[str, list[Path]] = {}
    for file in _folder_files(folder):
        words = re.split(r"[-_./\\]", str(file.relative_to(folder)).lower())
        names = [SPLITS[word] for word in words if word in SPLITS]
        splits.setdefault(names[-1] if names else "", []).append(file)
    return splits


def _concatenate(
    folder: Path, files: Sequence[Path], training: Table | None, names: Collection[str] = ()
) -> Table:
    """One table from files of a folder, which must have the same columns."""
    tables = [_read_file(file, training, names) for file in files]
    first = tables[0]
    for table in tables:
        if table.columns != first.columns:
            raise DataError(
                f"{table.path} has the columns {', '.join(table.columns)},\n"
                f"and {first.path} has {', '.join(first.columns)}; give one of the two files"
            )
    if len(tables) == 1:
        return first
    # a file of integers alone does not show that the other files have decimal commas
    commas = dict.fromkeys(name for table in tables for name in table.decimal_commas)
    tables = [
        replace_decimal_commas(table, [name for name in commas if name not in table.decimal_commas])
        for table in tables
    ]
    first = tables[0]
    row_offsets: list[int] = []  # rows before the first row of each file, of those read so far

    def rows() -> Iterator[Row]:
        last = 0
        for index, table in enumerate(tables):
            start = last
            if index == len(row_offsets):
                row_offsets.append(start)
            for number, cells in table.rows():
                last = start + number
                yield last, cells

    def location(number: int) -> str:
        index = bisect_left(row_offsets, number) - 1
        return tables[index].location(number - row_offsets[index])

    digest = hashlib.sha256(" ".join(table.digest for table in tables).encode()).hexdigest()
    return Table(
        name=folder.resolve().name,
        path=str(folder),
        format=f"{len(tables)} files, {first.format}",
        columns=first.columns,
        rows=rows,
        digest=digest,
        header=first.header,
        header_location=first.header_location,
        decimal_commas=first.decimal_commas,
        locate=location,
    )


def _read_file(path: Path, training: Table | None, names: Collection[str]) -> Table:
    kind = suffix(path)
    if kind in (".parquet", ".arrow"):
        return from_arrow(path)
    if kind in (".jsonl", ".ndjson"):
        return from_json_lines(path)
    if kind == ".json":
        return from_json(path)
    return from_delimited(path, training, names)
