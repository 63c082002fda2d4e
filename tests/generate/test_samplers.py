"""Every sampler against its definition, and what all of them have in common."""

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sampler_reference as reference
from regard.errors import ConfigError
from regard.generate import SAMPLERS, Chain, SamplingState, parse_chain
from regard.generate.samplers.constraints import Allow, Ban, Bias, Force, MinNewTokens
from regard.generate.samplers.mirostat import AdaptiveP, Mirostat1, Mirostat2
from regard.generate.samplers.penalties import DRY, Frequency, NoRepeatNGram, Presence, Repetition
from regard.generate.samplers.temperature import DynamicTemperature, Quadratic, Temperature
from regard.generate.samplers.truncation import (
    XTC,
    Epsilon,
    Eta,
    MinP,
    TailFree,
    TopA,
    TopH,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)
from regard.generate.sampling_state import RowGenerators

CASES = 300
LOGITS = st.lists(st.floats(-9, 9), min_size=1, max_size=12)
LOGITS_OF_8 = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0]])
TEXT = [0, 1, 2, 5, 0, 1, 2, 0, 1]
# a sampler that is not named here is tested with its defaults
EXAMPLES = {name: kind() for name, kind in SAMPLERS.items()} | {
    "bias": Bias((1, 3), 0.7),
    "ban": Ban((1, 3)),
    "allow": Allow((0, 2, 5)),
    "force": Force((2,)),
    "min_new_tokens": MinNewTokens(3, stop=(4,)),
    "repetition": Repetition(1.3),
    "presence": Presence(0.4),
    "frequency": Frequency(0.3),
    "no_repeat_ngram": NoRepeatNGram(2),
    "dry": DRY(0.8),
    "temperature": Temperature(0.7),
    "dynamic_temperature": DynamicTemperature(0.5, 1.5),
    "quadratic": Quadratic(0.3),
    "top_n_sigma": TopNSigma(1.0),
    "top_k": TopK(2),
    "top_p": TopP(0.6),
    "min_p": MinP(0.2),
    "top_a": TopA(0.3),
    "top_h": TopH(0.5),
    "typical": Typical(0.4),
    "epsilon": Epsilon(0.05),
    "eta": Eta(0.3),
    "tail_free": TailFree(0.5),
    "xtc": XTC(1.0, 0.1),
    "mirostat_1": Mirostat1(1.0),
    "mirostat_2": Mirostat2(1.0),
    "adaptive_p": AdaptiveP(0.4),
}
CONSTRAINTS = {"bias", "ban", "allow", "force", "min_new_tokens"}
PENALTIES = {"repetition", "presence", "frequency", "no_repeat_ngram", "dry"}
DROPS_THE_BEST = {"typical", "xtc", "adaptive_p", *CONSTRAINTS, *PENALTIES}


def rows(*logits):
    return torch.tensor(logits, dtype=torch.double)


def state_of(*texts, seed=0, generated=0):
    """The sampling state of these texts, of which the last `generated` ids are no prompt."""
    sampling = SamplingState.from_prompts(texts, 1, seed=seed)
    sampling.prompt_lengths -= generated
    return sampling


def kept(sampler, logits, sampling=None):
    return sampler(
        logits, state_of(*[TEXT] * len(logits)) if sampling is None else sampling
    ).isfinite()


def ids_kept(sampler, logits=LOGITS_OF_8, sampling=None):
    return kept(sampler, logits, sampling)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_has_an_example_that_changes_something(name):
    assert not EXAMPLES[name].is_off, (
        f"the defaults of {name} change nothing: add an example of it to EXAMPLES in {__file__}"
    )


def test_every_sampler_is_in_the_document():
    path = Path(__file__).parents[2] / "docs" / "samplers.md"
    table = path.read_text(encoding="utf-8").partition("| name |")[2].partition("\n\n")[0]
    first_column = "".join(re.findall(r"^\|[^|]*\|", table, re.M))
    documented = set(re.findall(r"`(\w+)`", first_column))
    assert documented >= set(SAMPLERS), (
        f"add a row to the table of {path} for: {sorted(set(SAMPLERS) - documented)}"
    )
    assert documented <= set(SAMPLERS), (
        f"the table of {path} names what is no sampler: {sorted(documented - set(SAMPLERS))}"
    )


def hard_cases(seed, vocab=40):
    """Rows of logits: some peaked, some flat, a third with ties, a third with removed tokens."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(CASES, 1, generator=generator, dtype=torch.double) * 4 + 0.2
    logits = spread * torch.randn(CASES, vocab, generator=generator, dtype=torch.double)
    logits[: CASES // 3] = logits[: CASES // 3].round()
    gone = torch.rand(CASES // 3, vocab, generator=generator) < 0.4
    gone[:, 0] = False
    logits[-(CASES // 3) :] = logits[-(CASES // 3) :].masked_fill(gone, -torch.inf)
    return logits, torch.rand(CASES, 3, generator=generator, dtype=torch.double)


TRUNCATIONS = {  # from three numbers in [0, 1] to a sampler and its definition
    "top_k": lambda x, *_: (TopK(int(50 * x)), reference.top_k, int(50 * x)),
    "top_p": lambda x, *_: (TopP(x), reference.top_p, x),
    "top_p, at least 3": lambda x, *_: (TopP(x / 2, min_keep=3), reference.top_p, x / 2, 3),
    "min_p": lambda x, *_: (MinP(x), reference.min_p, x),
    "min_p, at least 4": lambda x, *_: (MinP(x, min_keep=4), reference.min_p, x, 4),
    "top_a": lambda x, *_: (TopA(x), reference.top_a, x),
    "top_n_sigma": lambda x, *_: (TopNSigma(3 * x), reference.top_n_sigma, 3 * x),
    "top_h": lambda x, *_: (TopH(x), reference.top_h, x),
    "typical": lambda x, *_: (Typical(x), reference.typical, x),
    "typical, at least 3": lambda x, *_: (Typical(x / 3, min_keep=3), reference.typical, x / 3, 3),
    "epsilon": lambda x, *_: (Epsilon(x / 2), reference.epsilon, x / 2),
    "eta": lambda x, *_: (Eta(x), reference.eta, x),
    "tail_free": lambda x, *_: (TailFree(x), reference.tail_free, x),
    "xtc": lambda x, *_: (XTC(1.0, x / 2), reference.xtc, x / 2),
    "mirostat_1": lambda x, *_: (Mirostat1(3 * x), reference.mirostat_1, 6 * x),
    "mirostat_2": lambda x, *_: (Mirostat2(3 * x), reference.mirostat_2, 6 * x),
}


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_a_truncation_keeps_what_its_definition_says(name):
    logits, numbers = hard_cases(len(name))
    for row in range(CASES):
        sampler, definition, *settings = TRUNCATIONS[name](*numbers[row].tolist())
        found = ids_kept(sampler, logits[row : row + 1], state_of([0]))
        assert set(found) == definition(logits[row].tolist(), *settings), (row, settings)


RESHAPINGS = {
    "temperature": lambda row, x, y, z: (
        Temperature(x + 0.1),
        [logit / (x + 0.1) for logit in row],
    ),
    "dynamic_temperature": lambda row, x, y, z: (
        DynamicTemperature(x, x + y, z + 0.1),
        reference.dynamic_temperature(row, x, x + y, z + 0.1),
    ),
    "quadratic": lambda row, x, y, z: (
        Quadratic(x, 1 + 2 * y),
        reference.quadratic(row, x, 1 + 2 * y),
    ),
    "adaptive_p": lambda row, x, y, z: (AdaptiveP(x, 0.9 * y), reference.adaptive_p(row, x, x)),
}


@pytest.mark.parametrize("name", RESHAPINGS)
def test_a_reshaping_follows_its_formula(name):
    logits, numbers = hard_cases(len(name))
    for row in range(CASES):
        sampler, expected = RESHAPINGS[name](logits[row].tolist(), *numbers[row].tolist())
        found = sampler(logits[row : row + 1], state_of([0]))
        torch.testing.assert_close(found, rows(expected), rtol=1e-9, atol=1e-9)


PENALTY_CASES = {  # a sampler and its definition; the definition is told the text in the window
    "repetition": lambda x, n: (
        Repetition(x + 0.5, window=n),
        lambda row, text: reference.repetition(row, x + 0.5, text[-n:] if n else text),
    ),
    "presence": lambda x, n: (
        Presence(x - 0.3, window=n),
        lambda row, text: reference.presence(row, x - 0.3, text[-n:] if n else text),
    ),
    "frequency": lambda x, n: (
        Frequency(x - 0.3, window=n),
        lambda row, text: reference.frequency(row, x - 0.3, text[-n:] if n else text),
    ),
    "no_repeat_ngram": lambda x, n: (
        NoRepeatNGram(1 + n % 4),
        lambda row, text: reference.no_repeat_ngram(row, 1 + n % 4, text),
    ),
    "dry": lambda x, n: (
        DRY(x + 0.1, 1 + x, 1 + n % 3, window=5 + 2 * n),
        lambda row, text: reference.dry(row, x + 0.1, 1 + x, 1 + n % 3, text[-5 - 2 * n :]),
    ),
    "dry with breakers": lambda x, n: (
        DRY(x + 0.1, 1 + x, 1 + n % 3, window=40, breakers=(0, 2)),
        lambda row, text: reference.dry(row, x + 0.1, 1 + x, 1 + n % 3, text, (0, 2)),
    ),
}


@pytest.mark.parametrize("name", PENALTY_CASES)
def test_a_penalty_follows_its_formula(name):
    logits, numbers = hard_cases(len(name), vocab=6)
    generator = torch.Generator().manual_seed(len(name))
    changed = 0
    for row in range(CASES):
        length, kinds = 1 + row % 30, 2 + row % 4  # few kinds of token, so that much is repeated
        text = torch.randint(kinds, (length,), generator=generator).tolist()
        sampler, definition = PENALTY_CASES[name](numbers[row, 0].item(), row % 7)
        sampling = state_of(text, text[:1] * (length + 2))  # beside a longer one
        found = sampler(logits[[row, row]], sampling)
        expected = rows(definition(logits[row].tolist(), text))
        torch.testing.assert_close(found[:1], expected, rtol=1e-9, atol=1e-9)
        changed += not torch.equal(expected, logits[row : row + 1])
    assert changed > CASES / 8


@pytest.mark.parity
@pytest.mark.parametrize("min_keep", [1, 3])
def test_samplers_agree_with_transformers(min_keep):
    from transformers.generation import logits_process as peer

    logits, numbers = hard_cases(9, vocab=50)
    logits = logits[CASES // 3 :]  # among ties, transformers keeps what its unstable sort puts last
    logits = torch.cat([logits, hard_cases(10, vocab=50)[0][CASES // 3 :]]).float()
    for row, x in enumerate([*numbers[:, 0].tolist(), *numbers[:, 1].tolist()][: len(logits)]):
        one, x = logits[row : row + 1], min(max(x, 0.01), 0.99)
        least = {"min_tokens_to_keep": min_keep}
        pairs = [
            (TopP(x, min_keep=min_keep), peer.TopPLogitsWarper(x, **least)),
            (MinP(x, min_keep=min_keep), peer.MinPLogitsWarper(x, **least)),
            (Typical(x, min_keep=min_keep), peer.TypicalLogitsWarper(x, **least)),
            (Epsilon(x, min_keep=min_keep), peer.EpsilonLogitsWarper(x, **least)),
            (Eta(x, min_keep=min_keep), peer.EtaLogitsWarper(x, **least)),
        ]
        if min_keep == 1:
            k = 1 + int(50 * x)
            pairs += [(Temperature(2 * x), peer.TemperatureLogitsWarper(2 * x))]
            pairs += [(TopK(k), peer.TopKLogitsWarper(k))]
            if one.isfinite().all():  # its entropy of removed tokens is not a number
                pairs += [(TopH(x), peer.TopHLogitsWarper(x))]
        for ours, theirs in pairs:
            assert torch.equal(ours(one), theirs(None, one)), (row, ours)


@pytest.mark.parity
def test_penalties_agree_with_transformers():
    from transformers.generation import logits_process as peer

    generator = torch.Generator().manual_seed(0)
    for case in range(CASES):
        texts = torch.randint(5, (2, 1 + case % 25), generator=generator)
        logits, sampling = torch.randn(2, 8, generator=generator), state_of(*texts.tolist())
        x, n = 0.5 + case / CASES, 1 + case % 4
        for ours, theirs in [
            (Repetition(x), peer.RepetitionPenaltyLogitsProcessor(x)),
            (NoRepeatNGram(n), peer.NoRepeatNGramLogitsProcessor(n)),
        ]:
            assert torch.equal(ours(logits, sampling), theirs(texts, logits)), (case, ours)


# P = .405 .245 .149 .090 .055 .033 .020 .003
@pytest.mark.parametrize(
    ("sampler", "ids"),
    [
        (TopK(3), [0, 1, 2]),
        (TopP(0.8), [0, 1, 2, 3]),
        (TopP(0.0), [0]),
        (MinP(0.2), [0, 1, 2, 3]),
        (TopA(0.3), [0, 1, 2, 3, 4]),
        (Typical(0.4), [0, 1, 2]),
        (Typical(0.9), [0, 1, 2, 3, 4]),
        (Epsilon(0.05), [0, 1, 2, 3, 4]),
        (Eta(0.05), [0, 1, 2, 3, 4]),
        (Eta(0.3), [0, 1, 2]),
        (TopNSigma(1.0), [0, 1, 2]),
        (TailFree(0.9), [0, 1, 2, 3]),
        (TailFree(0.5), [0, 1]),
        (XTC(1.0, 0.1), [2, 3, 4, 5, 6, 7]),
        (XTC(1.0, 0.3), list(range(8))),
        (Mirostat2(1.5), [0, 1, 2]),
    ],
)
def test_eight_tokens_by_hand(sampler, ids):
    assert ids_kept(sampler) == ids


DRY_RESULT = [2.0, 1.5, 0.2, 0.5, 0.0, -0.5, -1.0, -3.0]


@pytest.mark.parametrize(
    ("sampler", "logits"),
    [
        (Quadratic(0.3, 1.0), [2.0, 1.925, 1.7, 1.325, 0.8, 0.125, -0.7, -5.5]),
        (Quadratic(0.3, 2.0), [2.0, 1.94375, 1.7, 1.15625, 0.2, -1.28125, -3.4, -20.5]),
        (
            DynamicTemperature(0.5, 1.5),
            [1.588492, 1.191369, 0.794246, 0.397123, 0.0, -0.397123, -0.794246, -2.382738],
        ),
        (Repetition(1.2), [1.666667, 1.25, 0.833333, 0.5, 0.0, -0.6, -1.0, -3.0]),
        (DRY(0.8), DRY_RESULT),
        (DRY(0.8, breakers=(5,)), DRY_RESULT),
        (DRY(0.8, breakers=(1,)), LOGITS_OF_8[0].tolist()),
    ],
)
def test_eight_logits_by_hand(sampler, logits):
    # the expected numbers have six digits
    torch.testing.assert_close(
        sampler(LOGITS_OF_8, state_of(TEXT))[0], torch.tensor(logits), rtol=0, atol=1e-6
    )


def test_presence_and_frequency_by_hand():
    changed = Presence(0.25)(Frequency(0.5)(LOGITS_OF_8, state_of(TEXT)), state_of(TEXT))
    assert changed[0].tolist() == [0.25, -0.25, -0.25, 0.5, 0.0, -1.25, -1.0, -3.0]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_that_is_off_returns_the_same_logits(name):
    sampler = SAMPLERS[name](**SAMPLERS[name].off_settings())
    assert sampler.is_off
    assert sampler(LOGITS_OF_8) is LOGITS_OF_8


@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - DROPS_THE_BEST))
@settings(max_examples=25)
@given(logits=LOGITS)
def test_the_largest_logit_survives(name, logits):
    logits = rows(logits)
    assert kept(EXAMPLES[name], logits)[0, logits.argmax()]


@pytest.mark.parametrize(
    "name", sorted(set(SAMPLERS) - {"ban", "allow", "force", "min_new_tokens"})
)
@settings(max_examples=25)
@given(logits=st.lists(st.floats(-9, 9), min_size=8, max_size=12))
def test_something_is_left_to_draw(name, logits):
    assert kept(EXAMPLES[name], rows(logits)).any()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_row_is_treated_as_if_it_were_alone(name):
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    texts = [[1, 2, 3, 1, 2], [4], [5] * 9, [0, 1, 0, 1, 0], [7, 8]]
    sampling = state_of(*texts)
    together = EXAMPLES[name](logits, sampling)
    for row in range(5):
        alone = state_of(texts[row])
        alone.generators = RowGenerators.from_seed(0, 5).select(torch.tensor([row]))
        assert torch.equal(together[row], EXAMPLES[name](logits[row : row + 1], alone)[0])


@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - CONSTRAINTS - PENALTIES))
def test_a_removed_token_stays_removed_and_has_no_mass(name):
    logits = rows([2.0, -torch.inf, 1.5, 1.0, -torch.inf, -1.0])
    left = [0, 2, 3, 5]
    result = EXAMPLES[name](logits, state_of([0]))
    assert result[0, [1, 4]].tolist() == [-torch.inf] * 2
    if name != "mirostat_1":  # it asks for the size of the vocabulary
        torch.testing.assert_close(
            result[:, left], EXAMPLES[name](logits[:, left], state_of([0])), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", sorted(CONSTRAINTS - {"force"} | PENALTIES))
def test_what_was_removed_is_not_brought_back(name):
    logits = torch.full((1, 8), -torch.inf)
    logits[0, 7] = 1.0
    assert not kept(EXAMPLES[name], logits)[0, :7].any()


@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - CONSTRAINTS - PENALTIES))
def test_renaming_the_tokens_renames_the_result(name):
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    one, other = (
        EXAMPLES[name](logits, state_of([0])) for logits in (LOGITS_OF_8, LOGITS_OF_8[:, order])
    )
    torch.testing.assert_close(one[:, order], other, rtol=0, atol=2e-6)  # sums in another order


STRENGTHS = {  # from weak to strong
    "top_k": lambda x: TopK(1 + int(11 * (1 - x))),
    "top_p": lambda x: TopP(1 - x),
    "min_p": MinP,
    "top_a": TopA,
    "top_n_sigma": lambda x: TopNSigma(3 * (1 - x) + 0.01),
    "top_h": lambda x: TopH(1 - x),
    "epsilon": Epsilon,
    "tail_free": lambda x: TailFree(1 - x),
    "mirostat_2": lambda x: Mirostat2(3 * (1 - x) + 0.01),
}


@pytest.mark.parametrize("name", STRENGTHS)
@settings(max_examples=25)
@given(logits=LOGITS, one=st.floats(0.01, 0.99), other=st.floats(0.01, 0.99))
def test_a_stronger_setting_never_keeps_more(name, logits, one, other):
    weak, strong = (kept(STRENGTHS[name](x), rows(logits)) for x in sorted((one, other)))
    assert (strong <= weak).all()


@settings(max_examples=25)
@given(LOGITS, st.floats(0.01, 1))
def test_top_p_keeps_the_fewest_tokens_that_reach_p(logits, p):
    logits = rows(logits)
    probs, left = logits.softmax(-1), kept(TopP(p), logits)
    mass = probs[left].sum()
    assert mass >= p - 1e-9  # enough
    assert mass - probs[left].min() < p + 1e-9  # and none to spare
    assert left.all() or probs[left].min() >= probs[~left].max()  # the most probable ones


@settings(max_examples=25)
@given(LOGITS, st.floats(0.05, 5), st.floats(1.01, 3))
def test_a_lower_temperature_makes_the_most_probable_token_no_less_probable(logits, value, factor):
    logits = rows(logits)
    cold, warm = (Temperature(t)(logits).softmax(-1).max() for t in (value, value * factor))
    assert cold >= warm - 1e-9


@settings(max_examples=25)
@given(LOGITS, st.floats(0.1, 5))
def test_top_n_sigma_does_not_ask_for_the_temperature(logits, value):
    logits = rows(logits).round(decimals=3)
    n = 0.987654321  # no logit of three digits lies on the edge
    assert torch.equal(kept(TopNSigma(n), logits), kept(TopNSigma(n), Temperature(value)(logits)))


def test_equally_likely_tokens_enter_the_nucleus_in_the_order_of_their_ids():
    assert kept(TopP(0.5), rows([0.0] * 4)).tolist() == [[True, True, False, False]]


def test_what_ties_with_a_threshold_is_kept():
    for sampler, logits in [
        (MinP(1.0), [3.0, 3.0]),
        (TopK(1), [3.0, 3.0]),
        (Epsilon(0.25), [0.0] * 4),
        (TopNSigma(2.0), [1.0, -1.0]),  # sigma is 1
        (TopA(0.5), [0.0, 0.0]),
    ]:
        assert kept(sampler, rows(logits)).all(), sampler


def test_the_token_that_crosses_p_is_kept():
    assert ids_kept(TopP(0.6), rows([0.5, 0.3, 0.2]).log()) == [0, 1]


@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_temperature_zero_leaves_the_first_of_the_largest(value):
    logits = rows([1.0, 3.0, 3.0, 2.0])
    assert Temperature(value)(logits).tolist() == [[-torch.inf, 3.0, -torch.inf, -torch.inf]]


def test_a_dynamic_temperature_of_zero_is_greedy():
    logits = rows([0.0, 2000.0, -3.0])  # no doubt: the entropy is 0
    assert ids_kept(DynamicTemperature(0.0, 1.0), logits) == [1]


def test_a_tail_without_a_bend_is_not_cut():
    assert ids_kept(TailFree(0.5), rows([1.0] * 5)) == [0, 1, 2, 3, 4]
    assert ids_kept(TailFree(0.5), rows([1.0, 0.0])) == [0, 1]


def test_xtc_tosses_one_coin_per_token_whatever_qualifies():
    sampling = state_of([0], [0], seed=3)
    logits = torch.tensor([[9.0, 0.0, 0.0], [1.0, 1.0, 1.0]])  # one top choice; three
    acted = sum(kept(XTC(0.3, 0.2), logits, sampling)[1].sum().item() == 1 for _ in range(1000))
    assert sampling.generators.counters.tolist() == [1000, 1000]
    assert abs(acted - 300) < 3.3 * math.sqrt(1000 * 0.3 * 0.7)  # 99.9 % of the time


def test_xtc_leaves_alone_what_would_cost_a_protected_token():
    assert ids_kept(XTC(1.0, 0.1, protect=(1,))) == list(range(8))
    assert ids_kept(XTC(1.0, 0.1, protect=(2,))) == [2, 3, 4, 5, 6, 7]


def test_penalties_may_count_the_answer_only():
    sampling = state_of(TEXT, generated=2)  # 0 1
    for sampler, expected in [
        (Presence(1.0, scope="completion"), [1.0, 0.5, 1.0]),
        (Frequency(1.0, scope="completion"), [1.0, 0.5, 1.0]),
        (Repetition(2.0, scope="completion"), [1.0, 0.75, 1.0]),
    ]:
        assert sampler(LOGITS_OF_8, sampling)[0, :3].tolist() == expected


def test_bias_ban_and_allow_do_what_they_say():
    assert Bias((0, 7), 1.5)(LOGITS_OF_8)[0].tolist() == [3.5, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5]
    assert ids_kept(Ban((0, 7))) == [1, 2, 3, 4, 5, 6]
    assert ids_kept(Allow((0, 7))) == [0, 7]


def test_an_answer_begins_with_what_is_forced():
    force = Force((6, 4))
    for said, left in [(0, [6]), (1, [4]), (2, list(range(8)))]:
        assert ids_kept(force, LOGITS_OF_8, state_of(TEXT, generated=said)) == left
    removed = LOGITS_OF_8.masked_fill(LOGITS_OF_8[0, 6] == LOGITS_OF_8, -torch.inf)
    assert ids_kept(force, removed, state_of(TEXT)) == [6]


def test_an_answer_does_not_stop_before_its_least_length():
    least = MinNewTokens(2, stop=(3, 5))
    for said, left in [(1, [0, 1, 2, 4, 6, 7]), (2, list(range(8)))]:
        assert ids_kept(least, LOGITS_OF_8, state_of(TEXT, generated=said)) == left
    sampling = state_of(TEXT)
    sampling.stop = (0,)
    assert ids_kept(MinNewTokens(1), LOGITS_OF_8, sampling) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("surprisal", "told"), [("truncated", 0), ("full", 1)])
@pytest.mark.parametrize("kind", [Mirostat1, Mirostat2])
def test_mirostat_follows_the_surprisal_of_what_was_sampled(kind, surprisal, told):
    sampler, sampling, mu = kind(1.2, 0.3, surprisal=surprisal), state_of([0], seed=5), 2.4
    keeps = {Mirostat1: reference.mirostat_1, Mirostat2: reference.mirostat_2}[kind]
    logits = LOGITS_OF_8.double()
    for _ in range(50):
        left = ids_kept(sampler, logits, sampling)
        assert set(left) == keeps(logits[0].tolist(), mu)
        (drawn,) = Chain((sampler,))(logits, sampling).tolist()
        seen = [x if v in left or told else -math.inf for v, x in enumerate(logits[0].tolist())]
        mu -= 0.3 * (-math.log2(reference.softmax(seen)[drawn]) - 1.2)
        assert sampler.mu(logits, sampling).item() == pytest.approx(mu, abs=1e-9)


def test_mirostat_reaches_its_target():
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)) * 2
    sampling, chain = state_of([0], seed=1), Chain((Mirostat2(3.0, 0.1, surprisal="full"),))
    bits = -logits.log_softmax(-1)[0] / math.log(2)
    drawn = torch.cat([chain(logits, sampling) for _ in range(1000)])
    assert bits[drawn].mean() == pytest.approx(3.0, abs=0.1)  # the mean of 1000 draws


def test_adaptive_p_keeps_a_running_mean_of_what_it_draws():
    sampler, sampling = AdaptiveP(0.3, 0.8), state_of([0], seed=5)
    total, weight, probs = 0.3 / 0.2, 1 / 0.2, reference.softmax(LOGITS_OF_8[0].tolist())
    for _ in range(50):
        expected = rows(reference.adaptive_p(LOGITS_OF_8[0].tolist(), 0.3, total / weight))
        torch.testing.assert_close(
            sampler(LOGITS_OF_8.double(), sampling), expected, rtol=0, atol=1e-9
        )
        (drawn,) = Chain((sampler,))(LOGITS_OF_8.double(), sampling).tolist()
        total, weight = 0.8 * total + probs[drawn], 0.8 * weight + 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("temperature=-0.1", "temperature=-0.1 must be finite, and 0"),
        ("temperature=nan", "temperature=nan"),
        ("temperature=inf", "temperature=inf"),
        ("dynamic_temperature={low=2, high=1}", "low=2.0 and high=1.0"),
        ("dynamic_temperature={low=0.5, high=nan}", "high=nan"),
        ("dynamic_temperature={low=0.5, high=2, exponent=0}", "exponent=0.0 must be above 0"),
        ("quadratic=-1", "quadratic=-1.0 must be 0"),
        ("quadratic={factor=0.3, curve=4}", "curve=4.0 must lie in"),
        ("top_k=-1", "top_k=-1 must be 1 or more tokens"),
        ("top_p=2", r"top_p=2.0 must lie in \[0, 1\]"),
        ("top_p=nan", "top_p=nan"),
        ("top_p={p=0.5, min_keep=0}", "min_keep=0 must be at least 1"),
        ("min_p=-0.5", "min_p=-0.5 must lie"),
        ("top_a=1.5", "top_a=1.5 must lie"),
        ("top_h=2", "top_h=2.0 must lie"),
        ("top_n_sigma=-1", "top_n_sigma=-1.0 must be 0"),
        ("typical=1.1", "typical=1.1 must lie"),
        ("epsilon=2", "epsilon=2.0 must lie"),
        ("eta=nan", "eta=nan must lie"),
        ("tail_free=-1", "tail_free=-1.0 must lie"),
        ("xtc=1.5", "xtc=1.5 must lie"),
        ("xtc={probability=0.5, threshold=-1}", "xtc: threshold=-1.0 must lie"),
        ("repetition=0", "repetition=0.0 must be above 0"),
        ("repetition={penalty=1.2, window=-1}", "window=-1 must be 0"),
        ("presence=inf", "presence=inf must be a finite number"),
        ("frequency=nan", "frequency=nan"),
        ("no_repeat_ngram=-2", "no_repeat_ngram=-2"),
        ("dry=-1", "dry=-1.0 must be 0"),
        ("dry={multiplier=1, base=0.5}", "base=0.5 must be at least 1"),
        ("dry={multiplier=1, allowed_length=0}", "allowed_length=0 must be at least 1"),
        ("dry={multiplier=1, window=0}", "window=0 must be at least 1"),
        ("bias={tokens=[1], value=inf}", "value=inf must be finite; ban removes"),
        ("min_new_tokens=-1", "min_new_tokens=-1"),
        ("mirostat_2=-1", "target=-1.0 must be 0"),
        ("mirostat_1={target=3, lr=0}", "lr=0.0 must be above 0"),
        ("mirostat_2={target=3, surprisal='half'}", "unknown value 'half'"),
        ("adaptive_p=2", "adaptive_p=2.0 must lie"),
        ("adaptive_p={target=0.5, decay=1}", "decay=1.0 must lie"),
    ],
)
def test_a_setting_out_of_range_is_named(word, message):
    with pytest.raises(ConfigError, match=message):
        parse_chain([word])


@pytest.mark.parametrize("token", [9999, -1])
@pytest.mark.parametrize("word", ["xtc={probability=1, protect", "dry={multiplier=1, breakers"])
def test_a_token_beside_the_point_must_exist_too(word, token):
    chain, name = parse_chain([f"{word}=[{token}]}}"]), word.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name}: .*: token {token} is not in"):
        chain(torch.zeros(1, 8), SamplingState.from_prompts([[1, 2]], 1))


@pytest.mark.parametrize("name", sorted(CONSTRAINTS))
def test_a_token_that_does_not_exist_is_named(name):
    settings = {"tokens": (8,)} if name != "min_new_tokens" else {"tokens": 1, "stop": (8,)}
    settings |= {"value": 1.0} if name == "bias" else {}
    with pytest.raises(
        ConfigError, match=f"{name}: token 8 is not in the vocabulary \\(vocab_size=8"
    ):
        SAMPLERS[name](**settings)(LOGITS_OF_8, state_of(TEXT))


@pytest.mark.parametrize(
    "name", sorted({"xtc", "adaptive_p", "force", "min_new_tokens", *PENALTIES})
)
def test_a_sampler_that_needs_a_context_says_so(name):
    with pytest.raises(ConfigError, match=f"{name} uses the generated tokens or random numbers"):
        EXAMPLES[name](LOGITS_OF_8)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_first_setting_is_the_one_a_plain_word_sets(name):
    first = fields(SAMPLERS[name])[0]
    value = getattr(EXAMPLES[name], first.name)
    (sampler,) = parse_chain(
        [f"{name}={list(value) if isinstance(value, tuple) else value}"]
    ).samplers
    assert getattr(sampler, first.name) == value
