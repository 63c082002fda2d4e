import pytest
import torch

from regard.errors import ConfigError, RegardError
from regard.generate import Chain, Context, Temperature, TopK, TopP, draw, parse_chain
from regard.generate.context import row_generator


def context_of(rows, seed=0):
    return Context.begin([[0]] * rows, 1, seed=seed)


def draws(logits, count, *, seed=0):
    """Ids drawn one after another from one row's generator."""
    generator = row_generator(seed, 0)
    return torch.cat([draw(logits, [generator]) for _ in range(count)])


@pytest.mark.parametrize("stages", [(), (TopK(4),), (TopP(0.8), Temperature(1.5))])
def test_draws_follow_the_stated_distribution(stages):
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0]])
    context, count = context_of(1), 4000
    ids = torch.cat([Chain(stages)(logits, context) for _ in range(count)])
    for stage in stages:
        logits = stage(logits)
    seen = torch.bincount(ids, minlength=8).double()
    expected = count * logits.double().softmax(-1)[0]
    alive = expected > 0
    assert seen[~alive].sum() == 0
    chi_square = ((seen - expected)[alive] ** 2 / expected[alive]).sum()
    # 99.9th percentile of chi-square with 7, 3 and 3 degrees of freedom
    assert chi_square < {8: 24.3, 4: 16.3}[int(alive.sum())]


def test_a_removed_token_is_never_drawn_not_even_at_the_ends():
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [3, 20, 21]] = torch.tensor([0.0, -3.0, -3.0])
    assert set(draws(logits, 500).tolist()) == {3, 20, 21}


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2.0**-53, 998)])
def test_the_least_and_the_largest_number_find_a_token_that_is_left(monkeypatch, number, token):
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    logits[0, [0, -1]] = -torch.inf
    monkeypatch.setattr(torch, "rand", lambda *_, dtype, **__: torch.tensor([number], dtype=dtype))
    assert draw(logits, [torch.Generator()]).tolist() == [token]


def test_a_row_draws_the_same_whoever_is_beside_it():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    together, alone = context_of(5), [row_generator(0, row) for row in range(5)]
    for _ in range(20):
        ids = Chain()(logits, together)
        for row in range(5):
            assert draw(logits[row : row + 1], [alone[row]]) == ids[row]


def test_rows_and_seeds_have_numbers_of_their_own():
    first = {
        torch.rand((), generator=row_generator(seed, row)).item()
        for seed in range(20)
        for row in range(20)
    }
    assert len(first) == 400


def test_no_seed_means_new_numbers():
    one, other = (torch.rand(4, generator=row_generator(None, 0)) for _ in range(2))
    assert not torch.equal(one, other)


def test_greedy_is_the_argmax_and_needs_no_chance():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, -torch.inf]])
    context = context_of(2)
    before = [generator.get_state() for generator in context.generators]
    assert parse_chain(["greedy"])(logits, context).tolist() == [1, 0]
    after = [generator.get_state() for generator in context.generators]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_half_precision_logits_are_sampled_in_float32():
    seen = []

    def spy(logits, context=None):
        seen.append(logits.dtype)
        return logits

    Chain((spy,))(torch.randn(1, 4).bfloat16(), context_of(1))
    assert seen == [torch.float32]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("chain", [Chain(), parse_chain(["greedy"])])
def test_logits_that_are_no_numbers_are_an_error_that_names_the_row(chain, bad):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(RegardError, match="row 1 has nothing to draw from"):
        chain(logits, context_of(3))


def test_a_row_without_any_token_left_is_an_error():
    with pytest.raises(RegardError, match="largest logit is -inf"):
        Chain()(torch.full((1, 4), -torch.inf), context_of(1))


def test_the_context_keeps_prompt_and_answer_of_ragged_rows():
    context = Context.begin([[5], [6, 7, 8]], 2, seed=1)
    context.append(torch.tensor([1, 2]))
    context.append(torch.tensor([3, 4]))
    texts = [
        row[:length].tolist()
        for row, length in zip(context.history, context.lengths.tolist(), strict=True)
    ]
    assert texts == [[5, 1, 3], [6, 7, 8, 2, 4]]
    assert context.prompts.tolist() == [1, 3]


def test_words_become_stages_in_their_order():
    chain = parse_chain(["top_k=40", "temperature=1", "top_p=0.9", "temperature={value=0.5}"])
    assert chain.stages == (TopK(40), Temperature(1.0), TopP(0.9), Temperature(0.5))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("topp=0.9", "unknown sampler 'topp'; did you mean 'top_p'"),
        ("gredy", "did you mean 'greedy'"),
        ("top_p", "lacks its value"),
        ("top_p=high", "top_p.p must be a number, not 'high'"),
        ("top_k=2.5", "top_k.k must be a whole number"),
        ("top_p=2", r"must lie in \[0, 1\]"),
        ("top_p={mass=0.5}", "unknown key 'mass'"),
    ],
)
def test_a_wrong_word_is_explained(word, message):
    with pytest.raises(ConfigError, match=message):
        parse_chain([word])
