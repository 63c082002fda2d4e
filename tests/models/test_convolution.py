"""Causal convolutions against their formula in loops, and how far they see."""

import math

import pytest
import torch

from regard.errors import ConfigError
from regard.models.convolution import ConvolutionConfig, ConvolutionLM
from regard.nn.state import Source

VOCAB = 7


def small(**choices):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "dim": 3, "layers": 2}
    model = ConvolutionLM(ConvolutionConfig(**{**sizes, **choices})).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model


def some_ids(rows=2, time=9):
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(1))


def matmul(layer, vector):
    rows, bias = layer.weight.tolist(), layer.bias.tolist()
    return [
        sum(a * v for a, v in zip(row, vector, strict=True)) + b
        for row, b in zip(rows, bias, strict=True)
    ]


def convolve(layer, x, t, dilation):
    """(W * x)_t = sum_k W_k x_{t - k dilation} + b; torch keeps W_0 last."""
    weight, bias = layer.weight.tolist(), layer.bias.tolist()
    kernel_size = len(weight[0][0])
    result = []
    for out, b in zip(weight, bias, strict=True):
        total = b
        for k in range(kernel_size):
            at = t - k * dilation
            if at >= 0:
                total += sum(out[n][kernel_size - 1 - k] * x[at][n] for n in range(len(out)))
        result.append(total)
    return result


def loop_logits(model, ids):
    """h after each id of one row, a number at a time."""
    table = model.embed.weight.tolist()
    x = [table[each] for each in ids]
    skips = [[0.0] * len(vector) for vector in x]
    for number, layer in enumerate(model.layers):
        dilation, y = 2**number, []
        for t in range(len(x)):
            activated = [math.tanh(v) for v in convolve(layer.filter, x, t, dilation)]
            gate = [1 / (1 + math.exp(-v)) for v in convolve(layer.gate, x, t, dilation)]
            y.append(matmul(layer.out, [a * b for a, b in zip(activated, gate, strict=True)]))
        for t, added in enumerate(y):
            x[t] = [a + b for a, b in zip(x[t], added, strict=True)]
            skips[t] = [a + b for a, b in zip(skips[t], added, strict=True)]
    relu = [[max(v, 0.0) for v in vector] for vector in skips]
    shown = [[max(v, 0.0) for v in matmul(model.mix, vector)] for vector in relu]
    return torch.tensor(shown, dtype=torch.float64)


@pytest.mark.parametrize("kernel_size", [2, 3])
@pytest.mark.parametrize("layers", [1, 3])
def test_it_equals_the_formula(layers, kernel_size):
    model, ids = small(layers=layers, kernel_size=kernel_size), some_ids()
    expected = torch.stack([loop_logits(model, row) for row in ids.tolist()])
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-12)
    logits, _ = model.step(ids, model.start(2, 9), all_logits=True)
    torch.testing.assert_close(logits, model.head(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel_size", [2, 3])
def test_the_last_layer_sees_as_far_as_is_said_and_no_further(kernel_size):
    model, ids = small(dim=8, kernel_size=kernel_size), some_ids()
    sight = model.config.receptive_field
    assert sight == {2: 4, 3: 7}[kernel_size]
    for at in range(9):
        changed = ids.clone()
        changed[:, at] = (changed[:, at] + 1) % VOCAB
        differs = (model(changed) != model(ids)).any(-1).any(0)
        assert differs.tolist() == [at <= t < at + sight for t in range(9)]


def test_a_row_that_takes_in_nothing_stays_where_it_was():
    model, ids = small(), some_ids()
    before, state = model.step(ids, model.start(2, 12))
    after, state = model.step(ids[:, :2], state, counts=torch.tensor([0, 2]))
    assert state.lengths.tolist() == [9, 11]
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_dropout_works_in_training_only():
    model, ids = small(dropout=0.5), some_ids()
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"dim": 0}, "dim=0 must be at least 1"),
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"layers": 21}, "layers=21 must be at most 20"),
        ({"kernel_size": 1}, "kernel_size=1 must be at least 2"),
        ({"context": 0}, "context=0 must be at least 1"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        ConvolutionConfig(**{"vocab_size": 5, **wrong})


def test_a_source_is_refused():
    with pytest.raises(ConfigError, match="takes no source"):
        small().start(1, 5, source=Source(torch.zeros(1, 1).long(), torch.ones(1).long()))
