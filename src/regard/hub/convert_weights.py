"""Tensors on their way from one layout to another, one at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.files.safetensors import Tensors
from regard.hub.safetensors_writer import Form, Writer, split_into_shards, write_index
from regard.hub.weight_mapping import PLAIN, Move

Shapes = Mapping[str, torch.Size]


def parts(
    tensors: Tensors, moves: Sequence[Move], shapes: Shapes, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Our tensors, by name, each in memory of its own."""
    for move in moves:
        theirs = tensors.read(move.theirs)
        ours = move.layout.split(theirs, [shapes[name] for name in move.ours])
        for name, part in zip(move.ours, ours, strict=True):
            own = part.to(dtype).contiguous()
            shared = own.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
            yield name, own.clone() if shared and len(ours) > 1 else own


def bring(
    tensors: Tensors, moves: Sequence[Move], shapes: Shapes, dtype: torch.dtype, path: Path
) -> None:
    """Write our tensors into one file; what only changes its name goes from disk to disk."""
    forms = {name: (dtype, shapes[name]) for move in moves for name in move.ours}
    with tensors, Writer({path: forms}) as writer:
        for move in moves:
            if _only_renamed(move) and tensors.entries[move.theirs].dtype == dtype:
                writer.stream(move.ours[0], tensors.chunks(move.theirs))
                continue
            for name, part in parts(tensors, [move], shapes, dtype):
                writer.put(name, part)


def send(
    tensors: Tensors,
    moves: Sequence[Move],
    shapes: Shapes,
    folder: Path,
    change: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Write their tensors into a folder, in several files where they are many.

    What `tensors` lacks, being known to fit the model, is a bias of zeros that only the other
    library has. `change` may reorder each of ours before.
    """
    dtype = next(iter(tensors.entries.values())).dtype
    forms: dict[str, Form] = {}
    for move in moves:
        empty = [torch.empty(shapes[name], device="meta") for name in move.ours]
        forms[move.theirs] = (dtype, move.layout.join(empty).shape)
    files = split_into_shards(folder, forms)
    with tensors, Writer(files) as writer:
        for move in moves:
            present = all(name in tensors.entries for name in move.ours)
            if change is None and present and _only_renamed(move):
                writer.stream(move.theirs, tensors.chunks(move.ours[0]))
                continue
            ours = [
                tensors.read(name)
                if name in tensors.entries
                else torch.zeros(shapes[name], dtype=dtype)
                for name in move.ours
            ]
            if change is not None:
                ours = [change(name, part) for name, part in zip(move.ours, ours, strict=True)]
            writer.put(move.theirs, move.layout.join(ours))
    if len(files) > 1:
        write_index(folder, writer.entries)


def _only_renamed(move: Move) -> bool:
    return move.layout == PLAIN and len(move.ours) == 1
