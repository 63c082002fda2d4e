"""Dropout masks of compiled training steps, as an operator that the compiler does not look into."""

import torch
from torch import Tensor

from regard.accel.kernels import can_run_kernels


@torch.library.custom_op("regard::dropout_mask", mutates_args=())
def dropout_mask(seeds: Tensor, index: int, shape: list[int], p: float) -> Tensor:
    """False with probability p, else True; random by `seeds[index]`."""
    if can_run_kernels(seeds):
        from regard.accel.kernels import dropout

        return dropout.dropout_mask(seeds, index, shape, p)
    generator = torch.Generator(seeds.device).manual_seed(int(seeds[index]))
    return torch.rand(shape, generator=generator, device=seeds.device) >= p


@dropout_mask.register_fake
def _(seeds: Tensor, index: int, shape: list[int], p: float) -> Tensor:
    return seeds.new_empty(shape, dtype=torch.bool)
