"""Contrastive search against its formula; contrastive decoding against its own, and as a model."""

import math

import pytest
import torch

from regard.data.batch import TextBatch
from regard.errors import ConfigError, RegardError
from regard.generate import (
    BeamSearch,
    Chain,
    ContrastiveDecoding,
    ContrastiveSearch,
    PromptLookup,
    generate,
    generate_speculative,
    parse_chain,
)
from regard.generate.decode import prefill
from regard.models.base import Language
from regard.models.build import build_model
from regard.models.ngram import NGramConfig
from regard.models.recurrent import RecurrentConfig
from regard.models.transformer import TransformerConfig
from regard.nn.state import Source

VOCAB = 11
GREEDY = parse_chain(["greedy"])
PROMPTS = [[1], [2, 3, 1, 4], [3, 3]]
SOURCE = Source(torch.tensor([[4, 2, 9], [7, 0, 0], [3, 3, 0]]), torch.tensor([3, 1, 2]))
SIZES = {"vocab_size": VOCAB, "dim": 16, "layers": 2, "heads": 2, "context": 24}
CONFIGS = {
    "learned": TransformerConfig(**SIZES),
    "rotary": TransformerConfig(**SIZES, position="rotary", norm="rms", kv_heads=1),
    "pair": TransformerConfig(**SIZES, architecture="encoder-decoder"),
    "lstm": RecurrentConfig(vocab_size=VOCAB, dim=16),
}


def made(config, seed=0, size=0.5):
    torch.manual_seed(seed)
    model = build_model(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=size)
    return model


def counted():
    model = build_model(NGramConfig(vocab_size=VOCAB, order=3))
    text = torch.randint(0, VOCAB, (20, 12), generator=torch.Generator().manual_seed(0))
    model.fit([TextBatch(text[:, :-1], text[:, 1:])])
    return model.eval()


def source_of(model, row=None):
    paired = getattr(model.config, "architecture", "") == "encoder-decoder"
    if row is None or not paired:
        return {"source": SOURCE} if paired else {}
    return {"source": Source(SOURCE.ids[row : row + 1], SOURCE.lengths[row : row + 1])}


def by_hand(model, prompt, k, alpha, max_new_tokens, stop, **source):
    """The formula, every hidden state from nothing, one candidate after the other."""

    def hidden(ids):
        return model(torch.tensor([ids]), **source)[0]

    text, score = [], 0.0
    for _ in range(max_new_tokens):
        so_far = hidden([*prompt, *text])
        log_p = model.head(so_far[-1:])[0].log_softmax(-1).tolist()
        likeliest = sorted(range(VOCAB), key=lambda v: -log_p[v])[:k]

        def merit(v, so_far=so_far, log_p=log_p):
            mine = hidden([*prompt, *text, v])[-1]
            likeness = max(float(mine @ other / (mine.norm() * other.norm())) for other in so_far)
            return (1 - alpha) * math.exp(log_p[v]) - alpha * likeness

        best = max(likeliest, key=merit)
        score += log_p[best]
        if best in stop:
            break
        text.append(best)
    return text, score


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("k", "alpha"), [(3, 0.6), (5, 0.3), (VOCAB, 1.0)])
@torch.no_grad()
def test_the_text_is_that_of_the_formula(name, k, alpha):
    model, search = made(CONFIGS[name]), ContrastiveSearch(k, alpha)
    (_, (text,), _) = search(model, PROMPTS, max_new_tokens=4, **source_of(model))
    stop = {text.ids[-1]}  # one that a text does come to
    results = search(model, PROMPTS, max_new_tokens=10, stop=stop, **source_of(model))
    for row, (text,) in enumerate(results):
        ids, score = by_hand(model, PROMPTS[row], k, alpha, 10, stop, **source_of(model, row))
        assert text.ids == ids
        assert math.isclose(text.score, score, rel_tol=1e-5)  # ours is a sum of float32
    assert any(len(text.ids) < 10 for (text,) in results)


@pytest.mark.parametrize("settings", [(5, 0.0), (1, 0.9)])
@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_contrast_it_is_greedy(name, settings):
    model = made(CONFIGS[name], seed=1)
    results = ContrastiveSearch(*settings)(
        model, PROMPTS, max_new_tokens=12, stop={0}, **source_of(model)
    )
    expected = generate(model, PROMPTS, GREEDY, max_new_tokens=12, stop={0}, **source_of(model))
    assert [text.ids for (text,) in results] == expected


def test_it_repeats_itself_less_than_greedy_search_does():
    model = made(CONFIGS["rotary"], size=0.3)

    def repeated(alpha):
        ((text,),) = ContrastiveSearch(6, alpha)(model, [[1, 2]], max_new_tokens=20)
        pairs = list(zip(text.ids, text.ids[1:], strict=False))
        return len(pairs) - len(set(pairs))

    assert repeated(0.6) < repeated(0.0)


def test_it_ends_at_a_full_context_whose_last_place_is_read():
    model = made(CONFIGS["learned"])
    results = ContrastiveSearch(3)(model, PROMPTS, max_new_tokens=99)
    assert [len(text.ids) for (text,) in results] == [24 - len(prompt) for prompt in PROMPTS]


def test_each_row_has_its_own_limit():
    model, limits = made(CONFIGS["learned"]), [5, 2, 7]
    results = ContrastiveSearch(3)(model, PROMPTS, max_new_tokens=limits)
    for prompt, limit, texts in zip(PROMPTS, limits, results, strict=True):
        ((alone,),) = ContrastiveSearch(3)(model, [prompt], max_new_tokens=limit)
        assert texts[0].ids == alone.ids
        assert len(alone.ids) == limit


def test_a_model_without_hidden_states_is_refused():
    with pytest.raises(ConfigError, match="needs hidden states, and this model has none"):
        ContrastiveSearch()(counted(), [[1]], max_new_tokens=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k=0 of contrastive search"),
        ({"k": 12}, "k=12 of contrastive search must be at most vocab_size=11"),
        ({"alpha": 1.5}, "alpha=1.5 of contrastive search"),
        ({"alpha": math.nan}, "alpha=nan of contrastive search"),
        ({"prompts": [[1] * 24]}, "a prompt of 24 ids fills"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_what_cannot_be_searched_is_refused(settings, message):
    settings = {"prompts": PROMPTS, "max_new_tokens": 3, **settings}
    prompts, max_new_tokens = settings.pop("prompts"), settings.pop("max_new_tokens")
    with pytest.raises(ConfigError, match=message):
        ContrastiveSearch(**settings)(
            made(CONFIGS["learned"]), prompts, max_new_tokens=max_new_tokens
        )


def test_no_prompts_are_no_texts():
    assert ContrastiveSearch()(made(CONFIGS["learned"]), [], max_new_tokens=3) == []


def logits_of(model, ids, **source):
    state = model.start(1, len(ids), **source)
    return model.step(torch.tensor([ids]), state, all_logits=True)[0][0]


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 0.5), (0.5, 2.0), (0.0, 1.0), (1.0, 0.3)])
def test_the_logits_of_expert_and_amateur_are_those_of_the_formula(alpha, beta):
    expert, amateur = made(CONFIGS["learned"], size=0.3), counted()
    both = ContrastiveDecoding(expert, amateur, alpha, beta)
    assert isinstance(both, Language)
    ids = [1, 2, 3, 4, 5]
    p, q = (logits_of(model, ids).double().softmax(-1).tolist() for model in (expert, amateur))
    for results, p_t, q_t in zip(logits_of(both, ids).softmax(-1).tolist(), p, q, strict=True):
        merit = [
            p_v ** (1 + beta) / q_v**beta if p_v >= alpha * max(p_t) else 0.0
            for p_v, q_v in zip(p_t, q_t, strict=True)
        ]
        expected = [x / sum(merit) for x in merit]
        assert results == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["learned", "pair", "lstm"])
def test_expert_and_amateur_are_searched_and_drawn_from_like_one_model(name):
    expert, amateur = made(CONFIGS[name]), made(CONFIGS[name], seed=1, size=0.2)
    source = source_of(expert)
    neutral = ContrastiveDecoding(expert, amateur, alpha=0.0, beta=0.0)
    both = ContrastiveDecoding(expert, amateur, alpha=0.2, beta=1.0)
    ways = (
        lambda model: generate(model, PROMPTS, GREEDY, max_new_tokens=8, stop={0}, **source),
        lambda model: generate(
            model, PROMPTS, Chain(), max_new_tokens=8, stop={0}, seed=1, **source
        ),
        lambda model: [
            [text.ids for text in texts]
            for texts in BeamSearch(4, n_best=2)(
                model, PROMPTS, max_new_tokens=8, stop={0}, **source
            )
        ],
    )
    for write in ways:
        assert write(neutral) == write(expert)
    assert any(write(both) != write(expert) for write in ways)


def test_a_prefix_lm_reads_the_prompt_in_both_directions_as_expert_and_as_amateur():
    prefix = made(TransformerConfig(**SIZES, prefix=True))
    causal = made(TransformerConfig(**SIZES))  # of the same weights
    prompts = [[1, 5, 2, 8], [2, 3, 1], [7]]

    def logits(model):
        return prefill(model, prompts, 24, None)[0]

    assert not torch.allclose(logits(prefix)[:2], logits(causal)[:2])
    p, q = logits(prefix).log_softmax(-1), logits(causal).log_softmax(-1)
    for expert, amateur, log_p, log_q in [(prefix, causal, p, q), (causal, prefix, q, p)]:
        both = ContrastiveDecoding(expert, amateur, alpha=0.0, beta=0.5)
        expected = (1.5 * log_p - 0.5 * log_q).float()
        assert torch.allclose(logits(both).float(), expected, atol=1e-5)
    neutral = ContrastiveDecoding(prefix, causal, alpha=0.0, beta=0.0)
    written = generate(neutral, prompts, GREEDY, max_new_tokens=30)  # more than the context
    assert written == generate(prefix, prompts, GREEDY, max_new_tokens=30)
    with pytest.raises(ConfigError, match="does not support a prefix LM"):
        generate_speculative(neutral, prompts, GREEDY, draft=PromptLookup(), max_new_tokens=3)


def test_a_token_that_the_amateur_rules_out_stays_finite(table_model):
    amateur = table_model(vocab_size=6, seed=1)
    amateur.table[:, 2:] = -torch.inf
    both = ContrastiveDecoding(table_model(vocab_size=6), amateur)
    [ids] = generate(both, [[1]], Chain(), max_new_tokens=30, seed=0)
    assert set(ids) <= {2, 3, 4, 5}


def test_the_shorter_context_counts():
    long, short = made(CONFIGS["lstm"]), made(CONFIGS["learned"])
    assert ContrastiveDecoding(long, short).context == 24
    assert ContrastiveDecoding(long, long).context is None


def test_two_vocabularies_are_refused():
    other = made(TransformerConfig(**(SIZES | {"vocab_size": 12})))
    both = ContrastiveDecoding(made(CONFIGS["learned"]), other)
    with pytest.raises(
        ConfigError, match="the amateur has vocab_size=12 and the expert vocab_size=11"
    ):
        generate(both, [[1]], GREEDY, max_new_tokens=3)
    both = ContrastiveDecoding(other, made(CONFIGS["learned"]))
    with pytest.raises(
        ConfigError, match="the amateur has vocab_size=11 and the expert vocab_size=12"
    ):
        generate(both, [[11]], GREEDY, max_new_tokens=3)  # an id that the amateur does not know


def test_numbers_that_are_not_finite_are_an_error():
    model = made(CONFIGS["learned"])
    model.embed.token.weight.data[:] = math.nan
    with pytest.raises(RegardError, match="row 0: no continuation has a probability above 0"):
        ContrastiveSearch()(model, [[1]], max_new_tokens=3)


@pytest.mark.parametrize("settings", [{"alpha": 2.0}, {"beta": -1.0}, {"beta": math.nan}])
def test_bad_settings_of_contrastive_decoding_are_named(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name}=.* of contrastive decoding"):
        ContrastiveDecoding(counted(), counted(), **settings)
