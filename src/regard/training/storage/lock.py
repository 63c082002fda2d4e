"""The lock of a run folder: flock, which the operating system releases when the process ends.

Local file systems: the folder itself is locked, so that deleting a file does not release the lock.
NFS cannot lock folders: the file `lock` is locked, which excludes other machines too, and the
holder must check that nobody has deleted it. File systems without flock: the run is locked while
the process that the file `lock` names is alive. Windows: nothing is locked.
"""

import errno
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from regard.errors import CheckpointError
from regard.files.directory import Directory
from regard.files.disk_space import write_error_message

if sys.platform != "win32":
    import fcntl

LOCK = "lock"
logger = logging.getLogger(__name__)


@contextmanager
def hold_lock(directory: Directory) -> Iterator[Callable[[], bool]]:
    """A context in which this process holds the lock.

    Yields a function that returns whether the lock was lost: only where folders cannot be locked,
    and someone has deleted or replaced the file `lock`.
    """
    locks_folder = _flock(directory.descriptor)
    if locks_folder is False:
        raise _held_error(directory, "wait until it ends, or stop it")
    try:
        with _open_file(directory) as descriptor:
            locks_file = _flock(descriptor)
            if locks_file is False:
                raise _held_error(directory, "wait until it ends, or stop it")
            if not (locks_folder or locks_file):
                _check_owner(directory, descriptor)
            _write_owner(descriptor, f"{os.getpid()} on {platform.node()}")
            try:
                yield lambda: not locks_folder and not _is_lock_file(directory, descriptor)
            finally:
                _write_owner(descriptor, "")
    finally:
        _unlock(directory.descriptor)


@contextmanager
def _open_file(directory: Directory) -> Iterator[int]:
    try:
        descriptor = directory.open_descriptor(LOCK, os.O_RDWR | os.O_CREAT)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(write_error_message(directory.path / LOCK, error)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _flock(descriptor: int | None) -> bool | None:
    """Lock an open file or folder; False: another process holds the lock; None: unsupported."""
    if sys.platform == "win32" or descriptor is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # NFS: EBADF for a folder; a file system without locks: ENOLCK
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _unlock(descriptor: int | None) -> None:
    if sys.platform != "win32" and descriptor is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _held_error(directory: Directory, advice: str) -> CheckpointError:
    owner = ""
    with suppress(OSError), directory.open_reader(LOCK) as file:
        owner = _read_owner(file.fileno())
    by = f"process {owner}" if owner else "another process"
    return CheckpointError(f"{directory.path} is in use by {by};\n{advice}")


def _check_owner(directory: Directory, descriptor: int) -> None:
    """Without locks: raise if the process named in the file may still run."""
    if sys.platform == "win32":
        logger.warning(
            "on Windows a run folder is not locked: do not train twice in %s", directory.path
        )
    elif _may_be_alive(_read_owner(descriptor)):
        file = directory.path / LOCK
        advice = f"wait until it ends; if it no longer runs, remove {file}"
        raise _held_error(directory, advice)


def _may_be_alive(owner: str) -> bool:
    """Whether the process may still be alive; a process on another host always may be."""
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


def _is_lock_file(directory: Directory, descriptor: int) -> bool:
    """Whether the file `lock` in the folder is still the open file."""
    try:
        other = directory.open_descriptor(LOCK)
    except OSError:
        return False
    try:
        return os.path.sameopenfile(other, descriptor)
    finally:
        os.close(other)


def _read_owner(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, 200).decode(errors="replace")


def _write_owner(descriptor: int, name: str) -> None:
    with suppress(OSError):  # the disk may be full
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, name.encode())
