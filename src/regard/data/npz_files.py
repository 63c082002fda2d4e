"""NumPy archives (.npz), read without pickle."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import DataError
from regard.files.untrusted import ARCHIVE_ERRORS
from regard.units import format_bytes


def array_names(path: Path) -> list[str]:
    """The names of the arrays in an archive; an empty list if the file is not an archive."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return list(archive.files)
    except ARCHIVE_ERRORS:
        return []


def read_arrays(
    path: Path, select: Callable[[str], bool], alternative: str
) -> dict[str, NDArray[Any]]:
    """The arrays of an archive whose names `select` accepts, by name.

    The error for object arrays tells the user to save the `alternative`.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            names = [name for name in archive.files if select(name)]
            _check_size(path, archive, names)
            arrays = {name: archive[name] for name in names}
    except DataError:
        raise
    except ARCHIVE_ERRORS as error:
        if "pickle" in str(error).lower():
            raise DataError(
                f"{path} has object arrays, which need pickle; save {alternative}"
            ) from None
        raise DataError(f"{path} is corrupted or not an .npz archive: {error}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # the bytes of a file that is not in NumPy's format
            raise DataError(f"{path}: {name!r} is not a NumPy array")
    return arrays


def _check_size(path: Path, archive: Any, names: list[str]) -> None:
    """Raise if arrays are larger than the memory: zeros compress to a thousandth of their size.

    Unpacking stops at the size that the archive states, so a false size cannot fill the memory.
    """
    files = {info.filename.removesuffix(".npy"): info.file_size for info in archive.zip.infolist()}
    size, memory = sum(files.get(name, 0) for name in names), _memory()
    if size > memory:
        raise DataError(
            f"{path} has {format_bytes(size)} of arrays, and this machine has "
            f"{format_bytes(memory)} of memory; save fewer rows"
        )


def _memory() -> int:
    """The memory of this machine in bytes; 16 GB on Windows, where it cannot be queried."""
    if not hasattr(os, "sysconf"):
        return 16_000_000_000
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
