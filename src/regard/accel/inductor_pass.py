"""Inductor passes: autotuned matmuls, and dropout masks that a kernel draws."""

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from regard.accel import dropout, matmul
from regard.accel.kernels import can_run_triton

MIN_MASK = 1 << 20  # elements; the compiler's kernels draw smaller masks as fast
MIN_PROBABILITY = 0.01  # of both values: the kernel rounds it to a multiple of 2^-16
aten: Any = torch.ops.aten
prims: Any = torch.ops.prims


class AutotunedMatmuls(CustomGraphPass):
    """Replaces large matmuls in half precision on a GPU by `accel.matmul.autotuned_matmul`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph before it is lowered."""
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            if _is_large(*node.args):
                node.target = torch.ops.regard.autotuned_matmul.default
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            bias, *operands = node.args
            if not node.kwargs and bias.meta["val"].ndim == 1 and _is_large(*operands):
                node.target = torch.ops.regard.autotuned_matmul.default
                node.args = (*operands, bias)

    def uuid(self) -> bytes:
        """The key of this pass in the cache of compiled graphs."""
        return get_hash_for_files((__file__, matmul.__file__))


class DropoutMasks(CustomGraphPass):
    """Replaces large dropout masks on a GPU by `accel.dropout.dropout_mask`.

    It must run before the graph is split into forward and backward pass, so that both have the same
    masks where one is recomputed.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph of the forward and the backward pass."""
        for node in graph.find_nodes(op="call_function", target=aten.gt.Scalar):
            if arguments := _mask_arguments(node):
                node.target, node.args = torch.ops.regard.dropout_mask.default, arguments

    def uuid(self) -> bytes:
        """The key of this pass in the cache of compiled graphs."""
        return get_hash_for_files((__file__, dropout.__file__))


def _is_large(a: fx.Node, b: fx.Node) -> bool:
    left, right = a.meta["val"], b.meta["val"]
    half_precision = left.dtype in (torch.bfloat16, torch.float16)
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return left.is_cuda and half_precision and flops >= matmul.MIN_AUTOTUNED_FLOPS


def _mask_arguments(node: fx.Node) -> tuple[Any, ...] | None:
    """The arguments of `dropout_mask` if a node compares random numbers with a probability.

    None if the numbers are few, are not uniform, or are used elsewhere too.
    """
    random, p = node.args
    if not isinstance(p, float) or not MIN_PROBABILITY <= p <= 1 - MIN_PROBABILITY:
        return None
    if isinstance(random, fx.Node) and random.target is prims.convert_element_type.default:
        if len(random.users) > 1:
            return None
        random = random.args[0]
    if not isinstance(random, fx.Node) or random.target is not prims.inductor_random.default:
        return None
    shape, seed, distribution = random.args
    if distribution != "rand" or len(random.users) > 1 or not _is_large_mask(node):
        return None
    assert isinstance(seed, fx.Node)
    seeds, index = seed.args
    return seeds, index, shape, p


def _is_large_mask(node: fx.Node) -> bool:
    mask = node.meta["val"]
    return bool(mask.is_cuda) and mask.numel() >= MIN_MASK and can_run_triton(mask.device)
