"""A folder that is held open: all writes through it go into this folder only.

Names are opened relative to the folder's descriptor (`dir_fd`), symbolic links are not followed,
and only regular files are opened. A link in the folder cannot lead a write outside it. If
the folder is moved, writes follow it and do not go to a folder that replaces it.

Windows has no directory descriptors. There the folder is opened by its path each time, and links
are rejected only by a check before a file is opened.
"""

import errno
import io
import json
import os
import re
import shutil
import stat
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import CheckpointError
from regard.files.atomic import temporary_path
from regard.files.disk_space import write_error_message

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# O_NONBLOCK: a FIFO that takes the place of a file after the check must not block.
FILE_FLAGS = NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
HAS_DESCRIPTORS = os.open in os.supports_dir_fd
LINK = "a symbolic link"
KINDS = {
    stat.S_IFLNK: LINK,
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


class Directory:
    """An open folder; names of files and folders in it are single path components."""

    def __init__(self, path: Path, parent: "Directory | None" = None) -> None:
        """Open `path`, which may be a symbolic link to a folder; folders inside it may not."""
        self.path = path
        self._absolute = path.absolute()  # the working directory may change
        self.descriptor: int | None = None
        try:
            if HAS_DESCRIPTORS:
                flags = os.O_RDONLY | os.O_DIRECTORY | (NOFOLLOW if parent else 0)
                base = parent.descriptor if parent else None
                self.descriptor = os.open(path.name if parent else path, flags, dir_fd=base)
                weakref.finalize(self, os.close, self.descriptor)
            self._identity = _identity(os.stat(self._path_or_descriptor))
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from None

    @property
    def _path_or_descriptor(self) -> int | Path:
        return self.path if self.descriptor is None else self.descriptor

    def _path_argument(self, name: str) -> str:
        """The path argument for functions that also take `dir_fd`."""
        assert Path(name).name == name, name
        return name if self.descriptor is not None else str(self.path / name)

    def is_at_its_path(self) -> bool:
        """Whether the path still leads to this folder: it was not moved, replaced or deleted."""
        try:
            return _identity(os.stat(self._absolute)) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # such as a network error; assume that the folder has not moved
            return True

    def is_deleted(self) -> bool:
        """Whether the folder was deleted, so that nothing can be written to it."""
        if self.descriptor is None:
            return not self.path.is_dir()
        return os.fstat(self.descriptor).st_nlink == 0

    def location(self) -> Path | None:
        """The current path of the folder; None if the system cannot tell."""
        if self.descriptor is None:
            return None
        try:
            if sys.platform == "darwin":
                import fcntl

                path = fcntl.fcntl(self.descriptor, fcntl.F_GETPATH, bytes(1024))
                return Path(os.fsdecode(path.rstrip(b"\0")))
            return Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        except OSError:
            return None

    def sync(self) -> None:
        """fsync the folder, which makes its directory entries durable."""
        if self.descriptor is not None:
            os.fsync(self.descriptor)

    def names(self) -> list[str]:
        """The names of all files and folders in this folder."""
        return os.listdir(self._path_or_descriptor)

    def kind(self, name: str) -> str | None:
        """'a file', 'a folder', 'a symbolic link', …; None if the name does not exist."""
        try:
            status = os.stat(
                self._path_argument(name), dir_fd=self.descriptor, follow_symlinks=False
            )
        except FileNotFoundError:
            return None
        return KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")

    def require_kind(self, name: str, expected: str) -> None:
        """Raise if the name exists and is not `expected`: "a file" or "a folder"."""
        kind = self.kind(name)
        if kind not in (None, expected):
            copy = " or replace it with a copy of its target" if kind == LINK else ""
            raise CheckpointError(
                f"{self.path / name} is {kind} and must be {expected}: nothing is written outside "
                f"the folder\nremove it{copy}"
            )

    def open_folder(self, name: str) -> "Directory":
        """Open a subfolder, which is created if it does not exist."""
        self.require_kind(name, "a folder")
        with suppress(FileExistsError):
            os.mkdir(self._path_argument(name), dir_fd=self.descriptor)
        return Directory(self.path / name, self)

    def open_descriptor(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a regular file and return its descriptor; the umask sets the mode of a new file."""
        self.require_kind(name, "a file")
        try:
            flags |= FILE_FLAGS
            descriptor = os.open(self._path_argument(name), flags, 0o666, dir_fd=self.descriptor)
        except OSError as error:
            # ELOOP, ENXIO, EISDIR: the file was replaced after the check
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            raise CheckpointError(f"{self.path / name} is not a regular file") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{self.path / name} is not a regular file")
        return descriptor

    def open_reader(self, name: str) -> io.BufferedReader:
        """Open a file for reading."""
        return os.fdopen(self.open_descriptor(name), "rb")

    def create(self, name: str) -> BinaryIO:
        """Open a new file; an existing file of this name is removed, not written to."""
        self.remove(name)
        return os.fdopen(self.open_descriptor(name, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b")

    def append(self, name: str, content: bytes) -> None:
        """Append to a file, which is created if it does not exist."""
        with self._open_to_modify(name, os.O_CREAT | os.O_APPEND) as file:
            file.write(content)

    def truncate(self, name: str, size: int) -> None:
        """Make a file at most `size` bytes long; it is created if it does not exist."""
        with self._open_to_modify(name, os.O_CREAT) as file:
            file.truncate(min(size, os.fstat(file.fileno()).st_size))

    def _open_to_modify(self, name: str, flags: int) -> BinaryIO:
        """Open a file to change it in place.

        A file with further hard links, perhaps outside the folder, is first replaced with a copy,
        so that the file under its other names is not changed.
        """
        descriptor = self.open_descriptor(name, os.O_RDWR | flags)
        if os.fstat(descriptor).st_nlink > 1:
            with os.fdopen(descriptor, "rb") as shared, self.atomic(name, sync=False) as copy:
                shutil.copyfileobj(shared, copy)
            descriptor = self.open_descriptor(name, os.O_RDWR | flags)
        return os.fdopen(descriptor, "r+b")

    @contextmanager
    def atomic(self, name: str, *, sync: bool = True) -> Iterator[BinaryIO]:
        """Yield a new file, which replaces the file `name` at the end; on errors nothing changes.

        With `sync`, it is synced to disk before it is renamed.
        """
        self.require_kind(name, "a file")
        temporary = temporary_path(self.path / name).name
        try:
            with self.create(temporary) as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            self.replace(temporary, name)
            if sync:
                self.sync()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(write_error_message(self.path / name, error)) from error
        finally:
            with suppress(OSError):
                self.remove(temporary)

    def write_json(self, name: str, value: Any, *, sync: bool = True) -> None:
        """Write a JSON file atomically."""
        with self.atomic(name, sync=sync) as file:
            file.write(json.dumps(value, indent=1, ensure_ascii=False).encode())

    def replace(self, name: str, new: str) -> None:
        """Rename a file or a folder; a file of the new name is replaced."""
        base = self.descriptor
        os.replace(
            self._path_argument(name), self._path_argument(new), src_dir_fd=base, dst_dir_fd=base
        )

    def remove(self, name: str) -> None:
        """Remove a file, a link (not its target) or a folder with all its contents."""
        if self.kind(name) == "a folder":
            shutil.rmtree(self._path_argument(name), dir_fd=self.descriptor)
        else:
            with suppress(FileNotFoundError):
                os.unlink(self._path_argument(name), dir_fd=self.descriptor)

    def remove_leftovers(self, is_known_name: Callable[[str], bool]) -> None:
        """Remove temporary files of atomic writes whose final name satisfies `is_known_name`."""
        for name in self.names():
            match = re.fullmatch(r"\.(.+)\.tmp-\d+@.*", name)
            if match and is_known_name(match[1]):
                with suppress(OSError):
                    self.remove(name)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
