"""Numbers in the order of time: a series, or several beside each other."""

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

from regard.data.pairs import lines, shown
from regard.data.text import stem
from regard.data.text_files import open_bytes, scan
from regard.errors import ConfigError, DataError, unknown


@dataclass(frozen=True, slots=True)
class Series:
    """Columns of numbers, each row later than the one before it."""

    kind: ClassVar[Literal["series"]] = "series"
    name: str
    description: str
    values: NDArray[np.float64] = field(repr=False)  # (time, columns)
    column_names: tuple[str, ...]  # of the columns

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str | None) -> NDArray[np.float64]:
        """The numbers of this column; without a name, of the last."""
        if name is not None and name not in self.column_names:
            raise ConfigError(f"{self.name}: {unknown('column', name, self.column_names)}")
        return self.values[:, -1 if name is None else self.column_names.index(name)]

    def split(self, fraction: float) -> tuple["Series", "Series"]:
        """What is learned from, and the last `fraction` share: the future of it."""
        if not 0 < fraction < 1:
            raise ConfigError(
                f"validation_fraction={fraction} must lie between 0 and 1, as 0.1 does"
            )
        many = min(max(1, round(fraction * len(self))), len(self) - 1)
        if many < 1:
            raise DataError(f"{self.name} has {len(self)} row; there is nothing to hold out")
        kept = len(self) - many
        told = f"{self.description}; the first {kept:,}"
        return (
            replace(self, values=self.values[:kept], description=told),
            replace(self, values=self.values[kept:], description=f"the last {many:,} rows"),
        )

    def note_overlap(self, learned: "Series") -> "Series":
        """This series to judge by."""
        return self

    def fingerprint(self) -> str:
        """A sha256 that is equal for equal content."""
        digest = hashlib.sha256("\n".join(self.column_names).encode())
        digest.update(np.ascontiguousarray(self.values).tobytes())
        return digest.hexdigest()


def from_columns(name: str, how: str, columns: Mapping[str, Sequence[float]]) -> Series:
    """Series that are already in memory."""
    values = np.array(list(columns.values()), dtype=np.float64).T
    many = f"{len(columns)} columns" if len(columns) > 1 else "1 column"
    return Series(name, f"series, {len(values):,} rows, {many}{how}", values, tuple(columns))


def is_series(path: Path) -> bool:
    """Whether there is a number in the second line of a table."""
    found = lines(path, scan(path))
    next(found)
    return any(_number(cell) is not None for cell in next(found, "").split(","))


def from_csv(path: Path) -> Series:
    """A .csv file whose first line names its columns; those that hold no numbers are left out."""
    scan(path)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader)
            rows = [(reader.line_num, row) for row in reader if row]
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num} is not CSV: {error}") from None
    if not rows or len(set(header)) < len(header):
        wrong = "two columns of the same name" if rows else "no row after its first line"
        raise DataError(f"{path} has {wrong}; the first line names the columns")
    kept = [place for place, cell in enumerate(rows[0][1]) if _number(cell) is not None]
    columns: dict[str, list[float]] = {header[place]: [] for place in kept if place < len(header)}
    if not columns:
        raise DataError(f"{path} has no column of numbers: {shown(', '.join(rows[0][1]))}")
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {line} has {len(row)} columns, the first line {len(header)}"
            )
        for place in kept:
            value = _number(row[place])
            if value is None:
                raise DataError(
                    f"{path}, line {line}: {header[place]} is {row[place]!r}, not a number;\n"
                    "fill in what is missing, or leave the column out"
                )
            columns[header[place]].append(value)
    left = [name for name in header if name not in columns]
    return from_columns(stem(path), f"; left out: {', '.join(left)}" if left else "", columns)


def _number(cell: str) -> float | None:
    with suppress(ValueError):
        value = float(cell)
        return value if math.isfinite(value) else None
    return None
