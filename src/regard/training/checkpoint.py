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
            write_tensors(aside / f"{name}.safetensors", group)
        _write(aside / "state.json", json.dumps(state, indent=1).encode())
        files = {
            path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(aside.iterdir())
        }
        manifest = {"format": FORMAT, "step": step, "torch": torch.__version__, "files": files}
        _write(aside / "MANIFEST.json", json.dumps(manifest, indent=1).encode())
        _sync_folder(aside)
        shutil.rmtree(final, ignore_errors=True)  # only ever a damaged one of the same step
        aside.rename(final)
        _sync_folder(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(_disk_message(final, error)) from error
    return Checkpoint(final, step)


def latest(folder: Path, step: int | None = None) -> Checkpoint | None:
    """The newest checkpoint, or that of `step`; damage is an error that offers the one before."""
    for left in folder.glob("step-*.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)  # of a run that was killed while writing
    steps = sorted((n for n in map(_step_of, folder.glob("step-*")) if n is not None), reverse=True)
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
        for name, facts in files.items():
            file = path / name
            if not file.exists():
                return f"{file} is missing"
            if file.stat().st_size != facts["size"]:
                return f"{file} has {file.stat().st_size} bytes instead of {facts['size']}"
            if _sha256(file) != facts["sha256"]:
                return f"{file} has changed since it was written (sha256 differs)"
    except OSError as error:
        return f"{error.filename or manifest_path} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest_path} is not a manifest"
    return None


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    steps = sorted(n for n in map(_step_of, folder.glob("step-*")) if n is not None)
    for step in steps[: max(len(steps) - keep, 0)]:
        if step != best:
            shutil.rmtree(folder / f"step-{step}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file in place of an old one, whole or not at all, down to the disk."""
    aside = path.with_name(path.name + ".tmp")
    try:
        ready = {n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}
        save_file(ready, aside, metadata={"format": "pt"})
        aside.chmod(0o644)  # the library makes it readable for its owner only
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(_disk_message(path, error)) from error


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
        aside.unlink(missing_ok=True)
        raise CheckpointError(_disk_message(path, error)) from error


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


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None


def _disk_message(path: Path, error: Exception) -> str:
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e6
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"cannot write {path}: {reason} ({free:,.0f} MB free)\nearlier checkpoints are untouched"
