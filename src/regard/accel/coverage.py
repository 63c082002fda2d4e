"""Which models each fast decoder supports, and the reason if it does not."""

import torch

from regard.accel.description import Description

PACKED_NORM_ORDERS = ("pre", "parallel", "parallel_norms")
TRITON_ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "silu")
TRITON_HEAD_DIMS = (16, 32, 64, 128, 256)
TRITON_NORMS = ("rms", "rms_plus_one")
MAX_SHARED_HEADS = 32  # query heads per key head: the shared memory of a GPU must hold them


def packing_obstacle(description: Description) -> str | None:
    """Why `PackedDecoder` cannot run a model; None if it can."""
    if description.position_in_each_layer:
        return "positions are added in every layer"
    if len({block.norm_order for block in description.blocks}) > 1:
        return "the layers differ in norm_order"
    for block in description.blocks:
        if block.norm_order not in PACKED_NORM_ORDERS:
            return f"norm_order={block.norm_order!r}"
        if block.score_scale is None:
            return "the attention score has a soft cap"
        if description.interleaved and block.head_dim % 2:
            return f"interleaved rotary positions with an odd head_dim={block.head_dim}"
    return None


def cpu_decoder_obstacle(description: Description) -> str | None:
    """Why `CpuDecoder` cannot run a packed model; None if it can."""
    if description.device.type != "cpu" or description.dtype != torch.float32:
        return f"it needs float32 on a CPU, not {description.dtype} on {description.device}"
    if description.biases_scores:
        return f"position={description.position!r} adds a bias to the scores"
    shapes = {
        (block.heads, block.kv_heads, block.head_dim, block.ffn_dim, block.gated)
        for block in description.blocks
    }
    if len(shapes) > 1:
        return "the layers differ in shape"
    if any(block.value_dim != block.head_dim for block in description.blocks):
        return "values are not as wide as keys"
    return None


def triton_obstacle(description: Description) -> str | None:
    """Why `TritonDecoder` cannot run a packed model on a GPU; None if it can."""
    if description.position != "rotary":
        return f"position={description.position!r} is not rotary"
    if description.final_norm not in TRITON_NORMS:
        return f"the final norm is {description.final_norm!r}, not RMSNorm"
    if description.head_scale != 1.0 or description.head_projects:
        return "the head scales or projects its input"
    shapes = {(block.heads, block.kv_heads, block.head_dim) for block in description.blocks}
    if len(shapes) > 1:
        return "the layers differ in shape"
    for block in description.blocks:
        if block.norm_order != "pre":
            return f"norm_order={block.norm_order!r}"
        if block.norm not in TRITON_NORMS:
            return f"norm={block.norm!r} is not RMSNorm"
        if block.qk_norm is not None:
            return "queries and keys are normalised"
        if block.head_dim not in TRITON_HEAD_DIMS or block.value_dim != block.head_dim:
            return f"head_dim={block.head_dim} is none of {TRITON_HEAD_DIMS}"
        if block.heads > MAX_SHARED_HEADS * block.kv_heads:
            return f"more than {MAX_SHARED_HEADS} query heads share a key head"
        if block.activation not in TRITON_ACTIVATIONS:
            return f"activation={block.activation!r} has no kernel"
    return None
