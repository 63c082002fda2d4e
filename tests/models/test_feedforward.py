"""Bengio's network against its formula in loops, and how far it sees."""

import math

import pytest
import torch

from regard.errors import ConfigError
from regard.models.feedforward import FeedForwardConfig, FeedForwardLM
from regard.nn.state import Source

VOCAB = 7


def small(**choices):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "order": 4, "dim": 3, "hidden_dim": 5}
    model = FeedForwardLM(FeedForwardConfig(**{**sizes, **choices})).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def some_ids(rows=2, time=6):
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(1))


def loop_logits(model, ids):
    """y = b + W x + U tanh(d + H x), for one row, a number at a time."""
    config, table = model.config, model.embed.weight.tolist()
    h, d = model.hidden_layer.weight.tolist(), model.hidden_layer.bias.tolist()
    u_and_w, b = model.head.weight.tolist(), model.head.bias.tolist()
    every = []
    for t in range(len(ids)):
        x = []
        for at in range(t - config.order + 2, t + 1):
            x += table[ids[at]] if at >= 0 else [0.0] * config.dim
        hidden = [
            math.tanh(d[n] + sum(h[n][m] * x[m] for m in range(len(x))))
            for n in range(config.hidden_dim)
        ]
        logits = []
        for word in range(VOCAB):
            u, w = u_and_w[word][: config.hidden_dim], u_and_w[word][config.hidden_dim :]
            direct = sum(w[m] * x[m] for m in range(len(w)))
            logits.append(b[word] + direct + sum(u[n] * hidden[n] for n in range(len(u))))
        every.append(logits)
    return torch.tensor(every, dtype=torch.float64)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("order", [2, 4, 9])
def test_it_equals_the_formula(order, direct):
    model, ids = small(order=order, direct_connections=direct), some_ids()
    expected = torch.stack([loop_logits(model, row) for row in ids.tolist()])
    torch.testing.assert_close(model.head(model(ids)), expected, rtol=0, atol=1e-12)


def test_it_sees_order_minus_one_ids_and_no_more():
    model, ids = small(order=4), some_ids()
    for at in range(6):
        changed = ids.clone()
        changed[:, at] = (changed[:, at] + 1) % VOCAB
        differs = (model(changed) != model(ids)).any(-1).all(0)
        assert differs.tolist() == [at <= t < at + 3 for t in range(6)]


def test_a_row_that_takes_in_nothing_stays_where_it_was():
    model, ids = small(), some_ids()
    before, state = model.step(ids, model.start(2, 9))
    after, state = model.step(ids[:, :2], state, counts=torch.tensor([0, 2]))
    assert state.lengths.tolist() == [6, 8]
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"order": 1}, "order=1 must be at least 2"),
        ({"dim": 0}, "dim=0 must be at least 1"),
        ({"hidden_dim": -3}, "hidden_dim=-3 must be at least 1"),
        ({"context": 0}, "context=0 must be at least 1"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        FeedForwardConfig(**{"vocab_size": 5, **wrong})


def test_a_source_is_refused():
    with pytest.raises(ConfigError, match="takes no source"):
        small().start(1, 5, source=Source(torch.zeros(1, 1).long(), torch.ones(1).long()))
