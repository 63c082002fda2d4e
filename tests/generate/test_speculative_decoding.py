"""Speculative decoding writes what plain decoding writes, whatever is guessed."""

import itertools
import math
from collections import Counter

import pytest
import torch

from regard.data.batch import TextBatch
from regard.errors import ConfigError, RegardError
from regard.generate import (
    Chain,
    PromptLookup,
    SamplingState,
    TracedChain,
    generate,
    generate_speculative,
    parse_chain,
)
from regard.models.build import build_model
from regard.models.ngram import NGramConfig
from regard.models.recurrent import RecurrentConfig
from regard.models.transformer import TransformerConfig
from regard.nn.state import Source

VOCAB = 6
GREEDY = parse_chain(["greedy"])
PROMPTS = [[1], [2, 3, 1, 4], [3, 3]]
SOURCE = Source(torch.tensor([[4, 2, 5], [1, 0, 0], [3, 3, 0]]), torch.tensor([3, 1, 2]))
SIZES = {"vocab_size": VOCAB, "dim": 16, "layers": 2, "heads": 2, "context": 48, "tied": False}
CONFIGS = {
    "learned": TransformerConfig(**SIZES),
    "rotary": TransformerConfig(**SIZES, position="rotary", norm="rms", kv_heads=1),
    "window": TransformerConfig(**SIZES, position="alibi", window=5),
    "pair": TransformerConfig(**SIZES, architecture="encoder-decoder"),
    "lstm": RecurrentConfig(vocab_size=VOCAB, dim=16, tied=False),
    "ngram": NGramConfig(vocab_size=VOCAB, order=3),
}
DRAFTS = ["prompt-lookup", "smaller", "same", "lstm", "ngram"]


def made(config, seed=0, size=0.5):
    torch.manual_seed(seed)
    model = build_model(config)
    if isinstance(config, NGramConfig):
        text = torch.randint(0, VOCAB, (8, 12))
        model.fit([TextBatch(text[:, :-1], text[:, 1:])])
        return model.eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=size)
    return model.double().eval().requires_grad_(False)


def source_of(model):
    return (
        {"source": SOURCE} if getattr(model.config, "architecture", "") == "encoder-decoder" else {}
    )


def draft_of(name, model):
    if name == "prompt-lookup":
        return PromptLookup()
    if name == "same":
        return model
    if name == "smaller":
        return made(model.config, seed=1)
    return made(CONFIGS[name], seed=1)


class Counted:
    """A model that counts its forward passes."""

    def __init__(self, model):
        self.model, self.context, self.passes = model, model.context, 0
        self.vocab_size, self.device, self.start = model.vocab_size, model.device, model.start

    def step(self, *args, **kwargs):
        self.passes += 1
        return self.model.step(*args, **kwargs)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_the_same_to_the_token(name, draft):
    model = made(CONFIGS[name])
    if name == "pair" and draft in ("lstm", "ngram"):
        pytest.skip("they read no source")
    settings = {"max_new_tokens": 25, "stop": {0}, **source_of(model)}
    expected = generate(model, PROMPTS, GREEDY, **settings)
    count = 1 if name == "rotary" else 4
    actual = generate_speculative(
        model, PROMPTS, GREEDY, draft=draft_of(draft, model), draft_tokens=count, **settings
    )
    assert actual == expected


@pytest.mark.parametrize(("context", "seed"), [(1, 0), (2, 4), (3, 3), (5, 6), (8, 5)])
@pytest.mark.parametrize("draft", ["prompt-lookup", "same", "shorter"])
def test_a_full_context_forgets_what_plain_decoding_forgets(context, seed, draft):
    model = made(TransformerConfig(**(SIZES | {"context": context})), seed=seed, size=1.0)
    if draft == "shorter":
        drafter = made(TransformerConfig(**(SIZES | {"context": max(1, context // 2)})), seed=1)
    else:
        drafter = draft_of(draft, model)
    expected = generate(model, PROMPTS, GREEDY, max_new_tokens=30)
    assert any(len(set(text[8:])) > 1 for text in expected) or context == 1
    assert (
        generate_speculative(model, PROMPTS, GREEDY, draft=drafter, max_new_tokens=30) == expected
    )


def test_with_a_source_a_row_ends_where_its_context_is_full():
    model = made(TransformerConfig(**(SIZES | {"context": 9}), architecture="encoder-decoder"))
    expected = generate(model, PROMPTS, GREEDY, max_new_tokens=30, source=SOURCE)
    assert [len(text) for text in expected] == [9, 6, 8]
    for draft in (PromptLookup(), model, made(model.config, seed=1)):
        actual = generate_speculative(
            model, PROMPTS, GREEDY, draft=draft, max_new_tokens=30, source=SOURCE
        )
        assert actual == expected


@pytest.mark.parametrize("words", [["greedy"], [], ["temperature=0.7", "top_p=0.9"]])
def test_guesses_that_come_true_save_passes(words):
    chain, model = parse_chain(words), Counted(made(CONFIGS["learned"]))
    generate_speculative(
        model, [[1]], chain, draft=model.model, draft_tokens=4, max_new_tokens=40, seed=0
    )
    # a perfect draft settles five ids a pass; the first pass has no guess, and reads no prompt
    assert model.passes == 1 + math.ceil(39 / 5)


def test_a_text_that_quotes_itself_is_looked_up():
    model = Counted(made(CONFIGS["rotary"], size=0.3))
    [text] = generate_speculative(
        model, [[1, 2, 3]], GREEDY, draft=PromptLookup(), max_new_tokens=30
    )
    assert len(text) == 30
    assert model.passes < 20
    assert PromptLookup(3)._continuation([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1, 2, 3]
    assert PromptLookup(3)._continuation([9, 2, 3, 7, 8, 1, 2, 3]) == [7, 8, 1, 2, 3]
    assert PromptLookup(2)._continuation([3, 1, 3, 2, 3]) == [2, 3]
    assert PromptLookup()._continuation([1, 2, 3]) == []


CHAINS = {
    "plain": [],
    "narrow": ["temperature=0.8", "top_k=4", "top_p=0.9"],
    "history": ["repetition=1.5", "temperature=1.3", "no_repeat_ngram=2"],
    "steered": ["mirostat_2={target=1.5, lr=0.5}"],
    "adaptive": ["adaptive_p=0.3"],
}
DRAWN = [*itertools.product(("plain", "narrow", "history"), ("prompt-lookup", "smaller", "ngram"))]
DRAWN += [("steered", "smaller"), ("steered", "prompt-lookup"), ("adaptive", "smaller")]


@torch.no_grad()
def exact(model, prompt, chain, max_new_tokens):
    """P of every text of so many ids: each is forced upon the chain, id by id."""
    texts, shares, context = (
        torch.tensor([prompt]),
        torch.ones(1),
        SamplingState.from_prompts([prompt], max_new_tokens),
    )
    for _ in range(max_new_tokens):
        logits, _ = model.step(texts, model.start(*texts.shape))
        forced = torch.arange(VOCAB).repeat(len(texts))
        rows = torch.arange(len(texts)).repeat_interleave(VOCAB)
        context, steps = context.select(rows), torch.empty(len(rows))

        def sample_ids(logits, forced=forced, steps=steps):
            steps.copy_(logits.softmax(-1).gather(1, forced[:, None]).squeeze(1))
            return forced

        chain.sample(logits[rows, 0], context, sample_ids)
        context.append(forced)
        texts, shares = torch.cat([texts[rows], forced[:, None]], 1), shares[rows] * steps
    ids = texts[:, len(prompt) :].tolist()
    return dict(zip(map(tuple, ids), shares.tolist(), strict=True))


def surprise(actual, shares):
    """Pearson's chi-square by its degrees of freedom, in standard deviations."""
    count, total = Counter(map(tuple, actual)), len(actual)
    assert all(shares[ids] > 0 for ids in count)
    rare = [ids for ids, share in shares.items() if share * total < 5]
    cells = [(count[ids], shares[ids] * total) for ids in shares if ids not in set(rare)]
    cells.append((sum(count[ids] for ids in rare), sum(shares[ids] for ids in rare) * total))
    cells = [(seen, expected) for seen, expected in cells if expected > 0]
    square = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    return (square - freedom) / math.sqrt(2 * freedom)


def draws(model, chain, draft, rows):
    """The first three ids of many texts."""
    return generate_speculative(
        model, [[1, 2, 1]] * rows, chain, draft=draft, max_new_tokens=3, seed=0
    )


@pytest.mark.parametrize(
    ("chain", "draft", "rows"),
    [
        *((*case, 3000) for case in DRAWN),
        *(
            pytest.param(*case, 20_000, marks=pytest.mark.long)
            for case in itertools.product(CHAINS, ("smaller", "lstm"))
        ),
    ],
)
def test_texts_are_drawn_as_the_model_alone_would_draw_them(chain, draft, rows):
    model, chain = made(CONFIGS["learned"], size=0.35), parse_chain(CHAINS[chain])
    actual = draws(model, chain, draft_of(draft, model), rows)
    assert surprise(actual, exact(model, [1, 2, 1], chain, 3)) < 3.5


def test_the_draft_alone_would_draw_otherwise():
    model = made(CONFIGS["learned"], size=0.35)
    actual = draws(draft_of("smaller", model), Chain(), PromptLookup(), rows=3000)
    assert surprise(actual, exact(model, [1, 2, 1], Chain(), 3)) > 10


def test_a_row_draws_the_same_alone_and_in_a_batch():
    model, draft = made(CONFIGS["rotary"]), made(CONFIGS["rotary"], seed=1)
    settings = {"draft": draft, "max_new_tokens": 20, "stop": {0}}
    together = generate_speculative(model, PROMPTS, Chain(), seed=[3, 4, 5], **settings)
    for prompt, seed, text in zip(PROMPTS, (3, 4, 5), together, strict=True):
        assert generate_speculative(model, [prompt], Chain(), seed=[seed], **settings) == [text]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_tokens": 0}, "draft_tokens=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"draft": 7}, "the draft has vocab_size=7 and the model vocab_size=6"),
        (
            {"draft": 2},
            "the draft has vocab_size=2 and the model vocab_size=6",
        ),  # too few to read the prompts
        (
            {"draft": 7, "max_new_tokens": 1},
            "the draft has vocab_size=7",
        ),  # no draft token is needed
        ({"seed": [1]}, "1 seeds for 3 rows"),
    ],
)
def test_what_cannot_be_speculated_is_refused(settings, message):
    settings = {"prompts": PROMPTS, "draft": PromptLookup(), "max_new_tokens": 5} | settings
    if isinstance(settings["draft"], int):
        settings["draft"] = made(RecurrentConfig(vocab_size=settings["draft"], dim=8))
    with pytest.raises(ConfigError, match=message):
        generate_speculative(made(CONFIGS["learned"]), chain=GREEDY, **settings)
    with pytest.raises(ConfigError, match="max_ngram=0"):
        PromptLookup(0)


def test_a_trace_tells_of_the_text_and_not_of_guesses():
    chain, model = TracedChain(parse_chain(["top_k=4"]).samplers), made(CONFIGS["learned"])
    (text,) = generate_speculative(
        model, [[1]], chain, draft=made(CONFIGS["lstm"], 7), max_new_tokens=9, seed=1
    )
    assert [token.id for (token,) in chain.tokens] == text


def test_numbers_that_are_not_finite_are_an_error():
    model = made(CONFIGS["learned"])
    model.embed.token.weight.data[:] = math.nan
    with pytest.raises(RegardError, match="row 0"):
        generate_speculative(model, [[1]], Chain(), draft=PromptLookup(), max_new_tokens=4)


def test_no_prompts_are_no_texts():
    assert (
        generate_speculative(
            made(CONFIGS["lstm"]), [], GREEDY, draft=PromptLookup(), max_new_tokens=3
        )
        == []
    )
