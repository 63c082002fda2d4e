"""A folder held open: with descriptors, and by paths, as on Windows."""

import io
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from regard.errors import CheckpointError
from regard.files import directory as module
from regard.files.directory import Directory
from regard.files.safetensors import DTYPES, write_safetensors


@pytest.fixture(params=[True, False], ids=["descriptors", "paths"])
def folder(request, tmp_path, monkeypatch):
    if request.param and not module.HAS_DESCRIPTORS:
        pytest.skip("no descriptors of folders")
    monkeypatch.setattr(module, "HAS_DESCRIPTORS", request.param)
    (tmp_path / "folder").mkdir()
    (tmp_path / "outside").write_text("theirs")
    return Directory(tmp_path / "folder")


def content(folder, name):
    with folder.open_reader(name) as file:
        return file.read()


def test_files_are_written_appended_to_and_cut(folder):
    folder.write_json("a.json", {"é": 1})
    assert (folder.path / "a.json").read_text(encoding="utf-8") == '{\n "é": 1\n}'
    folder.append("log", b"one\n")
    folder.append("log", b"two\n")
    folder.truncate("log", 100)
    assert content(folder, "log") == b"one\ntwo\n"
    folder.truncate("log", 4)
    assert content(folder, "log") == b"one\n"
    folder.truncate("new", 4)
    assert sorted(folder.names()) == ["a.json", "log", "new"]


def test_a_failure_while_a_file_is_written_leaves_the_old_one(folder):
    folder.write_json("a.json", 1)
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*a\.json: No space left"),
        folder.atomic("a.json"),
    ):
        raise OSError(28, "No space left on device")
    with pytest.raises(ZeroDivisionError), folder.atomic("a.json"):
        raise ZeroDivisionError
    assert content(folder, "a.json") == b"1"
    assert folder.names() == ["a.json"]


def test_folders_are_made_renamed_and_removed(folder):
    inner = folder.open_folder("inner")
    inner.append("file", b"x")
    folder.replace("inner", "other")
    assert (folder.kind("inner"), folder.kind("other")) == (None, "a folder")
    assert folder.open_folder("other").names() == ["file"]
    folder.remove("other")
    folder.remove("other")  # there is nothing
    assert folder.names() == []


@pytest.mark.skipif(os.name == "nt", reason="links need privileges on Windows")
def test_links_are_removed_and_not_followed(folder):
    outside = folder.path.parent / "outside"
    link = folder.path / "link"
    link.symlink_to(outside)
    for act in (
        lambda: folder.append("link", b"ours"),
        lambda: folder.truncate("link", 0),
        lambda: folder.open_reader("link"),
        lambda: folder.open_folder("link"),
        lambda: folder.write_json("link", 1),
    ):
        with pytest.raises(CheckpointError, match="link is a symbolic link and must be"):
            act()
    with folder.create("link") as file:
        file.write(b"ours")
    assert not link.is_symlink()
    link.unlink()
    link.symlink_to(folder.path.parent)
    folder.remove("link")
    os.link(outside, folder.path / "shared")
    folder.append("shared", b" and ours")
    assert (folder.path / "shared").read_text() == "theirs and ours"
    assert outside.read_text() == "theirs"


def test_a_folder_knows_whether_it_was_moved_and_deleted(folder):
    assert folder.is_at_its_path()
    assert not folder.is_deleted()
    moved = folder.path.with_name("moved")
    folder.path.rename(moved)
    assert not folder.is_at_its_path()
    if folder.descriptor is not None:
        folder.append("log", b"here")
        assert (moved / "log").read_text() == "here"
        assert folder.location() in (None, moved)
        (moved / "log").unlink()
    Path(moved).rmdir()
    assert folder.is_deleted()


def test_changing_the_working_directory_is_no_move(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    folder = Directory(Path("folder"))
    monkeypatch.chdir("/")
    assert folder.is_at_its_path()


def test_only_temporary_files_of_our_names_are_removed(folder):
    ours = [".a.json.tmp-12@host", ".a.json.tmp-12@"]
    others = [".a.json.tmp-x@host", ".b.json.tmp-12@host", "a.json.tmp-12@host", ".tmp12"]
    for name in (*ours, *others):
        (folder.path / name).touch()
    folder.remove_leftovers("a.json".__eq__)
    assert sorted(folder.names()) == sorted(others)


def test_weights_are_written_byte_for_byte_as_safetensors_does():
    tensors = {
        f"{'za'[number % 2]}{name}": torch.arange(6).view(2, 3).to(dtype)
        for number, (name, dtype) in enumerate(DTYPES.items())
    }
    tensors |= {"é": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}
    for metadata in ({"format": "pt"}, {"quoted": '"\n'}):
        file = io.BytesIO()
        write_safetensors(file, tensors, metadata)
        assert file.getvalue() == save(tensors, metadata)
