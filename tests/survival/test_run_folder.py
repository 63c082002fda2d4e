"""Run folders from strangers, moved and shared ones: nothing is written or removed outside them."""

import errno
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from regard.errors import CheckpointError
from regard.files.directory import Directory
from regard.training import run as training
from regard.training.run import begin, resume
from regard.training.storage import checkpoint
from regard.training.storage.run_folder import FILES, FOLDERS, RunFolder
from training.runs import config, contents

fcntl = pytest.importorskip("fcntl")  # dir_fd, FIFOs and locks: not on Windows
MORE = {"train": {"steps": 7}}
TREASURE = "not yours\n" * 100


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run of 6 steps with checkpoints of steps 2, 4 and 6, not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = config(
        data / "cats.txt", steps=6, save_every=2, evaluate_every=3, keep_checkpoints=3
    )
    list(begin(settings, folder))
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def outside(tmp_path):
    """A folder of somebody else, with a file and a folder that looks like a checkpoint."""
    folder = tmp_path / "outside"
    (folder / "step-1").mkdir(parents=True)
    for name in ("file", "step-1/model.safetensors"):
        (folder / name).write_text(TREASURE)
    return folder


def state_of(folder):
    """Everything in a folder, without following links: name, kind, content or target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if path.is_symlink():
            content = os.readlink(path)
        else:
            content = path.read_bytes() if stat.S_ISREG(mode) else None
        found[str(path.relative_to(folder))] = (stat.S_IFMT(mode), content)
    return found


def bind_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            server.bind(path.name)
        finally:
            os.chdir(before)


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # /dev/null
    except PermissionError:
        pytest.skip("only root can make devices")


HOSTILE = {
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "new"),
    "FIFO": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: bind_socket(path),
    "folder": lambda path, outside: path.mkdir(),
    "device": lambda path, outside: make_device(path),
}
KINDS = {"link": "a symbolic link", "FIFO": "a FIFO", "socket": "a socket", "device": "a device"}


def replace(path, how, outside):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    HOSTILE[how](path, outside)


@pytest.mark.parametrize("how", HOSTILE)
def test_anything_in_place_of_a_file_is_refused_and_nothing_outside_changes(run, outside, how):
    """Each name in turn, then put back; `resume` neither hangs nor leaves a trace."""
    tried = 0
    aside = run.parent / "aside"
    for name in (*FILES, *FOLDERS, "tokenizer.json"):
        path = run / name
        if how == "folder" and name in FOLDERS:
            continue
        if path.exists():
            path.rename(aside)
        HOSTILE[how](path, outside)
        before, theirs = state_of(run), state_of(outside)
        with pytest.raises(CheckpointError) as raised:
            list(resume(run, MORE))
        assert str(run if name == "config.json" else path) in str(raised.value), name
        assert len(str(raised.value).splitlines()) <= 5
        after = state_of(run)
        after.pop("lock", None)
        before.pop("lock", None)
        assert after == before, name
        assert state_of(outside) == theirs, name
        path.rmdir() if how == "folder" else path.unlink()
        if aside.exists():
            aside.rename(path)
        tried += 1
    print(f"{how}: {tried} of {tried} refused")


def move_checkpoints(run, outside):
    """Valid checkpoints elsewhere, and a link to them."""
    (run / "checkpoints").rename(outside / "checkpoints")
    (run / "checkpoints").symlink_to(outside / "checkpoints")


LINKED_IN_CHECKPOINTS = {
    "all checkpoints": move_checkpoints,
    "the newest step": lambda run, outside: replace(
        run / "checkpoints/step-6", "link to a folder", outside
    ),
    "an old step": lambda run, outside: replace(
        run / "checkpoints/step-2", "link to a folder", outside
    ),
    "a later step": lambda run, outside: (run / "checkpoints/step-9").symlink_to(outside),
    "the next step": lambda run, outside: (run / "checkpoints/step-8").symlink_to(outside),
    "a temporary folder": lambda run, outside: (
        run / f"checkpoints/.step-8.tmp-{os.getpid()}@{os.uname().nodename}"
    ).symlink_to(outside),
    "a temporary file": lambda run, outside: (
        run / f".config.json.tmp-{os.getpid()}@{os.uname().nodename}"
    ).symlink_to(outside / "file"),
    "a file of the newest step": lambda run, outside: replace(
        run / "checkpoints/step-6/state.json", "link to a file", outside
    ),
}


@pytest.mark.parametrize("where", LINKED_IN_CHECKPOINTS)
def test_links_in_the_checkpoints_lead_nowhere(run, outside, where):
    LINKED_IN_CHECKPOINTS[where](run, outside)
    theirs = state_of(outside)
    try:
        list(resume(run, {"train": {"steps": 8, "keep_checkpoints": 1}}))
    except CheckpointError as error:
        assert "checkpoints" in str(error)  # noqa: PT017 -- some go on without the link
    assert state_of(outside) == theirs


def test_what_has_other_names_outside_keeps_its_content(run, outside):
    for name in ("metrics.jsonl", "samples.txt", "config.json", "clock.json"):
        os.link(run / name, outside / name)
    theirs = state_of(outside)
    list(resume(run, MORE))
    assert state_of(outside) == theirs
    assert len(RunFolder(run).rows()) > theirs["metrics.jsonl"][1].count(b"\n")


def test_what_is_not_ours_stays(run):
    """Files whose names resemble ours, in the folder, beside it and in the checkpoints."""
    notes = [
        run / name
        for name in (
            *(
                "mynotes.tmp",
                ".tmpnotes",
                ".mine.tmp-1@here",
                ".config.json.tmp-notes",
                "a.tmp-1@b",
            ),
            *("checkpoints/notes.txt", "checkpoints/.mine.tmp-1@here", "checkpoints/step-1.txt"),
            *("checkpoints/step-4/notes.txt", "checkpoints/step-x/notes.txt"),
        )
    ]
    for path in notes:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    leftover = run / "checkpoints" / ".step-5.tmp-1@here"
    leftover.mkdir()
    list(resume(run, {"train": {"steps": 8, "keep_checkpoints": 1}}))
    assert [path for path in notes if path.read_text() != "mine"] == []
    assert not leftover.exists()


def test_a_later_step_that_holds_something_else_is_not_dropped(run):
    note = run / "checkpoints" / "step-6" / "notes.txt"
    note.write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt is not part of a checkpoint\nmove it"):
        list(resume(run, step=4))
    assert note.exists()


def test_a_swap_between_check_and_use_is_not_followed(run, outside, monkeypatch):
    """A link that appears after the check is seen by the system call itself."""
    monkeypatch.setattr(Directory, "require_kind", lambda *words: None)
    theirs = state_of(outside)
    directory = Directory(run)
    for how in ("link to a file", "FIFO", "socket"):
        replace(run / "metrics.jsonl", how, outside)
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl is not a regular file"):
            directory.append("metrics.jsonl", b"x")
    replace(run / "checkpoints", "link to a folder", outside)
    with pytest.raises(CheckpointError, match=r"cannot open .*checkpoints"):
        directory.open_folder("checkpoints")
    (run / "model.safetensors").unlink()
    (run / "model.safetensors").symlink_to(outside / "file")
    directory.write_json("model.safetensors", {})  # replaces the link
    assert state_of(outside) == theirs


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_all_files_have_the_mode_of_the_umask(data, tmp_path, umask):
    before = os.umask(umask)
    try:
        list(begin(config(data / "cats.txt", steps=1), tmp_path / "run"))
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert {name: mode for name, mode in modes.items() if mode != 0o666 & ~umask} == {}
    assert "lock" in modes


def second(folder):
    """Resume the same folder from another thread of execution: it must be refused."""
    with pytest.raises(CheckpointError, match="is in use by") as raised:
        list(resume(folder, {"train": {"steps": 99}}))
    return str(raised.value)


def at_step(monkeypatch, number, action):
    """Do something right after a step of the next run."""
    train = training.train

    def acting(*words, **options):
        for step in train(*words, **options):
            if step.index + 1 == number:
                action()
            yield step

    monkeypatch.setattr(training, "train", acting)
    monkeypatch.setattr("regard.training.log.FLUSH_STEPS", 1)  # the folder is looked at then


def test_deleting_the_lock_file_lets_nobody_in(data, run, monkeypatch):
    said = []

    def delete():
        (run / "lock").unlink()
        said.append(second(run))

    at_step(monkeypatch, 7, delete)
    list(resume(run, {"train": {"steps": 8}}))
    assert said == [f"{run} is in use by another process;\nwait until it ends, or "
                    "stop it"]  # fmt: skip


def on_nfs(monkeypatch):
    """A file system that locks files, and not folders."""
    flock = fcntl.flock

    def limited(handle, how):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", limited)


def test_where_folders_cannot_be_locked_a_deleted_lock_file_ends_the_run(run, monkeypatch):
    on_nfs(monkeypatch)
    before = contents(run)
    with monkeypatch.context() as patch:
        at_step(patch, 7, (run / "lock").unlink)
        with pytest.raises(CheckpointError, match=r"lock was deleted or .*\n.*step 7, nothing"):
            list(resume(run, {"train": {"steps": 9}}))
    assert contents(run) == before
    at_step(monkeypatch, 8, lambda: second(run))
    list(resume(run, {"train": {"steps": 9}}))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The settings of a run of 8 steps, and that run undisturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    settings = config(
        data / "cats.txt", steps=8, save_every=3, evaluate_every=4, keep_checkpoints=9
    )
    list(begin(settings, folder))
    return settings, folder


@pytest.mark.parametrize(("replaced", "step"), [(False, 8), (True, 5)])
def test_a_folder_that_is_moved_is_noticed_and_saved(whole, tmp_path, monkeypatch, replaced, step):
    settings, undisturbed = whole
    path, moved = tmp_path / "run", tmp_path / "moved"

    def move():
        path.rename(moved)
        if replaced:
            shutil.copytree(undisturbed, path)

    at_step(monkeypatch, step, move)
    with pytest.raises(CheckpointError) as raised:
        list(begin(settings, path))
    told = f"stopped at step {step} and saved in the moved folder; resume with: "
    assert f"{path} is no longer the folder" in str(raised.value)
    assert told + f"regard resume {moved}" in str(raised.value)
    assert checkpoint.latest(moved / "checkpoints").step == step
    if replaced:
        assert contents(path) == contents(undisturbed)
    else:
        assert not path.exists()
    if step < 8:
        list(resume(moved))
        (moved / "checkpoints" / f"step-{step}").rename(tmp_path / "more")
    ours, theirs = contents(moved), contents(undisturbed)
    assert ours.items() >= {n: d for n, d in theirs.items() if n in ours}.items()


def test_a_folder_that_is_deleted_ends_the_run(whole, tmp_path, monkeypatch):
    settings, _ = whole
    at_step(monkeypatch, 5, lambda: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"run was deleted while .*step 5, nothing could be"):
        list(begin(settings, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_folder_may_be_reached_through_a_link_and_logs_may_be_deleted(run, tmp_path):
    (tmp_path / "latest").symlink_to(run)
    (run / "samples.txt").unlink()
    list(resume(tmp_path / "latest", MORE))
    assert checkpoint.latest(run / "checkpoints").step == 7
