import itertools
import math

import pytest
import torch

from regard.errors import ConfigError, RegardError, ShapeError
from regard.generate import BeamSearch, generate, parse_chain
from regard.nn.state import Source

STOP = 0
PROMPTS = [[1], [2, 3, 1], [3, 3]]
POWERS = [0.0, 0.6, 1.0, 2.0, -0.5]
NORMALIZATIONS = {"power": lambda n, a: n**a, "gnmt": lambda n, a: (5 + n) ** a / 6**a}


def log_p(model, prompt, source=None):
    """log P of every next token, from nothing."""
    state = model.start(1, len(prompt), source)
    logits, _ = model.step(torch.tensor([prompt]), state)
    return logits[0, 0].double().log_softmax(-1).tolist()


def exhaustive(model, prompt, max_new_tokens, power, normalization, ids_in_use):
    """Every text there is, best first."""
    scored = []
    for length in range(1, max_new_tokens + 1):
        for ids in itertools.product(range(ids_in_use), repeat=length):
            if STOP in ids[:-1] or (length < max_new_tokens and ids[-1] != STOP):
                continue
            total = sum(log_p(model, [*prompt, *ids[:t]])[ids[t]] for t in range(length))
            text = list(ids[:-1] if ids[-1] == STOP else ids)
            scored.append((total / NORMALIZATIONS[normalization](length, power), text))
    return sorted(scored, reverse=True)


def slow_beam(model, prompt, width, max_new_tokens, power=1.0, source=None, stop=(STOP,), **modes):
    """The definition, one row at a time, in lists, with a single group."""
    (results,) = slow_groups(model, prompt, width, max_new_tokens, power, source, stop, **modes)
    return results


def slow_groups(
    model,
    prompt,
    width,
    max_new_tokens,
    power=1.0,
    source=None,
    stop=(STOP,),
    normalization="power",
    early_stopping="never",
    groups=1,
    diversity=0.0,
):
    """The definition in lists; "never" never stops early, and so cannot do so wrongly."""

    def score(total, length):
        return total / NORMALIZATIONS[normalization](length, power)

    beams, finished, done = [[(0.0, [])]] * groups, [[] for _ in range(groups)], [False] * groups
    for length in range(1, max_new_tokens + 1):
        taken, after = [], []
        for group in range(groups):
            longer = [
                (total + step, [*ids, token])
                for total, ids in beams[group]
                for token, step in enumerate(log_p(model, [*prompt, *ids], source))
                if step > -math.inf
            ]
            longer.sort(key=lambda beam: beam[0] - diversity * taken.count(beam[1][-1]))
            longer.reverse()
            if not done[group]:
                for total, ids in longer[:width]:
                    if ids[-1] in stop:
                        finished[group].append((score(total, length), ids[:-1]))
                    elif length == max_new_tokens:
                        finished[group].append((score(total, length), ids))
            finished[group].sort(reverse=True)
            if width == 1 and longer and longer[0][1][-1] in stop:
                longer = []
            continuing = [beam for beam in longer if beam[1][-1] not in stop][:width]
            taken += [ids[-1] for _, ids in continuing]
            after.append(continuing)
            full = len(finished[group]) >= width
            if early_stopping == "full":
                done[group] |= full
            elif early_stopping == "heuristic" and full and continuing:
                best = max(total for total, _ in continuing)
                done[group] |= score(best, length) <= finished[group][width - 1][0]
        beams = after
        if early_stopping != "never" and all(done):
            break
    return finished


def search(model, prompts=PROMPTS, *, max_new_tokens, source=None, stop=(STOP,), **settings):
    return BeamSearch(**settings)(
        model, prompts, max_new_tokens=max_new_tokens, stop=stop, source=source
    )


def assert_found(hypotheses, expected):
    assert [hypothesis.ids for hypothesis in hypotheses] == [ids for _, ids in expected]
    for hypothesis, (score, _) in zip(hypotheses, expected, strict=True):
        assert math.isclose(hypothesis.score, score, rel_tol=1e-5, abs_tol=1e-5)  # float32 sums


def row_of(source, row):
    return Source(source.ids[row : row + 1], source.lengths[row : row + 1])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("power", POWERS)
def test_a_beam_that_covers_the_space_finds_the_best_of_all_texts(
    table_model, power, normalization
):
    model = table_model(vocab_size=64)
    model.table[:, 4:] = -torch.inf  # a space of 3^4 texts, and those that stop before
    results = search(
        model,
        width=64,
        max_new_tokens=4,
        length_penalty=power,
        normalization=normalization,
        n_best=5,
    )
    for prompt, hypotheses in zip(PROMPTS, results, strict=True):
        assert_found(hypotheses, exhaustive(model, prompt, 4, power, normalization, 4)[:5])


@pytest.mark.parametrize("early_stopping", ["never", "heuristic", "full"])
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize(("width", "normalization"), [(2, "power"), (3, "gnmt"), (5, "power")])
def test_all_rows_at_once_find_what_the_slow_search_finds(
    table_model, power, width, normalization, early_stopping
):
    model = table_model(vocab_size=7, seed=width)
    chosen = {"normalization": normalization, "early_stopping": early_stopping}
    results = search(
        model, width=width, max_new_tokens=12, length_penalty=power, n_best=2, **chosen
    )
    for prompt, hypotheses in zip(PROMPTS, results, strict=True):
        assert_found(hypotheses, slow_beam(model, prompt, width, 12, power, **chosen)[:2])


def test_when_a_search_ends_makes_a_difference(table_model):
    model = table_model(vocab_size=7, spread=3.0)
    prompts = [[a, b] for a in range(1, 7) for b in range(1, 7)]
    results = []
    for early_stopping in ("never", "heuristic", "full"):
        model.fed.clear()
        texts = search(model, prompts, width=2, max_new_tokens=20, early_stopping=early_stopping)
        results.append(([text.ids for (text,) in texts], sum(rows for rows, _ in model.fed)))
    (exact, longest), (heuristic, middle), (full, shortest) = results
    assert longest > middle > shortest
    assert exact != heuristic
    assert exact != full


def test_every_stop_ends_a_text(table_model):
    model = table_model(vocab_size=9)
    model.table[:, [0, 4, 5]] += 2  # so likely that every beam may stop in three ways
    results = search(
        model, width=3, max_new_tokens=10, stop={0, 4, 5}, n_best=3, length_penalty=3.0
    )
    for prompt, hypotheses in zip(PROMPTS, results, strict=True):
        assert_found(hypotheses, slow_beam(model, prompt, 3, 10, 3.0, stop=(0, 4, 5))[:3])


def test_without_a_stop_every_text_is_as_long_as_can_be(table_model):
    model = table_model(vocab_size=7)
    results = search(model, width=3, max_new_tokens=6, stop=(), n_best=3)
    for prompt, hypotheses in zip(PROMPTS, results, strict=True):
        assert_found(hypotheses, slow_beam(model, prompt, 3, 6, stop=())[:3])
        assert {len(hypothesis.ids) for hypothesis in hypotheses} == {6}


@pytest.mark.parametrize("diversity", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(("width", "groups"), [(6, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("early_stopping", ["never", "full"])
def test_groups_find_what_the_slow_groups_find(
    table_model, width, groups, diversity, early_stopping
):
    model = table_model(vocab_size=7)
    chosen = {"early_stopping": early_stopping, "groups": groups, "diversity": diversity}
    results = search(model, width=width, max_new_tokens=8, **chosen)
    for prompt, hypotheses in zip(PROMPTS, results, strict=True):
        slow = slow_groups(model, prompt, width // groups, 8, **chosen)
        assert_found(hypotheses, sorted((texts[0] for texts in slow), key=lambda text: -text[0]))


def test_the_first_group_is_a_beam_and_the_others_keep_away_from_it(table_model):
    model = table_model(vocab_size=7)
    alone = search(model, width=2, max_new_tokens=8, n_best=2)
    same, away = (
        search(model, width=6, groups=3, diversity=d, max_new_tokens=8, n_best=2)
        for d in (0.0, 5.0)
    )
    for one, alike, apart in zip(alone, same, away, strict=True):
        assert alike == [hypothesis for hypothesis in one for _ in range(3)]
        assert all(hypothesis in apart for hypothesis in one)
        scores = [hypothesis.score for hypothesis in apart]
        assert scores == sorted(scores, reverse=True)  # best first, of whichever group
        assert len({tuple(hypothesis.ids) for hypothesis in apart}) > len(
            {tuple(hypothesis.ids) for hypothesis in alike}
        )


def test_rows_that_finish_early_are_dropped_and_keep_their_place(table_model):
    model = table_model(vocab_size=7, spread=4.0)
    prompts = [[a, b] for a in range(1, 7) for b in range(1, 7)]
    results = search(model, prompts, width=3, max_new_tokens=15, length_penalty=0.0)
    rows = [rows for rows, _ in model.fed[1:]]
    assert rows[0] == 3 * len(prompts)
    assert rows[-1] < rows[0] / 4
    for prompt, hypotheses in zip(prompts, results, strict=True):
        assert_found(hypotheses, slow_beam(model, prompt, 3, 15, 0.0)[:1])


@pytest.mark.parametrize("early_stopping", ["never", "heuristic", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_one_beam_is_greedy_search(table_model, early_stopping, seed):
    model = table_model(seed=seed)
    greedy = generate(model, PROMPTS, parse_chain(["greedy"]), max_new_tokens=25, stop={STOP})
    results = search(model, width=1, max_new_tokens=25, early_stopping=early_stopping)
    assert [hypothesis.ids for (hypothesis,) in results] == greedy


def test_a_text_stands_only_once_among_the_best(table_model):
    for hypotheses in search(table_model(vocab_size=8), width=8, max_new_tokens=6, n_best=8):
        assert len({tuple(hypothesis.ids) for hypothesis in hypotheses}) == len(hypotheses) == 8
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)


@pytest.mark.parametrize("early_stopping", ["never", "heuristic", "full"])
def test_fewer_texts_come_back_where_there_are_no_more(table_model, early_stopping):
    model = table_model(vocab_size=8)
    model.table[:, 2:] = -torch.inf  # stop, or one more 1
    results = search(
        model, [[1]], width=8, max_new_tokens=3, n_best=8, early_stopping=early_stopping
    )
    assert sorted(hypothesis.ids for hypothesis in results[0]) == [[], [1], [1, 1], [1, 1, 1]]


def test_each_row_has_its_own_source(table_model):
    model = table_model(vocab_size=7)
    source = Source(torch.tensor([[4, 2, 9], [7, 0, 0], [3, 3, 0]]), torch.tensor([3, 1, 2]))
    results = search(model, [[1]] * 3, source=source, width=3, max_new_tokens=8)
    for row, hypotheses in enumerate(results):
        expected = slow_beam(model, [1], 3, 8, source=row_of(source, row))
        assert_found(hypotheses, expected[:1])


def test_the_search_of_a_row_ends_at_its_full_context(table_model):
    model = table_model(vocab_size=7, context=8)
    results = search(model, width=3, max_new_tokens=50, length_penalty=2.0)
    for prompt, hypotheses in zip(PROMPTS, results, strict=True):
        room = 8 - len(prompt) + 1  # the last id is not fed
        assert_found(hypotheses, slow_beam(table_model(vocab_size=7), prompt, 3, room, 2.0)[:1])


@pytest.mark.parametrize("early_stopping", ["never", "heuristic", "full"])
@pytest.mark.parametrize("power", POWERS)
def test_each_row_has_its_own_limit(table_model, power, early_stopping):
    model = table_model(vocab_size=7)
    prompts, limits = PROMPTS * 2, [12, 2, 5, 1, 12, 7]
    chosen = {"length_penalty": power, "early_stopping": early_stopping, "n_best": 2}
    results = search(model, prompts, width=3, max_new_tokens=limits, **chosen)
    for prompt, limit, hypotheses in zip(prompts, limits, results, strict=True):
        (alone,) = search(model, [prompt], width=3, max_new_tokens=limit, **chosen)
        assert hypotheses == alone
        slow = slow_beam(model, prompt, 3, limit, power, early_stopping=early_stopping)
        assert_found(hypotheses, slow[:2])


def test_limits_are_one_for_all_or_one_for_each(table_model):
    with pytest.raises(ShapeError, match="2 limits for 3 prompts; give one per prompt"):
        search(table_model(), width=1, max_new_tokens=[4, 5])


def test_an_encoder_decoder_is_searched_like_any_other():
    from regard.models.transformer import Transformer, TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=9, dim=16, layers=2, heads=2, context=16, architecture="encoder-decoder"
    )
    model = Transformer(config).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)
    source = Source(torch.tensor([[4, 2, 8], [7, 0, 0], [3, 3, 0]]), torch.tensor([3, 1, 2]))
    results = search(model, [[1]] * 3, source=source, width=4, max_new_tokens=8, n_best=2)
    for row, hypotheses in enumerate(results):
        expected = slow_beam(model, [1], 4, 8, source=row_of(source, row))
        assert_found(hypotheses, expected[:2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_best": 4}, "n_best=4 must lie between 1 and the 3 beams of a group"),
        ({"width": 6, "groups": 2, "n_best": 4}, "n_best=4 .* the 3 beams of a group"),
        ({"width": 0}, "width=0 of a beam search must be at least 1"),
        ({"width": 7}, "width=7 of a beam search must be at most vocab_size=6"),
        ({"groups": 2}, "groups=2 must divide the beam's width=3"),
        ({"groups": 0}, "groups=0"),
        ({"diversity": -1.0}, "diversity=-1.0"),
        ({"diversity": math.nan}, "diversity=nan"),
        ({"length_penalty": math.nan}, "length_penalty=nan"),
        ({"length_penalty": 1e3}, "length_penalty=1000 must lie between -20 and 20"),
        ({"normalization": "gmt"}, "normalization 'gmt'; did you mean 'gnmt'"),
        ({"early_stopping": "always"}, "early_stopping 'always'"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[1] * 9]}, "a prompt of 9 ids fills the model's context of 8"),
    ],
)
def test_what_cannot_be_searched_is_refused(table_model, settings, message):
    with pytest.raises(ConfigError, match=message):
        search(table_model(context=8), **({"width": 3, "max_new_tokens": 5} | settings))


def test_logits_that_are_no_numbers_are_an_error(table_model):
    model = table_model()
    model.table[:] = float("nan")
    with pytest.raises(RegardError, match="row 0"):
        search(model, width=2, max_new_tokens=3)


def test_no_prompts_are_no_texts(table_model):
    assert search(table_model(), [], width=2, max_new_tokens=3) == []
