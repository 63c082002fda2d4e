"""The LSTM layer against torch's own, against its loop, and against the formula."""

import math

import pytest
import torch
from torch import nn

from regard.errors import ShapeError
from regard.nn.recurrent import LSTM, Snapshots


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def slow_lstm(layer, x):
    """One row, one number at a time: h after each x."""
    w, b = layer.input.weight.tolist(), layer.input.bias.tolist()
    u, dim = layer.hidden.weight.tolist(), layer.dim
    h, c, shown = [0.0] * dim, [0.0] * dim, []
    for now in x.tolist():
        gates = [
            sum(a * v for a, v in zip(w[n], now, strict=True))
            + sum(a * v for a, v in zip(u[n], h, strict=True))
            + b[n]
            for n in range(4 * dim)
        ]
        h = list(h)
        for n in range(dim):
            i, f, g, o = gates[n], gates[dim + n], gates[2 * dim + n], gates[3 * dim + n]
            c[n] = sigmoid(f) * c[n] + sigmoid(i) * math.tanh(g)
            h[n] = sigmoid(o) * math.tanh(c[n])
        shown.append(h)
    return torch.tensor(shown, dtype=torch.float64)


def layer_and_input(dtype=torch.float64, dim_in=3, dim_out=4, batch=2, time=5):
    torch.manual_seed(0)
    layer = LSTM(dim_in, dim_out).to(dtype)
    return layer, torch.randn(batch, time, dim_in, dtype=dtype)


def test_the_fused_kernel_and_the_loop_equal_the_formula():
    layer, x = layer_and_input()
    expected = torch.stack([slow_lstm(layer, row) for row in x])
    hidden, _ = layer.loop(x, layer.start(len(x)))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-12)


def test_it_equals_torch_with_the_same_weights():
    layer, x = layer_and_input(torch.float32, dim_in=8, dim_out=16, batch=3, time=11)
    theirs = nn.LSTM(8, 16, batch_first=True)
    with torch.no_grad():
        layer.input.weight.copy_(theirs.weight_ih_l0)
        layer.input.bias.copy_(theirs.bias_ih_l0 + theirs.bias_hh_l0)
        layer.hidden.weight.copy_(theirs.weight_hh_l0)
    y, (h, c) = theirs(x)
    hidden, cell = layer.loop(x, layer.start(len(x)))
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-6)
    torch.testing.assert_close(hidden, y, rtol=0, atol=1e-6)
    torch.testing.assert_close(hidden[:, -1], h[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(cell[:, -1], c[0], rtol=0, atol=1e-6)


def test_the_loop_goes_on_from_any_of_its_states():
    layer, x = layer_and_input()
    hidden, cell = layer.loop(x, layer.start(len(x)))
    rest, _ = layer.loop(x[:, 2:], (hidden[:, 1], cell[:, 1]))
    torch.testing.assert_close(rest, hidden[:, 2:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", ["fused", "loop"])
def test_gradients_are_those_of_finite_differences(path):
    layer, x = layer_and_input(dim_in=2, dim_out=2, time=3)
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *values):
        parameters = dict(zip(names, values, strict=True))
        module = layer if path == "fused" else Loop(layer)
        prefix = "" if path == "fused" else "layer."
        parameters = {prefix + name: value for name, value in parameters.items()}
        return torch.func.functional_call(module, parameters, (x,))

    inputs = (x.requires_grad_(), *(p.detach().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(run, inputs)


class Loop(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer.loop(x, self.layer.start(len(x)))


def test_the_forget_gate_begins_open():
    layer = LSTM(3, 4)
    assert layer.input.bias.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8
    assert [name for name, _ in layer.named_parameters()] == [
        "input.weight",
        "input.bias",
        "hidden.weight",
    ]


def test_snapshots_stand_where_each_row_has_come_to():
    state = Snapshots.first([(torch.zeros(2, 1),)])
    seen = torch.tensor([[0.0, 1, 2, 3], [0, 10, 20, 30]]).unsqueeze(-1)
    state = state.advanced([(seen,)], torch.tensor([3, 1]))
    assert state.lengths.tolist() == [3, 1]
    assert state.now()[0][0].tolist() == [[3], [10]]
    back = state.rewind(torch.tensor([1, 0]))
    assert back.now()[0][0].tolist() == [[1], [0]]
    assert back.select(torch.tensor([1, 0, 0])).now()[0][0].tolist() == [[0], [1], [1]]
    with pytest.raises(ShapeError, match=r"from lengths \[1, 0\] to \[1, -1\]"):
        back.rewind(torch.tensor([1, -1]))
