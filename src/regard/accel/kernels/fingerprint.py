"""The Triton kernel that hashes the contents of many tensors in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

CHUNK_BYTES = 1 << 17  # of a tensor, for each program
ALIGNMENT = 16  # bytes of a load
BLOCK = 2048  # words that a program reads at once


@triton.jit
def _hash_kernel(chunks, hashes, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr):
    """See `ContentHashes`; a row of `chunks` is an address and a number of bytes."""
    chunk = tl.program_id(0).to(tl.int64)
    address, size = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1).to(tl.int32)
    lanes, bytes_left = tl.arange(0, BLOCK), tl.arange(0, ALIGNMENT)
    words = size // ALIGNMENT * (ALIGNMENT // 4)
    x = address.to(tl.pointer_type(tl.int32))
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, words, BLOCK):
        n = start + lanes
        # a chunk with words is aligned, which Triton cannot know of an address it has loaded
        word = tl.load(tl.multiple_of(x + n, (ALIGNMENT,)), mask=n < words, other=0)
        sums = sums * -7723592293110705685 + (word.to(tl.int64) & 0xFFFFFFFF)
    last = address.to(tl.pointer_type(tl.uint8)) + words * 4 + bytes_left
    byte = tl.load(last, mask=bytes_left < size - words * 4, other=0).to(tl.int64)
    sums ^= (sums >> 32) & 0xFFFFFFFF
    result = tl.sum(sums * _multiplier(lanes)) + tl.sum(byte * _multiplier(BLOCK + bytes_left))
    tl.store(hashes + chunk, result)


@triton.jit
def _multiplier(n):
    """An odd number for each n."""
    mixed = (n.to(tl.int64) + 1) * -7046029254386353131
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * -4658895280553007687
    return (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) | 1


class ContentHashes:
    r"""Hashes of contiguous tensors on one device: of every chunk of 128 KiB, modulo 2^64,

        h = sum_l m_l f(sum_t r^(T - 1 - t) w_tl) + sum_i m_(L + i) b_i,    f(x) = x ^ (x >> 32)

    w are the chunk's 4-byte words in T rows of L, b the last bytes, which are fewer than 16; r and
    all m are odd 64-bit constants. A change of one word always changes h: f is one-to-one, and the
    difference of two words, which is smaller than 2^32, is not 0 after a product with odd numbers.
    Other changes keep h with a probability of at most 2^-32: a sum of multiples of 2^v times odd
    numbers is 0 with a probability of 2^(v - 63), v is at most 31 for words of 4 bytes, and f
    removes the further factors of 2 that the sum of a column can have.

    The addresses of the tensors are read in the constructor only: they must not change.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        chunks = [_chunks(tensor) for tensor in tensors]
        self.sizes = [len(rows) for rows in chunks]  # hashes of each tensor
        table = torch.tensor([row for rows in chunks for row in rows], dtype=torch.int64)
        self.chunks: Int[Tensor, "chunks 2"] = table.view(-1, 2).to(tensors[0].device)

    def __call__(self) -> Int[Tensor, " chunks"]:
        """The hashes of all chunks, in the order of the tensors."""
        hashes = self.chunks.new_empty(len(self.chunks))
        if self.chunks.is_cuda:
            with torch.cuda.device(self.chunks.device):
                self._launch(hashes)
        else:  # interpreted
            self._launch(hashes)
        return hashes

    def _launch(self, hashes: Int[Tensor, " chunks"]) -> None:
        _hash_kernel[(len(hashes),)](
            self.chunks, hashes, BLOCK=BLOCK, ALIGNMENT=ALIGNMENT, num_warps=4
        )


def _chunks(tensor: Tensor) -> list[tuple[int, int]]:
    """The address and bytes of each chunk: aligned ones, after the bytes before the first."""
    address, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    aligned = min(-(-address // ALIGNMENT) * ALIGNMENT, end)
    head = [(address, aligned - address)] if address < aligned else []
    starts = range(aligned, end, CHUNK_BYTES)
    return head + [(start, min(CHUNK_BYTES, end - start)) for start in starts]
