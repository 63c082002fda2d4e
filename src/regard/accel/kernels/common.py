"""Functions and values that the Triton kernels share."""

import os
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # without support for inline assembly
IS_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """With PDL, wait until the previous kernel has ended, then call `launch_next`.

    Results of the previous kernel can be read afterwards.
    """
    if PDL:
        gdc_wait()
        launch_next(PDL)


@triton.jit
def launch_next(PDL: tl.constexpr):
    """With PDL, let the next kernel start once every program has called this, or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def load_vector(x, begin, width, BLOCK: tl.constexpr):
    """A block of a vector, in float32."""
    columns = begin + tl.arange(0, BLOCK)
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def load_per_output(x, rows, inside, IS_GIVEN: tl.constexpr, default):
    """The values of these outputs, in float32; `default` for all of them unless IS_GIVEN."""
    if IS_GIVEN:
        return tl.load(x + rows, mask=inside, other=0.0).to(tl.float32)
    return tl.full(rows.shape, default, tl.float32)


@triton.jit
def permute_columns(column):
    """The position of a column; also its inverse, since it swaps bits 5, 4 with bits 2, 1.

    `dequantize_int8` gives the columns of W in this order, so vectors must have it too.
    """
    return (column & ~54) | ((column >> 3) & 6) | ((column & 6) << 3)


@triton.jit
def dequantize_int8(w):
    """int8 / 64 in bfloat16, from int32 words of four, with permuted columns.

    A tensor core takes 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16 columns from thread t of four.
    The permutation makes the 16 values that a thread needs for four such groups contiguous in W, so
    that one load fetches them.
    """
    a, b, c, d = unpack_int8(w)
    OUTPUTS: tl.constexpr = w.shape[0]
    BLOCKS: tl.constexpr = w.shape[1] // 16
    four = tl.join(tl.join(a, b), tl.join(c, d))
    four = tl.reshape(four, (OUTPUTS, BLOCKS, 4, 2, 2, 2, 2))  # bits of columns: 5 4, 3, 2, 0, 1
    return tl.reshape(tl.permute(four, (0, 1, 4, 6, 3, 2, 5)), (OUTPUTS, BLOCKS * 64))


@triton.jit
def unpack_int8(w):
    """Four int8 / 64 in bfloat16, in fewer instructions than Triton's conversion.

    u = v + 128 as the bits of a bfloat16 is u * 2^-133: below 2^-125 floats are evenly spaced.
    A fused multiply-add, times 2^127 plus -2, turns it into v / 64, exactly.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 four, low, high, most, two;
        mov.b32 most, 0x7F007F00;
        mov.b32 two, 0xC000C000;
        xor.b32 four, $4, 0x80808080;
        prmt.b32 low, four, 0, 0x4140;
        prmt.b32 high, four, 0, 0x4342;
        fma.rn.bf16x2 low, low, most, two;
        fma.rn.bf16x2 high, high, most, two;
        mov.b32 {$0, $1}, low;
        mov.b32 {$2, $3}, high;
        }
        """,
        "=h,=h,=h,=h,r",
        [w],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def dequantize_words(words, BITS: tl.constexpr):
    """Integers of BITS bits in float32, from int32 words of consecutive columns.

    int8 is stored as it is, int4 as w + 8.
    """
    if BITS == 4:
        high = words >> 16
        a = tl.join(_unpack(words, 0, BITS), _unpack(high, 0, BITS))  # columns 0 and 4 of eight
        b = tl.join(_unpack(words, 1, BITS), _unpack(high, 1, BITS))
        c = tl.join(_unpack(words, 2, BITS), _unpack(high, 2, BITS))
        d = tl.join(_unpack(words, 3, BITS), _unpack(high, 3, BITS))
        columns = tl.join(tl.join(a, c), tl.join(b, d))
    else:
        words ^= -0x7F7F7F80  # w + 128 in each byte
        high = words >> 16
        a = tl.join(_unpack(words, 0, BITS), _unpack(high, 0, BITS))  # columns 0 and 2 of four
        b = tl.join(_unpack(words, 1, BITS), _unpack(high, 1, BITS))
        columns = tl.join(a, b)
    return tl.reshape(columns, (words.shape[0], 32 // BITS * words.shape[1]))


@triton.jit
def _unpack(words, INDEX: tl.constexpr, BITS: tl.constexpr):
    """The integer INDEX of the lowest 16 bits of a word, minus 2^(BITS - 1), as a float.

    With an integer i in its lowest bits, the float 2^23 becomes 2^23 + i. This takes two
    instructions; a conversion of an integer takes four times as long.
    """
    UNIT: tl.constexpr = 2 ** (BITS * INDEX)
    mask = (2**BITS - 1) * UNIT
    if IS_INTERPRETED:
        bits = (words & mask) | 0x4B000000
    else:  # ptxas would compile the line above to two instructions
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x4B000000, 0xEA;",
            "=r,r,r",
            [words, mask],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return bits.to(tl.float32, bitcast=True) * (1 / UNIT) - (8388608 / UNIT + 2 ** (BITS - 1))


@triton.jit
def wait_for_wgmma(value):
    """Wait until Hopper's tensor cores have finished, so that the registers they read are free.

    They read an operand in registers while the program continues. In a loop, the code of Triton
    3.6 may overwrite these registers without waiting; this function must be called before. `value`
    may be any integer: inline assembly needs an operand.
    """
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;",
        "=r,r",
        [value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """An activation, by its name in `nn.block.ACTIVATIONS`."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit
def tanh(x):
    """tanh(x) = 2 sigmoid(2 x) - 1"""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def soft_cap(x, cap):
    """cap tanh(x / cap)"""
    return cap * tanh(x / cap)


@triton.jit
def to_sort_key(x):
    """An integer for each float, in the same order."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_sort_key(key):
    """The float of a sort key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def uniform(key, count):
    """A random number in [0, 1), as `generate.sampling_state.RowGenerators` generates it."""
    mixed = key + count * -7046029254386353131
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


class FFNActivation(NamedTuple):
    """An activation by its name in `nn.block.ACTIVATIONS`, and whether it is the gate of an FFN."""

    name: str = ""
    gated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RotaryPairs:
    """The pairs of outputs of the packed projection that RoPE rotates, and their frequencies.

    `frequency_index` is a column of the tables of cos and sin. Outputs that are not rotated are
    paired too, with index -1. The last three fields describe the same for each column of one head:
    partner, index, and sign of the sine.
    """

    outputs: Int[Tensor, " 2*pairs"]  # the first and the second output of each pair
    frequency_index: Int[Tensor, " pairs"]
    partner: Int[Tensor, " head_dim"]
    column_frequency_index: Int[Tensor, " head_dim"]
    signs: Int[Tensor, " head_dim"]

    @classmethod
    def of(
        cls,
        heads: int,
        kv_heads: int,
        head_dim: int,
        num_frequencies: int,
        interleaved: bool,
        device: torch.device,
    ) -> "RotaryPairs":
        """The pairs of `heads` queries, then of `kv_heads` keys and values."""
        rotated = torch.arange(num_frequencies)
        unrotated = torch.arange(head_dim // 2 - num_frequencies)
        first_column = 2 * rotated if interleaved else rotated
        second_column = first_column + 1 if interleaved else rotated + num_frequencies
        first = torch.cat([first_column, 2 * num_frequencies + unrotated])
        second = torch.cat([second_column, 2 * num_frequencies + unrotated + len(unrotated)])
        frequency_index = torch.cat([rotated, torch.full_like(unrotated, -1)])
        start = head_dim * torch.arange(heads + 2 * kv_heads).unsqueeze(1)
        all_indices = frequency_index.repeat(heads + 2 * kv_heads, 1)
        all_indices[heads + kv_heads :] = -1
        column = torch.cat([first, second]).argsort()
        signs = torch.ones_like(frequency_index)
        by_column = (
            torch.cat([second, first]),
            frequency_index.repeat(2),
            torch.cat([-signs, signs]),
        )
        parts = (
            torch.stack((start + first, start + second), -1),
            all_indices,
            *(field[column] for field in by_column),
        )
        return cls(*(part.flatten().to(device, torch.int32) for part in parts))


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory per program."""
    if not x.is_cuda:
        return 1 << 18
    properties: dict[str, int] = driver.active.utils.get_device_properties(x.device.index)
    return properties["max_shared_mem"]


def pdl_options() -> dict[str, bool]:
    """Launch options for programmatic dependent launch, which Hopper and later GPUs have."""
    return {"PDL": _capability_major() >= 9, "launch_pdl": _capability_major() >= 9}


def is_hopper() -> bool:
    """Whether the current GPU is one that needs `wait_for_wgmma`."""
    return _capability_major() == 9


def _capability_major() -> int:
    """The major compute capability of the current GPU; 0 without one."""
    return _capability_majors()[torch.cuda.current_device()] if _capability_majors() else 0


@cache
def _capability_majors() -> list[int]:
    devices = range(torch.cuda.device_count())
    return [torch.cuda.get_device_capability(device)[0] for device in devices]
