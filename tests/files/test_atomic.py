"""A folder written aside: there whole, or not at all."""

import os
import platform
import signal
import subprocess
import sys
import threading

import pytest

from regard.errors import CheckpointError, ConfigError
from regard.files.atomic import atomic_folder, require_new_path


def test_what_was_written_aside_is_there_at_the_end_only(tmp_path):
    with atomic_folder(tmp_path / "new") as folder:
        (folder / "file").write_text("content")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "content"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (OSError(28, "No space left on device"), CheckpointError),
        (ConfigError("no"), ConfigError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_whatever_fails_leaves_nothing(error, seen, tmp_path):
    with pytest.raises(seen), atomic_folder(tmp_path / "new"):
        raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_being_told_to_end_leaves_nothing(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, atomic_folder(tmp_path / "new"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


def test_beside_the_main_thread_it_works_without_signals(tmp_path):
    def write():
        with atomic_folder(tmp_path / "new"):
            pass

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert (tmp_path / "new").is_dir()


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_what_a_kill_left_is_swept_away_by_the_next_attempt_and_a_living_one_is_not(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    for owner in (dead.pid, os.getppid()):
        (tmp_path / f".new.tmp-{owner}@{platform.node()}").mkdir()
    (tmp_path / ".new.tmp-notes").touch()  # not one of ours
    os.utime(tmp_path / ".new.tmp-notes", (0, 0))
    with atomic_folder(tmp_path / "new"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".new.tmp-{os.getppid()}@{platform.node()}",
        ".new.tmp-notes",
        "new",
    ]


def test_what_exists_is_never_written_over(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)exists already.*take another"):
        require_new_path(tmp_path, "take another")
    with pytest.raises(CheckpointError, match="File name too long"):
        require_new_path(tmp_path / ("x" * 300), "take another")
