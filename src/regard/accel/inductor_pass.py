"""An inductor pass that autotunes large matmuls."""

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from regard.accel import matmul

aten: Any = torch.ops.aten


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


def _is_large(a: fx.Node, b: fx.Node) -> bool:
    left, right = a.meta["val"], b.meta["val"]
    half_precision = left.dtype in (torch.bfloat16, torch.float16)
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return left.is_cuda and half_precision and flops >= matmul.MIN_AUTOTUNED_FLOPS
