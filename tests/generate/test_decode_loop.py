import random
from dataclasses import replace

import pytest
import torch

from regard.accel import pack
from regard.accel.packed_decoder import PackedDecoder
from regard.errors import ConfigError, RegardError
from regard.generate import (
    Chain,
    CudaGraphDecoder,
    detokenize_stream,
    generate,
    parse_chain,
    stream,
)
from regard.generate.decode_loop import CudaGraphLoop, EagerLoop
from regard.generate.stop_strings import truncate_at_stop
from regard.models.build import build_model, preset
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.state import Source

CHAIN = parse_chain(["repetition=1.3", "top_k=6", "temperature=0.9"])
PROMPTS = [[1], [2, 3, 4, 0, 1], [5, 5], [7, 7, 7]]


def small(**choices):
    torch.manual_seed(0)
    config = {"vocab_size": 11, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "context": 40}
    model = Transformer(TransformerConfig(**config, position="rotary", norm="rms", ffn="swiglu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def captured(model):
    return CudaGraphDecoder(PackedDecoder(model), capture=True)


@pytest.mark.parametrize("max_new_tokens", [1, 7, 35, 90])  # 90 overflow the context
@pytest.mark.parametrize("stop", [(), {0, 3}])
def test_draws_are_those_of_plain_generation(max_new_tokens, stop):
    model = small()
    fast = captured(model)
    for seed in (1, 2):
        options = {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed}
        plain = generate(model, PROMPTS, CHAIN, **options)
        assert generate(fast, PROMPTS, CHAIN, **options) == plain


@pytest.mark.parametrize("stop", [{0, 3, 4}, set()])
def test_only_a_row_that_goes_on_can_run_out_of_tokens(stop):
    """Eleven ids, each used once: a row that has stopped needs no further ones."""
    model, chain = small(), parse_chain(["no_repeat_ngram=1"])
    seeds = range(6)
    outcomes = []
    for language in (model, captured(model)):
        for prompts in ([[1]], [[1, 2, 4, 5, 6, 7, 8], [1], [2], [3]]):
            for seed in seeds:
                try:
                    outcomes.append(
                        generate(language, prompts, chain, max_new_tokens=20, stop=stop, seed=seed)
                    )
                except RegardError as error:
                    outcomes.append(str(error))
    half = len(outcomes) // 2
    assert outcomes[:half] == outcomes[half:]
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert all("no_repeat_ngram=1 removed all remaining tokens" in error for error in errors)
    if stop:
        assert len(errors) < half // 2
    else:
        assert len(errors) == len(outcomes)


def test_each_row_may_have_its_own_seed():
    model = small()
    together = generate(captured(model), PROMPTS, CHAIN, max_new_tokens=20, seed=[4, 5, 6, 7])
    alone = [
        generate(model, [prompt], CHAIN, max_new_tokens=20, seed=seed)[0]
        for prompt, seed in zip(PROMPTS, (4, 5, 6, 7), strict=True)
    ]
    assert together == alone


def test_the_cuda_graph_is_kept_for_a_text_of_the_same_size():
    fast = captured(small())
    generate(fast, [[1, 2]], CHAIN, max_new_tokens=9, seed=1)
    loop = fast.loop
    assert isinstance(loop, CudaGraphLoop)
    generate(fast, [[3, 4]], CHAIN, max_new_tokens=9, seed=1)
    assert fast.loop is loop
    generate(
        fast, [[3, 4]], parse_chain(CHAIN.specs()), max_new_tokens=9, seed=1
    )  # equal is the same
    assert fast.loop is loop
    generate(fast, [[3, 4]], CHAIN, max_new_tokens=10, seed=1)
    assert fast.loop is not loop


@pytest.mark.parametrize(
    "name", ["lstm", "gru", "bahdanau", "luong", "t5-small", "transformer-base"]
)
def test_the_loop_of_recurrent_models_and_encoder_decoders_is_reused(name):
    sizes = {"vocab_size": 21, "dim": 16, "layers": 2, "context": 64}
    config = preset(name)
    if isinstance(config, TransformerConfig):
        sizes |= {"heads": 2, "head_dim": 8, "ffn_dim": 24}
    torch.manual_seed(0)
    model = build_model(replace(config, **sizes)).eval()
    fast = CudaGraphDecoder(pack(model), capture=True)
    for length in (5, 9, 3, 40):  # the first three are padded to 32, as the last is to 64
        source = None
        if getattr(model.config, "architecture", "") == "encoder-decoder":
            lengths = torch.tensor([length, length - 1])
            source = Source(torch.randint(2, 21, (2, length)), lengths)
        loop = fast.loop
        prompts, options = [[1, 2], [3, 4]], {"max_new_tokens": 9, "seed": length, "source": source}
        expected = generate(model, prompts, CHAIN, **options)
        assert generate(fast, prompts, CHAIN, **options) == expected
        assert loop is None or (fast.loop is loop) == (length < 32 or source is None)


def test_two_texts_at_once_do_not_disturb_each_other():
    model = small()
    fast = captured(model)
    list(
        stream(fast, [3, 2], CHAIN, max_new_tokens=40, seed=3)
    )  # leaves a loop that both could reuse
    one, two = (stream(fast, [n, 2], CHAIN, max_new_tokens=40, seed=n) for n in (1, 2))
    mixed = [token for pair in zip(one, two, strict=True) for token in pair]
    for n in (1, 2):
        assert mixed[n - 1 :: 2] == list(stream(model, [n, 2], CHAIN, max_new_tokens=40, seed=n))


def test_rows_that_have_ended_are_no_longer_asked(monkeypatch):
    model, rows = small(), []
    step = PackedDecoder.step
    monkeypatch.setattr(
        PackedDecoder,
        "step",
        lambda self, ids, *a, **k: rows.append(len(ids)) or step(self, ids, *a, **k),
    )
    answers = generate(pack(model), PROMPTS, CHAIN, max_new_tokens=30, seed=1, stop={0, 3})
    lengths = sorted(map(len, answers))
    assert lengths[0] < lengths[-1]
    assert rows[0] == 4
    assert rows[-1] < 4
    assert rows == sorted(rows, reverse=True)


def test_a_chain_that_cannot_be_captured_is_decoded_eagerly(monkeypatch):
    model = small()
    made = []
    begin = EagerLoop.__init__
    monkeypatch.setattr(EagerLoop, "__init__", lambda self, *a: made.append(1) or begin(self, *a))
    monkeypatch.setattr(Chain, "capturable", False)
    assert generate(captured(model), PROMPTS, CHAIN, max_new_tokens=5, seed=1) == generate(
        model, PROMPTS, CHAIN, max_new_tokens=5, seed=1
    )
    assert len(made) == 2


def test_a_stop_is_found_wherever_a_text_is_cut():
    chance = random.Random(0)
    for _ in range(300):
        text = "".join(chance.choice("ab") for _ in range(chance.randrange(20)))
        stops = ["".join(chance.choice("ab") for _ in range(chance.randrange(1, 5)))]
        stops.append("abba")
        ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        shown = list(truncate_at_stop(pieces, stops))
        assert "".join(shown) == text[: min(ends, default=(0, len(text)))[1]]
        assert all(shown)


def test_what_cannot_begin_a_stop_is_not_held_back():
    pieces = truncate_at_stop(iter(["one ", "two<", "|e", "nd|>", "three"]), ["<|end|>"])
    assert [next(pieces), next(pieces)] == ["one ", "two"]
    assert list(pieces) == []


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="a stop string must have"):
        list(truncate_at_stop(["a"], [""]))


class Letters:
    def decode(self, ids):
        return "".join("abcdefghijk"[id] for id in ids)


def test_a_stop_string_ends_a_stream():
    model = small()
    prompt = [1, 2]
    ids = list(stream(model, prompt, CHAIN, max_new_tokens=30, seed=3))
    whole = "".join(detokenize_stream(ids, Letters(), prompt))
    stop = whole[11:14]
    text = "".join(detokenize_stream(ids, Letters(), prompt, [stop]))
    assert text == whole[: whole.index(stop)]
