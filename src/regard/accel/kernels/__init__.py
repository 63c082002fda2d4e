"""Kernels for CUDA, in Triton: each does what a plain function says, in one pass."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def usable(x: Tensor) -> bool:
    """Whether there is a GPU to run them, the one in use, and Triton, to make them; not while
    torch compiles."""
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and x.device.index == torch.cuda.current_device()
        and _triton()
    )


@cache
def _triton() -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)
