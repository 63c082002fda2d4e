"""Kernels for CUDA, in Triton: each does what a plain function says, in one pass."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def usable(x: Tensor) -> bool:
    """Whether there is a GPU to run them, and Triton, to make them."""
    return x.is_cuda and _triton()


@cache
def _triton() -> bool:
    return find_spec("triton") is not None
