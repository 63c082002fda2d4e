import pytest
import torch

import sampler_reference as reference
from regard.errors import ConfigError
from regard.generate import SAMPLER_ORDERS, Chain, SamplingState, parse_chain
from regard.generate.sampler_orders import arrange
from regard.generate.samplers import SAMPLERS
from regard.generate.samplers.mirostat import Mirostat2
from regard.generate.samplers.temperature import Temperature
from regard.generate.samplers.truncation import TopK, TopNSigma

SETTINGS = ["temperature=0.7", "top_p=0.9", "min_p=0.02", "typical=0.8", "repetition=1.2"]


def names(chain):
    return [word.partition("=")[0] for word in chain.specs()]


class Fresh:
    def __call__(self, logits, sampling=None):
        return logits


def test_regard_has_a_place_for_every_sampler_also_for_one_that_was_added(monkeypatch):
    assert SAMPLER_ORDERS["regard"].order == tuple(SAMPLERS)
    monkeypatch.setitem(SAMPLERS, "fresh", Fresh)
    samplers = [Fresh(), Mirostat2(3.0), Temperature(0.5)]
    assert arrange(samplers, "regard") == (samplers[2], samplers[0], samplers[1])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("regard", "repetition temperature top_p min_p typical"),
        ("hf", "repetition temperature top_k top_p min_p typical"),
        ("llama.cpp", "repetition top_k typical top_p min_p temperature"),
        ("textgen", "repetition temperature top_p typical min_p"),
    ],
)
def test_the_same_settings_act_in_another_order(order, expected):
    assert names(parse_chain(SETTINGS, order)) == expected.split()


def test_the_order_changes_what_is_drawn():
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0]])
    words = ["temperature=2.0", "top_p=0.7", "top_k=0", "min_p=0"]
    left = {
        order: parse_chain(words, order)
        .process(logits, SamplingState.from_prompts([[0]], 1))
        .isfinite()
        .sum()
        for order in SAMPLER_ORDERS
    }
    # P = .405 .245 .149 ... reaches 0.7 with three; at temperature 2, with four
    assert left == {"regard": 4, "hf": 4, "llama.cpp": 3, "textgen": 4}


def test_what_a_system_adds_where_nothing_is_said():
    assert str(parse_chain([], "regard")) == "sample"
    assert str(parse_chain([], "hf")) == "top_k=50 → sample"
    assert str(parse_chain([], "textgen")) == "sample"
    expected = "top_k={k=40, exact=true} → top_p=0.95 → min_p=0.05 → temperature=0.8 → sample"
    assert str(parse_chain([], "llama.cpp")) == expected
    assert str(parse_chain(["top_k=0"], "hf")) == "sample"


@pytest.mark.parametrize(
    ("order", "window"), [("llama.cpp", 64), ("textgen", 1024), ("regard", None)]
)
def test_penalties_look_back_as_far_as_the_system_does(order, window):
    samplers = parse_chain(["repetition=1.2", "presence={penalty=0.1, window=9}"], order).samplers
    assert [samplers[0].window, samplers[1].window] == [window, 9]
    words = ["repetition={penalty=1.2, window=0}", "dry={multiplier=1.0, window=1024}"]
    samplers = parse_chain(words, order).samplers
    assert [samplers[0].window, samplers[1].window] == [0, 1024]  # what is said is kept


@pytest.mark.parametrize("order", ["llama.cpp", "textgen"])
def test_a_setting_that_does_nothing_changes_no_habit(order):
    words = ["temperature=0.7", "xtc=0.5", "top_k=9"]
    for off in ("mirostat_2=0", "mirostat_1=0", "dynamic_temperature={low=1, high=1}"):
        assert parse_chain([*words, off], order) == parse_chain(words, order)


def test_a_setting_that_does_nothing_needs_no_place():
    words = ["temperature=0.7", "top_k=9"]
    assert parse_chain([*words, "xtc=0", "top_n_sigma=0"], "hf") == parse_chain(words, "hf")
    assert "top_p" not in str(parse_chain([*words, "top_p=1"], "llama.cpp"))


def test_llama_keeps_exactly_k_and_hf_what_ties():
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    for order, left in [("llama.cpp", [0, 1]), ("hf", [0, 1, 2, 3])]:
        (sampler,) = [s for s in parse_chain(["top_k=2"], order).samplers if isinstance(s, TopK)]
        assert sampler(logits)[0].isfinite().nonzero().flatten().tolist() == left


@pytest.mark.parametrize("ranked", [False, True])
def test_exactly_k_are_kept_by_rank_or_by_id(ranked):
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)).round()
    samplers = (
        (TopK(7, exact=True),)
        if not ranked
        else (*parse_chain(["top_p=0.999"]).samplers, TopK(7, exact=True))
    )
    left = Chain(samplers).process(logits, SamplingState.from_prompts([[0]] * 50, 1)).isfinite()
    assert left.sum(-1).tolist() == [7] * 50
    for row in range(50):
        assert set(left[row].nonzero().flatten().tolist()) == set(
            reference.ranked_ids(logits[row].tolist())[:7]
        )


def test_mirostat_of_llama_stands_alone_behind_the_temperature():
    words = ["mirostat_2=5", "repetition=1.2", "top_k=3", "xtc=0.5", "bias={tokens=[1], value=2}"]
    assert names(parse_chain(words, "llama.cpp")) == ["bias", "temperature", "mirostat_2"]
    assert "xtc" not in names(parse_chain(words, "textgen"))


def test_llama_has_one_temperature():
    words = ["dynamic_temperature={low=0.5, high=1.5}"]
    assert names(parse_chain(words, "llama.cpp"))[-1] == "dynamic_temperature"
    assert "temperature" not in names(parse_chain(words, "llama.cpp"))


def test_sigma_differs_between_llama_and_textgen():
    logits = torch.tensor([[3.0, 2.0, 1.0, -torch.inf, -torch.inf]])
    for order, left in [("llama.cpp", [0]), ("textgen", [0, 1])]:
        samplers = parse_chain(["top_n_sigma=1.0"], order).samplers
        (sampler,) = [sampler for sampler in samplers if isinstance(sampler, TopNSigma)]
        assert sampler(logits)[0].isfinite().nonzero().flatten().tolist() == left
        assert "top_n_sigma=1.0" in str(Chain((sampler,)))


@pytest.mark.parametrize(
    ("words", "order", "message"),
    [
        ([], "llama", "unknown order 'llama'; did you mean 'llama.cpp'"),
        (["quadratic=0.3"], "hf", "the order hf does not include quadratic; it includes bias, "),
        (
            ["top_k=3", "top_k=4"],
            "textgen",
            "top_k is given twice; the order textgen applies each sampler once",
        ),
        (["temperature=0"], "hf", "the order hf does not accept temperature=0"),
    ],
)
def test_what_does_not_fit_an_order_is_explained(words, order, message):
    with pytest.raises(ConfigError, match=message):
        parse_chain(words, order)


@pytest.mark.parity
def test_the_order_hf_is_that_of_transformers():
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_embd=8, n_layer=1, n_head=1, n_positions=32)
    )
    generator = torch.Generator().manual_seed(0)
    for case in range(60):
        x = 0.2 + 0.7 * torch.rand((), generator=generator).item()
        theirs = {"temperature": 2 * x, "top_k": 5 + case % 40, "top_p": x, "min_p": x / 9}
        theirs |= {"typical_p": x, "epsilon_cutoff": x / 99, "eta_cutoff": x / 50}
        theirs |= {"repetition_penalty": 1 + x, "no_repeat_ngram_size": 2}
        ours = [f"temperature={2 * x}", f"top_k={5 + case % 40}", f"top_p={x}", f"min_p={x / 9}"]
        ours += [f"typical={x}", f"epsilon={x / 99}", f"eta={x / 50}"]
        ours += [f"repetition={1 + x}", "no_repeat_ngram=2"]
        chosen = torch.randperm(9, generator=generator)[: 1 + case % 9].tolist()
        theirs = dict(list(theirs.items())[i] for i in chosen) | {"do_sample": True}
        ours = [ours[i] for i in chosen]
        if not any(word.startswith("top_k") for word in ours):
            theirs["top_k"] = 50  # what `generate` fills in
        settings = GenerationConfig(**theirs)
        settings._eos_token_tensor = None
        texts = torch.randint(60, (3, 20), generator=generator)
        logits = 3 * torch.randn(3, 60, generator=generator)
        processors = model._get_logits_processor(settings, input_ids_seq_length=20, device="cpu")
        sampling = SamplingState.from_prompts(texts.tolist(), 1)
        processed = parse_chain(ours, "hf").process(logits, sampling)
        torch.testing.assert_close(processed, processors(texts, logits), rtol=1e-6, atol=1e-6)


def test_greedy_comes_after_the_penalties_in_every_order():
    for order in SAMPLER_ORDERS.keys() - {"hf"}:
        chain = parse_chain(["greedy", "repetition=1.5"], order)
        samplers = [type(sampler) for sampler in chain.samplers]
        assert chain.greedy
        assert samplers.index(Temperature) > samplers.index(SAMPLERS["repetition"])
