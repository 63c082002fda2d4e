"""Reuse of freed memory on a CPU.

glibc returns large blocks to the operating system when they are freed, and the operating system
clears every page of the next one. The logits of a large vocabulary are such blocks, allocated and
freed in every step.
"""

import ctypes
import os
import sys
from functools import cache

# Parameters of glibc's mallopt (malloc.h)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
INT_MAX = 2**31 - 1


@cache
def keep_freed_memory() -> bool:
    """Let the process keep freed memory for later tensors; False if the C library cannot.

    All blocks then come from the heap, which is not trimmed. If the user has configured malloc
    (`GLIBC_TUNABLES`, `MALLOC_…`), nothing is changed and False is returned.
    """
    names = os.environ.keys()
    set_by_user = "GLIBC_TUNABLES" in names or any(name.startswith("MALLOC_") for name in names)
    if not sys.platform.startswith("linux") or set_by_user:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, INT_MAX))
