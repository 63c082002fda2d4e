"""cuBLASLt, the library behind torch's own products of matrices, asked for all that it knows.

It names several ways to compute a product, the most promising first. torch takes that one; here
all are timed when a product has been met some times, and the fastest is kept. It can also bend a
product by GELU before it is written, or multiply it by GELU's slope: a pass over memory less.
"""

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from threading import Lock
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

T = TypeVar("T")
_Value = ctypes.c_int32 | ctypes.c_int64 | ctypes.c_uint32 | ctypes.c_uint64 | ctypes.c_void_p

WAYS = 16  # of a product that are asked for
OFTEN = 3  # from this time on that a product is met, its ways are timed
TURNS, CALLS = 3, 10  # each way is timed so often, so many calls at a time
WORKSPACE = 32 << 20  # bytes, what torch gives it on large cards
ALIGNED = 16  # bytes, of every address
KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
COMPUTE_32F = 68  # cublasComputeType_t: sums in float32


class Epilogue(IntEnum):
    """cublasLtEpilogue_t: what happens to a product before it is written."""

    PLAIN = 1
    BIAS = 4
    GELU_AUX = 160  # bent by GELU's tanh form, and what was bent is written beside it
    GELU_AUX_BIAS = 164
    DGELU = 192  # times GELU's slope at what was bent


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("way", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The library that torch has brought, if it has."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}") if major else None
    except OSError:
        return None


def multiply(
    a: Float[Tensor, "rows inputs"],
    b: Float[Tensor, "inputs outputs"],
    out: Float[Tensor, "rows outputs"],
    *,
    add: bool = False,
    epilogue: Epilogue = Epilogue.PLAIN,
    bias: Float[Tensor, " outputs"] | None = None,
    aux: Float[Tensor, "rows outputs"] | None = None,
) -> bool:
    """Write a b to `out`, or add it to what stands there; after what `epilogue` says.

    False, and nothing is written, if the library cannot: it wants halves in line, on the GPU
    in use.
    """
    whole = [each for each in (a, b, aux) if each is not None]
    rows = [each.unsqueeze(0) for each in (bias,) if each is not None]
    if library() is None or not all(_fits(x, a.dtype) for x in (*whole, *rows)):
        return False
    assert out.is_contiguous()
    sizes, dtypes = (len(a), len(b), b.shape[1]), (a.dtype, out.dtype)
    product = _product(_layout(a), _layout(b), sizes, dtypes, epilogue, add, a.device.index)
    return product(a, b, out, bias, aux)


def _fits(x: Float[Tensor, "rows columns"], dtype: torch.dtype) -> bool:
    return (
        x.is_cuda
        and x.device.index == torch.cuda.current_device()
        and x.dtype == dtype
        and dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] > 1
        and 1 in x.stride()
        and max(x.stride()) % (ALIGNED // x.itemsize) == 0
        and x.data_ptr() % ALIGNED == 0
    )


def fastest(ways: Sequence[T], time: Callable[[T], float]) -> T:
    """The way with the shortest of its times; they take turns, so that all meet the same GPU."""
    best = [float("inf")] * len(ways)
    for _ in range(TURNS):
        best = [min(least, time(way)) for least, way in zip(best, ways, strict=True)]
    return ways[best.index(min(best))]


Layout = tuple[bool, int]  # of a matrix: whether column by column, and their distance


def _layout(x: Float[Tensor, "rows outputs"]) -> Layout:
    return (False, x.stride(0)) if x.stride(1) == 1 else (True, x.stride(1))


class _Product:
    """A product of one shape, and the way that was found for it.

    The library goes by columns, so it takes each matrix for its transpose. It is asked for
    (a b)' = b' a', whose factors it finds as they are where a and b lie row by row.
    """

    def __init__(
        self,
        left: Layout,
        right: Layout,
        sizes: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        epilogue: Epilogue,
        add: bool,
        device: int,
    ) -> None:
        (rows, inner, columns), (given, made) = sizes, dtypes
        self.add, self.handle = ctypes.c_float(add), _handle(device)
        self.met, self.lock = 0, Lock()
        self.ways: list[_Found] = []
        self.way: _Found | None = None
        self.description = _made("MatmulDescCreate", ctypes.c_int(COMPUTE_32F), ctypes.c_int(0))
        self._say(3, ctypes.c_int32(right[0]))  # CUBLASLT_MATMUL_DESC_TRANSA
        self._say(4, ctypes.c_int32(left[0]))  # …_TRANSB
        self._say(7, ctypes.c_int32(epilogue))  # …_EPILOGUE
        if epilogue not in (Epilogue.PLAIN, Epilogue.BIAS):
            self._say(12, ctypes.c_int64(columns))  # …_EPILOGUE_AUX_LD
        self.layouts = (
            _described(given, columns, inner, right),
            _described(given, inner, rows, left),
            _described(made, columns, rows, (False, columns)),
        )

    def __call__(
        self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, aux: Tensor | None
    ) -> bool:
        """Compute it; False if there is no way."""
        with self.lock:  # where bias and aux stand is said to all threads
            if bias is not None:
                self._say(8, ctypes.c_void_p(bias.data_ptr()))  # …_BIAS_POINTER
            if aux is not None:
                self._say(11, ctypes.c_void_p(aux.data_ptr()))  # …_EPILOGUE_AUX_POINTER
            way = self._choose(a, b, out) if self.way is None else self.way
            if way is not None:
                self._run(way, a, b, out)
        return way is not None

    def _choose(self, a: Tensor, b: Tensor, out: Tensor) -> _Found | None:
        """The first way that is named; for what is met again and again, the fastest."""
        self.met += 1
        if self.met == 1:
            self.ways = self._ways()
        if not self.ways:
            return None
        fixed = torch.are_deterministic_algorithms_enabled()
        if self.met < OFTEN or fixed or torch.cuda.is_current_stream_capturing():
            return self.ways[0]
        spare = torch.empty_like(out) if self.add.value else out
        self.way = fastest(self.ways, lambda way: self._time(way, a, b, spare))
        return self.way

    def _ways(self) -> list[_Found]:
        """Those that the library names, the most promising first."""
        wish = _made("MatmulPreferenceCreate")
        for what, number in {1: WORKSPACE, 5: ALIGNED, 6: ALIGNED, 7: ALIGNED, 8: ALIGNED}.items():
            size = ctypes.c_uint64(number) if what == 1 else ctypes.c_uint32(number)
            _call("MatmulPreferenceSetAttribute", wish, what, *_at(size))
        found, count = (_Found * WAYS)(), ctypes.c_int()
        _ask(
            "MatmulAlgoGetHeuristic",
            self.handle,
            self.description,
            *self.layouts,
            self.layouts[2],
            wish,
            WAYS,
            found,
            ctypes.byref(count),
        )
        _call("MatmulPreferenceDestroy", wish)
        return [way for way in found[: count.value] if way.state == 0]

    def _time(self, way: _Found, a: Tensor, b: Tensor, out: Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._run(way, a, b, out)
        start.record()
        for _ in range(CALLS):
            self._run(way, a, b, out)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _run(self, way: _Found, a: Tensor, b: Tensor, out: Tensor) -> None:
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=a.device)
        right, left, made = self.layouts
        written = ctypes.c_void_p(out.data_ptr())
        _call(
            "Matmul",
            self.handle,
            self.description,
            ctypes.byref(ctypes.c_float(1)),
            ctypes.c_void_p(b.data_ptr()),
            right,
            ctypes.c_void_p(a.data_ptr()),
            left,
            ctypes.byref(self.add),
            written,
            made,
            written,
            made,
            ctypes.byref(way.way),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def _say(self, what: int, value: _Value) -> None:
        _call("MatmulDescSetAttribute", self.description, what, *_at(value))


_product = cache(_Product)


@cache
def _handle(device: int) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return _made("Create")


def _described(dtype: torch.dtype, rows: int, columns: int, layout: Layout) -> ctypes.c_void_p:
    """A matrix of so many rows and columns, which lies there turned if its transpose does."""
    turned, distance = layout
    sizes = (columns, rows) if turned else (rows, columns)
    kind, sides = ctypes.c_int(KINDS[dtype]), map(ctypes.c_uint64, sizes)
    return _made("MatrixLayoutCreate", kind, *sides, ctypes.c_int64(distance))


def _made(what: str, *given: object) -> ctypes.c_void_p:
    """Something that the library makes."""
    thing = ctypes.c_void_p()
    _call(what, ctypes.byref(thing), *given)
    return thing


def _at(value: _Value) -> tuple[object, object]:
    """Where a number stands, and its size."""
    return ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))


def _call(what: str, *given: object) -> None:
    status = _ask(what, *given)
    if status:
        raise RuntimeError(f"cublasLt{what} failed with status {status}")


def _ask(what: str, *given: object) -> int:
    status: int = getattr(library(), f"cublasLt{what}")(*given)
    return status
