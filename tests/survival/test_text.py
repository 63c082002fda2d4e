"""Text as people have it: it is learned from, or refused with file, line and byte."""

import gzip
import os

import pytest

from cli.conftest import invoke

WORDS = ["model.dim=16", "model.layers=1", "model.heads=2", "train.batch=2", "train.steps=1"]
PROSE = "".join(f"the {n}th cat sat on the mat, and so did {n + 1} dogs\n" for n in range(60))


@pytest.fixture
def train(capsys, tmp_path, monkeypatch):
    """Train on a path; what was said."""
    monkeypatch.chdir(tmp_path)
    return lambda path, *words: invoke(capsys, "train", path, *WORDS, *words)


GOOD = {
    "plain": (PROSE.encode(), "text, 1 file, 2.9 kB;"),
    "a byte order mark": (b"\xef\xbb\xbf" + PROSE.encode(), "skipped: its byte order mark"),
    "lines of Windows": (PROSE.replace("\n", "\r\n").encode(), "text, 1 file, 2.9 kB;"),
    "gzip by another name": (gzip.compress(PROSE.encode()), "text, 1 file, 2.9 kB;"),
    "many empty lines": (PROSE.encode() + b"\n" * 200_000, "text, 1 file, 202.9 kB;"),
    "one long line": (("na\u00efve " * 20_000).encode(), "text, 1 file, 140.0 kB;"),
    "no line end": (PROSE.replace("\n", " ").encode(), "text, 1 file, 2.9 kB;"),
}
BAD = {
    "nothing": (b"", "my.txt is empty"),
    "a byte order mark alone": (b"\xef\xbb\xbf", "my.txt is empty"),
    "white space": (b" \n\t", "my.txt holds only whitespace (3 bytes)"),
    "a million empty lines": (b"\n" * 1_000_000, "my.txt holds only whitespace (1000000 bytes)"),
    "Latin-1": (b"one\ntwo\ncaf\xe9\n", "my.txt is not UTF-8: byte 11 (line 3) is 0xe9"),
    "half a character": (b"one\n\xc3", "my.txt is not UTF-8: byte 4 (line 2) is 0xc3"),
    "a lone surrogate": (b"one\n\xed\xa0\x80\n", "my.txt is not UTF-8: byte 4 (line 2) is 0xed"),
    "NUL": (b"one\ntw\0o\n", "my.txt is binary, not text: byte 6 (line 2) is NUL"),
    "UTF-16": ("one".encode("utf-16"), "my.txt is UTF-16"),
    "half a gzip": (gzip.compress(os.urandom(999))[:500], "my.txt is a corrupted gzip file"),
    "one letter": (b"x", "1 byte is too few for a validation fraction"),
}


@pytest.mark.parametrize("case", GOOD)
def test_what_is_text_is_learned_from_and_told(case, train, tmp_path):
    content, told = GOOD[case]
    (tmp_path / "my.txt").write_bytes(content)
    said = train("my.txt", "model.context=8", "data.tokenizer=char")
    assert said.code == 0, said.err
    assert told in said.err


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_is_refused_with_file_line_and_byte(case, train, tmp_path):
    content, told = BAD[case]
    (tmp_path / "my.txt").write_bytes(content)
    said = train("my.txt")
    assert said.code == 3, said.err
    assert said.out == ""
    complaint = said.err[said.err.index("regard: ") :]
    assert told in complaint
    assert len(complaint.splitlines()) <= 5
    assert not (tmp_path / "runs").exists()


def test_a_text_shorter_than_the_context_says_what_would_fit(train, tmp_path):
    (tmp_path / "my.txt").write_text(PROSE[:60])
    said = train("my.txt", "model.context=64", "data.tokenizer=char")
    assert said.code == 3
    assert "the text has 54 tokens, but one block of model.context=64 needs 65" in said.err
    assert "model.context=53 or less" in said.err
    said = train("my.txt", "data.tokenizer=char")  # chosen to fit
    assert said.code == 0, said.err


def test_a_pipe_is_refused_and_not_waited_for(train, tmp_path):
    os.mkfifo(tmp_path / "my.txt")
    said = train("my.txt")
    assert said.code == 3
    assert "my.txt is a pipe or a device, not a file" in said.err


def test_of_a_folder_what_is_left_out_is_counted(train, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    said = train("mine")
    assert said.code == 3
    assert "holds no text files; skipped: nothing, it is empty" in said.err
    for number, (content, _) in enumerate([*GOOD.values(), *BAD.values()]):
        (folder / f"{number:02}.txt").write_bytes(content if len(content) < 5000 else b"")
    os.mkfifo(folder / "pipe")
    (folder / "gone").symlink_to("nowhere")
    (folder / ".hidden").write_text("x")
    said = train("mine", "model.context=8", "data.tokenizer=char")
    assert said.code == 0, said.err
    assert "text, 6 files" in said.err
    for told in (
        "2 binary",
        "1 corrupted gzip",
        "6 empty",
        "1 hidden",
        "1 missing",
        "1 not a file",
    ):
        assert told in said.err
    assert "3 not UTF-8 (11.txt, …)" in said.err


@pytest.mark.long
def test_a_line_of_fifty_megabytes_is_learned_from(train, tmp_path):
    (tmp_path / "my.txt").write_bytes("na\u00efve ".encode() * (50_000_000 // 7))
    said = train("my.txt", "model.context=8", "data.tokenizer=bpe")
    assert said.code == 0, said.err
    assert "text, 1 file, 50.0 MB;" in said.err
