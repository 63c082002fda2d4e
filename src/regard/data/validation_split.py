"""Which rows of a data set are for validation: by a hash of their content, or at random."""

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from regard.errors import ConfigError, DataError
from regard.seeds import permute

Rows = TypeVar("Rows", bound=Any)  # data with `name`, `description`, a length and `subset`


def split_rows(data: Rows, what: str, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Data for training, and a random `fraction` of its rows for validation."""
    check_fraction(fraction)
    count = round(len(data) * fraction)
    if not 0 < count < len(data):
        raise DataError(
            f"{data.name}: {len(data)} {what} are too few for a validation fraction of {fraction};"
            f"\ngive more {what}, or separate validation data"
        )
    order = permute(np.arange(len(data)), len(data), seed)
    validation, train = np.sort(order[:count]), np.sort(order[count:])
    return (
        data.subset(train, f"{data.description}; {len(train):,} for training"),
        data.subset(validation, f"{count:,} of the {len(data):,} {what}"),
    )


def check_fraction(fraction: float) -> None:
    """Raise ConfigError if `fraction` is not between 0 and 1."""
    if not 0 < fraction < 1:
        raise ConfigError(f"validation_fraction={fraction} must lie between 0 and 1, as 0.1 does")


def row_hash(seed: int, text: str) -> int:
    """A 64-bit hash; rows whose hash is below the threshold are for validation."""
    content = f"{seed} {text}".encode("utf-8", "surrogatepass")  # tokenizers refuse surrogates
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def hash_threshold(hashes: Sequence[int], fraction: float, all_equal_message: str) -> int:
    """The hash below which about `fraction` of the rows lie, at least one on each side.

    If all hashes are equal, that is impossible: a DataError with `all_equal_message`.
    """
    check_fraction(fraction)
    lowest, highest = min(hashes), max(hashes)
    if lowest == highest:
        raise DataError(all_equal_message)
    return min(max(int(fraction * 2**64), lowest + 1), highest)
