"""Seeds for shuffling, batches, dropout and sampling, derived from one seed.

Each function in the table is a pure function of (seed, position in the run), so a resumed run
draws the same random numbers as an uninterrupted one. The four formulas differ for historical
reasons and must not change: every recorded result depends on them.

function           hash            random numbers that it seeds
shuffle_key        BLAKE2b         the order of the examples and the offset of the blocks
batch_generator    SHA-256         random operations on a micro-batch: masking, crops, sampling
step_seed          multiply, add   random operations of the model: dropout
row_key            BLAKE2b         sampling of one row of generated text
"""

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FEISTEL_ROUNDS = 6


def shuffle_key(*parts: int) -> int:
    """A 64-bit key of the seed and the integers that follow it, such as the epoch."""
    text = " ".join(f"{part:d}" for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def batch_generator(seed: int, index: int) -> torch.Generator:
    """The generator of micro-batch `index`.

    Its seed is hashed because torch's CPU generator uses only the lower 32 bits.
    """
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of torch's default generators in training step `step` on one rank."""
    mixed = seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB
    return mixed % (1 << 63)


def row_key(seed: int, row: int) -> int:
    """The signed 64-bit key of the random numbers with which one row of text is sampled."""
    digest = hashlib.blake2b(f"{seed} {row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def permute(index: NDArray[Any], size: int, key: int) -> NDArray[np.int64]:
    r"""The images of `index` under a pseudo-random permutation of range(size), without storing it.

    A Feistel network permutes the integers of 2 b bits: with halves l and r of b bits,

        (l, r) -> (r, l XOR hash_i(r)),      i = 1 .. rounds

    each round is invertible for any hash. b is the smallest integer with 2^(2b) >= size; a
    value outside range(size) is permuted again until it is inside (cycle walking).
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    keys = [np.uint64(shuffle_key(key, round_)) for round_ in range(FEISTEL_ROUNDS)]

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
