"""CUDA C++ kernels, compiled at run time with NVRTC and launched through the CUDA driver.

Both libraries are called through ctypes: NVRTC is installed with torch, the driver with the GPU.
"""

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from regard.errors import CheckpointError
from regard.files.cache import cache_key, cached_folder

logger = logging.getLogger(__name__)
BINARY = "kernel.cubin"
MAX_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaKernelError(RuntimeError):
    """Raised where a kernel cannot be compiled or launched."""


class CudaKernel:
    """A kernel of a compiled module, on the current GPU."""

    def __init__(self, binary: bytes, name: str, *, shared_bytes: int) -> None:
        torch.cuda.current_stream().synchronize()  # makes the context of torch current
        self.shared_bytes = shared_bytes
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        _check_driver("cuModuleLoadData", ctypes.byref(self.module), binary)
        _check_driver(
            "cuModuleGetFunction", ctypes.byref(self.function), self.module, name.encode()
        )
        _check_driver("cuFuncSetAttribute", self.function, MAX_SHARED_BYTES_ATTRIBUTE, shared_bytes)

    def max_blocks_per_multiprocessor(self, threads: int) -> int:
        """How many blocks of this kernel a multiprocessor can run at a time."""
        blocks = ctypes.c_int()
        function = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        size = ctypes.c_size_t(self.shared_bytes)
        _check_driver(function, ctypes.byref(blocks), self.function, threads, size)
        return blocks.value

    def read_constants(self, name: str, count: int) -> list[int]:
        """The values of an array of 64-bit integers of the module."""
        address, size, values = ctypes.c_uint64(), ctypes.c_size_t(), (ctypes.c_uint64 * count)()
        _check_driver(
            "cuModuleGetGlobal_v2",
            ctypes.byref(address),
            ctypes.byref(size),
            self.module,
            name.encode(),
        )
        assert size.value == ctypes.sizeof(values), f"{name} has {size.value} bytes"
        _check_driver("cuMemcpyDtoH_v2", values, address, size)
        return list(values)

    def launch(self, blocks: int, threads: int, *arguments: Any) -> None:
        """Launch all blocks at once on the current stream, so that they can wait for each other."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        _check_driver(
            "cuLaunchCooperativeKernel",
            self.function,
            *grid,
            *block,
            self.shared_bytes,
            stream,
            pointers,
        )


def compile_cuda(source: str, options: Sequence[str], device: torch.device) -> bytes:
    """The machine code of a source text for a GPU, from the cache if it was compiled before."""
    major, minor = torch.cuda.get_device_capability(device)
    # 'a': with the instructions that only this architecture has, from Hopper on
    target = f"--gpu-architecture=sm_{major}{minor}{'a' if major >= 9 else ''}"
    flags = [target, *options]

    def write(folder: Path) -> None:
        (folder / BINARY).write_bytes(_compile(source, flags))

    try:
        key = cache_key(source, flags, torch.version.cuda)
        folder, _ = cached_folder("cuda", key, write)
        return (folder / BINARY).read_bytes()
    except (CheckpointError, OSError) as error:  # the cache cannot be written
        logger.info("A CUDA kernel is compiled again at the next start: %s", error)
        return _compile(source, flags)


def _compile(source: str, options: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise CudaKernelError("NVRTC, which torch's CUDA builds contain, was not found")
    flags = [flag.encode() for flag in options]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None)
    if created != 0:
        raise CudaKernelError(f"NVRTC reports error {created}")
    try:
        arguments = (program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        if (error := nvrtc.nvrtcCompileProgram(*arguments)) != 0:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaKernelError(f"NVRTC reports error {error}:\n{log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc() -> ctypes.CDLL | None:
    """The NVRTC library of torch's CUDA version; None if there is none."""
    if torch.version.cuda is None:
        return None
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    packages = Path(torch.__file__).parents[1]  # where pip installs torch's libraries
    for path in [name, *map(str, packages.glob(f"nvidia/*/lib/{name}"))]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check_driver(function: str, *arguments: Any) -> None:
    """Call a function of the driver; raise if it fails."""
    if error := getattr(_driver(), function)(*arguments):
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(error, ctypes.byref(name))
        raise CudaKernelError(f"{function} reports {(name.value or b'an unknown error').decode()}")
