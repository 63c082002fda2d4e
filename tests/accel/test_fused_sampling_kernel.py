"""The Triton kernels at the end of a chain against the plain samplers: on a GPU, or interpreted."""

import os

import pytest
import torch

from regard.generate import SamplingState, parse_chain
from regard.generate.chain import NOT_FAILED, Chain, failure_lengths

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from regard.accel.kernels import fused_sampling as kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # slow, so fewer cases
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEN = [
    *("repetition=1.1", "frequency=0.1", "dry=0.8", "top_n_sigma=3", "top_k=200"),
    *("typical=0.95", "top_p=0.95", "min_p=0.02", "xtc=0.3", "temperature=0.8"),
]
KINDS = [
    *("top_p=0.7", "top_p=0", "top_p={p=0.1, min_keep=4}", "min_p=0.1", "min_p=1"),
    *("min_p={m=0.9, min_keep=5}", "typical=0.5", "typical=0.05", "typical=0"),
    *("typical={mass=0.1, min_keep=7}", "temperature=0.4", "temperature=2.5", "top_n_sigma=0.5"),
    *("top_n_sigma={n=0.1, min_keep=3}", "xtc={probability=1, threshold=0.02}", "top_k=3"),
    *("xtc={probability=0.5, threshold=0.05}", "top_k={k=3, exact=true}"),
    *("top_p={p=0.1, min_keep=9999}", "typical={mass=0.1, min_keep=9999}"),
]


@pytest.fixture(autouse=True)
def _use_kernels(monkeypatch):
    """The kernels are used, without a GPU too."""
    monkeypatch.setattr("regard.generate.chain.supports_fused_tail", lambda logits: True)


class PlainChain(Chain):
    """A chain that does not use the kernels."""

    __slots__ = ()


def compare(chain, logits, turns=1 if INTERPRETED else 2):
    assert chain.fused_tail is not None
    prompts = [[row, 3, 5, row, 3] for row in range(len(logits))]
    one, other = (
        SamplingState.from_prompts(prompts, turns, seed=4, device=DEVICE) for _ in range(2)
    )
    for _ in range(turns):
        expected = PlainChain(chain.samplers).sample(logits, one)
        actual = chain.sample(logits, other)
        assert actual.tolist() == expected.tolist(), str(chain)
        one.append(expected)
        other.append(actual)
    assert one.generators.counters.tolist() == other.generators.counters.tolist()
    assert one.row_states.keys() == other.row_states.keys()
    for key in one.row_states:
        assert one.row_states[key].tolist() == other.row_states[key].tolist()


def many_kinds(vocab, rows=5):
    """Logits: random, sharp, with ties, with few left, shifted."""
    torch.manual_seed(0)
    logits = 2.5 * torch.randn(rows, vocab)
    logits[1] *= 3
    logits[2] = logits[2].round()
    logits[3, 5:-5] = -torch.inf
    logits[4] = logits[4].abs() + 100
    return logits.to(DEVICE)


@pytest.mark.parametrize("order", ["llama.cpp", "regard"])
@pytest.mark.parametrize("vocab", [53, 5003])
def test_kernels_sample_at_the_end_of_a_chain_of_ten(order, vocab):
    compare(parse_chain(TEN, order), many_kinds(vocab), 2 if INTERPRETED else 6)


@pytest.mark.parametrize("word", KINDS[::3] if INTERPRETED else KINDS)
def test_each_stage_does_what_its_formula_says(word):
    logits = many_kinds(3001)
    compare(parse_chain(["top_k=40", word]), logits)
    before = ["top_n_sigma={n=1.5, min_keep=3}", "temperature=1.3", "top_k={k=512, exact=true}"]
    compare(parse_chain([*before, word]), logits)


def test_stages_follow_one_that_leaves_gaps():
    logits = many_kinds(3001)
    gaps = ["top_k=100", "xtc={probability=0.7, threshold=0.01}"]
    for word in KINDS[::4] if INTERPRETED else KINDS:
        compare(parse_chain([*gaps, "typical=0.6", word, "min_p=0.01"]), logits, 1)


@pytest.mark.parametrize("last", ["min_p=0.1", "top_p=0.9", "typical=0.9", "temperature=1.5"])
def test_a_low_temperature_follows_a_stage_that_removed_the_most_probable(last):
    likeliest = torch.full((1, 60), -5.0, device=DEVICE)
    likeliest[0, 7], likeliest[0, 11] = 5.0, 2.9
    xtc = ["top_k=40", "xtc={probability=1, threshold=0.1}", "temperature=0.02"]
    lonely = torch.full((1, 900), -9.0, device=DEVICE)
    lonely[0, 200:600], lonely[0, 3] = 0.0, 5.5
    typical = ["top_k=512", "typical=0.3", "temperature=0.05"]
    for words, logits in ((xtc, likeliest), (typical, lonely)):
        compare(parse_chain(words), logits)
        compare(parse_chain([*words, last]), logits)


def test_two_temperatures_leave_the_most_probable():
    words = ["temperature=0.7", "top_k=50", "temperature=0.9", "min_p=1"]
    compare(parse_chain(words), many_kinds(5003, rows=8 if INTERPRETED else 64))


def test_rows_of_which_many_tokens_are_equal():
    torch.manual_seed(0)
    logits = torch.randn(4, 5003).round().clamp(-1, 2)
    logits[1] = 0.0
    logits[2, torch.arange(5003) % 2048 < 3] = 4 + torch.rand(5003)[torch.arange(5003) % 2048 < 3]
    logits[3, ::2] = -0.0
    logits[3, 1::2] = 0.0
    compare(parse_chain(["top_k={k=300, exact=true}", "top_p=0.9"]), logits.to(DEVICE))
    compare(parse_chain(["top_k=1", "top_p=0.9"]), logits[2:3].to(DEVICE))


def test_the_largest_logits_may_have_neighbouring_ids():
    logits = torch.randn(2, 3 * 2048)
    logits[:, ::2048] += 50
    logits[1, 2048 : 2048 + 1500] += 20
    logits[1, torch.arange(6144) % 2048 > 500] = -torch.inf  # few groups, many tokens
    compare(parse_chain(["top_k=512", "temperature=9"]), logits.to(DEVICE))


def test_fewer_tokens_may_be_ranked(monkeypatch):
    monkeypatch.setattr(kernel, "MAX_RANKED", 64)
    compare(parse_chain(["top_k=20", "top_p=0.9", "temperature=2"]), many_kinds(3001))


def test_half_precision_is_widened():
    compare(parse_chain(["top_k=50", "top_p=0.9"]), many_kinds(3001).bfloat16())
    compare(parse_chain(["top_k=50", "top_p=0.9"]), many_kinds(3001).half())


@pytest.mark.parametrize("vocab", [53, 2048] if INTERPRETED else [53, 2048, 32000, 50257, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_and_top_k_alone(vocab, dtype):
    logits = many_kinds(vocab)
    logits[2] = 2.5 * torch.randn(vocab).mul(4).round().div(4)  # hundreds of ties, no thousand
    for k in (1, 200) if INTERPRETED else (1, 50, 200, 512):
        compare(parse_chain(["temperature=0.8", f"top_k={k}"]), logits.to(dtype), 1)


def test_rows_may_be_strided():
    logits = many_kinds(3001, 6).view(3, 2, 3001)[:, 1]
    compare(parse_chain(["top_k=50", "top_p=0.9"]), logits)
    compare(parse_chain(["top_k=50", "top_p=0.9"]), many_kinds(3001).T.contiguous().T)


def test_a_row_with_nothing_to_draw_from_is_noted():
    logits = many_kinds(3001)
    logits[0], logits[2], logits[3, 7], logits[4, 8] = -torch.inf, torch.nan, torch.nan, torch.inf
    sampling = SamplingState.from_prompts(
        [[1], [1, 2], [1], [1, 2, 3], [1]], 4, seed=1, device=DEVICE
    )
    chain = parse_chain(TEN, "llama.cpp")
    for _ in range(2):
        ids = chain.sample(logits, sampling)
        assert ids.max() < 3001
        assert ids.min() >= 0
        sampling.append(ids)
    assert failure_lengths(sampling).tolist() == [1, NOT_FAILED, 1, 3, 1]
    assert sampling.generators.counters.tolist() == [4] * 5


@pytest.mark.parametrize(
    "words",
    [
        ["top_p=0.9"],
        ["top_k=513"],
        ["top_p=0.9", "top_k=50"],
        ["top_n_sigma=1", "top_n_sigma=2", "top_k=50"],
        ["top_k=50", "greedy"],
        ["top_k=50", "tail_free=0.9"],
        ["top_k=50", "repetition=1.2"],
        ["top_k=50", "mirostat_2=5"],
        ["top_k=50", "xtc={probability=1, threshold=0}"],
        ["top_k=50", "xtc={probability=1, threshold=0.1, protect=[1]}"],
    ],
    ids=str,
)
def test_other_chains_are_left_as_they_are(words):
    assert parse_chain(words).fused_tail is None


def test_settings_of_rows_are_left_as_they_are():
    chain = Chain.per_row([parse_chain(["top_k=50"]), parse_chain(["top_k=60"])])
    assert chain.fused_tail is None
