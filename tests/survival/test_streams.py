"""Streams that are closed or full, homes that cannot be written, words of any bytes and length."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import TEXT_WORDS, invoke, trained
from regard.cli.output import write_file
from regard.errors import CheckpointError, ConfigError, shorten
from regard.files import cache
from regard.training.events import RunStarted
from regard.training.run import begin, resume
from training.runs import Crash, config, interrupt

LONG = "x" * 5000


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("streams") / "run", data / "cats.txt", TEXT_WORDS)


def shell(redirections, *words):
    """The exit code, stdout and stderr of `regard WORDS` with these redirections."""
    command = [sys.executable, "-m", "regard", *map(str, words)]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("redirections", "code"), [("2>/dev/full", 0), (">&- 2>&- <&-", 1)])
def test_training_goes_on_when_nothing_can_be_said(data, tmp_path, redirections, code):
    words = ("train", data / "cats.txt", *TEXT_WORDS, "train.baseline=false")
    got, out, _ = shell(redirections, *words, "--out", tmp_path / "run")
    assert got == code  # of a result that could not be written
    assert ("perplexity" in out) == (code == 0)
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("redirections", "words", "code", "message"),
    [
        (">/dev/full", ["--help"], 1, "cannot write the result to stdout: No space left on device"),
        (">&-", ["info", "gpt2"], 1, "cannot write the result to stdout: it is closed"),
        ("2>&-", ["info", "nonesuch"], 2, None),
        ("<&-", ["generate", "run", "-"], 3, "cannot read stdin: Bad file descriptor"),
    ],
)
def test_exit_code_and_one_sentence(redirections, words, code, message):
    got = shell(redirections, *words)
    assert got[0] == code
    assert got[2] == ("" if message is None else f"regard: {message}\n")


@pytest.mark.parametrize(
    "words",
    [
        ["info", LONG],
        ["generate", LONG, "the"],
        ["train", LONG],
        ["train", f"{LONG}=3"],
        ["train", "{cats}", f"model.dim={LONG}"],
        ["train", "{cats}", "--out", LONG],
        ["train", "{cats}", f"--{LONG}"],
        ["generate", "{run}", "the", "-s", LONG],
        ["generate", "{run}", "the", "-s", "x " * 2500],
        ["explain", "{run}", "the", "--out", f"{LONG}.svg"],
    ],
)
def test_long_words_are_not_echoed(run, data, capsys, words):
    done = invoke(capsys, *(w.format(cats=data / "cats.txt", run=run) for w in words))
    assert done.code in (2, 3, 4)
    assert done.err.startswith("regard: ")
    assert len(done.err) < 1500


def test_short_messages_stay():
    message = f"{'w ' * 400}\n{'x' * 200}"
    assert shorten(message) == message
    assert str(ConfigError(LONG)) == str(CheckpointError(LONG)) == "x" * 100 + "…" + "x" * 100


@pytest.mark.parametrize("words", [["generate", "{run}"], ["train", "{cats}", "--out"]])
def test_words_that_are_not_utf8(run, data, capsys, words):
    words = [word.format(run=run, cats=data / "cats.txt") for word in words]
    done = invoke(capsys, *words, os.fsdecode(b"/the \xff"))
    assert done.code == 2
    assert "must be UTF-8, and character 6 of '/the \\udcff' is not\n" in done.err


def test_too_many_tokens(run, capsys):
    done = invoke(capsys, "generate", run, "the", "-n", 1_000_000_000_000)
    assert (done.code, done.out) == (2, "")
    assert done.err == "regard: max_new_tokens=1000000000000 must be at most 10,000,000\n"


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """A folder for temporary files; the cache may be anywhere."""
    monkeypatch.delenv("REGARD_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    cache._temporary_cache.cache_clear()
    yield tmp_path
    cache._temporary_cache.cache_clear()


@pytest.mark.parametrize("why", ["not a folder", "read-only", "none"])
def test_cache_falls_back_to_a_temporary_folder(temporary, monkeypatch, caplog, why):
    home = temporary / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    if why == "not a folder":
        (home / ".cache").write_text("")
    elif why == "read-only":
        monkeypatch.setattr(cache.os, "access", lambda path, mode: False)
    else:
        monkeypatch.setattr(cache.Path, "home", _no_home)
    folder, _ = cache.cached_folder("k", "key", lambda f: (f / "a").write_text("a") and None)
    assert "set REGARD_HOME to use another folder" in caplog.text
    assert folder == temporary / f"regard-{os.getuid()}" / "k" / "key"
    assert stat.S_IMODE((temporary / f"regard-{os.getuid()}").stat().st_mode) == 0o700


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_temporary_cache_of_somebody_else_is_not_used(temporary):
    planted = temporary / f"regard-{os.getuid()}"
    (temporary / "elsewhere").mkdir()
    planted.symlink_to(temporary / "elsewhere")
    assert cache._temporary_cache("of a test") != planted


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_umask_holds_for_weights(data, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        list(begin(config(data / "cats.txt", steps=2), tmp_path / "run"))
    finally:
        os.umask(before)
    weights = [tmp_path / "run" / "model.safetensors"]
    weights += (tmp_path / "run").glob("checkpoints/*/*.safetensors")
    assert len(weights) > 1
    assert {stat.S_IMODE(file.stat().st_mode) for file in weights} == {mode}


def test_failed_picture_leaves_no_file(tmp_path, monkeypatch):
    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_file(tmp_path / "a.svg", b"<svg/>")
    assert not list(tmp_path.iterdir())


def test_changed_thread_count_is_said(data, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Crash):
            list(begin(config(data / "cats.txt", steps=6, threads=1), tmp_path / "run"))
    same, other = (
        next(e for e in resume(tmp_path / "run", over) if isinstance(e, RunStarted)).description
        for over in ({}, {"train": {"threads": 2}})
    )
    assert not any("threads" in line for line in same)
    assert "threads    is now 2 and was 1 when the run began" in other[-1]
