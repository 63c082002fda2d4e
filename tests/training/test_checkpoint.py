"""Checkpoints: whole or not there, and damage is named, never loaded."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from regard.errors import CheckpointError
from regard.files.atomic import remove_leftovers, write_json
from regard.files.directory import Directory
from regard.files.disk_space import check_disk_space
from regard.training.storage import checkpoint
from regard.training.storage.checkpoint import (
    drop_after,
    find_valid,
    latest,
    prune,
    read_tensors,
    save,
    verify,
    write_tensors,
)


def write_weights(path, tensors):
    write_tensors(Directory(path.parent), path.name, tensors)


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"]


def write(folder, step):
    torch.manual_seed(step)
    return save(
        Directory(folder),
        step,
        {"model": {"a": torch.randn(3, 4)}, "optimizer": {"a/step": torch.tensor(float(step))}},
        {"sizes": {"metrics.jsonl": 10 * step}},
    )


@pytest.fixture
def folder(tmp_path):
    """The checkpoints of two steps."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    for step in (3, 6):
        write(place, step)
    return place


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_what_is_read(folder):
    found = latest(folder)
    torch.manual_seed(6)
    assert (found.step, found.path) == (6, folder / "step-6")
    assert torch.equal(found.tensors("model")["a"], torch.randn(3, 4))
    assert found.tensors("optimizer")["a/step"] == 6
    assert found.state() == {"sizes": {"metrics.jsonl": 60}}
    assert names(found.path) == sorted(FILES)


def test_steps_are_ordered_as_numbers(folder):
    write(folder, 20)
    assert latest(folder).step == 20  # as words, step-6 would be the last


def test_there_may_be_no_checkpoint_yet(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None


def test_a_step_can_be_asked_for(folder):
    assert latest(folder, 3).step == 3
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 in .*; available: 3, 6"):
        latest(folder, 5)


def test_a_manifest_says_step_format_and_what_every_file_is(folder):
    manifest = json.loads((folder / "step-6" / "MANIFEST.json").read_text())
    assert (manifest["step"], manifest["format"]) == (6, checkpoint.FORMAT)
    assert sorted([*manifest["files"], "MANIFEST.json"]) == sorted(FILES)
    assert verify(folder / "step-6") is None


def test_only_the_newest_and_the_best_are_kept(folder):
    for step in (9, 12, 15):
        write(folder, step)
    prune(Directory(folder), 2, best=6)
    assert names(folder) == ["step-12", "step-15", "step-6"]
    prune(Directory(folder), 2, best=None)
    assert names(folder) == ["step-12", "step-15"]
    prune(Directory(folder), 5, best=None)
    assert names(folder) == ["step-12", "step-15"]


def test_a_run_that_goes_on_from_an_earlier_step_drops_the_later_ones(folder):
    write(folder, 12)
    drop_after(Directory(folder), 3)
    assert names(folder) == ["step-3"]


@pytest.mark.parametrize(
    "remove", [lambda f: prune(Directory(f), 1, None), lambda f: drop_after(Directory(f), 0)]
)
def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half_of_it(folder, remove):
    def killed(name, dir_fd):
        next((folder / name).iterdir()).unlink()
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            remove(folder)
    assert len([name for name in names(folder) if "tmp" not in name]) == 1
    assert latest(folder)  # of the two that there were, the other one, whole
    remove_leftovers(folder, locked=True)
    assert not list(folder.glob("*.tmp-*"))


def test_a_step_is_whole_or_it_is_none(folder):
    assert find_valid(folder, 3).step == 3
    assert find_valid(folder, 4) is None
    assert find_valid(folder, None) is None
    (folder / "step-3" / "state.json").unlink()
    assert find_valid(folder, 3) is None


class Killed(BaseException):
    """What no `except OSError` sees, as nobody sees a SIGKILL."""


class Faults:
    """Fails at one of the calls by which a checkpoint gets to the disk."""

    CALLS = (
        (os, "fsync"),
        (os, "mkdir"),
        (os, "replace"),
        (checkpoint, "write_safetensors"),
        (checkpoint, "_sha256"),
    )

    def __init__(self, patch, at, error):
        self.count, self.at, self.error = 0, at, error
        for owner, name in self.CALLS:
            patch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, call):
        def counting(*words, **options):
            self.count += 1
            if self.count - 1 == self.at:
                raise self.error
            return call(*words, **options)

        return counting


def fault_points(tmp_path):
    (tmp_path / "counted").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, -1, None)
        write(tmp_path / "counted", 1)
    return faults.count


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Killed()])
def test_a_failure_at_any_moment_leaves_the_checkpoint_before(folder, tmp_path, error):
    points = fault_points(tmp_path)
    assert points > 10
    survived = []
    for at in range(points):
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, at, error)
            with pytest.raises((CheckpointError, Killed)) as raised:
                write(folder, 9)
        if raised.type is CheckpointError:
            assert re.fullmatch(
                r"cannot write .*step-9: No space left on device "
                r"\([\d.]+ (bytes|kB) needed, [\d.]+ [MGT]B free\)\n"
                "earlier checkpoints are intact",
                str(raised.value),
            )
            assert not list(folder.glob("*.tmp-*"))
        assert verify(folder / "step-3") is None
        assert verify(folder / "step-6") is None
        found = latest(folder)
        survived.append(found.step)
        remove_leftovers(folder, locked=True)
        assert not list(folder.glob("*.tmp-*"))
        shutil.rmtree(folder / "step-9", ignore_errors=True)
    assert survived == sorted(survived)  # the old one up to the rename, from then on the new one
    assert survived[0] == 6


def cut(share):
    return lambda content: content[: int(len(content) * share)]


def flip(share):
    def flipped(content):
        at = int((len(content) - 1) * share)
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return flipped


DAMAGES = {
    "nothing left": cut(0),
    "cut early": cut(0.02),
    "cut in the middle": cut(0.5),
    "cut at the end": cut(0.99),
    "a bit flipped at the beginning": flip(0),
    "a bit flipped in the middle": flip(0.5),
    "a bit flipped at the end": flip(1),
    "a byte too many": lambda content: content + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [name for name in FILES if name != "MANIFEST.json"])
def test_damage_is_refused_by_name_and_the_step_before_is_offered(folder, name, damage):
    file = folder / "step-6" / name
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(CheckpointError) as raised:
        latest(folder)
    assert f"{file} has" in str(raised.value)
    assert f"step 3 is valid: regard resume {folder.parent} --step 3" in str(raised.value)
    assert raised.value.exit_code == 4
    assert latest(folder, 3).step == 3


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_by_name(folder, name):
    file = folder / "step-6" / name
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} .*\n.*--step 3"):
        latest(folder)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is not a manifest"),
        ("{", "is not a manifest"),
        ("[]", "is not a manifest"),
        ("{}", "is not a manifest"),
        ('{"format": 1, "step": 6, "files": {"state.json": 7}}', "is not a manifest"),
        ("\udcff", "is not a manifest"),
        ('{"format": 2, "files": {}}', "has format 2, this version reads 1"),
        ('{"format": 1, "step": 7, "files": {}}', "is of step 7"),
    ],
)
def test_a_broken_manifest_is_refused_by_name(folder, content, complaint):
    file = folder / "step-6" / "MANIFEST.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=f"{file} {complaint}\n.*--step 3"):
        latest(folder)


def test_any_flipped_bit_of_a_manifest_is_harmless_or_refused(folder):
    file = folder / "step-6" / "MANIFEST.json"
    content = file.read_bytes()
    before = {name: latest(folder).tensors(name) for name in ("model", "optimizer")}
    for at in range(0, len(content), 7):
        file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        if verify(file.parent) is None:
            found = latest(folder)
            assert found.step == 6
            for name, tensors in before.items():
                assert all(torch.equal(found.tensors(name)[n], t) for n, t in tensors.items())
        else:
            with pytest.raises(CheckpointError, match=re.escape(str(file.parent))):
                latest(folder)


def test_without_a_whole_one_the_way_out_is_to_begin_again(folder):
    for step in (3, 6):
        (folder / f"step-{step}" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="there is no earlier one; train the run again"):
        latest(folder)


def test_the_step_offered_is_the_newest_that_is_whole(folder):
    write(folder, 9)
    for step in (6, 9):
        (folder / f"step-{step}" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="--step 3"):
        latest(folder)


def test_a_folder_that_cannot_be_written_is_named_with_the_room_there_is(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*file.*\([\d.]+ [MGT]B free\)"):
        write_json(tmp_path / "file" / "config.json", {})
    with pytest.raises(CheckpointError, match=r"cannot open .*/file: Not a directory"):
        Directory(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot open .*/nowhere: No such file"):
        Directory(tmp_path / "nowhere")


def test_a_full_disk_leaves_the_checkpoint_before_and_the_old_weights(folder):
    resource = pytest.importorskip("resource")
    kept = folder.parent / "model.safetensors"
    write_weights(kept, {"a": torch.ones(3)})
    large = {"a": torch.zeros(100_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(CheckpointError, match=r"step-9: File too large \(400\.0 kB needed, "):
            save(Directory(folder), 9, {"model": large}, {})
        with pytest.raises(CheckpointError, match=r"model.safetensors: File too large"):
            write_weights(kept, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest(folder).step == 6
    assert torch.equal(read_tensors(kept)["a"], torch.ones(3))
    assert names(folder.parent) == ["checkpoints", "model.safetensors"]


def test_what_cannot_fit_is_refused_before_it_is_begun(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=20_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    run = tmp_path / "run"
    check_disk_space(run, 900_000, checkpoints=1, ema=False)
    for parameters, checkpoints, averaged in (
        (1_010_000, 1, False),
        (900_000, 2, False),
        (900_000, 1, True),
    ):
        with pytest.raises(CheckpointError, match=r"run needs [\d.]+ MB .*; 20\.0 MB are free"):
            check_disk_space(run, parameters, checkpoints=checkpoints, ema=averaged)
    run.mkdir()
    write_weights(run / "model.safetensors", {"a": torch.zeros(300_000)})
    check_disk_space(run, 1_010_000, checkpoints=1, ema=False)  # what is there needs no more room


def test_files_longer_than_the_system_allows_are_refused_before_they_are_begun(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000_000, before[1]))
        check_disk_space(tmp_path, 1_000_000, checkpoints=1, ema=False)
        with pytest.raises(
            CheckpointError, match=r"files of 8\.0 MB; this process .*\n.*ulimit -f"
        ):
            check_disk_space(tmp_path, 1_000_001, checkpoints=1, ema=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_weights_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    write_weights(path, {"a": torch.ones(3)})

    def fail(*words):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_weights(path, {"a": torch.zeros(3)})
    assert torch.equal(read_tensors(path)["a"], torch.ones(3))
    assert names(tmp_path) == ["model.safetensors"]


def test_any_flipped_bit_of_weights_is_harmless_or_refused_by_name(tmp_path):
    path = tmp_path / "model.safetensors"
    wanted = {"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16(), "c": torch.tensor(3)}
    write_weights(path, wanted)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    harmless = 0
    for bit in range(0, 8 * len(content), 5):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = read_tensors(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017 -- most are refused, not all
        else:
            harmless += 1
            assert bit // 8 < header  # nothing is flipped among the numbers unseen
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], each) for name, each in wanted.items())
    assert harmless < 16  # in the name of the hash, and in spaces


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickle_is_refused_and_never_run(tmp_path, how):
    path, mark = tmp_path / "model.safetensors", tmp_path / "mark"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Trap(mark)))
    else:
        torch.save({"a": Trap(mark)}, path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupted or not"):
        read_tensors(path)
    assert not mark.exists()


def test_weights_that_are_not_there_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights at .*model"):
        read_tensors(tmp_path / "model.safetensors")


def test_nothing_in_the_library_can_read_a_pickle():
    source = Path(checkpoint.__file__).parents[1]
    reading = re.compile(r"torch\.load\(|pickle\.load|import pickle|joblib|\bdill\b|yaml\.load")
    found = [
        f"{path}:{number}"
        for path in source.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if reading.search(line) or "allow_pickle=True" in line
    ]
    assert not found
