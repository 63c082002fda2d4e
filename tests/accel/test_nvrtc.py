"""Compiling CUDA C++: the cache, and errors where NVRTC is missing or reports one."""

import ctypes
from pathlib import Path

import pytest
import torch

from regard.accel import nvrtc

CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("REGARD_HOME", str(tmp_path))


@pytest.mark.usefixtures("hopper")
def test_without_nvrtc_the_error_says_so(monkeypatch):
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: None)
    with pytest.raises(
        nvrtc.CudaKernelError, match="NVRTC, which torch's CUDA builds contain, was not"
    ):
        nvrtc.compile_cuda("", (), CUDA)


@pytest.mark.usefixtures("hopper")
def test_a_kernel_is_compiled_once_for_its_source_and_options(monkeypatch):
    calls = []

    def compile_(source, options):
        calls.append((source, options))
        return f"{source} {options}".encode()

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    first = nvrtc.compile_cuda("a", ("--use_fast_math",), CUDA)
    assert nvrtc.compile_cuda("a", ("--use_fast_math",), CUDA) == first
    assert calls == [("a", ["--gpu-architecture=sm_90a", "--use_fast_math"])]
    assert nvrtc.compile_cuda("b", ("--use_fast_math",), CUDA) != first
    assert nvrtc.compile_cuda("a", (), CUDA) != first
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("capability", "target"), [((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")]
)
@pytest.mark.usefixtures("hopper")
def test_code_may_use_instructions_that_only_its_gpu_has(monkeypatch, capability, target):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(nvrtc, "_compile", lambda source, options: options[0].encode())
    assert nvrtc.compile_cuda("", (), CUDA) == f"--gpu-architecture={target}".encode()


@pytest.mark.usefixtures("hopper")
def test_a_cache_that_cannot_be_written_is_not_used(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("REGARD_HOME", str(file))
    monkeypatch.setattr(nvrtc, "_compile", lambda source, options: b"binary")
    assert nvrtc.compile_cuda("a", (), CUDA) == b"binary"


NVRTC = sorted(Path(torch.__file__).parent.parent.glob("nvidia/*/lib/libnvrtc.so.*"))


@pytest.mark.skipif(not NVRTC, reason="needs NVRTC, which torch's CUDA builds contain")
@pytest.mark.usefixtures("hopper")
def test_the_log_of_nvrtc_is_in_the_error(monkeypatch):
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: ctypes.CDLL(str(NVRTC[0])))
    assert nvrtc.compile_cuda('extern "C" __global__ void f() {}', (), CUDA).startswith(b"\x7fELF")
    with pytest.raises(nvrtc.CudaKernelError, match="undefined"):
        nvrtc.compile_cuda('extern "C" __global__ void f() { x = 1; }', (), CUDA)
