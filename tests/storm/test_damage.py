"""Corrupted files: each is refused by name, and an earlier step is offered, not taken silently."""

import json
import shutil

import pytest
import torch

from regard.cli import main
from regard.errors import CheckpointError
from regard.training.run import begin
from regard.training.storage.checkpoint import read_tensors
from training.runs import config, contents

PARTS = 50
MORE = "train.steps=14"  # or there would be nothing to go on with


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    list(begin(config(data / "cats.txt", keep_checkpoints=2), folder))
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    """A run of 12 steps, evaluated after 8 and 12; with checkpoints of 9 and 12, at least."""
    return shutil.copytree(whole, tmp_path / "run")


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def damages(content, every):
    """What can happen to a file of tensors, by name; of the many alike only one in `every`."""
    header = 8 + int.from_bytes(content[:8], "little")
    yield "another length of the header", (1 << 63).to_bytes(8, "little") + content[8:]
    yield "a longer header", (header - 7).to_bytes(8, "little") + content[8:]
    yield "a byte too many", content + b"\0"
    yield "a copy too many", content + content
    yield "deleted", None
    for part in range(0, PARTS, every):
        yield f"cut at {part}/{PARTS}", content[: len(content) * part // PARTS]
    for bit in range(0, 8 * 8, every):
        yield f"bit {bit} of the length flipped", flipped(content, bit)
    for part in range(0, PARTS, every):
        at = 8 * (8 + (header - 8) * part // PARTS) + part % 8
        yield f"bit {at} of the header flipped", flipped(content, at)
        at = 8 * (header + (len(content) - header) * part // PARTS) + part % 8
        yield f"bit {at} of the numbers flipped", flipped(content, at)


def spoil(file, content):
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


def said_by(capsys, *words):
    """What a command says on stderr that fails as a matter of checkpoints."""
    with pytest.raises(SystemExit) as exit:
        main([str(word) for word in words])
    said = capsys.readouterr().err
    assert exit.value.code == 4, said
    assert len(said.splitlines()) <= 5
    return said


def reads_the_same(*runs):
    try:
        ours, theirs = (read_tensors(run / "model.safetensors") for run in runs)
    except CheckpointError:
        return False
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.long)])
def test_any_damage_to_a_checkpoint_is_refused_and_the_step_before_offered(
    every, copied, whole, capsys
):
    files = sorted(copied.glob("checkpoints/step-12/*.safetensors"))
    assert files
    for file in files:
        content = file.read_bytes()
        refused = 0
        for what, corrupted in damages(content, every):
            spoil(file, corrupted)
            before = everything(copied)
            said = said_by(capsys, "resume", copied, MORE)
            assert f"{file} " in said, what
            assert any(cause in said for cause in ("missing", "bytes instead of", "sha256")), what
            assert f"step 9 is valid: regard resume {copied} --step 9" in said
            assert everything(copied).items() >= before.items()  # nothing was chosen, or lost
            refused += 1
        print(f"{file.name}: {refused} of {refused} refused")
        file.write_bytes(content)
    file.unlink()
    with pytest.raises(SystemExit) as exit:  # as it was told
        main(["resume", str(copied), "--step", "9", "--quiet"])
    assert not exit.value.code
    ours = contents(copied)
    assert ours == {name: contents(whole)[name] for name in ours}


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.long)])
def test_any_damage_to_the_model_that_was_kept_is_refused(every, copied, whole, capsys):
    file = copied / "model.safetensors"
    content = file.read_bytes()
    harmless = refused = 0
    for what, corrupted in damages(content, every):
        spoil(file, corrupted)
        if "header flipped" in what and reads_the_same(whole, copied):
            harmless += 1  # in the name of the hash itself
            continue
        said = said_by(capsys, "generate", copied, "the", "-n", "1")
        assert f"{file} " in said or f"no weights at {file}" in said, what
        assert f"regard resume {copied} --step 9" in said, what
        refused += 1
    print(f"model: {refused} refused, {harmless} harmless")
    assert harmless <= 3
    with pytest.raises(SystemExit) as exit:
        main(["resume", str(copied), "--step", "9", "--quiet"])
    assert not exit.value.code
    assert file.read_bytes() == content


@pytest.mark.parametrize("name", ["state.json", "MANIFEST.json"])
def test_tables_cut_anywhere_or_deleted_are_refused(name, copied, capsys):
    file = copied / "checkpoints" / "step-12" / name
    content = file.read_bytes()
    for part in range(0, PARTS, 7):
        file.write_bytes(content[: len(content) * part // PARTS])
        assert f"{file} " in said_by(capsys, "resume", copied, MORE)
    file.unlink()
    said = said_by(capsys, "resume", copied, MORE)
    assert f"{file} " in said
    assert "--step 9" in said


def test_a_file_that_the_manifest_does_not_name_is_refused(copied, capsys):
    stray = copied / "checkpoints" / "step-12" / "index.json"
    parts = ("model", "optimizer", "ema")
    stray.write_text(json.dumps({part: [f"{part}.safetensors"] for part in parts}))
    said = said_by(capsys, "resume", copied, MORE)
    assert f"{stray} is not in its manifest" in said
    assert "--step 9" in said


@pytest.mark.parametrize("emptied", [False, True])
def test_a_manifest_that_names_nothing_is_refused(emptied, copied, capsys):
    file = copied / "checkpoints" / "step-12" / "MANIFEST.json"
    if emptied:
        shutil.rmtree(file.parent)
        file.parent.mkdir()
    file.write_text(json.dumps({"format": 1, "step": 12, "files": {}}))
    said = said_by(capsys, "resume", copied, MORE)
    assert "step-12" in said
    assert "manifest" in said.lower()
    assert "--step 9" in said


def test_a_manifest_that_names_a_file_that_is_not_there_is_refused(copied, capsys):
    file = copied / "checkpoints" / "step-12" / "MANIFEST.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["more.safetensors"] = manifest["files"]["model.safetensors"]
    file.write_text(json.dumps(manifest))
    said = said_by(capsys, "resume", copied, MORE)
    assert "more.safetensors is missing" in said
    assert "--step 9" in said
