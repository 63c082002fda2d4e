"""A pseudo-random permutation of any size that needs no memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.seeds import shuffle_key

_ROUNDS = 6


def permute(index: NDArray[Any], size: int, key: int) -> NDArray[np.int64]:
    r"""The images of `index` under a pseudo-random permutation of range(size), without storing it.

    A Feistel network permutes the integers of 2 b bits: with halves l and r of b bits,

        (l, r) -> (r, l XOR hash_i(r)),      i = 1 .. rounds

    each round is invertible for any hash. b is the smallest with 2^(2b) >= size; a value outside
    range(size) is permuted again until it is inside (cycle walking).
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    keys = [np.uint64(shuffle_key(key, number)) for number in range(_ROUNDS)]

    def encrypt(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> shift, x & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return left << shift | right

    x = encrypt(np.asarray(index).ravel().astype(np.uint64))
    while (outside := x >= size).any():
        x[outside] = encrypt(x[outside])
    return x.astype(np.int64).reshape(np.shape(index))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash in which every bit of the result depends on every bit of x."""
    for multiplier in (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)):
        x = x * multiplier
        x = x ^ (x >> np.uint64(32))
    return x
