"""Where a model runs, and whether it fits."""

import re

import pytest
import torch

from regard.config import TrainConfig
from regard.errors import ConfigError
from regard.training import device
from regard.training.run import begin
from training.runs import config


def test_a_model_that_does_not_fit_is_refused_with_need_and_have(monkeypatch):
    monkeypatch.setattr(device, "memory", lambda place: 16_000_000)
    cpu = torch.device("cpu")
    device.check_memory(1_000_000, TrainConfig(), cpu)  # 4 bytes, 4 copies: it just fits
    for parameters, average in ((1_000_001, 0.0), (1_000_000, 0.9)):
        with pytest.raises(ConfigError, match=f"{parameters:,} parameters need") as raised:
            device.check_memory(parameters, TrainConfig(average=average), cpu)
        assert "cpu has 0.0 GB" in str(raised.value)
        assert "smaller preset" in str(raised.value)


def test_a_preset_that_does_not_fit_is_refused_before_the_data_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "memory", lambda place: 8_000_000_000)
    over = {"model": {"preset": "gpt2-xl", "dim": 1600, "layers": 48, "heads": 25}}
    with pytest.raises(ConfigError, match=r"need [\d.]+ GB to train .*; cpu has 8\.0 GB") as raised:
        list(begin(config("no-such-file.txt", over), tmp_path / "run"))
    need = re.search(r"need ([\d.]+) GB", str(raised.value))
    assert 20 < float(need[1]) < 40  # 1.5 billion parameters, four or five copies of 4 bytes
    assert not (tmp_path / "run").exists()


def test_free_memory_is_a_plausible_number():
    assert 1e8 < device.memory(torch.device("cpu")) < 1e14


def test_auto_takes_what_is_there_and_the_rest_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device.pick_device("auto") == torch.device("cpu")
    for name in ("cuda", "mps"):
        with pytest.raises(ConfigError, match=f"device={name} is not to be had here"):
            device.pick_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.pick_device("auto") == torch.device("cuda")


@pytest.mark.parametrize(
    ("precision", "place", "wanted"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float32", "cuda", torch.float32),
    ],
)
def test_precision_is_bfloat16_by_default_only_on_cuda(precision, place, wanted):
    cast = device.autocast(TrainConfig(precision=precision), torch.device(place))
    if place == "cpu":
        with cast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == wanted
    else:
        assert (getattr(cast, "keywords", {}).get("dtype", torch.float32)) == wanted


@pytest.mark.parametrize(
    ("asked", "place", "wanted"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_compilation_is_the_default_only_on_cuda(asked, place, wanted):
    assert device.compiles(TrainConfig(compile=asked), torch.device(place)) is wanted


def test_the_environment_of_a_run_is_told():
    facts = device.environment(torch.device("cpu"))
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    assert {"regard", "python", "platform", "threads"} <= set(facts)
