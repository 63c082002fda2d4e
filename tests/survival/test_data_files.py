"""Damage inside files of data that libraries read for us: an error of ours, not theirs."""

import io
import json
import os
import struct
import zipfile

import numpy as np
import pytest

from cli.conftest import invoke
from regard.cli.output import common_options
from regard.errors import CheckpointError, ConfigError, DataError
from regard.files.cache import cache_folder
from regard.hub.class_names import read_class_count, read_class_names
from regard.hub.numpy_archive import open_archive
from regard.models.build import family_of
from regard.pipelines.detect import open_data
from regard.training.setup.device import pick_device

HEADERS = [  # of a .npy, which numpy parses as Python
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (((((((",
    b"  {'descr': '|u1',\n 1: [",
    b"{'descr': [('a', '|u1')], 'fortran_order': 1, 'shape': 3}",
    b"{'descr': '|u1', 'fortran_order': False, 'shape': " + b"-" * 4000 + b"1}",
    b"(" * 5000,
]


@pytest.mark.parametrize("header", HEADERS)
def test_the_header_of_an_array_is_not_trusted(header, tmp_path):
    content = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header) + 1) + header + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", content)
        archive.writestr("y.npy", content)
    with pytest.raises(DataError, match=r"x\.npz is corrupted or not an \.npz archive"):
        open_data(str(tmp_path / "x.npz"))
    with pytest.raises(CheckpointError, match=r"x\.npz is not a complete archive"):
        open_archive(tmp_path / "x.npz")


def test_damage_after_the_schema_of_a_parquet_file_is_named(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    texts = ["".join(map(chr, np.random.default_rng(n).integers(97, 123, 40))) for n in range(40)]
    table = pyarrow.table({"text": texts, "label": [*"xy" * 20]})
    parquet.write_table(table, buffer)
    content = buffer.getvalue()
    for at in range(20, 200, 20):
        path = tmp_path / "t.parquet"
        path.write_bytes(content[:at] + b"\xff" * 8 + content[at + 8 :])
        with pytest.raises(DataError, match=r"t\.parquet is corrupted: "):
            open_data(str(path))


@pytest.mark.parametrize("metadata", [b"{", b"[]", b'{"info": 3}', b"[" * 100_000])
def test_metadata_of_another_program_is_passed_over(metadata, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["good cat", "bad dog"] * 20, "label": ["yes", "no"] * 20})
    path = tmp_path / "t.parquet"
    parquet.write_table(table.replace_schema_metadata({"huggingface": metadata}), path)
    assert open_data(str(path)).kind == "labels"


@pytest.mark.parametrize("content", [",,,\n" * 30, "\t\t\n\t\t\n", '"",""\n' * 3])
def test_a_table_of_empty_cells_is_refused(content, tmp_path):
    for name in ("x.csv", "x.tsv"):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=name):
            open_data(str(tmp_path / name))


@pytest.mark.parametrize("labels", [3, "yes", ["yes"], float("nan"), True])
@pytest.mark.parametrize("key", ["id2label", "label2id"])
def test_class_names_that_are_none_are_refused(key, labels):
    for read in (read_class_count, read_class_names):
        with pytest.raises(ConfigError, match=f"{key}="):
            read({key: labels})


@pytest.mark.parametrize("kind", ["images", "text", "tables"])
def test_a_folder_that_cannot_be_read_is_not_passed_over(kind, tmp_path, monkeypatch):
    """Root may read everything, so that permissions are only pretended here."""
    names = {"images": "x.png", "text": "x.txt", "tables": "x.csv"}
    for folder in ("a", "b", "closed", ".hidden"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / names[kind]).write_text("text,label\ngood,yes\nbad,no\n")
    access = os.access
    closed = {tmp_path / "closed", tmp_path / ".hidden"}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in closed and access(path, mode))
    with pytest.raises(DataError, match=r"closed cannot be read: Permission denied"):
        open_data(str(tmp_path))


def test_the_home_of_nobody_is_a_name_like_any_other(capsys, monkeypatch):
    said = invoke(capsys, "train", "~nobody-of-this-name/x.txt", "--dry-run")
    assert said.code == 3
    assert "no file, folder or built-in dataset '~nobody-of-this-name/x.txt'" in said.err
    monkeypatch.setenv("REGARD_HOME", "~nobody-of-this-name")
    assert str(cache_folder()) == "~nobody-of-this-name"


def test_what_the_system_refuses_is_a_sentence(capsys, monkeypatch):
    def refuse(words, **options):
        common_options.debug = "--debug" in words
        raise PermissionError(13, "Permission denied", "runs/closed")

    monkeypatch.setattr("regard.cli.app", refuse)
    said = invoke(capsys, "info", "runs/closed")
    assert said.code == 4
    assert said.err == "regard: runs/closed: Permission denied\n--debug shows where it happened\n"
    debugged = invoke(capsys, "info", "runs/closed", "--debug")
    assert debugged.code == 4
    assert debugged.err.startswith("Traceback")
    assert debugged.err.endswith(said.err)


@pytest.mark.parametrize("value", [5, None, b"gpt2", ["gpt2"]])
def test_what_is_no_model_or_device_is_refused(value):
    with pytest.raises(ConfigError, match="is not a model configuration"):
        family_of(value)
    with pytest.raises(ConfigError, match="unknown device"):
        pick_device(value)


ANSWER = {"text": "a", "answer_start": 0}
OTHER = {"context": "b", "qas": [{"question": "why?"}]}


def squad(**changes):
    item = {"question": "who?", "answers": [ANSWER]} | changes
    context = changes.get("context", "a b")
    return {"data": [{"paragraphs": [{"context": context, "qas": [item]}, OTHER]}]}


@pytest.mark.parametrize(
    "answers", [[{**ANSWER, "answer_start": "9" * 5000}], [{**ANSWER, "answer_start": [0]}], "a"]
)
def test_answers_of_odd_values_are_refused(answers, tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps(squad(answers=answers)))
    with pytest.raises(DataError, match="answer"):
        open_data(str(tmp_path / "squad.json"))


def test_half_of_a_character_is_hashed_and_named_where_it_is_tokenized(tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps(squad(context="a \ud800")))
    open_data(str(tmp_path / "squad.json")).split(0.5, 1)
    rows = [json.dumps({"text": f"{n} \ud800"}) for n in range(9)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    with pytest.raises(DataError, match="lone surrogate"):
        open_data(str(tmp_path / "text.jsonl"))


@pytest.mark.parametrize(
    "offsets",
    [np.array(12), np.array(["x"]), np.array([0, np.nan]), np.array([0, 12j]), np.zeros((2, 2))],
)
def test_offsets_of_strokes_are_whole_numbers(offsets, tmp_path):
    np.savez(tmp_path / "strokes.npz", xyp=np.ones((12, 3)), off=offsets)
    with pytest.raises(DataError, match="integers"):
        open_data(str(tmp_path / "strokes.npz"))
    np.savez(tmp_path / "strokes.npz", xyp=np.full((12, 3), 1e300), off=np.array([0, 12]))
    with pytest.raises(DataError, match="must be finite"):
        open_data(str(tmp_path / "strokes.npz"))


def test_a_date_beyond_the_calendar_is_named(tmp_path):
    days = [f"2024-01-{n:02},{n}" for n in range(1, 30)] + ["9999-12-31T23:59:59-14:00,3"]
    (tmp_path / "x.csv").write_text("\n".join(["date,value", *days]))
    with pytest.raises(DataError, match=r"line 31.*not a date"):
        open_data(str(tmp_path / "x.csv"))


def test_images_outside_of_the_folder_are_told(tmp_path):
    image = pytest.importorskip("PIL.Image").new("L", (4, 4))
    (tmp_path / "in").mkdir()
    for name in ("in/a.png", "in/b.png", "secret.png"):
        image.save(tmp_path / name)

    def described(name):
        rows = f"image,caption\na.png,a cat\n{name},a dog\n"
        (tmp_path / "in" / "captions.csv").write_text(rows)
        return open_data(str(tmp_path / "in")).description

    assert "outside" not in described("./b.png")
    for name in ("../secret.png", str(tmp_path / "secret.png")):
        assert "; 1 image is outside the folder of the table" in described(name)
    with pytest.raises(DataError, match=r"line 3: 'xxx.*: File name too long"):
        described("x" * 300 + ".png")


def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    image.new("1", (10_000, 10_000)).save(tmp_path / "a" / "x.png")
    with pytest.raises(DataError, match=r"x\.png has too many pixels: .*100000000"):
        open_data(str(tmp_path))
