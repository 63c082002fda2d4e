"""Checkpoints that survive a kill at any moment: written aside, checked, then renamed.

    checkpoints/.step-N.tmp-PID@HOST/   while it is being written
    checkpoints/step-N/           model, optimizer and ema as .safetensors,
                                  state.json, MANIFEST.json

Where the weights lie in parts on several ranks, each writes its rows, as model-RANK.safetensors
and so on, and index.json names the files of a tensor's rows in order. Any number of ranks can
read what any other wrote.

The manifest is written last and holds size and sha256 of every other file; a folder without a
manifest that verifies is not a checkpoint. Only safetensors and JSON, never pickle.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import CheckpointError, RegardError
from regard.files.atomic import atomic_file, sync_to_disk, temporary_path
from regard.files.disk_space import disk_message
from regard.files.fault_injection import fault
from regard.files.safetensors import Tensors, as_bytes, is_shard_name
from regard.files.untrusted import open_regular_file, parse_json, read_json, read_text
from regard.training.parallel.ranks import SINGLE, Ranks

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose every byte has been verified."""

    path: Path
    step: int

    def tensors(self, name: str, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        """The tensors of this name; of each, the rows that one of several ranks keeps."""
        index, files = self.path / "index.json", [f"{name}.safetensors"]
        if index.exists():
            files = read_json(index).get(name, [])
            if not files or not isinstance(files, list) or not all(map(is_shard_name, files)):
                raise CheckpointError(f"{index} does not name the files beside it of {name}")
        return _read_rows([self.path / file for file in files], rank, ranks)

    def state(self) -> dict[str, Any]:
        """The integers and names that are not tensors."""
        return read_json(self.path / "state.json")


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    ranks: Ranks = SINGLE,
) -> Checkpoint:
    """Write a checkpoint of `step`; until the last rename nothing of it counts.

    Of several ranks, each calls this with its own rows of all tensors.
    """
    final = folder / f"step-{step}"
    aside = Path(ranks.broadcast(str(temporary_path(final))))
    parts = {name: [f"{name}-{rank}" for rank in range(ranks.size)] for name in tensors}
    needed = int(ranks.all_reduce_sum(torch.tensor(sum(map(_bytes, tensors.values())))))
    facts: dict[str, dict[str, Any]] = {}  # size and hash of each file

    def note(path: Path) -> None:
        facts[path.name] = {"size": path.stat().st_size, "sha256": sha256(path)}

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        fault("begin")

    def write() -> None:
        for name, group in tensors.items():
            own = name if ranks.size == 1 else parts[name][ranks.rank]
            path = aside / f"{own}.safetensors"
            _write_tensors(path, _on_cpu(group), {"format": "pt"})
            note(path)
            fault("tensors")

    def commit() -> None:
        tables: dict[str, Any] = {"state": state}
        if ranks.size > 1:
            tables["index"] = {n: [f"{own}.safetensors" for own in parts[n]] for n in parts}
        for name, table in tables.items():
            path = aside / f"{name}.json"
            _write(path, json.dumps(table, indent=1).encode())
            note(path)
        fault("state")
        files = dict(sorted(facts.items()))
        manifest = {"format": FORMAT, "step": step, "torch": torch.__version__, "files": files}
        _write(aside / "MANIFEST.json", json.dumps(manifest, indent=1).encode())
        fault("manifest")
        sync_to_disk(aside)
        shutil.rmtree(final, ignore_errors=True)  # only ever a damaged one of the same step
        fault("rename")
        aside.rename(final)
        fault("commit")
        sync_to_disk(folder)

    def attempt(work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, SafetensorError) as error:
            message = f"{disk_message(final, error, needed)}\nearlier checkpoints are untouched"
            raise CheckpointError(message) from error

    try:
        ranks.on_rank0(partial(attempt, begin))
        ranks.all_or_fail(partial(attempt, write))
        for rank in range(ranks.size):  # each has hashed what it wrote
            facts |= ranks.broadcast(facts, rank)
        ranks.on_rank0(partial(attempt, commit))
    except RegardError:
        if ranks.is_rank0:  # by now nobody writes there
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return Checkpoint(final, step)


def latest(folder: Path, step: int | None = None) -> Checkpoint | None:
    """The newest checkpoint, or that of `step`; damage is an error that offers the one before."""
    steps = _steps(folder)
    if step is not None and step not in steps:
        have = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; there are: {have}")
    for number in steps if step is None else [step]:
        path = folder / f"step-{number}"
        problem = verify(path)
        if problem is None:
            return Checkpoint(path, number)
        good = next(valid_steps_before(folder, number), None)
        way_out = (
            f"the one of step {good} is whole: regard resume {folder.parent} --step {good}"
            if good is not None
            else "there is no earlier one; begin again with regard train"
        )
        raise CheckpointError(f"damaged checkpoint: {problem}\n{way_out}")
    return None


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None when it has the files of its manifest, unchanged."""
    manifest_path = path / "MANIFEST.json"
    try:
        manifest = parse_json(read_text(manifest_path))
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"{manifest_path} has format {manifest['format']}, this version reads {FORMAT}"
        if manifest["step"] != _step_of(path):
            return f"{manifest_path} is of step {manifest['step']}"
        there = {file.name for file in path.iterdir() if not file.name.startswith(".")}
        for name, facts in files.items():
            file = path / name
            if name not in there:
                return f"{file} is missing"
            if file.stat().st_size != facts["size"]:
                return f"{file} has {file.stat().st_size} bytes instead of {facts['size']}"
            if sha256(file) != facts["sha256"]:
                return f"{file} has changed since it was written (sha256 differs)"
        if unknown := there - files.keys() - {manifest_path.name}:
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
    """The steps before this one whose checkpoints verify, newest first."""
    return (n for n in _steps(folder) if n < step and verify(folder / f"step-{n}") is None)


def of_step(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of a step, which another process has verified."""
    return Checkpoint(folder / f"step-{step}", step)


def find_valid(folder: Path, step: int | None) -> Checkpoint | None:
    """The checkpoint of a step, if there is one and it verifies."""
    path = folder / f"step-{step}"
    return None if step is None or verify(path) else Checkpoint(path, step)


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    for step in _steps(folder)[keep:]:
        if step != best:
            _remove(folder / f"step-{step}")
    fault("end")


def drop_after(folder: Path, step: int) -> None:
    """Remove all that is newer than `step`, newest first: a run goes on from there."""
    for newer in _steps(folder):
        if newer > step:
            _remove(folder / f"step-{newer}")


def _remove(path: Path) -> None:
    """Remove a checkpoint, so that a kill leaves no half of it under its name."""
    aside = temporary_path(path)
    try:
        path.rename(aside)
        fault("prune")
        shutil.rmtree(aside)
    except OSError as error:
        raise CheckpointError(f"cannot remove {path}: {error.strerror}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file in place of an old one, whole or not at all, down to the disk.

    It holds the hash of its own tensors, which safetensors alone would load with any bit flipped.
    """
    tensors = _on_cpu(tensors)
    try:
        with atomic_file(path) as temporary:
            _write_tensors(temporary, tensors, {"sha256": digest(sorted(tensors.items()))})
            fault("weights")
    except (CheckpointError, SafetensorError) as error:
        cause = error.__cause__ or error
        raise CheckpointError(disk_message(path, cause, _bytes(tensors))) from error
    fault("replace")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; what is wrong with it is named."""
    with _reading(path), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        wanted = (file.metadata() or {}).get("sha256")
    _must_be(wanted, path, sorted(tensors.items()))
    return tensors


def check_tensors(path: Path, tensors: Tensors) -> None:
    """Refuse a safetensors file that has changed since it was written, a tensor at a time."""
    with _reading(path), safe_open(path, framework="pt") as file, tensors:
        wanted = (file.metadata() or {}).get("sha256")
        _must_be(wanted, path, ((name, tensors.read(name)) for name in sorted(tensors.entries)))


def _must_be(wanted: str | None, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    if wanted is not None and digest(tensors) != wanted:
        raise CheckpointError(f"{path} has changed since it was written (sha256 differs)")


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The hash of tensors, their names, types and shapes; in the order of their names."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(as_bytes(tensor.contiguous()))
    return found.hexdigest()


def _read_rows(paths: list[Path], rank: int, ranks: int) -> dict[str, Tensor]:
    """The rows that one of several ranks keeps of tensors whose rows lie in several files."""
    with ExitStack() as stack:
        files = []
        for path in paths:
            stack.enter_context(_reading(path))
            files.append(stack.enter_context(safe_open(path, framework="pt")))
        found = {}
        for name in files[0].keys():  # noqa: SIM118
            parts = [file.get_slice(name) for file in files]
            if len({(len(part.get_shape()), *part.get_shape()[1:]) for part in parts}) > 1:
                raise CheckpointError(f"{paths[0]} and others have unlike parts of {name}")
            scalar = not parts[0].get_shape()
            found[name] = files[0].get_tensor(name) if scalar else _rows(parts, rank, ranks)
        return found


def _rows(parts: list[Any], rank: int, ranks: int) -> Tensor:
    counts = [part.get_shape()[0] for part in parts]
    each = -(-sum(counts) // ranks)  # as torch cuts: the last ranks may have less, or nothing
    begin, end = each * rank, each * (rank + 1)
    found = []
    for part, count in zip(parts, counts, strict=True):
        found.append(part[min(max(begin, 0), count) : min(max(end, 0), count)])
        begin, end = begin - count, end - count
    return torch.cat(found)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Inside, what is wrong with a file is named; a pipe, which may never end, at once."""
    try:
        open_regular_file(path).close()
        yield
    except FileNotFoundError:
        raise CheckpointError(f"no weights at {path}") from None
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from None


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    save_file(dict(tensors), path, metadata)  # of two entries the order would be random
    path.chmod(0o644)  # the library makes it readable for its owner only
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None


def _steps(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint, whole or not, newest first."""
    found = map(_step_of, folder.glob("step-*"))
    return sorted((step for step in found if step is not None), reverse=True)
