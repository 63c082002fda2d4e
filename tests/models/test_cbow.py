"""CBOW against its formula in loops, and what its noise is worth in expectation."""

import math

import pytest
import torch

from regard.data.batch import TextBatch
from regard.errors import ConfigError
from regard.models.build import build_model, resolve
from regard.models.cbow import CBOW, CBOWConfig

VOCAB = 9
LENGTHS = torch.tensor([7, 5, 1])


def small(**choices):
    sizes = {"vocab_size": VOCAB, "dim": 4, "window": 2, "context": 7}
    model = CBOW(CBOWConfig(**{**sizes, **choices})).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def some_ids():
    return torch.randint(VOCAB, (3, 7), generator=torch.Generator().manual_seed(1))


def targets_of(ids):
    return ids.masked_fill(torch.arange(7) >= LENGTHS.unsqueeze(1), -1)


def middle(model, row, t):
    """The mean of the vectors around place t of a row, a number at a time."""
    window, dim = model.config.window, model.config.dim
    near = [c for c in range(t - window, t + window + 1) if 0 <= c < len(row) and c != t]
    vectors = [model.embed.weight[row[c]] for c in near]
    return [sum(v[i] for v in vectors) / max(1, len(near)) for i in range(dim)]


def dot(u, h):
    return sum(u[i] * h[i] for i in range(len(h)))


def whole_softmax(model, ids):
    """- sum log P(w | C) over the real words, with every prior of the head."""
    prior = getattr(model.head, "log_noise", torch.zeros(VOCAB))
    total = 0.0
    for row, length in zip(ids.tolist(), LENGTHS.tolist(), strict=True):
        row = row[:length]
        for t in range(length):
            h = middle(model, row, t)
            scores = [dot(model.head.weight[w], h) + prior[w] for w in range(VOCAB)]
            total = total - scores[row[t]] + sum(score.exp() for score in scores).log()
    return total


def expected_noise(model, ids):
    """- sum [log s(u_w h) + k E log s(- u_n h)], with the exact expectation over the noise."""
    q = model.head.log_noise.exp()
    total = 0.0
    for row, length in zip(ids.tolist(), LENGTHS.tolist(), strict=True):
        row = row[:length]
        for t in range(length):
            h = middle(model, row, t)
            scores = [dot(model.head.weight[w], h) for w in range(VOCAB)]
            own = -(1 + (-scores[row[t]]).exp()).log()
            others = sum(-q[n] * (1 + scores[n].exp()).log() for n in range(VOCAB))
            total = total - own - model.config.negatives * others
    return total


def counted(**choices):
    """A model that has seen how often each word comes: the frequent ones are the small ids."""
    model = small(**choices)
    ids = torch.arange(VOCAB).repeat_interleave(torch.arange(VOCAB, 0, -1)).view(1, -1)
    model.set_noise_distribution([TextBatch(ids, ids)])
    return model


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("window", [1, 2, 6, 9])
def test_the_whole_softmax_and_its_gradient_are_the_formula_s(window):
    model, ids = small(negatives=0, window=window), some_ids()
    ours = model.head.loss(model(ids, lengths=LENGTHS), targets_of(ids))
    slow = whole_softmax(model, ids)
    torch.testing.assert_close(ours, slow, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients(ours, model), gradients(slow, model), rtol=0, atol=1e-12)


def test_noise_is_drawn_by_the_counts_to_the_power_of_three_quarters():
    model = counted()
    weights = [(1 + VOCAB - n) ** 0.75 for n in range(VOCAB)]
    expected = torch.tensor([weight / sum(weights) for weight in weights])
    torch.testing.assert_close(model.head.log_noise.exp().float(), expected)


def test_padding_is_not_counted():
    ids = torch.zeros(1, 4, dtype=torch.long)
    model = small()
    model.set_noise_distribution([TextBatch(ids, torch.tensor([[0, -1, -1, -1]]))])
    assert model.head.log_noise[0] - model.head.log_noise[1] == pytest.approx(0.75 * math.log(2))


def test_negative_sampling_is_its_formula_in_expectation():
    model, ids = counted(negatives=3).train(), some_ids()
    slow = expected_noise(model, ids)
    exact = float(slow.detach())
    x, targets = model(ids, lengths=LENGTHS), targets_of(ids)
    draws = 1500
    ours = torch.stack([model.head.loss(x, targets) for _ in range(draws)])
    error = float(ours.detach().std()) / math.sqrt(draws)
    assert error < 0.01 * exact
    assert float(ours.detach().mean()) == pytest.approx(exact, abs=4 * error)  # four sigma
    for mean, wanted in zip(gradients(ours.mean(), model), gradients(slow, model), strict=True):
        assert float((mean - wanted).norm() / wanted.norm()) < 0.02  # of 12,000 draws for a row


def plain_negative_sampling(model, x, targets, sampled):
    """The loss by autograd alone, with one lookup for the words and one for the noise."""
    u = model.head.weight
    positive = (x * u[targets.clamp_min(0)]).sum(-1)
    negative = torch.nn.functional.logsigmoid(-x @ u[sampled].mT).mean(-1)
    words = torch.nn.functional.logsigmoid(positive) + model.config.negatives * negative
    return -(words * (targets != -1)).sum()


@pytest.mark.parametrize(("time", "samples"), [(7, 8), (80, 10)])
def test_negative_sampling_and_its_gradients_are_those_of_autograd(time, samples):
    model = counted(negatives=3).train()
    ids = torch.randint(VOCAB, (3, time), generator=torch.Generator().manual_seed(1))
    targets = ids.masked_fill(torch.arange(time) >= LENGTHS.unsqueeze(1), -1)
    torch.manual_seed(1)
    ours = model.head.loss(model(ids, lengths=LENGTHS), targets)
    torch.manual_seed(1)
    sampled = torch.multinomial(model.head.log_noise.exp(), 3 * samples, replacement=True)
    x = model(ids, lengths=LENGTHS)
    plain = plain_negative_sampling(model, x, targets, sampled.view(3, samples))
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients(ours, model), gradients(plain, model), rtol=0, atol=1e-12)


def test_autocast_sums_the_loss_in_float32():
    model, ids = counted().train().float(), some_ids()
    losses = []
    for enabled in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(model.head.loss(model(ids, lengths=LENGTHS), targets_of(ids)))
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)  # scores of the noise have 8 bits
    full, mixed = (gradients(loss, model) for loss in losses)
    torch.testing.assert_close(full, mixed, rtol=0, atol=1e-2)


def test_what_learned_by_noise_is_judged_by_its_probabilities():
    model, ids = counted().eval(), some_ids()
    ours = model.head.loss(model(ids, lengths=LENGTHS), targets_of(ids))
    torch.testing.assert_close(ours, whole_softmax(model, ids), rtol=0, atol=1e-12)
    logits = model.head(model(ids))
    assert torch.allclose(logits - model(ids) @ model.head.weight.T, model.head.log_noise)


def test_a_word_does_not_see_itself_nor_beyond_its_window_nor_padding():
    model, ids = small(window=2), some_ids()
    for at in range(7):
        changed = ids.clone()
        changed[:, at] = (changed[:, at] + 1) % VOCAB
        differs = (model(changed) != model(ids)).any(-1).all(0)
        assert differs.tolist() == [0 < abs(at - t) <= 2 for t in range(7)]
    padded = ids.clone()
    padded[1, 5:] = 0
    x, y = model(ids, lengths=LENGTHS), model(padded, lengths=LENGTHS)
    assert torch.equal(x[1, :5], y[1, :5])
    assert torch.equal(x[2, 0], torch.zeros(4).double())  # a word alone has no neighbours


def test_what_is_counted_is_saved_with_the_weights():
    model, other = counted(), small()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.head.log_noise, model.head.log_noise)


def test_smoothing_needs_the_whole_softmax():
    model, ids = small().train(), some_ids()
    with pytest.raises(ConfigError, match=r"task.label_smoothing=0.1 .* set model.negatives=0"):
        model.head.loss(model(ids), ids, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"negatives": -1}, "negatives=-1 must be at least 0"),
        ({"context": 1}, "context=1 must be at least 2"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        CBOWConfig(**{"vocab_size": 5, **wrong})


def test_the_family_is_built_from_a_table():
    model = build_model(resolve({"family": "cbow", "vocab_size": 5, "negatives": 0}))
    assert isinstance(model, CBOW)
