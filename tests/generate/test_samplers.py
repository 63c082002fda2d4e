import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ConfigError
from regard.generate import SAMPLERS, Temperature, TopK, TopP

LOGITS = st.lists(st.floats(-9, 9), min_size=1, max_size=12)
SOME = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0]])
WORKING = {"temperature": Temperature(0.7), "top_k": TopK(2), "top_p": TopP(0.6)}
NEUTRAL = {"temperature": Temperature(1.0), "top_k": TopK(0), "top_p": TopP(1.0)}


def rows(*logits):
    return torch.tensor(logits, dtype=torch.double)


def kept(sampler, logits):
    return sampler(logits).isfinite()


def test_every_sampler_of_the_table_is_tested_here_or_beside():
    assert set(SAMPLERS) == set(WORKING) == set(NEUTRAL)


@given(LOGITS, st.floats(0.01, 1))
def test_top_p_keeps_the_fewest_tokens_that_reach_p(logits, p):
    logits = rows(logits)
    probs, alive = logits.softmax(-1), kept(TopP(p), logits)
    mass = probs[alive].sum()
    assert mass >= p - 1e-9  # enough
    assert mass - probs[alive].min() < p + 1e-9  # and none to spare
    assert alive.all() or probs[alive].min() >= probs[~alive].max()  # the likeliest ones


@given(LOGITS, st.integers(1, 14))
def test_top_k_keeps_the_k_largest_and_all_that_tie_with_the_last(logits, k):
    logits = rows(logits)
    alive = kept(TopK(k), logits)
    least = logits[0].sort(descending=True).values[min(k, logits.shape[1]) - 1]
    assert torch.equal(alive, logits >= least)
    assert alive.sum() >= min(k, logits.shape[1])


@given(LOGITS, st.floats(0.05, 5), st.floats(1.01, 3))
def test_a_lower_temperature_makes_the_likeliest_token_no_less_likely(logits, value, factor):
    logits = rows(logits)
    cold, warm = (Temperature(t)(logits).softmax(-1).max() for t in (value, value * factor))
    assert cold >= warm - 1e-9


@given(LOGITS, st.floats(0, 0.99), st.floats(0, 0.99))
def test_a_larger_p_never_removes_more(logits, one, other):
    logits = rows(logits)
    assert (kept(TopP(min(one, other)), logits) <= kept(TopP(max(one, other)), logits)).all()


@pytest.mark.parametrize("name", SAMPLERS)
@given(logits=LOGITS)
def test_the_largest_logit_survives(name, logits):
    logits = rows(logits)
    assert kept(WORKING[name], logits)[0, logits.argmax()]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_neutral_value_gives_the_very_same_logits_back(name):
    assert NEUTRAL[name](SOME) is SOME


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_row_is_treated_as_if_it_were_alone(name):
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    together = WORKING[name](logits)
    for row in range(5):
        assert torch.equal(together[row], WORKING[name](logits[row : row + 1])[0])


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_removed_token_stays_removed_and_has_no_mass(name):
    logits = rows([2.0, -torch.inf, 1.5, 1.0, -torch.inf, -1.0])
    alive = [0, 2, 3, 5]
    result = WORKING[name](logits)
    assert result[0, [1, 4]].tolist() == [-torch.inf] * 2
    assert torch.equal(result[:, alive], WORKING[name](logits[:, alive]))


@pytest.mark.parametrize("name", SAMPLERS)
def test_renaming_the_tokens_renames_the_result(name):
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(WORKING[name](SOME)[:, order], WORKING[name](SOME[:, order]))


def test_top_p_of_nothing_is_the_likeliest_token():
    assert kept(TopP(0.0), SOME)[0].nonzero().flatten().tolist() == [0]


def test_equally_likely_tokens_enter_the_nucleus_in_the_order_of_their_ids():
    assert kept(TopP(0.5), rows([0.0] * 4)).tolist() == [[True, True, False, False]]


def test_the_token_that_crosses_p_is_kept():
    logits = rows([0.5, 0.3, 0.2]).log()
    assert kept(TopP(0.6), logits).tolist() == [[True, True, False]]


@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_temperature_zero_leaves_the_first_of_the_largest(value):
    logits = rows([1.0, 3.0, 3.0, 2.0])
    assert Temperature(value)(logits).tolist() == [[-torch.inf, 3.0, -torch.inf, -torch.inf]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopP(1.5), r"top_p=1.5 must lie in \[0, 1\]"),
        (lambda: TopP(float("nan")), "top_p=nan"),
        (lambda: TopK(-1), "top_k=-1 must be 1 or more tokens"),
        (lambda: Temperature(-0.1), "temperature=-0.1 must be 0"),
        (lambda: Temperature(float("inf")), "temperature=inf"),
    ],
)
def test_a_setting_out_of_range_is_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("sampler", "ids"),
    [(TopK(3), [0, 1, 2]), (TopP(0.8), [0, 1, 2, 3]), (TopP(0.0), [0])],
)
def test_eight_tokens_by_hand(sampler, ids):
    # P = .405 .245 .149 .090 .055 .033 .020 .003
    assert kept(sampler, SOME)[0].nonzero().flatten().tolist() == ids


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(20))
def test_samplers_agree_with_transformers(seed):
    from transformers.generation import logits_process as peer

    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(seed))
    if seed % 2:
        logits = logits.round()  # ties
    for ours, theirs in [
        (TopK(1 + seed), peer.TopKLogitsWarper(1 + seed)),
        (Temperature(0.1 + seed / 7), peer.TemperatureLogitsWarper(0.1 + seed / 7)),
    ]:
        assert torch.equal(ours(logits), theirs(None, logits))
    if not seed % 2:  # among ties, transformers keeps whichever its unstable sort puts last
        p = 0.05 + seed / 25
        assert torch.equal(TopP(p)(logits), peer.TopPLogitsWarper(p)(None, logits))
