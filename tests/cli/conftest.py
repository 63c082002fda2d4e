"""The command line in this process, and two small runs that all tests share."""

import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from regard.cli import main

TINY = ["model.dim=16", "model.layers=1", "model.heads=2", "train.batch=2"]
TEXT_WORDS = [*TINY, "model.context=8", "train.steps=4"]
PAIR_WORDS = [*TINY, "model.context=32", "train.steps=2", "data.tokenizer=char"]


@dataclass(frozen=True)
class Completed:
    code: int
    out: str
    err: str


def invoke(capture, *words):
    with pytest.raises(SystemExit) as exit:
        main([str(word) for word in words])
    out, err = capture.readouterr()
    return Completed(exit.value.code or 0, out, err)


@pytest.fixture
def regard(capsys, tmp_path, monkeypatch):
    """Run a command in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: invoke(capsys, *words)


@pytest.fixture
def stdin(monkeypatch):
    """Give bytes to stdin."""

    def give(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


@pytest.fixture(scope="session")
def materials(tmp_path_factory):
    """A text and a table of pairs."""
    folder = tmp_path_factory.mktemp("materials")
    lines = [f"the {n}th cat sat on the mat, and so did {n + 1} dogs\n" for n in range(60)]
    (folder / "cats.txt").write_text("".join(lines))
    pairs = [f"{n} cats\t{n} chats\n" for n in range(100, 200)]
    (folder / "pairs.tsv").write_text("".join(pairs))
    return folder


def shell(*words, **options):
    """`regard` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "regard", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **options)


def trained(folder, what, words):
    with pytest.raises(SystemExit) as exit:
        main(["train", str(what), *words, "--out", str(folder), "--quiet"])
    assert not exit.value.code
    return Path(folder)


@pytest.fixture(scope="session")
def text_run(materials, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "cats", materials / "cats.txt", TEXT_WORDS)


@pytest.fixture(scope="session")
def pair_run(materials, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "pairs", materials / "pairs.tsv", PAIR_WORDS)
