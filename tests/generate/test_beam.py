import itertools
import math

import pytest
import torch

from regard.errors import ConfigError, RegardError
from regard.generate import beam, generate, parse_chain
from regard.nn.state import Source

STOP = 0
PROMPTS = [[1], [2, 3, 1], [3, 3]]
PENALTIES = [0.0, 0.6, 1.0, 2.0, -0.5]


def log_p(model, prompt, source=None):
    """log P of every next token, from nothing."""
    state = model.start(1, len(prompt), source)
    logits, _ = model.step(torch.tensor([prompt]), state)
    return logits[0, 0].double().log_softmax(-1).tolist()


def exhaustive(model, prompt, tokens, penalty, vocab_size):
    """Every text there is, best first."""
    scored = []
    for length in range(1, tokens + 1):
        for ids in itertools.product(range(vocab_size), repeat=length):
            if STOP in ids[:-1] or (length < tokens and ids[-1] != STOP):
                continue
            total = sum(log_p(model, [*prompt, *ids[:t]])[ids[t]] for t in range(length))
            text = list(ids[:-1] if ids[-1] == STOP else ids)
            scored.append((total / length**penalty, text))
    return sorted(scored, reverse=True)


def slow_beam(model, prompt, width, tokens, penalty, source=None):
    """The definition, one row at a time, in lists, and without stopping early."""
    live, kept = [(0.0, [])], []
    for length in range(1, tokens + 1):
        longer = [
            (total + step, [*ids, token])
            for total, ids in live
            for token, step in enumerate(log_p(model, [*prompt, *ids], source))
        ]
        longer.sort(reverse=True)
        kept += [(s / length**penalty, ids[:-1]) for s, ids in longer[:width] if ids[-1] == STOP]
        live = [each for each in longer if each[1][-1] != STOP][:width]
        if width == 1 and kept:
            return kept
    kept += [(total / tokens**penalty, ids) for total, ids in live]
    return sorted(kept, reverse=True)


def search(model, source=None, *, prompts=PROMPTS, **settings):
    return beam(model, source, prompts=prompts, stop=STOP, **settings)


def assert_found(hypotheses, expected):
    assert [each.ids for each in hypotheses] == [ids for _, ids in expected]
    for each, (score, _) in zip(hypotheses, expected, strict=True):
        assert math.isclose(each.score, score, rel_tol=1e-5, abs_tol=1e-5)  # float32 sums


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_the_best_of_all_texts(table_model, penalty, seed):
    model = table_model(vocab_size=4, seed=seed)
    found = search(model, width=64, tokens=4, length_penalty=penalty, n_best=5)
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        assert_found(hypotheses, exhaustive(model, prompt, 4, penalty, 4)[:5])


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_all_rows_at_once_find_what_the_slow_search_finds(table_model, penalty, width, seed):
    model = table_model(vocab_size=7, seed=seed)
    found = search(model, width=width, tokens=12, length_penalty=penalty, n_best=2)
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        assert_found(hypotheses, slow_beam(model, prompt, width, 12, penalty)[:2])


def test_rows_that_finish_early_are_dropped_and_keep_their_place(table_model):
    model = table_model(vocab_size=7, spread=4.0)
    prompts = [[a, b] for a in range(1, 7) for b in range(1, 7)]
    found = search(model, prompts=prompts, width=3, tokens=15, length_penalty=0.0)
    rows = [rows for rows, _ in model.fed[1:]]
    assert rows[0] == 3 * len(prompts)
    assert rows[-1] < rows[0] / 4
    for prompt, hypotheses in zip(prompts, found, strict=True):
        assert_found(hypotheses, slow_beam(model, prompt, 3, 15, 0.0)[:1])


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("seed", range(5))
def test_one_beam_is_greedy_search(table_model, penalty, seed):
    model = table_model(seed=seed)
    greedy = generate(model, PROMPTS, parse_chain(["greedy"]), tokens=25, stop={STOP})
    found = search(model, width=1, tokens=25, length_penalty=penalty)
    assert [each.ids for (each,) in found] == greedy


def test_a_wider_beam_scores_no_worse_here(table_model):
    model = table_model(vocab_size=7)
    scores = [search(model, width=w, tokens=10, length_penalty=0.0)[0][0].score for w in (1, 64)]
    assert scores[0] <= scores[1]


def test_a_text_stands_only_once_among_the_best(table_model):
    for hypotheses in search(table_model(vocab_size=4), width=8, tokens=6, n_best=8):
        assert len({tuple(each.ids) for each in hypotheses}) == len(hypotheses) == 8
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)


def test_fewer_texts_come_back_where_there_are_no_more(table_model):
    model = table_model(vocab_size=3)
    model.table[:, 2] = -torch.inf  # stop, or one more 1
    found = search(model, prompts=[[1]], width=8, tokens=3, n_best=8)
    assert sorted(each.ids for each in found[0]) == [[], [1], [1, 1], [1, 1, 1]]


def test_each_row_has_its_own_source(table_model):
    model = table_model(vocab_size=7)
    source = Source(torch.tensor([[4, 2, 9], [7, 0, 0], [3, 3, 0]]), torch.tensor([3, 1, 2]))
    found = search(model, source, prompts=[[1]] * 3, width=3, tokens=8)
    for row, hypotheses in enumerate(found):
        alone = Source(source.ids[row : row + 1], source.lengths[row : row + 1])
        assert_found(hypotheses, slow_beam(model, [1], 3, 8, 1.0, alone)[:1])


def test_the_search_ends_at_a_full_context(table_model):
    found = search(table_model(vocab_size=7, context=8), width=3, tokens=50)
    unlimited = search(table_model(vocab_size=7), width=3, tokens=6)  # 3 ids of prompt, 5 fed
    assert found == unlimited


def test_an_encoder_decoder_is_searched_like_any_other():
    from regard.models.transformer import Transformer, TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=9, dim=16, layers=2, heads=2, context=16, shape="encoder-decoder"
    )
    model = Transformer(config).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)
    source = Source(torch.tensor([[4, 2, 8], [7, 0, 0], [3, 3, 0]]), torch.tensor([3, 1, 2]))
    found = search(model, source, prompts=[[1]] * 3, width=4, tokens=8, n_best=2)
    for row, hypotheses in enumerate(found):
        alone = Source(source.ids[row : row + 1], source.lengths[row : row + 1])
        assert_found(hypotheses, slow_beam(model, [1], 4, 8, 1.0, alone)[:2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_best": 4}, "n_best=4 must lie between 1 and width=3"),
        ({"width": 0}, "n_best=1 must lie between 1 and width=0"),
        ({"tokens": 0}, "tokens=0"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[1] * 9]}, "a prompt of 9 ids does not fit the model's context of 8"),
    ],
)
def test_what_cannot_be_searched_is_refused(table_model, settings, message):
    with pytest.raises(ConfigError, match=message):
        search(table_model(context=8), **({"width": 3, "tokens": 5} | settings))


def test_logits_that_are_no_numbers_are_an_error(table_model):
    model = table_model()
    model.table[:] = float("nan")
    with pytest.raises(RegardError, match="row 0"):
        search(model, width=2, tokens=3)


def test_no_prompts_are_no_texts(table_model):
    assert search(table_model(), prompts=[], width=2, tokens=3) == []
