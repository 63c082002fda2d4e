"""Triton kernels for CUDA; each fuses the operations of a function in plain torch."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

MIN_COMPUTE_CAPABILITY = (8, 0)
MAX_RANKED = 1024  # tokens that the kernels of fused sampling can rank per row
ACTIVATION_TILE = 128  # rows and columns of a tile of `activation_matmul`


def can_run_kernels(x: Tensor) -> bool:
    """Whether the kernels can run on the device of `x`."""
    return x.is_cuda and kernels_unsupported_reason(x) is None


def kernels_unsupported_reason(x: Tensor) -> str | None:
    """Why the kernels cannot run on the device of `x`; None if they can."""
    if not x.is_cuda:
        return f"Triton kernels need a CUDA GPU, not {x.device.type}"
    if torch.compiler.is_compiling():
        return "torch is compiling"
    if x.device.index != torch.cuda.current_device():
        return f"{x.device} is not the current GPU"
    return (
        None if can_run_triton(x.device) else "Triton is missing, or the GPU is older than Ampere"
    )


def can_run_activation_matmul(weight: Tensor) -> bool:
    """Whether `activation_matmul` can run for a weight, (outputs, inputs): on Hopper only."""
    outputs, inputs = weight.shape
    return (
        weight.is_cuda
        and torch.cuda.get_device_capability(weight.device)[0] == 9
        and can_run_triton(weight.device)
        and outputs % ACTIVATION_TILE == 0
        and inputs % 8 == 0  # copies of tiles need rows of a multiple of 16 bytes
    )


@cache
def can_run_triton(device: torch.device) -> bool:
    """Whether Triton kernels can run on a CUDA device."""
    is_capable = torch.cuda.get_device_capability(device) >= MIN_COMPUTE_CAPABILITY
    return find_spec("triton") is not None and is_capable
