"""Convert weights between external and internal names and layouts, one tensor at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.files.safetensors import TensorReader
from regard.hub.safetensors_writer import (
    SafetensorsWriter,
    TensorSpec,
    split_into_shards,
    write_index,
)
from regard.hub.weight_mapping import CONCATENATED, TensorMapping

Shapes = Mapping[str, torch.Size]


def read_internal(
    tensors: TensorReader, mappings: Sequence[TensorMapping], shapes: Shapes, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the internal tensors by name; no two of them share memory."""
    for mapping in mappings:
        external = tensors.read(mapping.external)
        parts = mapping.layout.split(external, [shapes[name] for name in mapping.internal])
        for name, part in zip(mapping.internal, parts, strict=True):
            tensor = part.to(dtype).contiguous()
            is_view = tensor.untyped_storage().data_ptr() == external.untyped_storage().data_ptr()
            yield name, tensor.clone() if is_view and len(parts) > 1 else tensor


def write_internal(
    tensors: TensorReader,
    mappings: Sequence[TensorMapping],
    shapes: Shapes,
    dtype: torch.dtype,
    path: Path,
    metadata: Mapping[str, str],
) -> list[str]:
    """Write the internal tensors into one file; those that are only renamed are copied as bytes.

    Returns the names of the external tensors that have values which are not finite.
    """
    non_finite: dict[str, None] = {}  # in order
    specs = {name: (dtype, shapes[name]) for mapping in mappings for name in mapping.internal}
    with tensors, SafetensorsWriter({path: specs}, metadata) as writer:
        for mapping in mappings:
            if _is_rename(mapping) and tensors.entries[mapping.external].dtype == dtype:

                def chunks(external: str = mapping.external) -> Iterator[memoryview]:
                    for chunk in tensors.chunks(external):
                        if not is_finite(torch.frombuffer(chunk, dtype=dtype)):
                            non_finite[external] = None
                        yield chunk

                writer.write_chunks(mapping.internal[0], chunks())
                continue
            for name, tensor in read_internal(tensors, [mapping], shapes, dtype):
                if not is_finite(tensor):
                    non_finite[mapping.external] = None
                writer.write(name, tensor)
    return list(non_finite)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass without a copy."""
    return not tensor.numel() or all(bool(x.isfinite()) for x in tensor.aminmax())


def write_external(
    tensors: TensorReader,
    mappings: Sequence[TensorMapping],
    shapes: Shapes,
    folder: Path,
    transform: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Write the external tensors into a folder, sharded if they are large.

    An internal tensor that is not in `tensors` is a bias that the model here lacks; zeros are
    written for it. `transform` is applied to each internal tensor first.
    """
    dtype = next(iter(tensors.entries.values())).dtype
    specs: dict[str, TensorSpec] = {}
    for mapping in mappings:
        empty = [torch.empty(shapes[name], device="meta") for name in mapping.internal]
        specs[mapping.external] = (dtype, mapping.layout.join(empty).shape)
    files = split_into_shards(folder, specs)
    with tensors, SafetensorsWriter(files) as writer:
        for mapping in mappings:
            complete = all(name in tensors.entries for name in mapping.internal)
            if transform is None and complete and _is_rename(mapping):
                writer.write_chunks(mapping.external, tensors.chunks(mapping.internal[0]))
                continue
            parts = {
                name: tensors.read(name)
                if name in tensors.entries
                else torch.zeros(shapes[name], dtype=dtype)
                for name in mapping.internal
            }
            if transform is not None:
                parts = {name: transform(name, part) for name, part in parts.items()}
            writer.write(mapping.external, mapping.layout.join(list(parts.values())))
    if len(files) > 1:
        write_index(folder, writer.entries)


def _is_rename(mapping: TensorMapping) -> bool:
    """Whether internal and external tensor differ only in their names."""
    return mapping.layout == CONCATENATED and len(mapping.internal) == 1
