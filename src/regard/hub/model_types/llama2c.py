"""The first file format of llama2.c (Karpathy 2023): a LLaMA in a binary file without tensor names.

    int32    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len
    float32  the tensors in the order of `_tensor_shapes`

A negative vocab_size means that the output matrix is not tied to the embedding and follows at the
end. The format has no magic number; a file is recognized by its size, which the seven integers
determine. RoPE rotates interleaved pairs, unlike in transformers.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from regard.errors import CheckpointError
from regard.files.safetensors import TensorEntry, TensorReader, find_single_file
from regard.files.untrusted import open_regular_file
from regard.hub.model_type import MAX_LAYERS, CheckpointWithoutConfig, ModelType
from regard.hub.weight_mapping import Rule, module_rules
from regard.models.transformer import TransformerConfig

HEADER = struct.Struct("<7i")
MAX_SIZE = 1 << 24  # of any of the seven integers; with a larger one it is another format
LAYER = {
    "att_norm": "attention_norm",
    "wq": "attention.query",
    "wk": "attention.key",
    "wv": "attention.value",
    "wo": "attention.out",
    "ffn_norm": "ffn_norm",
    "w1": "ffn.gate",
    "w2": "ffn.down",
    "w3": "ffn.up",
}
LLAMA2C = ModelType(
    name="llama2.c",
    heads={"Transformer": "linear"},
    fields={},
    ignored_tensors=("freq_cos", "freq_sin"),
    rules=lambda config: [
        Rule("tok_emb.weight", "embed.token.weight"),
        *module_rules(LAYER, "layers.{i}.", "decoder.blocks.{i}."),
        Rule("norm.weight", "decoder.norm.weight"),
        Rule("out.weight", "head.weight"),
    ],
)


def find_file(path: Path) -> Path | None:
    """The llama2.c file at `path` or in the folder `path`; None if there is none."""
    return find_single_file(path, "*.bin", lambda file: _header(file) is not None)


def open_file(path: Path) -> CheckpointWithoutConfig:
    """Read the configuration and the offsets of all tensors."""
    header = _header(path)
    assert header is not None
    dim, hidden_dim, layers, heads, kv_heads, vocab_size, context = header
    config = TransformerConfig(
        vocab_size=abs(vocab_size),
        context=context,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_dim=hidden_dim,
        position={"kind": "rotary", "interleaved": True},
        norm="rms",
        ffn="swiglu",
        bias=False,
        tied=vocab_size > 0,
    )
    entries, offset = {}, HEADER.size
    for name, shape in _tensor_shapes(header):
        entries[name] = TensorEntry(path, torch.float32, torch.Size(shape), offset)
        offset += entries[name].size
    return CheckpointWithoutConfig(LLAMA2C, config, TensorReader(entries))


def _tensor_shapes(header: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, in the order of the file."""
    dim, hidden_dim, layers, heads, kv_heads, vocab_size, context = header
    head_dim = dim // heads
    shapes = {
        "att_norm": (dim,),
        "wq": (dim, dim),
        "wk": (kv_heads * head_dim, dim),
        "wv": (kv_heads * head_dim, dim),
        "wo": (dim, dim),
        "ffn_norm": (dim,),
        "w1": (hidden_dim, dim),
        "w2": (dim, hidden_dim),
        "w3": (hidden_dim, dim),
    }
    yield "tok_emb.weight", (abs(vocab_size), dim)
    for name, shape in shapes.items():
        for layer in range(layers):
            yield f"layers.{layer}.{name}.weight", shape
    yield "norm.weight", (dim,)
    yield "freq_cos", (context, head_dim // 2)
    yield "freq_sin", (context, head_dim // 2)
    if vocab_size < 0:
        yield "out.weight", (-vocab_size, dim)


def _header(path: Path) -> tuple[int, ...] | None:
    """The seven integers; None if they are implausible or do not match the size of the file."""
    try:
        with open_regular_file(path) as file:
            content = file.read(HEADER.size)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if len(content) < HEADER.size:
        return None
    header = HEADER.unpack(content)
    dim, _, layers, heads, kv_heads, vocab_size, _ = header
    positive = (*header[:5], abs(vocab_size), header[6])
    if not all(0 < size < MAX_SIZE for size in positive) or layers > MAX_LAYERS:
        return None
    if dim % heads or heads % kv_heads:
        return None
    size = HEADER.size + 4 * sum(math.prod(shape) for _, shape in _tensor_shapes(header))
    return header if path.stat().st_size == size else None
