"""The Triton kernels of penalties against the plain samplers: on a GPU, or interpreted."""

import os

import pytest
import torch

from regard.generate.samplers import penalties
from regard.generate.samplers.logits_processor import PerRow
from regard.generate.samplers.penalties import DRY, Frequency, Presence, Repetition
from regard.generate.sampling_state import SamplingState

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from regard.accel.kernels import penalties as kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # slow, so fewer cases
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REACH = [
    {"window": window, "scope": scope}
    for window in (None, 0, 1, 7, 300, 5000)
    for scope in ("text", "completion")
]
DRY_SETTINGS = [
    {},
    {"base": 1.0, "allowed_length": 1},
    {"base": 1.1, "allowed_length": 4, "window": 40},
    {"base": 3.0, "allowed_length": 1, "window": 1200},
    {"allowed_length": 1, "window": 1},
    {"allowed_length": 1, "window": 2},
    {"allowed_length": 1, "window": 17},
    {"allowed_length": 5000},
    {"allowed_length": 1, "breakers": (3,)},
    {"base": 1.01, "breakers": (0, 2), "window": 1300},
    {"allowed_length": 1, "breakers": (5,), "window": 900},  # no text has it
]


def texts(room, vocab=6):
    """Histories: random, a loop, a loop with an error, few ids, one and none, with padding."""
    torch.manual_seed(room)
    history = torch.randint(0, vocab - 1, (7, room))
    history[1] = torch.arange(room) % 3
    history[2] = 1
    history[2, room // 3] = 3
    history[3] = torch.arange(room) % 37 % 4
    lengths = torch.tensor([room, room, room - 5, room // 2, 3, 1, 0]).clamp(0, room)
    sampling = SamplingState.from_prompts([[0]] * 7, room - 1, seed=0, device=DEVICE)
    sampling.history, sampling.lengths = history.to(DEVICE), lengths.to(DEVICE)
    sampling.prompt_lengths = (lengths // 3).to(DEVICE)
    logits = 3 * torch.randn(7, vocab, device=DEVICE)
    logits[0, 1] = logits[1, 2] = logits[3] = -torch.inf
    logits[2, 0] = 0.0
    return logits, sampling


def both(sampler, logits, sampling, monkeypatch):
    """The logits after the plain sampler, and after the kernel."""
    before, results = logits.clone(), []
    for uses_kernel in (False, True):
        monkeypatch.setattr(penalties, "can_run_kernels", lambda _, answer=uses_kernel: answer)
        results.append(sampler.process(logits, sampling))
        assert torch.equal(logits, before)
    return results


def same(sampler, room, monkeypatch):
    expected, actual = both(sampler, *texts(room), monkeypatch)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reach", REACH, ids=str)
@pytest.mark.parametrize(
    "sampler", [Repetition, Frequency, Presence], ids=["repetition", "frequency", "presence"]
)
def test_the_kernel_penalizes_earlier_tokens(sampler, reach, monkeypatch):
    for room in (1, 6, 50, 2500):
        for penalty in (1.3, 0.7):
            same(sampler(penalty, **reach), room, monkeypatch)


@pytest.mark.parametrize("settings", DRY_SETTINGS[::3] if INTERPRETED else DRY_SETTINGS, ids=str)
def test_the_kernel_penalizes_the_longest_repetition(settings, monkeypatch):
    for room in (1, 6, 300) if INTERPRETED else (1, 2, 6, 50, 1300):
        same(DRY(0.8, **settings), room, monkeypatch)


@pytest.mark.parametrize("lags", [2, 8])
@pytest.mark.parametrize("steps", [2, 4])
def test_the_block_sizes_of_the_kernel_do_not_matter(lags, steps, monkeypatch):
    monkeypatch.setattr(kernels, "LAGS", lags)
    monkeypatch.setattr(kernels, "STEPS", steps)
    same(DRY(0.8, allowed_length=1, breakers=(3,)), 40, monkeypatch)


def test_the_largest_penalty_is_finite(monkeypatch):
    logits, sampling = texts(600)
    logits = logits.nan_to_num(neginf=-1.0)
    expected, actual = both(DRY(2.0), logits, sampling, monkeypatch)
    assert actual.isfinite().all()
    assert actual.min() == -penalties.MAX_PENALTY
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_large_vocabulary_in_strides(monkeypatch):
    _, sampling = texts(50)
    sampling.history = (sampling.history * 7919).repeat_interleave(2, 1)[:, ::2]
    logits = torch.randn(2 * 7, 40000, device=DEVICE)[::2]
    for sampler in (
        Repetition(1.5),
        Frequency(0.3),
        Presence(-0.3),
        DRY(0.8, breakers=(3 * 7919,)),
    ):
        expected, actual = both(sampler, logits, sampling, monkeypatch)
        assert not torch.equal(expected, logits)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_settings_without_a_kernel_run_in_torch(monkeypatch):
    for name in ("repetition", "frequency", "dry"):
        monkeypatch.setattr(kernels, name, None)
    logits, sampling = texts(50)
    for sampler in (Repetition(1.5), Frequency(0.3), Presence(0.3), DRY(0.8)):
        each = PerRow.merge([sampler, None] * 3 + [sampler], DEVICE)
        expected, actual = both(each, logits, sampling, monkeypatch)
        assert torch.equal(actual, expected)
        expected, actual = both(sampler, logits.double(), sampling, monkeypatch)
        assert torch.equal(actual, expected)
    monkeypatch.setattr(penalties, "MAX_KERNEL_WINDOW", 49)
    expected, actual = both(Frequency(0.3), logits, sampling, monkeypatch)
    assert torch.equal(actual, expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="a graph is recorded on a GPU")
def test_the_kernels_are_captured_in_a_cuda_graph(monkeypatch):
    logits, sampling = texts(50)
    samplers = [Repetition(1.5), Frequency(0.3), Presence(0.2), DRY(0.8, breakers=(3,))]
    for sampler in samplers:
        sampler.process(logits, sampling)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [sampler.process(logits, sampling) for sampler in samplers]
    other, changed = texts(50)
    logits.copy_(other + 1)
    sampling.history.copy_(changed.history.flip(1))
    sampling.lengths.copy_(changed.lengths.flip(0))
    graph.replay()
    for sampler, actual in zip(samplers, found, strict=True):
        expected, _ = both(sampler, logits, sampling, monkeypatch)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
