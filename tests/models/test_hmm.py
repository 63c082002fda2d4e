"""The hidden Markov model against every path of its states, and the promises it makes."""

import pytest
import torch
from safetensors.torch import load, save

import count_reference as reference
from regard.data.batch import TextBatch
from regard.errors import ConfigError, DataError
from regard.models.base import Language
from regard.models.hmm import HMM, HMMConfig
from regard.nn.state import Source

VOCAB, STATES = 5, 3


def hmm(seed=0, states=STATES, iterations=1, peaked=2.0):
    torch.manual_seed(seed)
    model = HMM(HMMConfig(vocab_size=VOCAB, states=states, iterations=iterations))
    for name, value in model.state_dict().items():
        drawn = peaked * torch.randn(value.shape, dtype=torch.float64)
        setattr(model, name, drawn.log_softmax(-1))
    return model


def slow(model):
    return reference.HMM(*(each.exp().tolist() for each in model.state_dict().values()))


def rows(count=4, time=6, seed=0):
    return torch.randint(VOCAB, (count, time), generator=torch.Generator().manual_seed(seed))


def text(ids, lengths=None):
    """A batch of rows that end where `lengths` say."""
    targets = ids[:, 1:].clone()
    for row, length in enumerate(lengths or []):
        targets[row, length - 1 :] = -1
    return TextBatch(ids[:, :-1], targets)


def close(actual, expected):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("states", [1, 2, 3])
def test_the_likelihood_is_the_sum_over_all_paths(states):
    model, ids = hmm(states=states), rows()
    expected = [slow(model).likelihood(row) for row in ids.tolist()]
    close(model.log_likelihood(ids).exp(), expected)


@pytest.mark.parametrize("seed", range(5))
def test_viterbi_finds_the_best_of_all_paths(seed):
    model, ids = hmm(seed), rows(seed=seed)
    assert model.viterbi(ids).tolist() == [list(slow(model).viterbi(row)) for row in ids.tolist()]


def test_the_next_id_is_as_likely_as_the_row_with_it_over_the_row_without():
    model, ids = hmm(), rows(2, 4)
    p = model(ids).double().exp()
    for row, each in enumerate(ids.tolist()):
        for t in range(4):
            before = slow(model).likelihood(each[: t + 1])
            expected = [slow(model).likelihood([*each[: t + 1], v]) / before for v in range(VOCAB)]
            # the model gives float32
            torch.testing.assert_close(p[row, t].tolist(), expected, rtol=1e-6, atol=0)


def test_a_round_of_baum_and_welch_expects_what_all_paths_say():
    model, ids, lengths = hmm(), rows(), [6, 2, 5, 3]
    expected = slow(model).improved(
        [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
    )
    written = model.em_step([(ids[:2], torch.tensor([6, 2])), (ids[2:], torch.tensor([5, 3]))])
    close(model.log_initial.exp(), expected.first)
    close(model.log_transition.exp(), expected.move)
    close(model.log_emission.exp(), expected.write)
    close(written.sum(), 16)


@pytest.mark.parametrize("seed", range(4))
def test_the_likelihood_never_falls(seed):
    model, ids = hmm(seed), rows(20, 15, seed)
    texts, history = [(ids, torch.full((20,), 15))], []
    for _ in range(40):
        history.append(model.log_likelihood(ids).sum())
        model.em_step(texts)
    gains = torch.stack(history).diff()
    assert gains.min() > -1e-9  # sums of 300 logarithms
    assert gains[:5].min() > 1e-3


def test_a_long_row_does_not_vanish():
    model, ids = hmm(peaked=20.0), rows(1, 3000)
    assert model.log_likelihood(ids).exp() == 0  # no float holds it
    assert model.log_likelihood(ids).isfinite().all()
    model.em_step([(ids, torch.tensor([3000]))])
    assert all(each.exp().isfinite().all() for each in model.state_dict().values())


def test_fit_reads_each_row_to_its_last_target():
    ids, lengths = rows(), [6, 2, 5, 3]
    model, again = hmm(), hmm()
    model.fit([text(ids, lengths)])
    again.fit([text(ids[row : row + 1, :length]) for row, length in enumerate(lengths)])
    for name, value in model.state_dict().items():
        close(value.exp(), again.state_dict()[name].exp())
    written = hmm().em_step([(ids, torch.tensor(lengths))]) + 1 / VOCAB
    close(model.log_emission.exp(), written / written.sum(-1, keepdim=True))


def test_what_was_never_written_is_not_impossible():
    model = hmm(iterations=5)
    model.fit([text(1 + rows() % 3, [6, 2, 5, 3])])  # and what pads a row was never written
    p = model(rows())
    assert p.isfinite().all()
    assert p[..., [0, 4]].exp().max() < 0.1


def test_it_finds_the_two_halves_of_an_alphabet():
    late = torch.arange(40) % 10 >= 5  # five of a, b, c, then five of d, e
    ids = torch.where(late, 3 + rows(8, 40) % 2, rows(8, 40, seed=1) % 3)
    torch.manual_seed(0)
    model = HMM(HMMConfig(vocab_size=VOCAB, states=2, iterations=50))
    model.fit([text(ids)])
    path = model.viterbi(ids)
    assert (path == path[0, 0]).equal(~late.expand_as(path))


def test_it_is_a_language_model_that_steps_as_it_reads():
    model, ids = hmm(), rows()
    assert isinstance(model, Language)
    whole, state = model(ids), model.start(4, 6)
    _, state = model.step(ids[:, :2], state)
    part, state = model.step(ids[:, 2:], state, all_logits=True)
    torch.testing.assert_close(part, whole[:, 2:])
    counts = torch.tensor([1, 6, 3, 2])
    ragged, state = model.step(ids, model.start(4, 6), counts=counts)
    torch.testing.assert_close(ragged[:, 0], whole[torch.arange(4), counts - 1])
    again, _ = model.step(ids[:, 1:2], state.rewind(torch.ones(4).long()))
    torch.testing.assert_close(again, whole[:, 1:2])


def test_a_saved_model_loads_into_a_fresh_one():
    model, fresh = hmm(), HMM(HMMConfig(vocab_size=VOCAB, states=STATES))
    fresh.load_state_dict(load(save(model.state_dict())))
    assert torch.equal(fresh(rows()), model(rows()))


def test_what_cannot_be_learned_is_said():
    model, ids = hmm(), rows()
    with pytest.raises(DataError, match="no scored target"):
        model.fit([TextBatch(ids, torch.full_like(ids, -1))])
    with pytest.raises(ConfigError, match="takes no source"):
        model.start(1, 5, source=Source(torch.zeros(1, 1).long(), torch.ones(1).long()))
    with pytest.raises(ConfigError, match="states=0 must be at least 1"):
        HMMConfig(vocab_size=VOCAB, states=0)


@pytest.mark.parity
def test_likelihood_states_and_rounds_equal_hmmlearn():
    peer = pytest.importorskip("hmmlearn.hmm")
    model, ids = hmm(), rows(5, 30)
    theirs = peer.CategoricalHMM(STATES, n_iter=1, init_params="", implementation="log")
    theirs.startprob_, theirs.transmat_, theirs.emissionprob_ = (
        each.exp().numpy() for each in model.state_dict().values()
    )
    lengths, flat = [30] * 5, ids.flatten().unsqueeze(-1).numpy()
    close(model.log_likelihood(ids).sum(), theirs.score(flat, lengths))
    _, path = theirs.decode(flat, lengths)
    assert model.viterbi(ids).flatten().tolist() == path.tolist()
    theirs.fit(flat, lengths)
    model.em_step([(ids, torch.tensor(lengths))])
    close(model.log_transition.exp(), theirs.transmat_)
    close(model.log_emission.exp(), theirs.emissionprob_)
