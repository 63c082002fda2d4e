"""A small disk that can be filled without asking anybody, and one that becomes read-only."""

import errno
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A file system of its own, in a mount namespace that ends with its shell."""

    def __init__(self, shell, at):
        self.shell = shell
        self.at = at  # as the shell sees it
        self.path = Path(f"/proc/{shell.pid}/root{at}")  # as all others do

    def run(self, command):
        """Let the shell run a command."""
        self.shell.stdin.write(f"{command} && echo done || echo failed\n")
        self.shell.stdin.flush()
        return self.shell.stdout.readline() == "done\n"

    def fill(self, *, leaving):
        """Leave only so many bytes free."""
        (self.path / "filler").write_bytes(bytes(shutil.disk_usage(self.path).free - leaving))

    def make_room(self):
        """Remove what filled it."""
        (self.path / "filler").unlink()


@contextmanager
def read_only():
    """As if every disk were read-only now, also through directories that are open already.

    A mount cannot be made read-only while a run has it open, as a failing disk can.
    """
    with pytest.MonkeyPatch.context() as patch:
        opens = os.open

        def refuse(path, *_, **__):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

        def open_to_read(path, flags, *args, **options):
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                refuse(path)
            return opens(path, flags, *args, **options)

        patch.setattr(os, "open", open_to_read)
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "link"):
            patch.setattr(os, name, refuse)
        yield


@contextmanager
def mounted(at, size):
    """A disk of so many bytes; where namespaces are not to be had, the test is skipped."""
    if not shutil.which("unshare"):
        pytest.skip("no `unshare` to mount a small disk with")
    with subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as shell:
        try:
            disk = Disk(shell, at)
            at.mkdir()
            try:
                there = disk.run(f"mount -t tmpfs -o size={size} tmpfs {at}")
            except BrokenPipeError:
                there = False
            if not there:
                pytest.skip("this system lets nobody mount a small disk")
            yield disk
        finally:
            shell.kill()
