"""Files out to harm, through every door: nothing in them runs, and they are refused at once."""

import io
import json
import os
import pickle
import resource
import shutil
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from cli.conftest import TEXT_WORDS, invoke
from hub.runs import make_checkpoint
from regard.errors import RegardError
from regard.text import Tokenizer
from regard.training.import_export import export_run
from regard.training.run import begin
from regard.training.storage.checkpoint import sha256
from regard.training.tracking.history import read_history
from training.runs import config

SECONDS, BYTES = 2.0, 500_000_000


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def pickled(mark):
    return pickle.dumps(Trap(mark))


def saved(mark):
    """As torch.save writes it: a pickle in a zip archive."""
    stream = io.BytesIO()
    torch.save({"embed": Trap(mark)}, stream)
    return stream.getvalue()


def slipped(mark):
    """An archive whose member would be written outside."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(f"../../../../../..{mark}", "slipped")
    return stream.getvalue()


def yaml(mark):
    return f'!!python/object/apply:os.system ["touch {mark}"]\n'.encode()


def bomb(mark):
    """Twelve million empty lists: three characters each in the file, sixty bytes in memory."""
    return b'{"a": [' + b"[]," * 12_000_000 + b"[]]}"


def deep(mark):
    return b"[" * 1_000_000


CONTENTS = {each.__name__: each for each in (pickled, saved, slipped, yaml, bomb, deep)}


@pytest.fixture
def harmless(tmp_path):
    """Call something that must refuse: soon, in little memory, and without a mark."""
    mark = tmp_path / "mark"

    def attempt(call):
        held, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        with pytest.raises(RegardError) as raised:
            call()
        assert time.process_time() - began < SECONDS
        assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) < BYTES
        assert not mark.exists()
        assert len(str(raised.value)) < 2000
        assert "\x1b" not in str(raised.value)
        return raised.value

    attempt.mark = mark
    return attempt


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    list(begin(config(data / "cats.txt", steps=3, evaluate_every=3), folder))
    return folder


def doors(folder, data, tmp_path):
    """All the ways into the library that a folder of somebody else's has."""
    started = config(data / "cats.txt", steps=1, start=str(folder))
    return {
        "import": lambda: regard.import_model(folder, tmp_path / "imported"),
        "load": lambda: regard.load(folder, device="cpu"),
        "start": lambda: list(begin(started, tmp_path / "started")),
        "resume": lambda: regard.resume(folder, "train.steps=9"),
        "export": lambda: export_run(folder, tmp_path / "exported"),
        "compare": lambda: read_history(folder),
    }


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", "pickled"),
        ("model.pt", "saved"),
        ("x.ckpt", "pickled"),
        ("model.safetensors", "saved"),
        ("model.safetensors", "slipped"),
    ],
)
@pytest.mark.parametrize("door", ["import", "load", "start", "resume"])
def test_weights_that_are_no_numbers_are_never_opened(
    door, content, name, harmless, data, tmp_path
):
    make_checkpoint(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    (tmp_path / "theirs" / name).write_bytes(CONTENTS[content](harmless.mark))
    harmless(doors(tmp_path / "theirs", data, tmp_path)[door])
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "started").exists()


def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


@pytest.mark.parametrize(
    ("name", "door", "content"),
    [
        ("model.safetensors", "load", "pickled"),
        ("model.safetensors", "start", "saved"),
        ("config.json", "load", "pickled"),
        ("config.json", "start", "bomb"),
        ("config.json", "resume", "deep"),
        ("environment.json", "load", "deep"),
        ("tokenizer.json", "resume", "yaml"),
        ("checkpoints/step-3/model.safetensors", "resume", "saved"),
        ("checkpoints/step-3/state.json", "resume", "pickled"),
        ("checkpoints/step-3/MANIFEST.json", "resume", "pickled"),
        ("checkpoints/step-3/MANIFEST.json", "resume", "bomb"),
        ("checkpoints/step-3/MANIFEST.json", "resume", "deep"),
        ("checkpoints/step-3/index.json", "resume", "deep"),
        ("metrics.jsonl", "compare", "pickled"),
        ("metrics.jsonl", "compare", "bomb"),
        ("metrics.jsonl", "compare", "deep"),
    ],
)
def test_no_file_of_a_run_is_trusted(name, door, content, harmless, trained, data, tmp_path):
    folder = copied(trained, tmp_path)
    (folder / name).write_bytes(CONTENTS[content](harmless.mark) + b"\n")
    told = harmless(doors(folder, data, tmp_path)[door])
    assert Path(name).name in str(told)


@pytest.mark.parametrize(
    ("name", "door"),
    [
        ("model.safetensors", "load"),
        ("model.safetensors", "start"),
        ("model.safetensors", "export"),
        ("model.safetensors", "resume"),
        ("config.json", "load"),
        ("metrics.jsonl", "compare"),
        ("checkpoints/step-3/model.safetensors", "resume"),
        ("checkpoints/step-3/MANIFEST.json", "resume"),
    ],
)
def test_a_pipe_in_a_run_is_not_waited_for(name, door, harmless, trained, data, tmp_path):
    folder = copied(trained, tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    told = harmless(doors(folder, data, tmp_path)[door])
    assert f"{folder / name}" in str(told)


def test_a_clock_out_to_harm_tells_no_time(trained, tmp_path):
    folder = copied(trained, tmp_path)
    assert read_history(folder).seconds is not None
    for content in (deep(None), b"[1]", b'{"seconds": 1' + b"0" * 400 + b"}"):
        (folder / "clock.json").write_bytes(content)
        assert read_history(folder).seconds is None
    (folder / "clock.json").unlink()
    os.mkfifo(folder / "clock.json")
    assert read_history(folder).seconds is None


def vouched(folder):
    """A manifest that says all is well, as anybody can write one."""
    files = [file for file in folder.iterdir() if file.name != "MANIFEST.json"]
    facts = {file.name: {"size": file.stat().st_size, "sha256": sha256(file)} for file in files}
    table = json.loads((folder / "MANIFEST.json").read_text())
    (folder / "MANIFEST.json").write_text(json.dumps({**table, "files": facts}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b"[" * 1_000_000),
        ("state.json", b"[]"),
        ("state.json", b"{}"),
        ("index.json", b"[" * 1_000_000),
        ("index.json", b"{}"),
        ("index.json", b'{"model": []}'),
        ("index.json", b'{"model": "model.safetensors"}'),
        ("index.json", b'{"model": ["../../model.safetensors"]}'),
        ("index.json", b'{"model": ["/dev/zero"]}'),
        ("index.json", b'{"model": [["model.safetensors"]]}'),
        ("index.json", b'{"model": ["model.safetensors", "none.safetensors"]}'),
        ("index.json", b'{"model": ["model.safetensors", "optimizer.safetensors"]}'),
    ],
)
def test_a_checkpoint_is_not_trusted_for_its_hashes(
    name, content, harmless, trained, data, tmp_path
):
    folder = copied(trained, tmp_path)
    (folder / "checkpoints" / "step-3" / name).write_bytes(content)
    vouched(folder / "checkpoints" / "step-3")
    told = harmless(doors(folder, data, tmp_path)["resume"])
    assert str(folder / "checkpoints" / "step-3") in str(told)


@pytest.mark.parametrize("shape", [(), (3,), (3, 4, 5)])
def test_parts_of_a_checkpoint_that_do_not_go_together_are_refused(
    shape, harmless, trained, data, tmp_path
):
    folder = copied(trained, tmp_path)
    place = folder / "checkpoints" / "step-3"
    unlike = {name: torch.zeros(shape) for name in load_file(place / "model.safetensors")}
    save_file(unlike, place / "other.safetensors")
    (place / "index.json").write_text('{"model": ["model.safetensors", "other.safetensors"]}')
    vouched(place)
    assert "disagree on the shape" in str(harmless(doors(folder, data, tmp_path)["resume"]))


def test_the_metadata_of_a_distributed_checkpoint_is_never_opened(
    harmless, trained, data, tmp_path
):
    folder = copied(trained, tmp_path)
    for place in (folder, folder / "checkpoints" / "step-3"):
        (place / ".metadata").write_bytes(pickled(harmless.mark))
    regard.resume(folder, "train.steps=4")
    regard.load(folder, device="cpu")
    assert not harmless.mark.exists()
    make_checkpoint(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / "__0_0.distcp")
    (tmp_path / "theirs" / ".metadata").write_bytes(pickled(harmless.mark))
    told = harmless(lambda: regard.import_model(tmp_path / "theirs", tmp_path / "run"))
    assert "no model.safetensors" in str(told)


@pytest.mark.parametrize("content", CONTENTS)
def test_a_tokenizer_out_to_harm_is_refused(content, harmless, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(CONTENTS[content](harmless.mark))
    told = harmless(lambda: Tokenizer.load(tmp_path / "tokenizer.json"))
    assert "tokenizer.json" in str(told)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "yaml"),
        ("config.json", "deep"),
        ("model.safetensors.index.json", "bomb"),
        ("model.safetensors.index.json", "yaml"),
    ],
)
def test_a_table_out_to_harm_is_refused(name, content, harmless, tmp_path):
    make_checkpoint(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    (tmp_path / "theirs" / name).write_bytes(CONTENTS[content](harmless.mark))
    told = harmless(lambda: regard.import_model(tmp_path / "theirs", tmp_path / "run"))
    assert name in str(told)


def test_code_that_a_checkpoint_brings_is_not_imported(harmless, tmp_path):
    code = f"import pathlib; pathlib.Path({str(harmless.mark)!r}).touch()\nclass Evil: pass\n"
    named = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    make_checkpoint(tmp_path / "theirs", auto_map=named)
    (tmp_path / "theirs" / "evil.py").write_text(code)
    regard.import_model(tmp_path / "theirs", tmp_path / "run")
    assert not harmless.mark.exists()
    table = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**table, "model_type": "evil"}))
    told = harmless(lambda: regard.import_model(tmp_path / "theirs", tmp_path / "again"))
    assert "unknown model_type 'evil'" in str(told)


def test_a_template_of_a_tokenizer_is_not_rendered(harmless, trained, tmp_path):
    folder = copied(trained, tmp_path)
    template = (
        "{{ cycler.__init__.__globals__.os.system('touch " + str(harmless.mark) + "') }}"
        "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "chat_template.jinja").write_text(template)
    run = regard.load(folder, device="cpu")
    run.generate("the cat", max_new_tokens=3, seed=1)
    assert not harmless.mark.exists()


@pytest.mark.parametrize("where", ["/etc/passwd", "/dev/zero", "pipe", "loop"])
def test_a_shard_that_is_a_link_to_something_else_is_refused(where, harmless, tmp_path):
    make_checkpoint(tmp_path / "theirs")
    folder = tmp_path / "theirs"
    (folder / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "pipe")
    shard = folder / "model-00001-of-00001.safetensors"
    target = {"pipe": tmp_path / "pipe", "loop": shard.name}.get(where, where)
    shard.symlink_to(target)
    index = {"weight_map": {"x": shard.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    told = harmless(lambda: regard.import_model(folder, tmp_path / "run"))
    assert shard.name in str(told)
    assert "root:" not in str(told)


def test_a_sane_link_is_followed(tmp_path):
    """As the hub's own cache has them."""
    make_checkpoint(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "blob")
    (tmp_path / "theirs" / "model.safetensors").symlink_to(tmp_path / "blob")
    regard.import_model(tmp_path / "theirs", tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mine.toml", "yaml"),
        ("mine.toml", "pickled"),
        ("mine.pt", "saved"),
        ("mine.npz", "pickled"),
        ("mine.npz", "slipped"),
        ("mine.tsv", "yaml"),
        ("mine.tsv", "slipped"),
    ],
)
def test_data_and_recipes_out_to_harm_are_refused(
    name, content, harmless, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(CONTENTS[content](harmless.mark))
    said = invoke(capsys, "train", name, *TEXT_WORDS)
    assert said.code in (2, 3), said.err
    assert name in said.err
    assert not harmless.mark.exists()


def test_numbers_that_hide_objects_are_refused(harmless, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trap = np.array([Trap(harmless.mark)], dtype=object)
    np.savez(tmp_path / "mine.npz", images=trap, labels=np.zeros(1))
    said = invoke(capsys, "train", "mine.npz")
    assert said.code == 3, said.err
    assert not harmless.mark.exists()


def test_these_traps_do_spring(tmp_path):
    """Or none of the above would prove anything."""
    mark = tmp_path / "mark"
    pickle.loads(pickled(mark))
    assert mark.exists()
    mark.unlink()
    torch.load(io.BytesIO(saved(mark)), weights_only=False)
    assert mark.exists()
