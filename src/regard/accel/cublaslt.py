"""Autotuned matmuls with cuBLASLt, called through ctypes.

The library's heuristic returns several algorithms for a matmul, sorted by estimated time. torch
uses the first one. Here all are timed at the third call of the same matmul, and the fastest is
used from then on; a resumed run uses the algorithms of its checkpoint (`prefer_algorithms`).
Epilogues apply a bias and ReLU or GELU, or GELU's gradient, before the result is written, which
saves one pass over memory.
"""

import ctypes
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from threading import Lock
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")
_Value = (
    ctypes.c_int8
    | ctypes.c_int32
    | ctypes.c_int64
    | ctypes.c_uint32
    | ctypes.c_uint64
    | ctypes.c_void_p
)

MAX_ALGORITHMS = 16  # that the heuristic may return for a matmul and a limit of its workspace
AUTOTUNE_AT_CALL = 3  # the call of a matmul at which its algorithms are timed
TIMING_ROUNDS, TIMING_CALLS = 3, 10  # timings of each algorithm, and calls per timing
# Bytes of workspace that algorithms may need: as torch has on large GPUs, or none. Many with a
# workspace count tiles in it, so a memset comes before the matmul.
WORKSPACE_LIMITS = (32 << 20, 0)
ALIGNMENT = 16  # bytes, of every address
DATA_TYPES = {  # cudaDataType_t
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
COMPUTE_32F = 68  # cublasComputeType_t: sums in float32


class Epilogue(IntEnum):
    """cublasLtEpilogue_t: applied to the result of a matmul before it is written."""

    PLAIN = 1
    RELU = 2
    BIAS = 4
    RELU_BIAS = 6
    GELU_AUX = 160  # GELU (tanh form); its input is written to `aux`
    GELU_AUX_BIAS = 164
    DGELU = 192  # times GELU's derivative at `aux`


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )

    @property
    def name(self) -> str:
        """An identifier to store; it is valid for one version of the library."""
        return bytes(self.algo).hex()


_choices: dict[str, str] = {}  # the algorithm of each matmul that was autotuned
_preferred: dict[str, str] = {}


def chosen_algorithms() -> dict[str, str]:
    """The algorithms that this process has chosen, by matmul."""
    return dict(_choices)


def prefer_algorithms(algorithms: Mapping[str, str]) -> None:
    """Use these algorithms, where the library offers them, instead of autotuning."""
    _preferred.update(algorithms)


@cache
def library() -> ctypes.CDLL | None:
    """The cuBLASLt library of torch's CUDA version; None if there is none."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}") if major else None
    except OSError:
        return None


def matmul(
    a: Float[Tensor, "rows inputs"],
    b: Float[Tensor, "inputs outputs"],
    out: Float[Tensor, "rows outputs"],
    *,
    add: bool = False,
    epilogue: Epilogue = Epilogue.PLAIN,
    bias: Float[Tensor, " outputs"] | None = None,
    aux: Float[Tensor, "rows outputs"] | None = None,
) -> bool:
    """Write epilogue(a b) to `out`; with `add`, add it to `out`.

    Returns False, and writes nothing, where the library is missing or does not support the
    operands: they must be aligned, in half precision and on the current GPU.
    """
    matrices = [x for x in (a, b, aux) if x is not None]
    if bias is not None:
        matrices.append(bias.unsqueeze(0))
    is_half = a.dtype in (torch.bfloat16, torch.float16)
    if library() is None or not is_half or not all(_is_supported(x, a.dtype) for x in matrices):
        return False
    return _find_matmul(a, b, out, epilogue, add)(a, b, out, bias=bias, aux=aux)


def float8_matmul(
    a: Float[Tensor, "rows inputs"],
    b: Float[Tensor, "inputs outputs"],
    out: Float[Tensor, "rows outputs"],
    scales: tuple[Float[Tensor, ""], Float[Tensor, ""]],
    *,
    add: bool = False,
    fast_accum: bool = False,
) -> bool:
    """As `matmul`, for row-major a and column-major b in FP8, with the scale of each."""
    assert a.stride(1) == b.stride(0) == 1
    if library() is None or not (_is_supported(a, a.dtype) and _is_supported(b, b.dtype)):
        return False
    return _find_matmul(a, b, out, Epilogue.PLAIN, add, fast_accum)(a, b, out, scales=scales)


def _find_matmul(
    a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue, add: bool, fast_accum: bool = False
) -> "_Matmul":
    assert out.is_contiguous()
    sizes, dtypes = (len(a), len(b), b.shape[1]), (a.dtype, b.dtype, out.dtype)
    layouts = _layout(a), _layout(b)
    return _cached_matmul(*layouts, sizes, dtypes, epilogue, add, a.device.index, fast_accum)


def _is_supported(x: Float[Tensor, "rows columns"], dtype: torch.dtype) -> bool:
    return (
        x.is_cuda
        and x.device.index == torch.cuda.current_device()
        and x.dtype == dtype
        and x.shape[1] > 1
        and 1 in x.stride()
        and max(x.stride()) % (ALIGNMENT // x.itemsize) == 0
        and x.data_ptr() % ALIGNMENT == 0
    )


def fastest(candidates: Sequence[T], time: Callable[[T], float]) -> T:
    """The candidate with the shortest time, of several rounds over all of them.

    Candidates are timed in turn, so that a change of the GPU's clock affects all alike.
    """
    best = [float("inf")] * len(candidates)
    for _ in range(TIMING_ROUNDS):
        best = [min(old, time(item)) for old, item in zip(best, candidates, strict=True)]
    return candidates[best.index(min(best))]


MatrixLayout = tuple[bool, int]  # whether a matrix is column-major, and its leading dimension


def _layout(x: Float[Tensor, "rows outputs"]) -> MatrixLayout:
    return (False, x.stride(0)) if x.stride(1) == 1 else (True, x.stride(1))


class _Matmul:
    """A matmul of one shape, dtype and layout, with the algorithm chosen for it.

    The library is column-major, so it reads a row-major matrix as its transpose. Computing
    (a b)ᵀ = bᵀ aᵀ therefore needs no copies of row-major a and b.
    """

    def __init__(
        self,
        left: MatrixLayout,
        right: MatrixLayout,
        sizes: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        epilogue: Epilogue,
        add: bool,
        device: int,
        fast_accum: bool = False,
    ) -> None:
        (rows, inner, columns), (left_dtype, right_dtype, output_dtype) = sizes, dtypes
        self.beta, self.handle = ctypes.c_float(add), _handle(device)  # out = a b + beta out
        self.calls, self.lock = 0, Lock()
        self.algorithms: list[_Algorithm] = []
        self.autotuned: _Algorithm | None = None
        inputs = dict.fromkeys((left_dtype, right_dtype))  # one, where both are the same
        types = f"{' '.join(map(_name, inputs))}→{_name(output_dtype)}"
        options = f"{' add' if add else ''}{' fast' if fast_accum else ''}"
        self.name = f"{sizes} {types} {left} {right} {epilogue.name}{options}"
        self.description = _create("MatmulDescCreate", ctypes.c_int(COMPUTE_32F), ctypes.c_int(0))
        self._set_attribute(3, ctypes.c_int32(right[0]))  # CUBLASLT_MATMUL_DESC_TRANSA
        self._set_attribute(4, ctypes.c_int32(left[0]))  # …_TRANSB
        self._set_attribute(7, ctypes.c_int32(epilogue))  # …_EPILOGUE
        if epilogue >= Epilogue.GELU_AUX:
            self._set_attribute(12, ctypes.c_int64(columns))  # …_EPILOGUE_AUX_LD
        if fast_accum:
            self._set_attribute(25, ctypes.c_int8(1))  # …_FAST_ACCUM
        self.layouts = (
            _create_layout(right_dtype, columns, inner, right),
            _create_layout(left_dtype, inner, rows, left),
            _create_layout(output_dtype, columns, rows, (False, columns)),
        )

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        aux: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> bool:
        """Run it; False if the library has no algorithm for it."""
        with self.lock:  # the addresses of these tensors are attributes shared by all threads
            if bias is not None:
                self._set_attribute(8, ctypes.c_void_p(bias.data_ptr()))  # …_BIAS_POINTER
            if aux is not None:
                self._set_attribute(11, ctypes.c_void_p(aux.data_ptr()))  # …_EPILOGUE_AUX_POINTER
            if scales is not None:
                a_scale, b_scale = scales
                self._set_attribute(17, ctypes.c_void_p(b_scale.data_ptr()))  # …_A_SCALE_POINTER
                self._set_attribute(18, ctypes.c_void_p(a_scale.data_ptr()))  # …_B_SCALE_POINTER
            algorithm = self._choose(a, b, out) if self.autotuned is None else self.autotuned
            if algorithm is not None:
                self._run(algorithm, a, b, out)
        return algorithm is not None

    def _choose(self, a: Tensor, b: Tensor, out: Tensor) -> _Algorithm | None:
        """The heuristic's first algorithm; from the call `AUTOTUNE_AT_CALL` on, the fastest."""
        self.calls += 1
        if self.calls == 1:
            self.algorithms = self._find_algorithms()
        if not self.algorithms:
            return None
        deterministic = torch.are_deterministic_algorithms_enabled()
        if self.calls == 1 and not deterministic:
            self.autotuned = self._preferred_algorithm()
        capturing = torch.cuda.is_current_stream_capturing()
        if self.autotuned is None:
            if self.calls < AUTOTUNE_AT_CALL or deterministic or capturing:
                return self.algorithms[0]
            scratch = torch.empty_like(out) if self.beta.value else out
            self.autotuned = fastest(
                self.algorithms, lambda algorithm: self._time(algorithm, a, b, scratch)
            )
        _choices[self.name] = self.autotuned.name
        return self.autotuned

    def _preferred_algorithm(self) -> _Algorithm | None:
        preferred = _preferred.get(self.name)
        for algorithm in self.algorithms:
            if algorithm.name == preferred:
                return algorithm
        if preferred is not None:
            logger.warning(
                "cuBLASLt no longer offers the algorithm of the checkpoint for the matmul %s: the "
                "last bits of the results may differ",
                self.name,
            )
        return None

    def _find_algorithms(self) -> list[_Algorithm]:
        """The algorithms that the library's heuristic returns: with a workspace, and without."""
        found = itertools.chain(*map(self._algorithms_within, WORKSPACE_LIMITS))
        return list({algorithm.name: algorithm for algorithm in found}.values())

    def _algorithms_within(self, workspace_bytes: int) -> list[_Algorithm]:
        """The algorithms with at most this workspace, sorted by estimated time."""
        preference = _create("MatmulPreferenceCreate")
        # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, …_MIN_ALIGNMENT_A_BYTES, …_B_, …_C_, …_D_
        limits = {1: workspace_bytes, 5: ALIGNMENT, 6: ALIGNMENT, 7: ALIGNMENT, 8: ALIGNMENT}
        for attribute, limit in limits.items():
            value = ctypes.c_uint64(limit) if attribute == 1 else ctypes.c_uint32(limit)
            _call("MatmulPreferenceSetAttribute", preference, attribute, *_pointer_and_size(value))
        results, count = (_Algorithm * MAX_ALGORITHMS)(), ctypes.c_int()
        _status(
            "MatmulAlgoGetHeuristic",
            self.handle,
            self.description,
            *self.layouts,
            self.layouts[2],
            preference,
            MAX_ALGORITHMS,
            results,
            ctypes.byref(count),
        )
        _call("MatmulPreferenceDestroy", preference)
        return [result for result in results[: count.value] if result.state == 0]

    def _time(self, algorithm: _Algorithm, a: Tensor, b: Tensor, out: Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._run(algorithm, a, b, out)
        start.record()
        for _ in range(TIMING_CALLS):
            self._run(algorithm, a, b, out)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _run(self, algorithm: _Algorithm, a: Tensor, b: Tensor, out: Tensor) -> None:
        workspace = torch.empty(algorithm.workspace, dtype=torch.uint8, device=a.device)
        right, left, result = self.layouts
        address = ctypes.c_void_p(out.data_ptr())
        _call(
            "Matmul",
            self.handle,
            self.description,
            ctypes.byref(ctypes.c_float(1)),
            ctypes.c_void_p(b.data_ptr()),
            right,
            ctypes.c_void_p(a.data_ptr()),
            left,
            ctypes.byref(self.beta),
            address,
            result,
            address,
            result,
            ctypes.byref(algorithm.algo),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(algorithm.workspace),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def _set_attribute(self, attribute: int, value: _Value) -> None:
        _call("MatmulDescSetAttribute", self.description, attribute, *_pointer_and_size(value))


_cached_matmul = cache(_Matmul)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return _create("Create")


def _create_layout(
    dtype: torch.dtype, rows: int, columns: int, layout: MatrixLayout
) -> ctypes.c_void_p:
    """A cublasLtMatrixLayout_t, of the transpose if the matrix is stored transposed."""
    transposed, leading_dimension = layout
    sizes = (columns, rows) if transposed else (rows, columns)
    data_type, sides = ctypes.c_int(DATA_TYPES[dtype]), map(ctypes.c_uint64, sizes)
    return _create("MatrixLayoutCreate", data_type, *sides, ctypes.c_int64(leading_dimension))


def _create(function: str, *arguments: object) -> ctypes.c_void_p:
    """The handle that a function of the library creates."""
    handle = ctypes.c_void_p()
    _call(function, ctypes.byref(handle), *arguments)
    return handle


def _pointer_and_size(value: _Value) -> tuple[object, object]:
    """The address and the size of a value."""
    return ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))


def _call(function: str, *arguments: object) -> None:
    """Call a function of the library; raise if it fails."""
    status = _status(function, *arguments)
    if status:
        raise RuntimeError(f"cublasLt{function} failed with status {status}")


def _status(function: str, *arguments: object) -> int:
    """Call a function of the library; return its cublasStatus_t."""
    status: int = getattr(library(), f"cublasLt{function}")(*arguments)
    return status
