"""Checkpoints that survive a kill at any moment: written aside, checked, then renamed.

    checkpoints/step-N.tmp-PID/   while it is being written
    checkpoints/step-N/           model, optimizer and average as .safetensors,
                                  state.json, MANIFEST.json

The manifest is written last and holds size and sha256 of every other file; a folder without a
manifest that verifies is not a checkpoint. Only safetensors and JSON, never pickle.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose every byte has been verified."""

    path: Path
    step: int

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files."""
        return read_tensors(self.path / f"{name}.safetensors")

    def state(self) -> dict[str, Any]:
        """The integers and names that are not tensors."""
        state: dict[str, Any] = json.loads((self.path / "state.json").read_text())
        return state


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
) -> Checkpoint:
    """Write a checkpoint of `step`; until the last rename nothing of it counts."""
    final = folder / f"step-{step}"
    aside = folder / f"step-{step}.tmp-{os.getpid()}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name, group in tensors.items():
            _write_tensors(aside / f"{name}.safetensors", group)
        _write(aside / "state.json", json.dumps(state, indent=1).encode())
        files = {
            path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(aside.iterdir())
        }
        manifest = {"format": FORMAT, "step": step, "torch": torch.__version__, "files": files}
        _write(aside / "MANIFEST.json", json.dumps(manifest, indent=1).encode())
        _sync_folder(aside)
        shutil.rmtree(final, ignore_errors=True)  # only ever a damaged one of the same step
        aside.rename(final)
        _sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        message = f"{disk_message(final, error)}\nearlier checkpoints are untouched"
        raise CheckpointError(message) from error
    return Checkpoint(final, step)


def latest(folder: Path, step: int | None = None) -> Checkpoint | None:
    """The newest checkpoint, or that of `step`; damage is an error that offers the one before."""
    for left in folder.glob("step-*.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)  # of a run that was killed while writing
    steps = _steps(folder)
    if step is not None and step not in steps:
        have = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; there are: {have}")
    for number in steps if step is None else [step]:
        path = folder / f"step-{number}"
        problem = verify(path)
        if problem is None:
            return Checkpoint(path, number)
        good = [n for n in steps if n < number and verify(folder / f"step-{n}") is None]
        way_out = (
            f"the one of step {good[0]} is whole: regard resume {folder.parent} --step {good[0]}"
            if good
            else "there is no earlier one; begin again with regard train"
        )
        raise CheckpointError(f"damaged checkpoint: {problem}\n{way_out}")
    return None


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None when size and sha256 of every file are right."""
    manifest_path = path / "MANIFEST.json"
    try:
        manifest = json.loads(manifest_path.read_text())
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"{manifest_path} has format {manifest['format']}, this version reads {FORMAT}"
        if manifest["step"] != _step_of(path):
            return f"{manifest_path} is of step {manifest['step']}"
        for name, facts in files.items():
            file = path / name
            if not file.exists():
                return f"{file} is missing"
            if file.stat().st_size != facts["size"]:
                return f"{file} has {file.stat().st_size} bytes instead of {facts['size']}"
            if sha256(file) != facts["sha256"]:
                return f"{file} has changed since it was written (sha256 differs)"
    except OSError as error:
        return f"{error.filename or manifest_path} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest_path} is not a manifest"
    return None


def whole(folder: Path, step: int | None) -> Checkpoint | None:
    """The checkpoint of a step, if there is one and it verifies."""
    path = folder / f"step-{step}"
    return None if step is None or verify(path) else Checkpoint(path, step)


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    for step in _steps(folder)[keep:]:
        if step != best:
            shutil.rmtree(folder / f"step-{step}")


def drop_after(folder: Path, step: int) -> None:
    """Remove all that is newer than `step`, newest first: a run goes on from there."""
    for newer in _steps(folder):
        if newer > step:
            shutil.rmtree(folder / f"step-{newer}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file in place of an old one, whole or not at all, down to the disk."""
    aside = path.with_name(path.name + ".tmp")
    try:
        _write_tensors(aside, tensors)
        aside.replace(path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            aside.unlink()
        raise CheckpointError(disk_message(path, error)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; what is wrong with it is named."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"no weights at {path}") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    aside = path.with_name(path.name + ".tmp")
    try:
        _write(aside, json.dumps(value, indent=1, ensure_ascii=False).encode())
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise CheckpointError(disk_message(path, error)) from error


def check_room(path: Path, parameters: int, *, averaged: bool) -> None:
    """Refuse to begin where not even the first checkpoint and the model fit on the disk."""
    copies = 4 + averaged  # weights, two moments and their mean; and the model that is kept
    needed, free = 4 * copies * parameters, shutil.disk_usage(_existing(path)).free
    if needed > free:
        raise CheckpointError(
            f"{path} needs {needed / 1e6:,.0f} MB for a checkpoint and the model; "
            f"{free / 1e6:,.0f} MB are free\nmake room, or name another place with --out"
        )


def disk_message(path: Path, error: Exception) -> str:
    """Why a file cannot be written, and how much room there is."""
    free = shutil.disk_usage(_existing(path)).free / 1e6
    inner = re.search(r"I/O error: (.+?) \(os error", str(error))  # as safetensors words it
    reason = inner[1] if inner else getattr(error, "strerror", None) or str(error)
    return f"cannot write {path}: {reason} ({free:,.0f} MB free)"


def _existing(path: Path) -> Path:
    while not path.is_dir():
        path = path.parent
    return path


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    ready = {n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}
    save_file(ready, path, metadata={"format": "pt"})  # one entry: of two, the order is random
    path.chmod(0o644)  # the library makes it readable for its owner only
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None


def _steps(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint, whole or not, newest first."""
    found = map(_step_of, folder.glob("step-*"))
    return sorted((step for step in found if step is not None), reverse=True)
