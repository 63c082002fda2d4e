"""One process at a time: by the system's lock, which dies with its owner."""

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
def locked(file: Path) -> Iterator[None]:
    """Inside, no other process has this file, which names the one that does."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(disk_message(file, error)) from error
    try:
        way_out = _taken(file, handle)
        if way_out is not None:
            raise CheckpointError(
                f"{file.parent} is being trained already, by process {_owner(handle)};\n{way_out}"
            )
        _sign(handle, f"{os.getpid()} on {platform.node()}")
        try:
            yield
        finally:
            _sign(handle, "")
    finally:
        os.close(handle)


def _taken(file: Path, handle: int) -> str | None:
    """What to do when another process has it; None when it is ours."""
    if sys.platform != "win32":
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "wait until it ends, or stop it"
        except OSError:  # some network file systems keep no locks: go by the name the last one left
            if _lives(_owner(handle)):
                return f"wait until it ends; if it runs no more, remove {file}"
    return None


def _lives(owner: str) -> bool:
    """Whether the process of this name may still run: of another machine nobody knows."""
    number, _, machine = owner.partition(" on ")
    if machine != platform.node() or not number.isdigit():
        return bool(owner)
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # somebody else's
    return True


def _owner(handle: int) -> str:
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, 200).decode(errors="replace")


def _sign(handle: int, name: str) -> None:
    with suppress(OSError):  # a full disk keeps no names
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, name.encode())
