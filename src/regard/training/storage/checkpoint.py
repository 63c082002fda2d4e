"""Crash-safe checkpoints: written to a temporary folder, synced, then renamed.

    checkpoints/.step-N.tmp-PID@HOST/   while it is written
    checkpoints/step-N/                 model, optimizer and ema as .safetensors,
                                        state.json, MANIFEST.json

With sharded weights every rank writes its rows, as model-RANK.safetensors and so on, and
index.json lists the files of model, optimizer and ema in the order of the rows. A checkpoint can
be loaded with another number of ranks.

The manifest is written last and holds size and sha256 of every other file; a folder without a
valid manifest is not a checkpoint. The files are safetensors and JSON, never pickle.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.errors import CheckpointError, RegardError, indented_list
from regard.files.atomic import temporary_path
from regard.files.directory import Directory
from regard.files.disk_space import write_error_message
from regard.files.fault_injection import inject_fault
from regard.files.safetensors import (
    TensorReader,
    as_bytes,
    is_shard_name,
    read_header,
    read_metadata,
    write_safetensors,
)
from regard.files.untrusted import open_regular_file, parse_json, read_json, read_text
from regard.renamed import current_settings, current_tensors
from regard.training.parallel.ranks import SINGLE, Ranks

FORMAT = 1  # of MANIFEST.json
NO_DIGEST = "0" * 64  # in place of a sha256 that is not known yet
# Hidden files are allowed: file managers and network file systems create them.
CHECKPOINT_FILES = r"(model|optimizer|ema)(-\d+)?\.safetensors|(state|index|MANIFEST)\.json|\..*"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose files agree with its manifest."""

    path: Path
    step: int

    def tensors(self, name: str, rank: int = 0, world_size: int = 1) -> dict[str, Tensor]:
        """The tensors of a file; of each, the rows that `rank` of `world_size` ranks stores."""
        index, files = self.path / "index.json", [f"{name}.safetensors"]
        if index.exists():
            files = read_json(index).get(name, [])
            if not files or not isinstance(files, list) or not all(map(is_shard_name, files)):
                raise CheckpointError(f"{index} does not list the files of {name} in its folder")
        return current_tensors(_read_rows([self.path / file for file in files], rank, world_size))

    def state(self) -> dict[str, Any]:
        """The content of state.json: everything that is not a tensor."""
        return current_settings(read_json(self.path / "state.json"))


def check_fit(path: str, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise unless saved tensors have the expected names, shapes and dtypes and finite values."""
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is not part of this run" for name in tensors if name not in expected]
    for name in (name for name in expected if name in tensors):
        saved, target = tensors[name], expected[name]
        if saved.shape != target.shape:
            problems.append(f"{name} has shape {tuple(saved.shape)}, the run {tuple(target.shape)}")
        elif saved.dtype != target.dtype:
            problems.append(f"{name} has dtype {saved.dtype}, the run {target.dtype}")
        elif not saved.isfinite().all():
            problems.append(f"{name} is not finite")
        elif name.endswith(("/exp_avg_sq", "/step")) and (saved < 0).any():
            problems.append(f"{name} is negative")
    if problems:
        raise CheckpointError(
            f"{path} does not fit the run:{indented_list(problems)}\n"
            "resume from another checkpoint with --step, or train again"
        )


def save(
    folder: Directory,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    ranks: Ranks = SINGLE,
) -> Checkpoint:
    """Write a checkpoint of `step` atomically; several ranks call this with their rows."""
    final = f"step-{step}"
    path = folder.path / final
    temporary = str(ranks.broadcast(temporary_path(path).name))
    shards = {name: [f"{name}-{rank}" for rank in range(ranks.world_size)] for name in tensors}
    needed_bytes = int(ranks.all_reduce_sum(torch.tensor(sum(map(_total_bytes, tensors.values())))))
    files: dict[str, dict[str, Any]] = {}  # size and sha256 of each file

    def write_file(name: str, write: Callable[[BinaryIO], object]) -> None:
        with folder.open_folder(temporary).create(name) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            files[name] = {"size": file.tell(), "sha256": _sha256(file)}

    def make_folder() -> None:
        folder.remove(temporary)
        folder.open_folder(temporary)
        inject_fault("begin")

    def write() -> None:
        for name, group in tensors.items():
            stem = name if ranks.world_size == 1 else shards[name][ranks.rank]
            write_file(
                f"{stem}.safetensors",
                partial(write_safetensors, tensors=_to_cpu(group), metadata={"format": "pt"}),
            )
            inject_fault("tensors")

    def commit() -> None:
        tables: dict[str, Any] = {"state": state}
        if ranks.world_size > 1:
            tables["index"] = {
                name: [f"{stem}.safetensors" for stem in stems] for name, stems in shards.items()
            }
        for name, table in tables.items():
            write_file(f"{name}.json", partial(_write_json, table=table))
        inject_fault("state")
        manifest = {
            "format": FORMAT,
            "step": step,
            "torch": torch.__version__,
            "files": dict(sorted(files.items())),
        }
        write_file("MANIFEST.json", partial(_write_json, table=manifest))
        inject_fault("manifest")
        folder.open_folder(temporary).sync()
        if folder.kind(final) is not None:  # only a corrupted one can have the same step
            if problem := _unexpected_entry(folder, final):
                raise CheckpointError(f"cannot write {path}: {problem}\nmove it elsewhere")
            folder.remove(final)
        inject_fault("rename")
        folder.replace(temporary, final)
        inject_fault("commit")
        folder.sync()

    def with_disk_errors(function: Callable[[], None]) -> None:
        try:
            function()
        except CheckpointError:
            raise
        except OSError as error:
            message = write_error_message(path, error, needed_bytes)
            raise CheckpointError(f"{message}\nearlier checkpoints are intact") from error

    try:
        ranks.on_rank0(partial(with_disk_errors, make_folder))
        ranks.all_or_fail(partial(with_disk_errors, write))
        for rank in range(ranks.world_size):  # every rank has hashed its own files
            files |= ranks.broadcast(files, rank)
        ranks.on_rank0(partial(with_disk_errors, commit))
    except RegardError:
        if ranks.is_rank0:  # after every rank has stopped writing
            with suppress(OSError):
                folder.remove(temporary)
        raise
    return Checkpoint(path, step)


def latest(folder: Path, step: int | None = None) -> Checkpoint | None:
    """The newest checkpoint, or that of `step`; None if there is none.

    If it is corrupted, the error names the newest valid checkpoint before it.
    """
    steps = _steps(_names(folder))
    if step is not None and step not in steps:
        available = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; available: {available}")
    if not steps:
        return None
    step = steps[0] if step is None else step
    path = folder / f"step-{step}"
    problem = verify(path)
    if problem is None:
        return Checkpoint(path, step)
    valid_step = next(valid_steps_before(folder, step), None)
    advice = (
        f"the one of step {valid_step} is valid: regard resume {folder.parent} --step {valid_step}"
        if valid_step is not None
        else "there is no earlier one; train the run again with regard train"
    )
    raise CheckpointError(f"corrupted checkpoint: {problem}\n{advice}")


def verify(path: Path) -> str | None:
    """Compare a checkpoint with its manifest; return the first problem, or None."""
    manifest_path = path / "MANIFEST.json"
    try:
        if path.is_symlink():
            return f"{path} is a symbolic link, not a folder of this run"
        manifest = parse_json(read_text(manifest_path))
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"{manifest_path} has format {manifest['format']}, this version reads {FORMAT}"
        if manifest["step"] != _step_of(path.name):
            return f"{manifest_path} is of step {manifest['step']}"
        present = {file.name for file in path.iterdir() if not file.name.startswith(".")}
        for name, expected in files.items():
            file = path / name
            if name not in present:
                return f"{file} is missing"
            if file.is_symlink():
                return f"{file} is a symbolic link, not a file of this checkpoint"
            if file.stat().st_size != expected["size"]:
                return f"{file} has {file.stat().st_size} bytes instead of {expected['size']}"
            if sha256(file) != expected["sha256"]:
                return f"{file} has changed since it was written (sha256 differs)"
        if unknown := present - files.keys() - {manifest_path.name}:
            return f"{path / min(unknown)} is not in its manifest"
        if "state.json" not in files:
            return f"{manifest_path} names no state.json"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or manifest_path} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest_path} is not a manifest"
    return None


def valid_steps_before(folder: Path, step: int) -> Iterator[int]:
    """The steps before this one with a valid checkpoint, newest first."""
    return (n for n in _steps(_names(folder)) if n < step and verify(folder / f"step-{n}") is None)


def of_step(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of a step, which rank 0 has verified."""
    return Checkpoint(folder / f"step-{step}", step)


def find_valid(folder: Path, step: int | None) -> Checkpoint | None:
    """The checkpoint of a step, if it exists and is valid."""
    path = folder / f"step-{step}"
    return None if step is None or verify(path) else Checkpoint(path, step)


def prune(folder: Directory, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one.

    A checkpoint folder with a file that no run has written is kept, with a warning.
    """
    for step in _steps(folder.names())[keep:]:
        if step == best:
            continue
        if problem := _unexpected_entry(folder, f"step-{step}"):
            logger.warning("an old checkpoint is kept: %s", problem)
        else:
            _remove(folder, f"step-{step}")
    inject_fault("end")


def drop_after(folder: Directory, step: int) -> None:
    """Remove the checkpoints after `step`, newest first, since a run resumes from it."""
    newer = [f"step-{number}" for number in _steps(folder.names()) if number > step]
    for name in newer:
        if problem := _unexpected_entry(folder, name):
            raise CheckpointError(f"cannot remove a later checkpoint: {problem}\nmove it elsewhere")
    for name in newer:
        _remove(folder, name)


def _unexpected_entry(folder: Directory, name: str) -> str | None:
    """The first entry at or inside the path of a checkpoint that no run has written, or None."""
    path = folder.path / name
    kind = folder.kind(name)
    if kind != "a folder":
        return f"{path} is {kind}, not a folder of a checkpoint"
    for file in folder.open_folder(name).names():
        if not re.fullmatch(CHECKPOINT_FILES, file):
            return f"{path / file} is not part of a checkpoint"
    return None


def _remove(folder: Directory, name: str) -> None:
    """Remove a checkpoint atomically: it is renamed first."""
    temporary = temporary_path(folder.path / name).name
    try:
        folder.replace(name, temporary)
        inject_fault("prune")
        folder.remove(temporary)
    except OSError as error:
        raise CheckpointError(f"cannot remove {folder.path / name}: {error.strerror}") from error


def write_tensors(
    directory: Directory,
    name: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a safetensors file atomically, with a hash of tensors and metadata in the metadata.

    Without that hash, safetensors would load tensors with flipped bits. Returns the sha256 of the
    file.
    """
    tensors, metadata = _to_cpu(tensors), dict(metadata or {})
    metadata = {"sha256": digest(sorted(tensors.items()), metadata), **metadata}
    try:
        with directory.atomic(name) as file:
            write_safetensors(file, tensors, metadata)
            result = _sha256(file)
            inject_fault("weights")
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        message = write_error_message(directory.path / name, error.__cause__, _total_bytes(tensors))
        raise CheckpointError(message) from error
    inject_fault("replace")
    return result


def write_digest(path: Path) -> None:
    """Replace `NO_DIGEST` in the metadata of a file by the hash of its tensors and metadata.

    For a file that was written tensor by tensor, not in the order of names; it is read in chunks.
    """
    entries, metadata = read_header(path), read_metadata(path)
    del metadata["sha256"]
    hasher = hashlib.sha256()
    with TensorReader(entries) as tensors:
        for name, entry in sorted(entries.items()):
            hasher.update(_tensor_label(name, entry.dtype, entry.shape))
            for chunk in tensors.chunks(name):
                hasher.update(chunk)
    hasher.update(_metadata_text(metadata))
    hex_digest = hasher.hexdigest()
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        offset = file.read(length).index(NO_DIGEST.encode())  # the first entry of the header
        file.seek(8 + offset)
        file.write(hex_digest.encode())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file and verify its hash."""
    with _file_errors(path), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    _check_digest(metadata, path, sorted(tensors.items()))
    return current_tensors(tensors)


def check_tensors(path: Path, tensors: TensorReader) -> None:
    """Verify the hash of a safetensors file, reading one tensor at a time."""
    with _file_errors(path), safe_open(path, framework="pt") as file, tensors:
        metadata = file.metadata() or {}
        _check_digest(
            metadata, path, ((name, tensors.read(name)) for name in sorted(tensors.entries))
        )


def _check_digest(
    metadata: Mapping[str, str], path: Path, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    other_entries = {key: value for key, value in metadata.items() if key != "sha256"}
    if "sha256" in metadata and digest(tensors, other_entries) != metadata["sha256"]:
        raise CheckpointError(f"{path} has changed since it was written (sha256 differs)")


def digest(tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str] | None = None) -> str:
    """The sha256 of tensors with their names, dtypes and shapes, and of metadata."""
    hasher = hashlib.sha256()
    for name, tensor in tensors:
        hasher.update(_tensor_label(name, tensor.dtype, tensor.shape))
        hasher.update(as_bytes(tensor.contiguous()))
    hasher.update(_metadata_text(metadata or {}))
    return hasher.hexdigest()


def _tensor_label(name: str, dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{name} {dtype} {list(shape)} ".encode()


def _metadata_text(metadata: Mapping[str, str]) -> bytes:
    return "".join(f"{key} {value} " for key, value in sorted(metadata.items())).encode()


def _read_rows(paths: list[Path], rank: int, world_size: int) -> dict[str, Tensor]:
    """The rows that `rank` stores, of tensors whose rows are in several files."""
    with ExitStack() as stack:
        files = []
        for path in paths:
            stack.enter_context(_file_errors(path))
            files.append(stack.enter_context(safe_open(path, framework="pt")))
        for path, file in zip(paths, files, strict=True):
            if different := set(files[0].keys()) ^ set(file.keys()):
                raise CheckpointError(f"{min(different)} is in only one of {paths[0]} and {path}")
        tensors = {}
        for name in files[0].keys():  # noqa: SIM118
            slices = [file.get_slice(name) for file in files]
            shapes = [shard.get_shape() for shard in slices]
            if len({(len(shape), *shape[1:]) for shape in shapes}) > 1:
                raise CheckpointError(
                    f"{paths[0]} and its other shards disagree on the shape of {name}"
                )
            is_scalar = not shapes[0]
            tensors[name] = (
                files[0].get_tensor(name) if is_scalar else _join_rows(slices, rank, world_size)
            )
        return tensors


def _join_rows(slices: list[Any], rank: int, world_size: int) -> Tensor:
    counts = [shard.get_shape()[0] for shard in slices]
    # rows are split as FSDP2 splits them: the last ranks may have fewer or none
    per_rank = -(-sum(counts) // world_size)
    begin, end = per_rank * rank, per_rank * (rank + 1)
    rows = []
    for shard, count in zip(slices, counts, strict=True):
        rows.append(shard[min(max(begin, 0), count) : min(max(end, 0), count)])
        begin, end = begin - count, end - count
    return torch.cat(rows)


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """A context whose errors name the file; raises unless it is a regular file."""
    try:
        open_regular_file(path).close()
        yield
    except FileNotFoundError:
        raise CheckpointError(f"no weights at {path}") from None
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is corrupted or not a safetensors file: {error}") from None


def _total_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}


def _write_json(file: BinaryIO, table: Any) -> None:
    file.write(json.dumps(table, indent=1).encode())


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    with open_regular_file(path) as file:
        return _sha256(file)


def _sha256(file: BinaryIO) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _step_of(name: str) -> int | None:
    match = re.fullmatch(r"step-(\d+)", name)
    return int(match[1]) if match else None


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _steps(names: Iterable[str]) -> list[int]:
    """The steps that have a checkpoint, valid or not, newest first."""
    steps = map(_step_of, names)
    return sorted((step for step in steps if step is not None), reverse=True)
