"""Pairs that do not fit together: refused before anything is learned, with the counts of both."""

import numpy as np
import pytest

from cli.conftest import PAIR_WORDS, invoke
from regard.pipelines import pairs


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Train on what must be refused before a token is made; what was said."""
    monkeypatch.chdir(tmp_path)
    for name in ("train_pair", "pair_store"):
        monkeypatch.setattr(pairs, name, lambda *words: pytest.fail("tokenized"))

    def train(*words):
        said = invoke(capsys, "train", *words, *PAIR_WORDS)
        assert said.code == 3, said.err
        assert said.out == ""
        complaint = said.err[said.err.index("regard: ") :]
        assert 1 <= len(complaint.splitlines()) <= 5
        assert not (tmp_path / "runs").exists()
        return complaint

    return train


def lines(count, word):
    return "".join(f"{word} {n}\n" for n in range(count))


@pytest.mark.parametrize(("left", "right"), [(1000, 999), (999, 1000), (1000, 1)])
def test_files_of_unequal_length_are_told_with_both_counts(refused, tmp_path, left, right):
    (tmp_path / "a.en").write_text(lines(left, "cat"))
    (tmp_path / "b.fr").write_text(lines(right, "chat"))
    said = refused("data.source=a.en", "data.target=b.fr")
    longer, shorter = sorted([(left, "a.en"), (right, "b.fr")], reverse=True)
    assert f"{longer[1]} has {longer[0]} lines" in said
    assert f"{shorter[1]} has {shorter[0]}" in said
    assert f"line {shorter[0] + 1} of" in said


def test_held_out_files_of_unequal_length_are_told_too(refused, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(lines(50, name))
    (tmp_path / "c").write_text(lines(49, "c"))
    said = refused("data.source=a", "data.target=b", "data.validation=['a', 'c']")
    assert "a has 50 lines" in said
    assert "c has 49" in said


def test_tabs_inside_a_field_are_told_with_the_first_bad_line(refused, tmp_path):
    (tmp_path / "pairs.tsv").write_text("one\tun\ntwo\tdeux\ttwo again\nthree\n")
    said = refused("pairs.tsv")
    assert "pairs.tsv, line 2 has 3 columns, the first line 2: 'two\\tdeux\\ttwo again'" in said


def test_a_side_that_is_empty_everywhere_is_told_with_the_count(refused, tmp_path):
    (tmp_path / "pairs.tsv").write_text("one\t\n" * 7)
    assert "each of the 7 rows has an empty side" in refused("pairs.tsv")
    (tmp_path / "a").write_text(lines(5, "a"))
    (tmp_path / "b").write_text("\n" * 5)
    assert "b holds only whitespace (5 bytes)" in refused("data.source=a", "data.target=b")


@pytest.mark.parametrize("side", ["source", "target"])
def test_an_empty_side_here_and_there_is_left_out_and_counted(capsys, tmp_path, monkeypatch, side):
    monkeypatch.chdir(tmp_path)
    rows = [(f"{n} cats", f"{n} chats") for n in range(40)]
    rows[6] = ("", "vide") if side == "source" else ("empty", " ")
    rows[9] = rows[6]
    (tmp_path / "pairs.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in rows))
    said = invoke(capsys, "train", "pairs.tsv", *PAIR_WORDS)
    assert said.code == 0, said.err
    assert "pairs, 38 rows" in said.err
    assert "skipped: 2 with an empty side (the first is line 7)" in said.err


def test_held_out_pairs_that_are_learned_from_too_are_told_with_their_count(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    learned = [(f"{n} cats", f"{n} chats") for n in range(40)]
    held = [*learned[3:8], ("7 cats", "sept chats"), ("99 dogs", "99 chiens"), learned[3]]
    for name, rows in (("train.tsv", learned), ("dev.tsv", held)):
        (tmp_path / name).write_text("".join(f"{s}\t{t}\n" for s, t in rows))
    said = invoke(capsys, "train", "train.tsv", "data.validation=dev.tsv", *PAIR_WORDS)
    assert said.code == 0, said.err
    # five of them and one twice; the same source with another target is no copy
    assert "overlap: 6 of the 8 pairs are in the training data" in said.err


def test_pairs_held_out_by_us_do_not_overlap(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.tsv").write_text("".join(f"{n % 50} cats\t{n} chats\n" for n in range(99)))
    said = invoke(capsys, "train", "p.tsv", *PAIR_WORDS)
    assert said.code == 0, said.err
    assert "overlap" not in said.err


def test_text_held_out_that_is_learned_from_too_is_told(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["model.dim=16", "model.layers=1", "model.heads=2", "model.context=8"]
    words += ["train.batch=2", "train.steps=1", "data.validation=dev"]
    for name in ("train", "dev"):
        (tmp_path / name).mkdir()
        for number in range(4):
            shift = 2 if name == "dev" else 0
            (tmp_path / name / f"{number}.txt").write_text(f"file {number + shift}\n" * 20)
    said = invoke(capsys, "train", "train", *words)
    assert said.code == 0, said.err
    assert "overlap: 2 of the 4 files are in the training data" in said.err


def image_file(path, count, classes, seed):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 255, (count, 8, 8), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(count) % classes)


def test_a_label_that_only_the_held_out_images_have_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image_file("train.npz", 20, 3, 1)
    image_file("dev.npz", 20, 4, 2)
    said = invoke(capsys, "train", "train.npz", "data.validation=dev.npz", "train.steps=1")
    assert said.code == 3, said.err
    assert "3" in said.err
    assert "dev" in said.err
    assert len(said.err[said.err.index("regard: ") :].splitlines()) <= 5
    assert not (tmp_path / "runs").exists()
