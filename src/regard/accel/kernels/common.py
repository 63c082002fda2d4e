"""What the kernels share."""

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

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # where assembly is not understood


@triton.jit
def wait(EARLY: tl.constexpr):
    """From here on, what the kernel before this one wrote may be read."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def vector(x, begin, width, WIDE: tl.constexpr):
    """Some of a vector, in float32."""
    columns = begin + tl.arange(0, WIDE)
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def numbers(x, rows, inside, GIVEN: tl.constexpr, other):
    """One number for each of some rows; the same for all where they are not given."""
    if GIVEN:
        return tl.load(x + rows, mask=inside, other=0.0).to(tl.float32)
    return tl.full(rows.shape, other, tl.float32)


@triton.jit
def shuffled(place):
    """Where a column lies, or which one lies there: bits 5 and 4 trade places with 2 and 1.

    In this order vectors meet the columns of a W of int8 as `sixty_fourths` gives them.
    """
    return (place & ~54) | ((place >> 3) & 6) | ((place & 6) << 3)


@triton.jit
def sixty_fourths(w):
    """int8 / 64 in bfloat16, of fours that lie in int32, with the columns `shuffled`.

    Tensor cores want 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16 columns from thread t of four. For
    four times 16 it gives them those 16 that lie side by side in W, which are loaded at once.
    """
    a, b, c, d = spread(w)
    SOME: tl.constexpr = w.shape[0]
    BLOCKS: tl.constexpr = w.shape[1] // 16
    four = tl.join(tl.join(a, b), tl.join(c, d))
    four = tl.reshape(four, (SOME, BLOCKS, 4, 2, 2, 2, 2))  # bits of columns: 5 4, 3, 2, 0, 1
    return tl.reshape(tl.permute(four, (0, 1, 4, 6, 3, 2, 5)), (SOME, BLOCKS * 64))


@triton.jit
def spread(w):
    """Four int8 / 64 in bfloat16, in fewer instructions than Triton's.

    u = v + 128 as the bits of a bfloat16 is u * 2^-133: below 2^-125 floats are evenly spaced.
    2^127 and -2 make v / 64 of it, exactly.
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
def settle(number):
    """Hopper's tensor cores are done with all they were given; registers they read are free.

    They read a factor in registers while the program goes on. In a loop, what Triton 3.6 makes
    may write the next into the same registers without waiting, so this must stand before it.
    Takes any number, since assembly must.
    """
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;",
        "=r,r",
        [number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def bent(x, BEND: tl.constexpr):
    """The activation of a feed-forward layer, by its name in `nn.ffn`."""
    if BEND == "silu":
        x = x * tl.sigmoid(x)
    elif BEND == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif BEND == "gelu":
        x = 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
    elif BEND == "relu":
        x = tl.maximum(x, 0.0)
    elif BEND == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit
def ranking(x):
    """A whole number for each float, in their order."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def number_of(key):
    """The float of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def uniform(key, count):
    """A number of `generate.sampler_context.RowGenerators`."""
    mixed = key + count * -7046029254386353131
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


class Bend(NamedTuple):
    """The activation after a product, by its name in `nn.ffn`, and whether it gates another."""

    name: str = ""
    gated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """Which outputs of the packed product are turned together, and by which of the waves.

    Outputs that are not turned are paired too, without a wave (-1). The last three say the same
    by the columns of one head: the other of the pair, the wave, and the sign of the sine.
    """

    first: Int[Tensor, " pairs"]
    second: Int[Tensor, " pairs"]
    wave: Int[Tensor, " pairs"]
    other: Int[Tensor, " head_dim"]
    waves: Int[Tensor, " head_dim"]
    signs: Int[Tensor, " head_dim"]

    @classmethod
    def of(
        cls,
        heads: int,
        kv_heads: int,
        head_dim: int,
        waves: int,
        interleaved: bool,
        device: torch.device,
    ) -> "Pairing":
        """The pairs of `heads` queries, then of as many keys and values as `kv_heads`."""
        turned, rest = torch.arange(waves), torch.arange(head_dim // 2 - waves)
        one = 2 * turned if interleaved else turned
        two = one + 1 if interleaved else turned + waves
        first = torch.cat([one, 2 * waves + rest])
        second = torch.cat([two, 2 * waves + rest + len(rest)])
        wave = torch.cat([turned, torch.full_like(rest, -1)])
        start = head_dim * torch.arange(heads + 2 * kv_heads).unsqueeze(1)
        waves_of = wave.repeat(heads + 2 * kv_heads, 1)
        waves_of[heads + kv_heads :] = -1
        column = torch.cat([first, second]).argsort()
        signs = torch.ones_like(wave)
        by_column = (torch.cat([second, first]), wave.repeat(2), torch.cat([-signs, signs]))
        parts = (start + first, start + second, waves_of, *(each[column] for each in by_column))
        return cls(*(part.flatten().to(device, torch.int32) for part in parts))


def shared_memory(x: Tensor) -> int:
    """Bytes that a program can share among its threads."""
    if not x.is_cuda:
        return 1 << 18
    known: dict[str, int] = driver.active.utils.get_device_properties(x.device.index)
    return known["max_shared_mem"]


def early() -> dict[str, bool]:
    """Whether a kernel begins before the one before it ends, which Hopper was the first to do."""
    return {"EARLY": _generation() >= 9, "launch_pdl": _generation() >= 9}


def hopper() -> bool:
    """Whether the card is one that `settle` is for."""
    return _generation() == 9


def _generation() -> int:
    """Of the current card; 0 where there is none."""
    return _generations()[torch.cuda.current_device()] if _generations() else 0


@cache
def _generations() -> list[int]:
    cards = range(torch.cuda.device_count())
    return [torch.cuda.get_device_capability(card)[0] for card in cards]
