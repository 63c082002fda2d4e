"""Which models each fast decoder supports, and why it does not support the others."""

from dataclasses import dataclass, replace

import torch

from regard.accel.description import DecoderDescription
from regard.models.plan import PERSISTENT_LAYER_BYTES

PACKED_NORM_PLACEMENTS = ("pre", "parallel", "parallel_norms")
TRITON_ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "silu")
TRITON_HEAD_DIMS = range(16, 257, 2)
TRITON_POSITIONS = ("none", "sinusoidal", "learned", "rotary", "alibi")
TRITON_NORM_PLACEMENTS = (*PACKED_NORM_PLACEMENTS, "sandwich", "post", "deepnorm")
RMS_NORMS = ("rms", "rms_plus_one")
# the decoders have one fixed table of rotations for all layers
LENGTH_DEPENDENT = "the rotary scaling depends on the length of the sequence"
WINDOW_BASE = "layers with a sliding window have another RoPE base (window_base)"
MAX_QUERY_HEADS_PER_KV_HEAD = (
    32  # query heads per KV head: the shared memory of a GPU must hold them
)
PERSISTENT_CAPABILITY = (9, 0)  # of the GPU: bulk copies to shared memory begin with Hopper
PERSISTENT_DTYPES = (torch.bfloat16, torch.float16)
PERSISTENT_QUERY_HEADS = 16  # per KV head: the rows of a tensor core matmul
# By bits of a weight: inputs that a warp multiplies at once; int4: those with 16 bytes of scales.
PERSISTENT_UNITS = {16: 64, 8: 128, 4: 512}
PERSISTENT_SHARED_BYTES = 160 << 10  # per block: four stages of weights, and activations
PERSISTENT_ROWS = 256  # outputs of a layer that a multiprocessor computes at most


def packed_unsupported_reason(description: DecoderDescription) -> str | None:
    """Why `PackedDecoder` cannot run a model; None if it can."""
    if description.position_in_each_layer:
        return "positions are added in every layer"
    if description.length_dependent:
        return LENGTH_DEPENDENT
    if description.has_window_base:
        return WINDOW_BASE
    if len({block.norm_placement for block in description.blocks}) > 1:
        return "the layers differ in norm_placement"
    for block in description.blocks:
        if block.norm_placement not in PACKED_NORM_PLACEMENTS:
            return f"norm_placement={block.norm_placement!r}"
        if block.score_cap is not None:
            return "the attention score has a soft cap"
        if description.interleaved and block.head_dim % 2:
            return f"interleaved rotary embeddings with an odd head_dim={block.head_dim}"
    return None


def cpu_unsupported_reason(description: DecoderDescription) -> str | None:
    """Why `CpuDecodeStep` cannot run a packed model; None if it can."""
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


def triton_unsupported_reason(description: DecoderDescription) -> str | None:
    """Why `TritonDecoder` cannot run a model on a GPU; None if it can."""
    if description.position_in_each_layer:
        return "positions are added in every layer"
    if description.position not in TRITON_POSITIONS:
        return f"position={description.position!r} has no kernel"
    if description.length_dependent:
        return LENGTH_DEPENDENT
    if description.has_window_base:
        return WINDOW_BASE
    shapes = {(block.heads, block.kv_heads, block.head_dim) for block in description.blocks}
    if len(shapes) > 1:
        return "the layers differ in shape"
    for block in description.blocks:
        if block.norm_placement not in TRITON_NORM_PLACEMENTS:
            return f"norm_placement={block.norm_placement!r}"
        if block.qk_norm not in (None, *RMS_NORMS):
            return f"queries and keys are normalized by {block.qk_norm!r}, not RMSNorm"
        if block.head_dim not in TRITON_HEAD_DIMS or block.value_dim != block.head_dim:
            widths = f"head_dim={block.head_dim}, value_dim={block.value_dim}"
            return f"{widths}: they must be equal, even and from 16 to 256"
        if block.heads > MAX_QUERY_HEADS_PER_KV_HEAD * block.kv_heads:
            return f"more than {MAX_QUERY_HEADS_PER_KV_HEAD} query heads share a KV head"
        if block.activation not in TRITON_ACTIVATIONS:
            return f"activation={block.activation!r} has no kernel"
    return None


@dataclass(frozen=True)
class GPUProperties:
    """What decides whether a GPU can run `PersistentStep`."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # of shared memory, per block

    @classmethod
    def of(cls, device: torch.device) -> "GPUProperties":
        """The properties of a CUDA device."""
        gpu = torch.cuda.get_device_properties(device)
        shared_bytes = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return cls((gpu.major, gpu.minor), gpu.multi_processor_count, shared_bytes)


def persistent_unsupported_reason(
    description: DecoderDescription, gpu: GPUProperties, *, bits: int = 16
) -> str | None:
    """Why `PersistentStep` cannot run a model that `TritonDecoder` can; None if it can.

    `bits` are those of a weight of its layers; the head has at least 8. A model with narrow layers
    and a very wide feed-forward network may still not fit into shared memory: then the kernel does
    not compile.
    """
    if gpu.capability < PERSISTENT_CAPABILITY:
        return "the GPU is older than Hopper"
    if gpu.shared_bytes < PERSISTENT_SHARED_BYTES:
        return f"the GPU has {gpu.shared_bytes >> 10} KiB of shared memory per block"
    if description.dtype not in PERSISTENT_DTYPES:
        return f"{description.dtype} is not a 16-bit type"
    if len({replace(block, window=None) for block in description.blocks}) > 1:
        return "the layers differ in more than their windows"
    block = description.blocks[0]
    if description.dtype.itemsize * block.weights > PERSISTENT_LAYER_BYTES:
        return f"a layer has more than {PERSISTENT_LAYER_BYTES >> 20} MiB of 16-bit weights"
    if block.heads > PERSISTENT_QUERY_HEADS * block.kv_heads:
        return f"more than {PERSISTENT_QUERY_HEADS} query heads share a KV head"
    if block.head_dim % 8:
        return f"head_dim={block.head_dim} is not a multiple of 8"
    widths = {"dim": description.dim, "ffn_dim": block.ffn_dim}
    widths["heads * head_dim"] = block.heads * block.head_dim
    for name, width in widths.items():
        if width % PERSISTENT_UNITS[bits]:
            return f"{name}={width} is not a multiple of {PERSISTENT_UNITS[bits]}"
    return _multiprocessors_unsupported_reason(description, gpu.multiprocessors)


def _multiprocessors_unsupported_reason(description: DecoderDescription, count: int) -> str | None:
    """Why the layers of a model cannot be distributed over this number of multiprocessors."""
    block, dim = description.blocks[0], description.dim
    qkv_dim = (block.heads + 2 * block.kv_heads) * block.head_dim
    if block.kv_heads > count:
        return f"{block.kv_heads} KV heads are more than the {count} multiprocessors"
    parallel = block.norm_placement in ("parallel", "parallel_norms")
    if dim < count or (parallel and max(qkv_dim, block.ffn_dim // 2) < count):
        return f"the layers are too narrow for {count} multiprocessors"
    if max(qkv_dim, dim, block.ffn_dim) // count + 2 > PERSISTENT_ROWS:
        return f"the layers are too wide for {count} multiprocessors"
    return None


def gemm_unsupported_reason(description: DecoderDescription) -> str | None:
    """Why `TritonDecoder` cannot decode several rows with its gemm kernels; None if it can."""
    if description.final_norm is None or description.head_scale != 1.0 or description.head_projects:
        return "the head does not follow a norm directly"
    for block in description.blocks:
        if block.norm_placement not in ("pre", "parallel"):
            return f"norm_placement={block.norm_placement!r}"
    return None


def prefill_unsupported_reason(description: DecoderDescription) -> str | None:
    """Why `TritonDecoder` leaves prompts to the model; None if its kernels can run them."""
    if description.position != "rotary":
        return f"position={description.position!r} is not rotary"
    if description.final_norm is None:
        return "there is no final norm"
    for block in description.blocks:
        if block.norm_placement != "pre" or block.norm not in RMS_NORMS:
            return f"norm_placement={block.norm_placement!r} with norm={block.norm!r}"
        if block.score_cap is not None:
            return "the attention score has a soft cap"
    return None
