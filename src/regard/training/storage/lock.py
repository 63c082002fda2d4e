"""A lock file: flock, which the operating system releases when the process ends."""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regard.errors import CheckpointError
from regard.files.disk_space import disk_message

if sys.platform != "win32":
    import fcntl


@contextmanager
def hold_lock(file: Path) -> Iterator[None]:
    """A context in which this process holds the lock; the file contains its pid and host."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(disk_message(file, error)) from error
    try:
        advice = _acquire(file, handle)
        if advice is not None:
            raise CheckpointError(
                f"{file.parent} is being trained already, by process {_read_owner(handle)};\n"
                f"{advice}"
            )
        _write_owner(handle, f"{os.getpid()} on {platform.node()}")
        try:
            yield
        finally:
            _write_owner(handle, "")
    finally:
        os.close(handle)


def _acquire(file: Path, handle: int) -> str | None:
    """Acquire the lock and return None; if another process holds it, return advice."""
    if sys.platform != "win32":
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "wait until it ends, or stop it"
        except OSError:  # a file system without locks: use the pid in the file
            if _may_run(_read_owner(handle)):
                return f"wait until it ends; if it does not run any more, remove {file}"
    return None


def _may_run(owner: str) -> bool:
    """Whether the process may still run; on another host that is unknown."""
    pid, _, host = owner.partition(" on ")
    if host != platform.node() or not pid.isdigit():
        return bool(owner)
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # a process of another user
    return True


def _read_owner(handle: int) -> str:
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, 200).decode(errors="replace")


def _write_owner(handle: int, name: str) -> None:
    with suppress(OSError):  # the disk may be full
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, name.encode())
