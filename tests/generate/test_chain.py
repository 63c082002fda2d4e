from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import regard.generate.chain as chains
from regard.errors import ConfigError, RegardError
from regard.generate import (
    DEFAULT_SAMPLERS,
    SAMPLER_ORDERS,
    SAMPLERS,
    Chain,
    SamplingState,
    Temperature,
    TopK,
    TopP,
    parse_chain,
    sample_token,
)
from regard.generate.sampler_spec import format_sampler
from regard.generate.samplers.constraints import Ban
from regard.generate.sampling_state import RowGenerators


def state_of(rows, seed=0):
    return SamplingState.from_prompts([[0]] * rows, 1, seed=seed)


def draws(logits, count, *, seed=0):
    """Ids drawn one after another from one row's generator."""
    generators = RowGenerators.from_seed(seed, 1)
    return torch.cat([sample_token(logits, generators) for _ in range(count)])


def chi_square(ids, p):
    """How far what was drawn lies from what was to be expected; nothing impossible was drawn."""
    seen, expected = torch.bincount(ids, minlength=len(p)).double(), len(ids) * p.double()
    assert seen[expected == 0].sum() == 0
    some = expected > 0
    return ((seen - expected)[some] ** 2 / expected[some]).sum()


LARGEST = {2: 10.8, 4: 16.3, 5: 18.5, 8: 24.3}  # of tokens; passed once in a thousand times
EIGHT = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0]])


@pytest.mark.parametrize(
    "words", [[], ["top_k=4"], ["top_p=0.8", "temperature=1.5"], ["typical=0.9", "quadratic=0.3"]]
)
def test_draws_follow_the_stated_distribution(words):
    chain, logits, count = parse_chain(words), EIGHT, 20_000
    for sampler in chain.samplers:
        logits = sampler(logits)
    ids = chain(EIGHT.expand(count, -1), state_of(count))  # a row each, with its own numbers
    p = logits.softmax(-1)[0]
    assert chi_square(ids, p) < LARGEST[int((p > 0).sum())]
    generators = RowGenerators.from_seed(1, 1)  # and one row again and again
    ids = torch.cat([sample_token(logits, generators) for _ in range(2000)])
    assert chi_square(ids, p) < LARGEST[int((p > 0).sum())]


def test_draws_behind_a_coin_follow_the_mixture():
    chain, count = parse_chain(["xtc={probability=0.3, threshold=0.1}"]), 20_000
    ids = chain(EIGHT.expand(count, -1), state_of(count))
    without = EIGHT.clone()
    without[0, :2] = -torch.inf  # P = .405 .245 .149 | .090
    p = 0.7 * EIGHT.softmax(-1)[0] + 0.3 * without.softmax(-1)[0]
    assert chi_square(ids, p) < LARGEST[8]


def test_a_removed_token_is_never_drawn_not_even_at_the_ends():
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [3, 20, 21]] = torch.tensor([0.0, -3.0, -3.0])
    assert set(draws(logits, 500).tolist()) == {3, 20, 21}


class Fixed:
    """A source that gives one number again and again."""

    def __init__(self, number):
        self.number = number

    def uniform(self):
        return torch.tensor([self.number], dtype=torch.double)


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2.0**-53, 998)])
def test_the_least_and_the_largest_number_find_a_token_that_is_left(number, token):
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    logits[0, [0, -1]] = -torch.inf
    assert sample_token(logits, Fixed(number)).tolist() == [token]


def test_a_row_draws_the_same_whoever_is_beside_it():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    together = state_of(5)
    alone = [RowGenerators.from_seed(0, 5).select(torch.tensor([row])) for row in range(5)]
    for _ in range(20):
        ids = Chain()(logits, together)
        for row in range(5):
            assert sample_token(logits[row : row + 1], alone[row]) == ids[row]


def test_a_seed_of_its_own_makes_a_row_what_it_is_alone():
    together, alone = RowGenerators.from_seed([7, 8], 2), RowGenerators.from_seed(8, 1)
    for _ in range(5):
        assert together.uniform()[1] == alone.uniform()[0]


def test_rows_and_seeds_have_numbers_of_their_own():
    first = [n for seed in range(20) for n in RowGenerators.from_seed(seed, 20).uniform().tolist()]
    assert len(set(first)) == 400


def test_no_seed_means_new_numbers():
    one, other = (RowGenerators.from_seed(None, 4).uniform() for _ in range(2))
    assert not torch.equal(one, other)


def test_a_number_is_used_up_only_where_it_is_wanted():
    generators = RowGenerators.from_seed(0, 2)
    first = generators.uniform(torch.tensor([True, False]))
    second = generators.uniform()
    assert first[0] != second[0]
    assert first[1] == second[1]


def splitmix(key, n):
    """The published generator in whole numbers."""
    bits = 2**64 - 1
    z = (key + n * 0x9E3779B97F4A7C15) & bits
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
    return z ^ (z >> 31)


def test_random_numbers_are_those_of_splitmix():
    assert (
        splitmix(1234567, 1) == 6457827717110365317
    )  # Vigna's splitmix64.c, first of seed 1234567
    generators = RowGenerators.from_seed(3, 4)
    for n in range(100):
        expected = [(splitmix(key % 2**64, n) >> 11) * 2.0**-53 for key in generators.keys.tolist()]
        assert generators.uniform().tolist() == expected


def test_greedy_is_the_argmax_and_needs_no_chance():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, -torch.inf]])
    sampling = state_of(2)
    assert parse_chain(["greedy"])(logits, sampling).tolist() == [1, 0]
    assert sampling.generators.counters.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fast_argmax_is_that_of_torch(dtype):
    """The values are few, so that the largest occurs several times."""
    logits = torch.randint(0, 9, (20, 300)).to(dtype).requires_grad_()
    ids = chains.finite_argmax(logits)
    assert ids.dtype == torch.long
    assert torch.equal(ids, logits.argmax(-1))
    for value in (torch.nan, torch.inf):
        other = logits.detach().clone()
        other[7, 5] = value
        assert chains.finite_argmax(other) is None
    other = torch.full((2, 5), -torch.inf)
    other[0, 1] = 1.0
    assert chains.finite_argmax(other) is None
    assert chains.finite_argmax(other[:1]).tolist() == [1]


def test_half_precision_logits_are_sampled_in_float32():
    seen = []

    def spy(logits, sampling=None):
        seen.append(logits.dtype)
        return logits

    Chain((spy,))(torch.randn(1, 4).bfloat16(), state_of(1))
    assert seen == [torch.float32]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("chain", [Chain(), parse_chain(["greedy"])])
def test_logits_that_are_no_numbers_are_an_error_that_names_the_row(chain, bad):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(RegardError, match="row 1 has no token left to sample: the model's largest"):
        chain(logits, state_of(3))


def test_a_row_without_any_token_left_is_an_error():
    with pytest.raises(RegardError, match="the model's largest logit is -inf"):
        Chain()(torch.full((1, 4), -torch.inf), state_of(1))


@pytest.mark.parametrize("words", [["ban=[0, 1, 2, 3]"], ["top_k=2", "ban=[0, 1, 2]", "top_p=0.5"]])
def test_samplers_that_leave_nothing_are_named(words):
    ban = next(word for word in words if word.startswith("ban"))
    with pytest.raises(
        RegardError, match=r"row 0 has no token left to sample: ban.* removed all"
    ) as e:
        parse_chain(words)(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), state_of(1))
    assert ban in str(e.value)


def test_what_failed_on_a_device_is_told_when_asked():
    sampling, chain = state_of(2), Chain((Ban((0, 1)),))
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, -torch.inf]])
    ids = chain.sample(logits, sampling)
    assert ids[0] == 2
    assert 0 <= ids[1] < 3  # some id, so that nothing downstream falls over
    with pytest.raises(RegardError, match=r"row 1 has no token left to sample: ban.* removed all"):
        chain.raise_if_failed(sampling, lambda row, length: logits[row : row + 1])
    chain.raise_if_failed(sampling, lambda row, length: logits[row : row + 1])  # told once


def test_whoever_left_nothing_is_named_by_the_coins_that_were_tossed():
    chain = parse_chain(["xtc={probability=0.5, threshold=0.1}", "ban=[2, 3]", "ban=[0, 1]"])
    logits = torch.tensor([[3.0, 3.0, 3.0, 2.0]])  # the top choices, or without them token 3
    for seed in range(12):
        sampling = state_of(1, seed)
        tossed = RowGenerators.from_seed(seed, 1).uniform() < 0.5
        expected = r"ban=\[2, 3\]" if tossed else r"ban=\[0, 1\]"
        with pytest.raises(RegardError, match=f"{expected} removed all remaining tokens$"):
            chain(logits, sampling)


def test_what_a_row_draws_behind_its_stop_is_nobodys_concern():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    chain = parse_chain(["no_repeat_ngram=1", "greedy"])
    for stop, fails in [((1,), False), ((), True)]:
        sampling = SamplingState.from_prompts([[3]], 9, stop=stop)
        for _ in range(3):  # 2, 1, 0: then everything was said
            sampling.append(chain(logits, sampling))
        if fails:
            with pytest.raises(RegardError, match="no_repeat_ngram=1 removed all remaining tokens"):
                chain(logits, sampling)
        else:
            chain(logits, sampling)


def words_of(case, generator):
    """Some samplers with settings of their own, in any order."""
    share = torch.rand(len(LINKS), generator=generator).tolist()
    some = torch.randperm(len(LINKS), generator=generator)[: 1 + case % 6].tolist()
    words = [list(LINKS.values())[i](0.05 + 0.9 * share[i]) for i in some]
    steering = [word for word in words if word.startswith("mirostat")]
    return [word for word in words if word not in steering] + steering[:1]


LINKS = {
    "temperature": lambda x: f"temperature={2 * x}",
    "dynamic_temperature": lambda x: f"dynamic_temperature={{low={x}, high={2 * x}}}",
    "quadratic": lambda x: f"quadratic={{factor={x}, curve={1 + x}}}",
    "top_k": lambda x: f"top_k={int(1 + 20 * x)}",
    "exactly top_k": lambda x: f"top_k={{k={int(1 + 20 * x)}, exact=true}}",
    "top_p": lambda x: f"top_p={x}",
    "min_p": lambda x: f"min_p={x / 2}",
    "top_a": lambda x: f"top_a={x}",
    "top_h": lambda x: f"top_h={x}",
    "top_n_sigma": lambda x: f"top_n_sigma={2 * x}",
    "typical": lambda x: f"typical={x}",
    "epsilon": lambda x: f"epsilon={x / 20}",
    "eta": lambda x: f"eta={x / 5}",
    "tail_free": lambda x: f"tail_free={x}",
    "xtc": lambda x: f"xtc={{probability=0.5, threshold={x / 8}}}",
    "repetition": lambda x: f"repetition={1 + x}",
    "presence": lambda x: f"presence={x}",
    "frequency": lambda x: f"frequency={{penalty={x}, window=4}}",
    "no_repeat_ngram": lambda x: f"no_repeat_ngram={int(1 + 3 * x)}",
    "dry": lambda x: f"dry={{multiplier={x}, allowed_length={int(1 + 2 * x)}}}",
    "bias": lambda x: f"bias={{tokens=[3, 4], value={x}}}",
    "ban": lambda x: f"ban=[{int(20 * x)}]",
    "mirostat_1": lambda x: f"mirostat_1={4 * x}",
    "mirostat_2": lambda x: f"mirostat_2={4 * x}",
}
NOT_MIXED = {
    "allow",
    "force",
    "min_new_tokens",
    "adaptive_p",
}  # they leave other samplers no choice
LINKS |= {  # of any other sampler, its defaults
    name: lambda x, name=name: format_sampler(SAMPLERS[name]())
    for name in SAMPLERS.keys() - LINKS.keys() - NOT_MIXED
}


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # sums in another order


def test_a_chain_is_its_stages_one_after_another():
    generator = torch.Generator().manual_seed(0)
    for case in range(150):
        chain, texts = parse_chain(words_of(case, generator)), [[1, 2, 1, 2, 1], [3, 4, 5]]
        logits = 2 * torch.randn(2, 25, generator=generator)
        expected, apart = logits, SamplingState.from_prompts(texts, 1, seed=case)
        for sampler in chain.samplers:
            expected = sampler(expected, apart)
        close(chain.process(logits, SamplingState.from_prompts(texts, 1, seed=case)), expected)


@pytest.mark.parametrize("first", LINKS)
def test_any_two_samplers_are_one_after_the_other(first):
    generator = torch.Generator().manual_seed(3)
    for second in LINKS:
        if "mirostat" in first:
            continue  # nothing comes behind it
        for ordered in ([], ["top_p=0.98"]):  # once with tokens that are ranked already
            words = [*ordered, LINKS[first](0.3), LINKS[second](0.1)]
            chain, texts = parse_chain(words), [[1, 2, 1, 2, 1], [3, 4, 5]]
            logits = (4 * torch.randn(2, 25, generator=generator)).round() / 2  # some tie
            expected, apart = logits, SamplingState.from_prompts(texts, 1, seed=1)
            for sampler in chain.samplers:
                expected = sampler(expected, apart)
            close(chain.process(logits, SamplingState.from_prompts(texts, 1, seed=1)), expected)
            joined = Chain.per_row([chain, parse_chain(["top_k=7"])])
            found = joined.process(logits, SamplingState.from_prompts(texts, 1, seed=1))
            close(found[:1], expected[:1])


@pytest.mark.parametrize(
    "words",
    [["mirostat_2=3", "top_k=1"], ["adaptive_p=0.3", "mirostat_2=3"], ["mirostat_1=3", "greedy"]],
)
def test_what_learns_is_the_last_and_the_only_one(words):
    with pytest.raises(ConfigError, match=f"{words[0].split('=')[0]}.* must be the last sampler"):
        parse_chain(words)
    parse_chain(["mirostat_2=3", "top_k=0", "adaptive_p=0"])  # what does nothing may stand there


def test_rows_with_chains_of_their_own_are_what_they_are_alone():
    generator, seeds = torch.Generator().manual_seed(1), [5, 6, 7, 8]
    for case in range(20):
        chains = [parse_chain(words_of(case + row, generator)) for row in range(4)]
        texts = [[1], [2, 3, 2], [4] * 5, [5, 6, 5, 6, 5, 6, 5]]
        together = SamplingState.from_prompts(texts, 6, seed=seeds)
        alone = [SamplingState.from_prompts([texts[row]], 6, seed=seeds[row]) for row in range(4)]
        joined = Chain.per_row(chains)
        for _ in range(6):
            logits = 2 * torch.randn(4, 25, generator=generator)
            ids = joined(logits, together)
            together.append(ids)
            for row, (chain, sampling) in enumerate(zip(chains, alone, strict=True)):
                single = chain(logits[row : row + 1], sampling)
                assert single == ids[row], (case, row, str(chain))
                sampling.append(single)


@pytest.mark.parametrize("link", ["mirostat_1=1.5", "mirostat_2=1.5", "adaptive_p=0.4"])
def test_a_row_learns_from_its_own_stage_only(link):
    chains = [
        parse_chain(words)
        for words in (["temperature=0.9", link], ["top_k=5", "temperature=0.8"], ["top_k=9", link])
    ]
    logits = 2 * torch.randn(3, 25, generator=torch.Generator().manual_seed(2))
    together = SamplingState.from_prompts([[1], [2], [3]], 20, seed=[3, 4, 5])
    joined, alone = (
        Chain.per_row(chains),
        [SamplingState.from_prompts([[1 + row]], 20, seed=3 + row) for row in range(3)],
    )
    assert len(joined.samplers) == 3
    for _ in range(20):
        ids = joined(logits, together)
        for row in range(3):
            assert chains[row](logits[row : row + 1], alone[row]) == ids[row]


def test_nothing_in_a_chain_asks_what_the_numbers_are(monkeypatch):
    """A compiler that must see one graph stops where the host would have to wait."""
    monkeypatch.setattr("regard.generate.chain.SKIP_REMOVED_DEVICES", ())  # as on a GPU
    names = [
        name for name in SAMPLER_ORDERS["regard"].order if name in LINKS and name != "mirostat_1"
    ]
    words = [LINKS[name](0.6) for name in names]
    chains = [parse_chain(words, "regard"), parse_chain(["temperature=0.5", "top_p=0.5"])]
    logits = 2 * torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    chain = Chain.per_row(chains)
    assert chain.capturable
    one, other = (SamplingState.from_prompts([[1, 2, 1, 2], [3]], 9, seed=2) for _ in range(2))
    pick = torch.compile(chain.sample, backend="eager", fullgraph=True)
    for sampling in (one, other):
        sampling.append(chain(logits, sampling))  # the first call makes tensors of settings
    for _ in range(3):
        assert torch.equal(chain.sample(logits, one), pick(logits, other))


def test_equal_chains_together_are_one_of_them():
    chain = parse_chain(["temperature=0.7", "top_k=5", "top_p=1"])
    assert Chain.per_row([chain] * 3).samplers == chain.samplers[:2]


def test_rows_that_stay_keep_their_settings_their_chance_and_their_memory():
    own = [["top_k=1"], ["top_p=0.9", "xtc=0.5"], ["mirostat_2={target=1, lr=0.5}"]]
    joined = Chain.per_row([parse_chain(words) for words in own])
    states = [SamplingState.from_prompts([[1], [2], [3]], 30, seed=4) for _ in range(2)]
    logits = 2 * torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    for sampling in states:
        for _ in range(5):
            sampling.append(joined(logits, sampling))
    stay = torch.tensor([2, 1])
    all_rows, some, fewer = states[0], states[1].select(stay), joined.select(stay)
    for _ in range(20):
        assert torch.equal(joined(logits, all_rows)[stay], fewer(logits[stay], some))


class Sorts(TorchDispatchMode):
    """Counts what sorts."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "sort" in function.name() and "search" not in function.name()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", SAMPLER_ORDERS)
def test_a_chain_of_all_samplers_sorts_once(order):
    names = [
        name for name in SAMPLER_ORDERS[order].order if name in LINKS and "mirostat" not in name
    ]
    chain = parse_chain([LINKS[name](0.9) for name in names], order)
    one_temperature = order == "llama.cpp"
    assert len(chain.samplers) == len(names) - one_temperature
    logits, sampling = torch.randn(2, 200), state_of(2)
    with Sorts() as sorts:
        chain(logits, sampling)
    assert sorts.count == 1
    with Sorts() as sorts:
        parse_chain(["top_k=5", "min_p=0.1", "temperature=0.5"])(logits, sampling)
    assert sorts.count == 0


def test_the_context_keeps_prompt_and_answer_of_ragged_rows():
    sampling = SamplingState.from_prompts([[5], [6, 7, 8]], 2, seed=1)
    sampling.append(torch.tensor([1, 2]))
    sampling.append(torch.tensor([3, 4]))
    texts = [
        row[:length].tolist()
        for row, length in zip(sampling.history, sampling.lengths.tolist(), strict=True)
    ]
    assert texts == [[5, 1, 3], [6, 7, 8, 2, 4]]
    assert sampling.prompt_lengths.tolist() == [1, 3]


def test_words_become_stages_in_their_order():
    chain = parse_chain(["top_k=40", "temperature=1", "top_p=0.9", "temperature={value=0.5}"])
    assert chain.samplers == (TopK(40), Temperature(1.0), TopP(0.9), Temperature(0.5))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("topp=0.9", "unknown sampler 'topp'; did you mean 'top_p'"),
        ("gredy", "did you mean 'greedy'"),
        ("top_p", "has no value"),
        ("top_p=high", "top_p.p must be a number, not 'high'"),
        ("top_k=2.5", "top_k.k must be an integer"),
        ("top_p=2", r"must lie in \[0, 1\]"),
        ("top_p={mass=0.5}", "unknown key 'mass'"),
    ],
)
def test_a_wrong_word_is_explained(word, message):
    with pytest.raises(ConfigError, match=message):
        parse_chain([word])


def test_a_chain_is_printed_as_the_words_it_is_made_from():
    words = ["ban=[1, 2]", "dry={multiplier=0.8, breakers=[3]}", "top_p={p=0.5, min_keep=2}"]
    chain = parse_chain([*words, 'mirostat_2={target=5.0, surprisal="full"}'])
    assert parse_chain(chain.specs()) == chain
    assert str(chain).startswith("ban=[1, 2] → dry={multiplier=0.8, breakers=[3]} → top_p={p=0.5, ")
    assert str(parse_chain(["greedy"])) == "temperature=0.0 → argmax"


def test_the_default_samplers_are_those_of_the_help_and_the_document():
    root = Path(__file__).parents[2]
    assert parse_chain() == parse_chain(DEFAULT_SAMPLERS)
    assert parse_chain(order="llama.cpp") == parse_chain([], "llama.cpp")
    for name in ("src/regard/cli/generate.py", "docs/samplers.md"):
        text = (root / name).read_text(encoding="utf-8")
        assert all(spec in text for spec in DEFAULT_SAMPLERS), name


@pytest.mark.parametrize(
    ("specs", "use_kernel", "supported", "expected"),
    [
        (["top_p=0.9"], True, True, "kernel"),
        (["top_p=0.9"], False, True, "sample_token"),
        (["top_k=5"], True, True, "fused"),
        (["top_k=5"], False, True, "fused"),
        (["top_k=5"], True, False, "sample_token"),  # fused kernels exist, but not for this dtype
        (["greedy"], True, True, "argmax"),
        ([], True, False, "kernel"),
    ],
)
def test_one_place_decides_how_a_token_is_sampled(
    monkeypatch, specs, use_kernel, supported, expected
):
    used = []

    def stub(name):
        return lambda logits, *_: used.append(name) or logits.new_zeros(len(logits)).long()

    monkeypatch.setattr(chains, "can_run_kernels", lambda tensor: True)
    monkeypatch.setattr(chains, "supports_fused_tail", lambda logits: supported)
    monkeypatch.setattr(chains, "_sample_kernel", lambda context: stub("kernel"))
    monkeypatch.setattr(chains, "sample_token", stub("sample_token"))
    monkeypatch.setattr(chains.FusedTail, "sample", lambda self, *args: stub("fused")(*args))
    chain, logits = parse_chain(specs), torch.randn(2, 20)
    ids = chain.sample(logits, state_of(2), use_kernel=use_kernel)
    assert used == ([] if expected == "argmax" else [expected])
    assert expected != "argmax" or torch.equal(ids, logits.argmax(-1))
    used.clear()
    chain.sample(logits, state_of(2), stub("sample_ids"), use_kernel=use_kernel)
    assert used == ["sample_ids"]
