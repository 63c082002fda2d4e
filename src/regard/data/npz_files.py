"""NumPy archives (.npz), read without pickle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import DataError
from regard.files.untrusted import ARCHIVE_ERRORS


def array_names(path: Path) -> list[str]:
    """The names of the arrays in an archive; none if it is not one."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return list(archive.files)
    except ARCHIVE_ERRORS:
        return []


def read_arrays(
    path: Path, wanted: Callable[[str], bool], what_to_save: str
) -> dict[str, NDArray[Any]]:
    """The wanted arrays of an archive by name; `what_to_save` instead of arrays of objects."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files if wanted(name)}
    except ARCHIVE_ERRORS as error:
        if "pickle" in str(error).lower():
            raise DataError(
                f"{path} has object arrays, which need pickle; save {what_to_save}"
            ) from None
        raise DataError(f"{path} is damaged or not an .npz archive: {error}") from None
