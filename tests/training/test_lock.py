"""One process at a time, also where the system keeps no locks."""

import errno
import os
import platform
import subprocess
import sys

import pytest

from regard.errors import CheckpointError
from regard.files.directory import Directory
from regard.training.storage.lock import hold_lock

fcntl = pytest.importorskip("fcntl")


@pytest.fixture
def dead():
    """The number of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


@pytest.fixture(params=[True, False], ids=["with locks", "without"])
def file(request, tmp_path, monkeypatch):
    """A lock, on a file system that keeps locks, and on one that does not."""

    def unable(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    if not request.param:
        monkeypatch.setattr(fcntl, "flock", unable)
    return tmp_path / "lock"


def test_the_second_is_refused_by_the_name_of_the_first(file):
    with hold_lock(Directory(file.parent)):
        name = f"{os.getpid()} on {platform.node()}"
        assert file.read_text() == name
        with pytest.raises(CheckpointError, match=f"{file.parent} is in use by process {name};"):
            hold_lock(Directory(file.parent)).__enter__()
        assert file.read_text() == name
    with pytest.raises(ZeroDivisionError), hold_lock(Directory(file.parent)):
        raise ZeroDivisionError
    with hold_lock(Directory(file.parent)):
        pass


def test_what_a_dead_process_left_is_taken_over(file, dead):
    file.write_text(f"{dead} on {platform.node()}")
    with hold_lock(Directory(file.parent)):
        assert file.read_text().startswith(f"{os.getpid()} on ")


def test_a_name_of_another_machine_holds_only_where_there_are_no_locks(file, request):
    file.write_text("1 on elsewhere")
    if "without" in request.node.name:
        with pytest.raises(CheckpointError, match=f"process 1 on elsewhere;\n.*remove {file}"):
            hold_lock(Directory(file.parent)).__enter__()
        file.unlink()
    with hold_lock(Directory(file.parent)):
        pass
