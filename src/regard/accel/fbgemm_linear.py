"""Linear layers with int8 and float16 weights on a CPU, by FBGEMM, which torch contains for x86."""

import threading
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor

BLOCK = 512  # inputs of a block in FBGEMM's layout
RANGE = torch.tensor([[-128.0, 127.0]], device="cpu")
STEPS = 127  # the largest quotient, and the number by which x is divided
TINY = 1e-30  # STEPS**2 divided by a smaller number may be infinite in float32
ZERO = RANGE.new_zeros(())  # torch would convert a number at each call


@dataclass(frozen=True, slots=True, eq=False)
class Int8Linear:
    r"""y_i = s_i sum_j w_ij x_j + b_i: the weights w are in int8, and each x is two int8 numbers:

        x_j ≈ c (q_j + r_j / 127),      c = max_j |x_j| / 127

    The quotients q and the remainders r, which have the sign of x, are two rows of one matmul. Each
    row of x has its own c, so that no row depends on the others. FBGEMM chooses the scale of its
    input by the range; two more inputs, -128 and 127, with weights of zero, make it 1.

    FBGEMM reads blocks of 512 inputs. Where a weight ends with half a block, as with 768 inputs,
    this is slow. With one thread, one row of x is then multiplied by another copy of the weight,
    which has whole blocks: a row of it contains the weights of two outputs. Two threads would be
    slower with it (docs/results.md).

        [y_1   … y_n ]     [x 0]     [w_1 w_n+1]T
        [y_n+1 … y_2n]  =  [0 x]  ·  [ …    …  ]
                                     [w_n w_2n ]
    """

    scale: Float[Tensor, " outputs"]
    weight: tuple[Any, ...]  # the arguments of FBGEMM's matmul after x
    row_weight: tuple[Any, ...]  # the same for one row of x
    outputs_per_row: int = 1  # of `row_weight`

    @classmethod
    def of(cls, weight: Int8[Tensor, "outputs inputs"], scale: Tensor) -> "Int8Linear":
        """Copy a weight to FBGEMM's layout, for the current number of threads."""
        packed = _pack(weight)
        if torch.get_num_threads() > 1 or weight.shape[1] % BLOCK != BLOCK // 2:
            return cls(scale, packed, packed)
        halves = F.pad(weight, (0, 0, 0, len(weight) % 2)).chunk(2)
        return cls(scale, packed, _pack(torch.cat(halves, 1)), 2)

    def __call__(
        self,
        x: Float[Tensor, "rows inputs"],
        bias: Float[Tensor, "*rows outputs"] | None,
        out: Float[Tensor, "rows outputs"] | None = None,
    ) -> Float[Tensor, "rows outputs"]:
        """W x + b, written to `out` if given."""
        bias = ZERO if bias is None else bias
        if x.shape[0] == 1 and not x.requires_grad:  # autograd does not allow buffers
            low, high = torch.aminmax(x)  # both are NaN if any x is
            largest = max(high.item(), -low.item())
            if TINY < largest < torch.inf:
                y = self._multiply_row(x, largest)
                return torch.addcmul(bias, y, self.scale, value=largest / STEPS, out=out)
        unit = x.abs().amax(1, keepdim=True) / STEPS**2  # of the remainders
        x = (x / unit).nan_to_num_(0.0, 0.0, 0.0)
        quotients = (x / STEPS).trunc_()
        remainders = torch.add(x, quotients, alpha=-STEPS)
        limits = RANGE.expand(len(x), 2)
        parts = torch.cat((quotients, limits, remainders, limits), 1).view(2 * len(x), -1)
        y = _matmul(parts, self.weight)
        y = torch.add(y[1::2], y[::2], alpha=STEPS).mul_(unit)
        return torch.addcmul(bias, y, self.scale, out=out)

    def _multiply_row(
        self, x: Float[Tensor, "1 inputs"], largest: float
    ) -> Float[Tensor, "1 outputs"]:
        """Sum_j w_ij x_j / c in as few calls as possible; `largest` is the largest |x_j|."""
        buffers = _buffers.of(self.outputs_per_row, x.shape[1])
        x = torch.add(ZERO, x, alpha=STEPS**2 / largest)
        torch.div(x, buffers.divisors, rounding_mode="trunc", out=buffers.quotients)
        torch.add(x, buffers.quotients, alpha=-STEPS, out=buffers.remainders)
        y = torch.mm(buffers.sums, _matmul(buffers.parts, self.row_weight)).view(1, -1)
        outputs = self.scale.shape[0]
        return y if y.shape[1] == outputs else y[:, :outputs]


@dataclass(frozen=True, slots=True, eq=False)
class RowBuffers:
    """The input of FBGEMM's matmul for one row of x, with views of it and constants."""

    parts: Float[Tensor, "parts packed_inputs"]
    quotients: Float[Tensor, "outputs_per_row inputs"]
    remainders: Float[Tensor, "outputs_per_row inputs"]
    divisors: Float[Tensor, "outputs_per_row 1"]  # STEPS
    sums: Float[Tensor, "outputs_per_row parts"]  # adds the products of quotients and remainders

    @classmethod
    def of(cls, count: int, inputs: int) -> "RowBuffers":
        """Buffers for `count` outputs per row of the weight and this number of inputs."""
        width = count * inputs + 2
        parts = RANGE.new_zeros(2 * count, width)
        parts[:, -2:] = RANGE
        quotients, remainders = (
            half.as_strided((count, inputs), (width + inputs, 1)) for half in parts.chunk(2)
        )
        identity = RANGE.new_ones(count).diag()
        sums = torch.cat((identity, identity / STEPS), 1)
        return cls(parts, quotients, remainders, RANGE.new_full((count, 1), STEPS), sums)


class ThreadBuffers(threading.local):
    """The buffers of a thread, which all layers of the same shape of input share."""

    def __init__(self) -> None:
        self.by_shape: dict[tuple[int, int], RowBuffers] = {}

    def of(self, count: int, inputs: int) -> RowBuffers:
        """See `RowBuffers.of`."""
        buffers = self.by_shape.get((count, inputs))
        if buffers is None:
            with torch.inference_mode(False):  # for use in any mode
                buffers = self.by_shape[count, inputs] = RowBuffers.of(count, inputs)
        return buffers


_buffers = ThreadBuffers()


@dataclass(frozen=True, slots=True, eq=False)
class Float16Linear:
    """W x + b, with W in float16, and x, b and the sums in float32.

    torch has two functions for it. A plain one uses one thread; that of its package for
    quantization uses all threads, and has 8 us more overhead.
    """

    weight: Any  # in FBGEMM's layout
    bias: Float[Tensor, " outputs"] | None
    is_plain: bool  # `weight` is one of the plain function

    @classmethod
    def of(cls, weight: Float[Tensor, "outputs inputs"], bias: Tensor | None) -> "Float16Linear":
        """Copy a weight to FBGEMM's layout, for the current number of threads."""
        if torch.get_num_threads() == 1 and has_plain_float16():
            return cls(torch.fbgemm_pack_gemm_matrix_fp16(weight.float()), bias, True)
        return cls(torch.ops.quantized.linear_prepack_fp16(weight.float(), bias), bias, False)

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """W x + b."""
        if self.is_plain:
            return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.weight, self.bias)
        return cast(Tensor, torch.ops.quantized.linear_dynamic_fp16(x, self.weight))


@cache
def has_fbgemm() -> bool:
    """Whether torch has FBGEMM's matmuls."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@cache
def has_exact_int8() -> bool:
    """Whether FBGEMM's int8 matmul is exact; without VNNI instructions, 16-bit sums saturate."""
    if not has_fbgemm() or not hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation"):
        return False
    weight = torch.full((16, 64), 127, dtype=torch.int8)
    with warnings.catch_warnings():  # torch 2.13 warns at the first call that it will remove these
        warnings.simplefilter("ignore")
        y = Int8Linear.of(weight, torch.ones(16))(torch.ones(1, 64), None)
    return bool(torch.allclose(y, torch.full_like(y, 64 * 127)))


@cache
def has_plain_float16() -> bool:
    """Whether torch has the plain function of `Float16Linear`, which it will remove."""
    if not has_fbgemm() or not hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation"):
        return False
    with warnings.catch_warnings():  # as in `has_exact_int8`
        warnings.simplefilter("ignore")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.zeros(1, 1))
        torch.fbgemm_linear_fp16_weight_fp32_activation(torch.zeros(1, 1), packed, None)
    return True


def _matmul(x: Tensor, weight: tuple[Any, ...]) -> Tensor:
    return torch.fbgemm_linear_int8_weight_fp32_activation(x, *weight)


def _pack(weight: Int8[Tensor, "outputs inputs"]) -> tuple[Any, ...]:
    """The arguments of FBGEMM's matmul for an int8 weight, with two more inputs for `RANGE`.

    Its scale is 1, its zero point 0 and its bias 0. Of the first argument only the shape is read.
    """
    weight = F.pad(weight, (0, 2))
    sums, packed = weight.sum(1, dtype=torch.int32), torch.fbgemm_pack_quantized_matrix(weight)
    return weight.new_zeros(()).expand(weight.shape), packed, sums, 1.0, 0, _zeros(len(weight))


@cache
def _zeros(size: int) -> Tensor:
    """Zeros that all layers share, so that they stay in the CPU's cache."""
    return RANGE.new_zeros(size)
