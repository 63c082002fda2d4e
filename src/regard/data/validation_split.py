"""Choose the validation rows of a dataset: by a hash of their content, or at random."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from regard.errors import ConfigError, DataError
from regard.seeds import permute
from regard.units import count_are

Rows = TypeVar("Rows", bound=Any)  # data with `name`, `description`, a length and `subset`


def split_rows(data: Rows, unit: str, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Data for training, and a random `fraction` of its rows for validation."""
    check_fraction(fraction)
    count = round(len(data) * fraction)
    if not 0 < count < len(data):
        raise DataError(
            f"{data.name}: {count_are(len(data), unit.removesuffix('s'))} too few for a validation "
            f"fraction of {fraction};"
            f"\ngive more {unit}, or separate validation data"
        )
    order = permute(np.arange(len(data)), len(data), seed)
    validation, train = np.sort(order[:count]), np.sort(order[count:])
    return (
        data.subset(train, f"{data.description}; {len(train):,} for training"),
        data.subset(validation, f"{count:,} of the {len(data):,} {unit}"),
    )


def split_by_hash(
    data: Rows, unit: str, keys: Sequence[str], fraction: float, seed: int, all_equal_message: str
) -> tuple[Rows, Rows]:
    """Data for training, and about a `fraction` of its `rows` for validation.

    A row is for validation if hash(seed, key) < fraction · 2^64, so rows with equal keys are in the
    same split; each split gets at least one row.
    """
    hashes = [row_hash(seed, key) for key in keys]
    threshold = hash_threshold(hashes, fraction, all_equal_message)
    hashed_rows = list(zip(data.rows, hashes, strict=True))
    train = [row for row, value in hashed_rows if value >= threshold]
    validation = [row for row, value in hashed_rows if value < threshold]
    counts = f"{len(validation):,} of the {len(data):,} {unit}"
    return (
        replace(data, rows=train, description=f"{data.description}; {len(train):,} for training"),
        replace(data, rows=validation, description=counts),
    )


def describe_overlap(validation: Rows, count: int, total: int, unit: str) -> Rows:
    """Validation data whose description says that `count` of `total` rows are training data too."""
    if not count:
        return validation
    note = f"overlap: {count:,} of the {total:,} {unit} are in the training data"
    return replace(validation, description=f"{validation.description}; {note}")


def check_fraction(fraction: float) -> None:
    """Raise ConfigError if `fraction` is not between 0 and 1."""
    if not 0 < fraction < 1:
        raise ConfigError(
            f"data.validation_fraction={fraction} must lie between 0 and 1, such as 0.1"
        )


def row_hash(seed: int, text: str) -> int:
    """A 64-bit hash of a row; rows whose hash is below `hash_threshold` are for validation."""
    content = f"{seed} {text}".encode("utf-8", "surrogatepass")  # tokenizers refuse surrogates
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def hash_threshold(hashes: Sequence[int], fraction: float, all_equal_message: str) -> int:
    """The hash below which about `fraction` of the rows lie, so that each split gets a row.

    Raises `DataError` with `all_equal_message` if all hashes are equal.
    """
    check_fraction(fraction)
    lowest, highest = min(hashes), max(hashes)
    if lowest == highest:
        raise DataError(all_equal_message)
    return min(max(int(fraction * 2**64), lowest + 1), highest)
