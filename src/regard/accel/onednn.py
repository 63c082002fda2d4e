"""Linear layers with oneDNN, which torch contains, for decoding on a CPU.

Large weights are copied to oneDNN's layout: blocks, in the order in which its matmul reads them.
MKL, which `F.linear` calls, is slow on some processors: on an AMD EPYC 9005, all matmuls of GPT-2
124M for 8 rows take 46 ms of one core with MKL and 19 ms with oneDNN (docs/results.md).
"""

import sys
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.accel.fingerprint import ModelFingerprint
from regard.accel.onednn_matmul import has_full_width_avx512
from regard.accel.packed import PackedBlock, PackedLinear
from regard.accel.packed_decoder import PackedDecoder, with_packed_layers
from regard.models.transformer import Transformer

MIN_ELEMENTS = 1 << 18  # smaller weights stay in the CPU's cache, and MKL is faster
ROWS = 8  # the batch size for which oneDNN chooses the layout; other sizes can use it too
BLOCKED_ROWS = 2  # on a Zen 4, up to this many rows are faster in blocks (docs/results.md)


@dataclass(frozen=True, slots=True, eq=False)
class OnednnLinear:
    """A linear layer with a copy of its weight in oneDNN's layout, without gradients."""

    weight: Tensor  # in oneDNN's layout
    bias: Float[Tensor, " outputs"] | None

    @classmethod
    def of(cls, weight: Float[Tensor, "outputs inputs"], bias: Tensor | None) -> "OnednnLinear":
        """Copy a weight to oneDNN's layout."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS), bias)

    def __call__(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """W x + b."""
        y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return cast(Tensor, y)


def attach_onednn_weights(decoder: PackedDecoder) -> None:
    """Let a decoder on a CPU use oneDNN copies of its large weights, for decoding and prefill."""
    blocks = {packed: _with_onednn(packed) for packed in {*decoder.layers}}
    decoder.layers = [blocks[packed] for packed in decoder.layers]
    decoder.head = _convert(decoder.head)
    decoder.prefill_model = with_packed_layers(decoder.model, decoder.layers, decoder.head)
    decoder.fingerprint = ModelFingerprint(decoder.model, copied_elements=sys.maxsize)


def copied_bytes(model: Transformer) -> int:
    """The memory of the copies that `attach_onednn_weights` makes."""
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    weights = [*weights, model.head.matrix]
    return sum(weight.nbytes for weight in {id(w): w for w in weights}.values() if is_large(weight))


def is_large(weight: Tensor) -> bool:
    """Whether a weight is too large to stay in the CPU's cache between two steps."""
    return weight.numel() >= MIN_ELEMENTS


def _with_onednn(packed: PackedBlock) -> PackedBlock:
    return replace(
        packed,
        qkv=_convert(packed.qkv),
        out=_convert(packed.out),
        gate_up=_convert(packed.gate_up),
        down=_convert(packed.down),
    )


def _convert(layer: PackedLinear) -> PackedLinear:
    if not is_large(layer.weight):
        return layer
    onednn = OnednnLinear.of(layer.weight, layer.bias)
    rows = 1 if layer.blocks is None or has_full_width_avx512() else BLOCKED_ROWS + 1
    return replace(layer, onednn=onednn, onednn_rows=rows, transposed=None)
