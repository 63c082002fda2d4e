"""A corrupted cache: it is noticed, said and computed again, and training goes on as if whole."""

import pytest

from regard.training.run import begin, resume
from regard.training.storage.checkpoint import read_tensors
from training.runs import config


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache folder of its own for every test."""
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def every_50th(content):
    corrupted = bytearray(content)
    for at in range(0, len(corrupted), 50):
        corrupted[at] ^= 1
    return bytes(corrupted)


def flipped_high_bits(content):
    return bytes(byte ^ 0x80 for byte in content)


DAMAGES = {
    "every 50th byte": every_50th,
    "ids beyond the vocabulary": flipped_high_bits,
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
}


def trained(path, settings):
    list(begin(settings, path))
    return {name: each.tolist() for name, each in read_tensors(path / "model.safetensors").items()}


def damage(home, how):
    """Damage the cached tokens of training and validation, and the cached tokenizer."""
    files = [file for file in home.glob("*/*/*") if file.name != "index.json"]
    assert sorted(file.name for file in files) == ["tokenizer.json", "tokens.bin", "tokens.bin"]
    for file in files:
        file.write_bytes(DAMAGES[how](file.read_bytes()))
    return files


@pytest.mark.parametrize("how", DAMAGES)
def test_training_on_a_corrupted_cache_is_training_on_a_whole_one(
    data, tmp_path, home, how, caplog
):
    settings = config(data / "cats.txt", steps=1)
    whole = trained(tmp_path / "a", settings)
    before = {file: file.read_bytes() for file in home.glob("*/*/*")}
    files = damage(home, how)
    assert trained(tmp_path / "b", settings) == whole
    assert {file: file.read_bytes() for file in home.glob("*/*/*")} == before
    said = [text for text in caplog.messages if text.startswith("corrupted cache: ")]
    assert len(said) == len(files)


@pytest.mark.parametrize("how", ["every 50th byte", "ids beyond the vocabulary"])
def test_a_resumed_run_reads_the_same_data_after_damage(data, tmp_path, home, how, caplog):
    run = tmp_path / "run"
    trained(run, config(data / "cats.txt", steps=4, save_every=2))
    last = run / "checkpoints" / "step-4" / "model.safetensors"
    before = last.read_bytes()
    damage(home, how)
    list(resume(run, step=2))
    assert last.read_bytes() == before
    assert "corrupted cache: " in caplog.text
