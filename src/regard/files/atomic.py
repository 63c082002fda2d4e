"""Atomic writes: a file or folder appears under its name complete, or not at all.

Everything is written next to its destination as `.NAME.tmp-PID@HOST` and then renamed. A process
that is killed leaves that temporary file or folder behind; `remove_leftovers` deletes it.
"""

import json
import os
import platform
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from regard.errors import CheckpointError, ConfigError
from regard.files.disk_space import write_error_message
from regard.files.fault_injection import inject_fault

ABANDONED_AFTER = 86_400  # seconds; then a temporary file of another machine counts as abandoned


def require_new_path(path: Path, hint: str) -> None:
    """Raise if the path exists (files are never overwritten) or cannot be created."""
    try:
        exists = path.exists()
    except OSError as error:
        raise CheckpointError(f"cannot access {path}: {error.strerror}") from None
    if exists:
        raise ConfigError(f"{path} exists already and is not overwritten;\n{hint}")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise CheckpointError(f"cannot write {path}: {parent} is a file, not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"cannot write {path}: {parent} is not writable")


def temporary_path(path: Path) -> Path:
    """The temporary path that this process renames to `path`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}@{platform.node()}")


@contextmanager
def atomic_file(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path; the file that is written there replaces `path` at the end.

    With `sync`, the file is synced to disk before it is renamed. On any error `path` is unchanged.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        if sync:
            sync_to_disk(temporary)
        temporary.replace(path)
        if sync:
            sync_to_disk(path.parent)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(write_error_message(path, error)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write a JSON file atomically."""
    with atomic_file(path, sync=sync) as temporary:
        temporary.write_bytes(json.dumps(value, indent=1, ensure_ascii=False).encode())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new temporary folder, which is renamed to `path` at the end.

    An error or SIGTERM removes the temporary folder. After SIGKILL it remains, and the next attempt
    to write `path` removes it.
    """
    temporary = temporary_path(path)
    with _exit_on_sigterm():
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            remove_leftovers(path.parent, path.name)
            temporary.mkdir(parents=True)
            yield temporary
            inject_fault("new")
            temporary.rename(path)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(write_error_message(path, error)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(folder: Path, name: str | None = None, *, locked: bool = False) -> None:
    """Delete the temporary files and folders that killed processes left in `folder`.

    By default, those whose process has ended, and those of another machine that are a day old are
    deleted. If the caller holds a lock on `folder` (`locked`), all are deleted. With `name`, only
    temporary versions of `folder / name` are deleted.
    """
    pattern = ".+" if name is None else re.escape(name)
    for leftover in folder.glob(".*.tmp-*"):
        with suppress(OSError):
            is_temporary = re.fullmatch(rf"\.{pattern}\.tmp-\d+@.*", leftover.name)
            if is_temporary and (locked or _is_abandoned(leftover)):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _is_abandoned(path: Path) -> bool:
    pid, _, host = path.name.rpartition(".tmp-")[2].partition("@")
    if host != platform.node() or os.name == "nt":  # os.kill(pid, 0) ends a process on Windows
        files = (path, *path.iterdir()) if path.is_dir() else (path,)
        return time.time() - max(file.stat().st_mtime for file in files) > ABANDONED_AFTER
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # a running process of another user, or a name of another format
        pass
    return False


def sync_to_disk(path: Path) -> None:
    """fsync a file, or a folder, which makes its directory entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises SystemExit, so that every `finally` runs."""
    is_main = threading.current_thread() is threading.main_thread()  # required by `signal`
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal_number, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    raise SystemExit(128 + signal_number)
