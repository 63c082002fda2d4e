"""Freed memory is used again, not given back to the kernel."""

import os
import subprocess
import sys

import pytest

from regard.accel import cpu_memory

FAULTS = """
import ctypes, importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("cpu_memory", sys.argv[2])  # without torch
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
kept = sys.argv[1] == "keep" and module.keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for turn in range(6):
    before, block = faults(), libc.malloc(100 << 20)
    ctypes.memset(block, 1, 100 << 20)
    libc.free(block)
print(faults() - before, kept)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_large_block_is_faulted_in_once():
    def run(argument, **environment):
        command = [sys.executable, "-c", FAULTS, argument, cpu_memory.__file__]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout.split()

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    pages, kept = run("keep", **environment)
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    assert int(pages) < 100
    assert int(run("free", **environment)[0]) > 100  # without it, every time again
    assert run("keep", **environment, MALLOC_TRIM_THRESHOLD_="0")[1] == "False"
