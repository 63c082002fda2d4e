"""Reading tables: a file, a folder of files, or a data set of the Hugging Face hub."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from regard.data.arrow_files import HUB, SPLITS, from_arrow, from_hub
from regard.data.delimited import from_delimited
from regard.data.json_files import from_json, from_json_lines
from regard.data.tables import SUFFIXES, Row, Table
from regard.data.text_files import suffix
from regard.errors import DataError

_BESIDE_TABLES = re.compile(r"(readme|licen[sc]e|dataset_?(info|dict)s?|state)(\..*)?$", re.I)


def is_table(path: Path) -> bool:
    """Whether a path is a table by its suffix, or a folder with nothing but tables."""
    if path.is_dir():
        return bool(_folder_files(path))
    return suffix(path) in SUFFIXES


def read_table(path: Path | str) -> Table:
    """The table at a path: a file, a folder of files, or hf://datasets/owner/name.

    Of a folder or a data set with a split called train, that split.
    """
    if isinstance(path, str) and path.startswith(HUB):
        return from_hub(path, "train")
    path = Path(path)
    if path.is_dir():
        splits = _files_by_split(path)
        files = splits.get("train") or [file for split in splits.values() for file in split]
        if not files:
            raise DataError(
                f"{path} holds no tables ({' '.join(SUFFIXES)}), or other files as well"
            )
        return _join(path, files)
    return _read_file(path)


def read_validation(path: Path | str) -> Table | None:
    """The validation split of a folder or data set: validation, or else test, or None."""
    if isinstance(path, str) and path.startswith(HUB):
        return from_hub(path, "validation")
    path = Path(path)
    if not path.is_dir():
        return None
    splits = _files_by_split(path)
    files = splits.get("validation") or splits.get("test") if "train" in splits else None
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


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """The files of a folder by the split that their names or folders name."""
    splits: dict[str, list[Path]] = {}
    for file in _folder_files(folder):
        words = re.split(r"[-_./\\]", str(file.relative_to(folder)).lower())
        named = [SPLITS[word] for word in words if word in SPLITS]
        splits.setdefault(named[-1] if named else "", []).append(file)
    return splits


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
        row_unit="row",
    )


def _chain(tables: Sequence[Table]) -> Iterator[Row]:
    for table in tables:
        yield from table.rows()


def _read_file(path: Path) -> Table:
    kind = suffix(path)
    if kind in (".parquet", ".arrow"):
        return from_arrow(path)
    if kind in (".jsonl", ".ndjson"):
        return from_json_lines(path)
    if kind == ".json":
        return from_json(path)
    return from_delimited(path)
