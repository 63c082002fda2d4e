"""Time series: one or several columns of numbers."""

import csv
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from regard.data.text import stem
from regard.data.text_files import open_bytes, preview, read_lines, scan
from regard.data.validation_split import check_fraction
from regard.errors import ConfigError, DataError, unknown


@dataclass(frozen=True, slots=True)
class Series:
    """Columns of numbers; rows are in the order of time."""

    kind: ClassVar[Literal["series"]] = "series"
    name: str
    description: str
    values: NDArray[np.float64] = field(repr=False)  # (time, columns)
    column_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str | None) -> NDArray[np.float64]:
        """The values of a column, by default of the last."""
        if name is not None and name not in self.column_names:
            raise ConfigError(f"{self.name}: {unknown('column', name, self.column_names)}")
        return self.values[:, -1 if name is None else self.column_names.index(name)]

    def split(self, fraction: float, seed: int = 0) -> tuple["Series", "Series"]:
        """Training rows, and the last `fraction` of the rows for validation; `seed` is not used."""
        check_fraction(fraction)
        count = min(max(1, round(fraction * len(self))), len(self) - 1)
        if count < 1:
            raise DataError(f"{self.name} has {len(self)} row; none is left for validation")
        train = len(self) - count
        description = f"{self.description}; the first {train:,}"
        return (
            replace(self, values=self.values[:train], description=description),
            replace(self, values=self.values[train:], description=f"the last {count:,} rows"),
        )

    def note_overlap(self, train: "Series") -> "Series":
        """This series; overlap is not checked."""
        return self

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        digest = hashlib.sha256("\n".join(self.column_names).encode())
        digest.update(np.ascontiguousarray(self.values).tobytes())
        return digest.hexdigest()


def from_columns(name: str, note: str, columns: Mapping[str, Sequence[float]]) -> Series:
    """Series in memory; `note` is added to the description."""
    values = np.array(list(columns.values()), dtype=np.float64).T
    count = f"{len(columns)} columns" if len(columns) > 1 else "1 column"
    return Series(name, f"series, {len(values):,} rows, {count}{note}", values, tuple(columns))


def is_series(path: Path) -> bool:
    """Whether the second line of a table has a number."""
    lines = read_lines(path, scan(path))
    next(lines)
    return any(_number(cell) is not None for cell in next(lines, "").split(","))


def from_csv(path: Path) -> Series:
    """A .csv file whose first line names its columns; those without numbers are left out."""
    scan(path)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader)
            rows = [(reader.line_num, row) for row in reader if row]
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num} is not CSV: {error}") from None
    if not rows or len(set(header)) < len(header):
        problem = "two columns of the same name" if rows else "no row after its first line"
        raise DataError(f"{path} has {problem}; the first line names the columns")
    numeric = [index for index, cell in enumerate(rows[0][1]) if _number(cell) is not None]
    columns: dict[str, list[float]] = {header[i]: [] for i in numeric if i < len(header)}
    if not columns:
        raise DataError(f"{path} has no column of numbers: {preview(', '.join(rows[0][1]))}")
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {line} has {len(row)} columns, the first line {len(header)}"
            )
        for index in numeric:
            value = _number(row[index])
            if value is None:
                raise DataError(
                    f"{path}, line {line}: {header[index]} is {row[index]!r}, not a number;\n"
                    "fill in missing values, or remove the column"
                )
            columns[header[index]].append(value)
    ignored = [name for name in header if name not in columns]
    note = f"; left out: {', '.join(ignored)}" if ignored else ""
    return from_columns(stem(path), note, columns)


def _number(cell: str) -> float | None:
    with suppress(ValueError):
        value = float(cell)
        return value if math.isfinite(value) else None
    return None
