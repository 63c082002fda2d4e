"""The n-gram model against counts in dicts, and against the `Language` protocol."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import count_reference as reference
from regard.data.batch import TextBatch
from regard.errors import ConfigError, DataError, ShapeError
from regard.models import ngram, ngram_counts
from regard.models.base import Language
from regard.models.ngram import NGram, NGramConfig
from regard.models.smoothing import SMOOTHINGS
from regard.nn.state import Source

VOCAB = 7
SLOW = {
    "witten_bell": reference.WittenBell,
    "add_k": reference.AddK,
    "kneser_ney": reference.KneserNey,
}
TEXT = "the cat sat on the mat and the cat ate the rat that sat on the mat with the cat " * 4


def blocks(rows=6, time=20, seed=0, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(vocab, (rows, time + 1), generator=generator)
    text[:, ::3] = text[:, ::3] % 3  # so that some contexts come often
    return TextBatch(text[:, :-1], text[:, 1:])


def fit_ngram(order=4, batches=None, smoothing="witten_bell"):
    model = NGram(NGramConfig(vocab_size=VOCAB, order=order, smoothing=smoothing))
    model.fit([blocks()] if batches is None else batches)
    return model


def pairs(batches):
    return [
        pair
        for batch in batches
        for pair in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True)
    ]


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("order", [1, 2, 3, 4, 6])
def test_probabilities_equal_the_formula_over_dicts(order, smoothing):
    batches = [blocks(seed=0), blocks(rows=2, time=3, seed=1)]
    model = fit_ngram(order, batches, smoothing)
    slow = SLOW[smoothing](pairs(batches), VOCAB, order)
    asked = blocks(rows=3, time=8, seed=2).ids
    expected = torch.stack([slow.table(row) for row in asked.tolist()])
    torch.testing.assert_close(model.probabilities(asked), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(asked), expected.log().float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("order", [1, 4])
def test_the_scores_of_targets_are_those_of_the_whole_distribution(order, smoothing):
    model = fit_ngram(order, smoothing=smoothing)
    asked = blocks(rows=3, time=8, seed=2)
    targets = asked.targets.clone()
    targets[1, 2:] = -1
    expected = model.probabilities(asked.ids).log()[targets != -1]
    expected = expected.gather(1, targets[targets != -1].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(
        model.target_log_probs(asked.ids, targets), expected, rtol=0, atol=1e-12
    )


def test_the_contributions_of_lower_orders_are_in_the_proportions_of_a_lower_order_model():
    asked = blocks(rows=3, time=8, seed=2)
    parts, lower = (fit_ngram(n).contributions(asked.ids, asked.targets) for n in (3, 2))
    assert parts.shape == (3 * 8, 4)  # uniform, then after 0, 1 and 2 ids
    backoff = parts[:, :3].sum(-1, keepdim=True) / lower.sum(-1, keepdim=True)
    torch.testing.assert_close(parts[:, :3], backoff * lower, rtol=0, atol=1e-12)
    assert (parts[:, 3] > 0).any()


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=2, max_size=30),
    hidden=st.lists(st.booleans(), min_size=30, max_size=30),
    asked=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    order=st.integers(1, 5),
    smoothing=st.sampled_from(list(SLOW)),
)
def test_targets_that_are_not_scored_are_context_only(text, hidden, asked, order, smoothing):
    targets = [-1 if hide else w for w, hide in zip(text[1:], hidden, strict=False)]
    if all(target == -1 for target in targets):
        return
    batch = TextBatch(torch.tensor([text[:-1]]), torch.tensor([targets]))
    model = NGram(NGramConfig(vocab_size=5, order=order, smoothing=smoothing))
    model.fit([batch])
    p = model.probabilities(torch.tensor([asked]))
    expected = SLOW[smoothing]([(text[:-1], targets)], 5, order).table(asked)
    torch.testing.assert_close(p[0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_probabilities_sum_to_one(smoothing):
    p = fit_ngram(smoothing=smoothing).probabilities(blocks(seed=3).ids)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]), rtol=0, atol=1e-12)


def test_padding_is_not_counted():
    batch = blocks(rows=1, time=6)
    ids = torch.nn.functional.pad(batch.ids, (0, 3), value=5)
    targets = torch.nn.functional.pad(batch.targets, (0, 3), value=-1)
    padded, plain = fit_ngram(batches=[TextBatch(ids, targets)]), fit_ngram(batches=[batch])
    for name, value in plain.state_dict().items():
        assert torch.equal(padded.state_dict()[name], value), name


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("sparse", [0, 1 << 20], ids=["sorted", "marked"])
def test_chunks_merge_to_what_one_chunk_counts(monkeypatch, sparse, smoothing):
    batches = [blocks(seed=seed) for seed in range(5)]
    whole = fit_ngram(batches=batches, smoothing=smoothing).state_dict()
    monkeypatch.setattr(ngram_counts, "CHUNK_TOKENS", 150)
    monkeypatch.setattr(ngram_counts, "MAX_DENSE_KEYS", sparse)
    merged = fit_ngram(batches=batches, smoothing=smoothing).state_dict()
    for name, value in whole.items():
        assert torch.equal(merged[name], value), name


def test_probabilities_do_not_depend_on_how_many_are_held_at_a_time(monkeypatch):
    model, ids = fit_ngram(), blocks(seed=3).ids
    whole = model(ids)
    monkeypatch.setattr(ngram, "CHUNK_ELEMENTS", 5 * VOCAB)
    assert torch.equal(model(ids), whole)


def test_the_tables_hold_sorted_keys_whose_followers_stand_side_by_side():
    model = fit_ngram(order=3)
    unigrams, bigrams, _ = model.tables
    for table in model.tables:
        assert (table.keys.diff() > 0).all()
    ids = blocks().ids
    first, second = unigrams.find(ids[0, :1]), ids[0, 1:2]
    assert unigrams.keys[first] == ids[0, 0]
    assert bigrams.find(first * VOCAB + second) >= 0


def test_it_is_a_language_model_without_limit():
    model = fit_ngram()
    assert isinstance(model, Language)
    assert model.context is None
    assert not list(model.parameters())


def test_nothing_leaks_from_the_future():
    model, ids = fit_ngram(), blocks(seed=4).ids
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCAB
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 2, 7, 20])
def test_stepping_equals_forward(order, width):
    model, ids = fit_ngram(order), blocks(seed=5).ids
    state = model.start(len(ids), 20)
    every = []
    for part in ids.split(width, 1):
        last, _ = model.step(part, state)
        logits, state = model.step(part, state, all_logits=True)
        assert torch.equal(last, logits[:, -1:])
        every.append(logits)
    assert torch.equal(torch.cat(every, 1), model(ids))
    assert state.lengths.tolist() == [20] * len(ids)


def test_ragged_rows_equal_rows_alone():
    model, ids = fit_ngram(), blocks(seed=6).ids[:3, :6]
    counts = torch.tensor([6, 1, 3])
    logits, state = model.step(ids, model.start(3, 20), counts=counts)
    more, state = model.step(ids[:, :2], state, counts=torch.tensor([2, 0, 1]))
    assert state.lengths.tolist() == [8, 1, 4]
    for row, (count, again) in enumerate([(6, 2), (1, 0), (3, 1)]):
        alone = torch.cat([ids[row : row + 1, :count], ids[row : row + 1, :again]], 1)
        expected = model(alone)
        assert torch.equal(logits[row, 0], expected[0, count - 1])
        assert torch.equal(more[row, 0], expected[0, -1])


def test_select_reorders_and_repeats_rows():
    model, ids = fit_ngram(), blocks(seed=7).ids[:3]
    _, state = model.step(ids[:, :5], model.start(3, 20), counts=torch.tensor([5, 4, 3]))
    rows = torch.tensor([2, 0, 2])
    chosen = state.select(rows)
    assert chosen.lengths.tolist() == [3, 5, 3]
    expected, _ = model.step(ids[:, 5:7], state)
    assert not torch.equal(expected[0], expected[2])
    same, _ = model.step(ids[rows][:, 5:7], chosen)
    assert torch.equal(same, expected[rows])


def test_rewind_goes_back_within_the_last_step_and_no_further():
    model, ids = fit_ngram(), blocks(seed=8).ids[:2]
    _, state = model.step(ids[:, :4], model.start(2, 20))
    _, state = model.step(ids[:, 4:9], state)
    state = state.rewind(torch.tensor([9, 8])).rewind(torch.tensor([7, 4]))
    logits, after = model.step(ids[:, 9:10], state)
    assert after.lengths.tolist() == [8, 5]
    for row, kept in enumerate([7, 4]):
        alone = torch.cat([ids[row : row + 1, :kept], ids[row : row + 1, 9:10]], 1)
        assert torch.equal(logits[row, 0], model(alone)[0, -1])
    with pytest.raises(ShapeError, match="only the states of the last step are stored"):
        state.rewind(torch.tensor([7, 3]))
    with pytest.raises(ShapeError, match="cannot rewind"):
        state.rewind(torch.tensor([8, 4]))


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_a_saved_model_loads_into_a_fresh_one(smoothing):
    model = fit_ngram(smoothing=smoothing)
    fresh = NGram(NGramConfig(vocab_size=VOCAB, smoothing=smoothing))
    fresh.load_state_dict(load(save(model.state_dict())))
    ids = blocks(seed=9).ids
    assert torch.equal(fresh(ids), model(ids))
    assert {"tables.0.counts", "tables.0.keys"} < set(model.state_dict())


def test_loading_says_which_table_is_missing():
    with pytest.raises(RuntimeError, match=r"tables\.3\.keys"):
        fit_ngram(order=4).load_state_dict(fit_ngram(order=3).state_dict())


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_before_anything_is_counted_every_id_is_as_likely(smoothing):
    p = NGram(NGramConfig(vocab_size=VOCAB, smoothing=smoothing)).probabilities(blocks().ids)
    torch.testing.assert_close(p, torch.full_like(p, 1 / VOCAB))


def test_fitting_again_forgets_the_first_text():
    model = fit_ngram(batches=[blocks(seed=1)])
    model.fit([blocks(seed=0)])
    for name, value in fit_ngram().state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_it_learns_its_text():
    ids = torch.tensor(list(TEXT.encode()))
    text = ids[: len(ids) // 41 * 41].view(-1, 41)
    batch = TextBatch(text[:, :-1], text[:, 1:])
    model = NGram(NGramConfig(vocab_size=256))
    model.fit([batch])
    loss = model.head.loss(model(batch.ids), batch.targets) / batch.targets.numel()
    assert loss.exp() < 2.5  # of 256


@pytest.mark.parametrize("field", ["vocab_size", "order", "context"])
def test_sizes_must_be_positive(field):
    with pytest.raises(ConfigError, match=f"{field}=0 must be at least 1"):
        NGramConfig(**{"vocab_size": 5, field: 0})


def test_what_cannot_be_counted_is_said():
    model = NGram(NGramConfig(vocab_size=5))
    ids = torch.tensor([[0, 1, 2]])
    with pytest.raises(DataError, match="no scored target"):
        model.fit([TextBatch(ids, torch.full_like(ids, -1))])
    with pytest.raises(DataError, match=r"targets\[t\] must be ids\[t \+ 1\]"):
        model.fit([TextBatch(ids, ids)])
    with pytest.raises(DataError, match="id 9 must be at least 0 and below vocab_size=5"):
        model.fit([TextBatch(ids, torch.tensor([[1, 2, 9]]))])
    with pytest.raises(ConfigError, match="takes no source"):
        model.start(1, 5, source=Source(torch.zeros(1, 1).long(), torch.ones(1).long()))
