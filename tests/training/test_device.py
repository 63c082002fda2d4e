"""Where a model runs, and whether it fits."""

import re
import subprocess
import sys

import pytest
import torch

from regard.accel import training_path
from regard.config import RunConfig, TrainConfig
from regard.errors import ConfigError
from regard.models.build import build_model, preset
from regard.nn import recurrent
from regard.nn.state import Source
from regard.training.run import begin
from regard.training.setup import device
from regard.training.storage.run_folder import RunFolder
from training.runs import config

ENDS = {
    "bidirectional": True,
    "tied": False,
    "head": {"kind": "classification", "classes": 2, "pool": "ends"},
}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bahdanau", {"cell": "lstm"}),
        ("luong", {}),
        ("sutskever", {}),
        ("lstm", {}),
        ("lstm", ENDS),
        ("convolution", {}),
    ],
)
def test_a_model_says_whether_it_asks_the_host_for_lengths(name, fields, monkeypatch):
    asked = []
    pack = recurrent.pack_padded_sequence

    def counted(*words, **options):
        asked.append(words)
        return pack(*words, **options)

    monkeypatch.setattr(recurrent, "pack_padded_sequence", counted)
    model = build_model(preset(name, dim=8, vocab_size=11, context=8, **fields))
    ids, lengths = torch.randint(11, (2, 5)), torch.tensor([5, 3])
    if hasattr(model, "source_embed"):
        model(ids, source=Source(ids, lengths))
    else:
        model(ids, lengths=lengths)
    path = training_path(TrainConfig(), torch.device("cuda"), model)
    assert path.cuda_graph != bool(asked)
    assert path.unsupported_reasons.keys() == ({"cuda_graph"} if asked else set())


def test_a_model_that_does_not_fit_is_refused_with_need_and_have(monkeypatch):
    monkeypatch.setattr(device, "free_memory", lambda place: 16_000_000)
    cpu = torch.device("cpu")
    device.check_memory(1_000_000, TrainConfig(), cpu)  # 4 bytes, 4 copies: it just fits
    for parameters, ema in ((1_000_001, 0.0), (1_000_000, 0.9)):
        with pytest.raises(ConfigError, match=f"{parameters:,} parameters need") as raised:
            device.check_memory(parameters, TrainConfig(ema=ema), cpu)
        assert "cpu has 16.0 MB" in str(raised.value)
        assert "smaller preset" in str(raised.value)


def test_a_preset_that_does_not_fit_is_refused_before_the_data_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "free_memory", lambda place: 8_000_000_000)
    over = {"model": {"preset": "gpt2-xl", "dim": 1600, "layers": 48, "heads": 25}}
    with pytest.raises(ConfigError, match=r"need [\d.]+ GB to train .*; cpu has 8\.0 GB") as raised:
        list(begin(config("no-such-file.txt", over), tmp_path / "run"))
    need = re.search(r"need ([\d.]+) GB", str(raised.value))
    assert 20 < float(need[1]) < 40  # 1.5 billion parameters, four or five copies of 4 bytes
    assert not (tmp_path / "run").exists()


def test_free_memory_is_a_plausible_number():
    assert 1e8 < device.free_memory(torch.device("cpu")) < 1e14


def test_auto_takes_what_is_there_and_the_rest_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device.pick_device("auto") == torch.device("cpu")
    for name in ("cuda", "mps"):
        with pytest.raises(
            ConfigError, match=f"device={name}: torch finds no {name.upper()} device"
        ):
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
    assert training_path(TrainConfig(compile=asked), torch.device(place)).compile is wanted


@pytest.mark.parametrize(
    ("place", "over", "wanted"),
    [
        ("cuda", {}, True),
        ("cpu", {"compile": "on"}, False),
        ("cuda", {"compile": "off"}, False),
        ("cuda", {"activation_checkpointing": True}, False),
    ],
)
def test_steps_are_captured_where_they_are_compiled_for_cuda(place, over, wanted):
    place, model = torch.device(place), torch.nn.Linear(1, 1)
    path = training_path(TrainConfig(**over), place, model)
    assert path.cuda_graph is wanted
    assert ("cuda_graph" in path.unsupported_reasons) is not wanted
    assert not training_path(TrainConfig(**over), place, model, ranks=2).cuda_graph
    model.uses_packed_sequence = True
    assert not training_path(TrainConfig(**over), place, model).cuda_graph


def test_the_environment_of_a_run_is_told():
    facts = device.environment(torch.device("cpu"))
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    assert {"regard", "python", "platform", "threads"} <= set(facts)


@pytest.fixture
def threads():
    """Four threads, whatever this machine has; afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("limit", "wanted", "expected"),
    [
        ("150000 100000", None, 2),  # the time of one and a half cores
        ("50000 100000", None, 1),
        ("900000 100000", None, 4),  # never more than torch would take by itself
        ("max 100000", None, 4),
        (None, None, 4),
        ("150000 100000", 3, 3),  # what was asked for is taken
    ],
)
def test_there_are_no_more_threads_than_a_container_may_use_cores(
    limit, wanted, expected, threads, monkeypatch, tmp_path
):
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    if limit is not None:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    device.use_threads(wanted)
    assert threads() == expected


def test_a_run_takes_its_threads_from_its_settings_and_says_so(data, tmp_path, threads):
    begun = begin(config(data / "cats.txt", threads=2), tmp_path / "run")
    next(begun)
    begun.close()
    assert threads() == 2
    assert RunFolder(tmp_path / "run").load_environment()["threads"] == 2
    with pytest.raises(ConfigError, match=r"train\.threads=0 must lie between 1 and"):
        list(begin(config(data / "cats.txt", threads=0), tmp_path / "none"))


ILLEGAL = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


def test_bfloat16_that_kills_the_process_is_refused_before_it_does(monkeypatch):
    bfloat16 = RunConfig(name="test", device="cpu", train=TrainConfig(precision="bfloat16"))
    monkeypatch.setattr(device, "BFLOAT16_TEST", "")
    assert device.prepare_device(bfloat16) == torch.device("cpu")
    monkeypatch.setattr(device, "BFLOAT16_TEST", ILLEGAL)
    with pytest.raises(ConfigError, match=r"bfloat16 does not work on this CPU: .* with -4\nleave"):
        device.prepare_device(bfloat16)
    device.prepare_device(RunConfig(name="test", device="cpu"))  # nobody asked for it


def test_the_trial_of_bfloat16_fails_for_no_reason_but_the_cpu():
    tried = subprocess.run(
        [sys.executable, "-c", device.BFLOAT16_TEST], capture_output=True, text=True
    )
    assert tried.returncode <= 0, tried.stderr
