"""Time series: one or several columns of numbers."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from regard.data.tables import Table
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


def from_table(table: Table) -> Series:
    """The numeric columns of a table; the others are ignored."""
    rows = [
        (number, row) for number, row in table.rows() if any(cell not in ("", None) for cell in row)
    ]
    if not rows:
        raise DataError(f"{table.path} has no row after its first line")
    numeric = [index for index, cell in enumerate(rows[0][1]) if _number(cell) is not None]
    columns: dict[str, list[float]] = {table.columns[index]: [] for index in numeric}
    if not columns:
        raise DataError(f"{table.path} has no column of numbers\n{table.listing()}")
    for number, row in rows:
        for index in numeric:
            value = _number(row[index])
            if value is None:
                raise DataError(
                    f"{table.position(number)}: {table.columns[index]} is {row[index]!r}, not a "
                    "number;\nfill in missing values, or remove the column"
                )
            columns[table.columns[index]].append(value)
    ignored = [name for name in table.columns if name not in columns]
    note = f"; left out: {', '.join(ignored)}" if ignored else ""
    return from_columns(table.name, note, columns)


def _number(cell: Any) -> float | None:
    with suppress(ValueError, TypeError):
        value = float(cell)
        return value if math.isfinite(value) and not isinstance(cell, bool) else None
    return None
