"""What torch's compiler is told to do better."""

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from regard.accel import matmul as products

aten: Any = torch.ops.aten


class Faster(CustomGraphPass):
    """Has torch's compiler call `product` for large products on a GPU."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph that is ready to be lowered."""
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            if _large(*node.args):
                node.target = torch.ops.regard.product.default
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            bias, *factors = node.args
            if not node.kwargs and bias.meta["val"].ndim == 1 and _large(*factors):
                node.target = torch.ops.regard.product.default
                node.args = (*factors, bias)

    def uuid(self) -> bytes:
        """What compiled graphs are kept under."""
        return get_hash_for_files((__file__, products.__file__))


def _large(a: fx.Node, b: fx.Node) -> bool:
    left, right = a.meta["val"], b.meta["val"]
    half = left.dtype in (torch.bfloat16, torch.float16)
    operations = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return left.is_cuda and half and operations >= products.LARGE
