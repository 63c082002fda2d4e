"""Recurrent cells against torch's own, against their loop, and against the lecture's equations."""

import math

import pytest
import torch
from torch import nn

from regard.errors import ConfigError, ShapeError
from regard.explain.trace import trace
from regard.nn.recurrent import CELLS, LSTM, Recurrent

# Each cell in each of its forms.
FORMS = {
    "elman": "elman",
    "elman relu": {"kind": "elman", "activation": "relu"},
    "update_gate": "update_gate",
    "gru": "gru",
    "gru write": {"kind": "gru", "update": "write"},
    "gru after": {"kind": "gru", "reset": "after"},
    "gru after write": {"kind": "gru", "reset": "after", "update": "write"},
    "lstm": "lstm",
    "lstm 1997": {"kind": "lstm", "forget_gate": False},
    "lstm without i": {"kind": "lstm", "input_gate": False},
    "lstm without o": {"kind": "lstm", "output_gate": False},
    "lstm without ifo": {
        "kind": "lstm",
        "input_gate": False,
        "forget_gate": False,
        "output_gate": False,
    },
    "mut1": "mut1",
    "mut2": "mut2",
    "mut3": "mut3",
}
THEIRS = {  # as torch has them
    "elman": lambda *sizes, **more: nn.RNN(*sizes, **more),
    "elman relu": lambda *sizes, **more: nn.RNN(*sizes, nonlinearity="relu", **more),
    "gru after": lambda *sizes, **more: nn.GRU(*sizes, **more),
    "lstm": lambda *sizes, **more: nn.LSTM(*sizes, **more),
}
every_form = pytest.mark.parametrize("form", FORMS)
every_torch = pytest.mark.parametrize("form", THEIRS)


def cell(form, dim_in=3, dim_out=4, dtype=torch.float64):
    """One cell whose biases are not zero either."""
    torch.manual_seed(0)
    (made,) = Recurrent(FORMS[form], dim_in, dim_out, 1).to(dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def random_input(batch=2, time=5, dim=3, dtype=torch.float64):
    return torch.randn(batch, time, dim, dtype=dtype, generator=torch.Generator().manual_seed(1))


def exactly(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


# The equations, one number at a time


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def dot(row, vector):
    return sum(a * v for a, v in zip(row, vector, strict=True))


def slow_mutation(kind, layer, x):
    """One row through a mutation of the GRU, from an empty state: h after each x."""
    dim, h, shown = layer.dim, [0.0] * layer.dim, []
    parts = {"mut1": ("r", "z"), "mut2": ("z", "c"), "mut3": ("r", "z", "c")}[kind]
    linear = layer.input if kind == "mut3" else layer.input.linear
    w = dict(zip(parts, (rows.tolist() for rows in linear.weight.split(dim)), strict=True))
    b = dict(zip(parts, (part.tolist() for part in linear.bias.split(dim)), strict=True))
    of_h = ("r", "c") if kind == "mut1" else ("r", "z", "c")
    u = dict(zip(of_h, (rows.tolist() for rows in layer.hidden.weight.split(dim)), strict=True))
    for now in x.tolist():
        from_x = {part: [dot(w[part][n], now) + b[part][n] for n in range(dim)] for part in parts}
        bare = now  # x itself
        if kind != "mut3" and layer.input.skip is not None:
            bare = [dot(row, now) for row in layer.input.skip.weight.tolist()]
        if kind == "mut1":
            from_x["c"] = [math.tanh(bare[n]) + layer.bias[n].item() for n in range(dim)]
        if kind == "mut2":
            from_x["r"] = [bare[n] + layer.bias[n].item() for n in range(dim)]
        r = [sigmoid(from_x["r"][n] + dot(u["r"][n], h)) for n in range(dim)]
        seen = {"mut1": [0.0] * dim, "mut2": h, "mut3": [math.tanh(v) for v in h]}[kind]
        u_z = u.get("z", [[0.0] * dim] * dim)
        z = [sigmoid(from_x["z"][n] + dot(u_z[n], seen)) for n in range(dim)]
        kept = [r[n] * h[n] for n in range(dim)]
        new = [math.tanh(from_x["c"][n] + dot(u["c"][n], kept)) for n in range(dim)]
        h = [z[n] * new[n] + (1 - z[n]) * h[n] for n in range(dim)]
        shown.append(h)
    return torch.tensor(shown, dtype=torch.float64)


def slow(form, layer, x):
    """One row, from an empty state: h after each x."""
    kind, _, rest = form.partition(" ")
    if kind.startswith("mut"):
        return slow_mutation(kind, layer, x)
    without = {"1997": "f"}.get(rest, rest.removeprefix("without "))  # gates of an LSTM
    w, b = layer.input.weight.tolist(), layer.input.bias.tolist()
    u, dim = layer.hidden.weight.tolist(), layer.dim
    d = [0.0] * len(b) if layer.hidden.bias is None else layer.hidden.bias.tolist()
    h, c, shown = [0.0] * dim, [0.0] * dim, []
    for now in x.tolist():
        from_x = [dot(w[n], now) + b[n] for n in range(len(b))]
        from_h = [dot(u[n], h) + d[n] for n in range(len(b))]
        a = [one + two for one, two in zip(from_x, from_h, strict=True)]
        after = []
        r = [sigmoid(a[n]) for n in range(dim)]  # of a GRU
        looked_at = [r[n] * h[n] for n in range(dim)]
        for n in range(dim):
            if kind == "elman":
                after.append(max(a[n], 0.0) if rest == "relu" else math.tanh(a[n]))
            elif kind == "update_gate":
                z = sigmoid(a[n])
                after.append(z * h[n] + (1 - z) * max(a[dim + n], 0.0))
            elif kind == "gru":
                z, m = sigmoid(a[dim + n]), 2 * dim + n
                inner = r[n] * from_h[m] if "after" in rest else dot(u[m], looked_at)
                new = math.tanh(from_x[m] + inner)
                if "write" in rest:
                    after.append((1 - z) * h[n] + z * new)
                else:
                    after.append(z * h[n] + (1 - z) * new)
            else:
                parts = iter(range(n, len(a), dim))
                i = 1.0 if "i" in without else sigmoid(a[next(parts)])
                f = 1.0 if "f" in without else sigmoid(a[next(parts)])
                g = math.tanh(a[next(parts)])
                o = 1.0 if "o" in without else sigmoid(a[next(parts)])
                c[n] = f * c[n] + i * g
                after.append(o * math.tanh(c[n]))
        h = after
        shown.append(h)
    return torch.tensor(shown, dtype=torch.float64)


def test_every_cell_is_tried():
    assert {form.split()[0] for form in FORMS} == set(CELLS)


@every_form
def test_what_runs_and_the_loop_equal_the_equation(form):
    layer, x = cell(form), random_input()
    expected = torch.stack([slow(form, layer, row) for row in x])
    y, _ = layer(x)
    exactly(y, expected)
    exactly(layer.loop(x, layer.start(len(x)))[0], expected)


@pytest.mark.parametrize(
    ("form", "fused"),
    [(form, form in THEIRS or form.startswith(("gru after", "lstm"))) for form in FORMS],
)
def test_the_fused_kernel_runs_where_torch_has_one(form, fused, monkeypatch):
    layer, x = cell(form), random_input()
    called = []
    monkeypatch.setattr(layer, "loop", lambda *given: called.append(given) or (x, x))
    layer(x)
    assert bool(called) != fused


def copy_weights(ours, theirs):
    """Our cells with the weights of torch's layers."""
    cells = [part for part in ours.modules() if hasattr(part, "step")]
    ends = [
        f"_l{n}{way}"
        for n in range(theirs.num_layers)
        for way in (("", "_reverse") if theirs.bidirectional else ("",))
    ]
    with torch.no_grad():
        for layer, end in zip(cells, ends, strict=True):
            layer.input.weight.copy_(getattr(theirs, f"weight_ih{end}"))
            layer.hidden.weight.copy_(getattr(theirs, f"weight_hh{end}"))
            first, second = (getattr(theirs, f"bias_{side}{end}") for side in ("ih", "hh"))
            if layer.hidden.bias is None:
                layer.input.bias.copy_(first + second)
            else:
                layer.input.bias.copy_(first)
                layer.hidden.bias.copy_(second)
    return ours


def pair(form, layers=1, bidirectional=False):
    torch.manual_seed(0)
    theirs = THEIRS[form](8, 16, layers, batch_first=True, bidirectional=bidirectional)
    return copy_weights(
        Recurrent(FORMS[form], 8, 16, layers, bidirectional=bidirectional), theirs
    ), theirs


def last_of(theirs, state, bidirectional):
    """Torch's last states as ours: of each layer h (and c), both ways side by side."""
    parts = state if isinstance(state, tuple) else (state,)
    ways = 1 + bidirectional
    return [
        tuple(torch.cat(list(part[n : n + ways]), -1) for part in parts)
        for n in range(0, ways * theirs.num_layers, ways)
    ]


@every_torch
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_stacks_equal_torch_with_the_same_weights(form, bidirectional, padded):
    ours, theirs = pair(form, layers=2, bidirectional=bidirectional)
    x = random_input(3, 11, 8, torch.float32).requires_grad_()
    lengths = torch.tensor([4, 11, 1]) if padded else None
    y, last = ours(x, lengths)
    if padded:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        packed, state = theirs(packed)
        expected, _ = nn.utils.rnn.pad_packed_sequence(packed, True, total_length=11)
    else:
        expected, state = theirs(x)
    close(y, expected)
    for mine, other in zip(last, last_of(theirs, state, bidirectional), strict=True):
        for one, two in zip(mine, other, strict=True):
            close(one, two)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


@every_torch
def test_the_loop_equals_torch_with_the_same_weights(form):
    (layer,), theirs = pair(form)
    x = random_input(3, 11, 8, torch.float32)
    expected, state = theirs(x)
    states = layer.loop(x, layer.start(3))
    close(states[0], expected)
    for one, two in zip(states, last_of(theirs, state, False)[0], strict=True):
        close(one[:, -1], two)


@every_form
@pytest.mark.parametrize("bidirectional", [False, True])
def test_padded_rows_equal_rows_alone(form, bidirectional):
    torch.manual_seed(0)
    layers = Recurrent(FORMS[form], 3, 4, 2, bidirectional=bidirectional).double()
    x, lengths = random_input(3, 6), [2, 6, 1]
    y, last = layers(x, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        alone, end = layers(x[row : row + 1, :length])
        exactly(y[row : row + 1, :length], alone)
        assert not y[row, length:].any()
        for one, two in zip(last, end, strict=True):
            for mine, other in zip(one, two, strict=True):
                exactly(mine[row : row + 1], other)


@every_form
def test_a_cell_goes_on_from_any_of_its_states(form):
    layer, x = cell(form), random_input()
    y, end = layer(x)
    states = layer.loop(x, layer.start(len(x)))
    rest, last = layer(x[:, 2:], state=tuple(each[:, 1] for each in states))
    exactly(rest, y[:, 2:])
    for one, two in zip(last, end, strict=True):
        exactly(one, two)


@every_form
def test_padded_rows_go_on_from_states_of_their_own(form):
    layer, x, lengths = cell(form), random_input(3, 6), [2, 6, 1]
    _, before = layer(random_input(3, 4))
    y, _ = layer(x, torch.tensor(lengths), before)
    for row, length in enumerate(lengths):
        alone = tuple(each[row : row + 1] for each in before)
        exactly(y[row : row + 1, :length], layer(x[row : row + 1, :length], state=alone)[0])


@every_form
@pytest.mark.parametrize("path", ["what runs", "loop"])
def test_gradients_are_those_of_finite_differences(form, path):
    layer, x = cell(form, dim_in=2, dim_out=2), random_input(time=3, dim=2)
    names = [name for name, _ in layer.named_parameters()]
    module = layer if path == "what runs" else Loop(layer)
    prefix = "" if path == "what runs" else "layer."

    def run(x, *values):
        parameters = {prefix + n: value for n, value in zip(names, values, strict=True)}
        y, last = torch.func.functional_call(module, parameters, (x,))
        return (y, *last)

    inputs = (x.requires_grad_(), *(p.detach().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(run, inputs)


class Loop(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        states = self.layer.loop(x, self.layer.start(len(x)))
        return states[0], tuple(each[:, -1] for each in states)


@every_form
def test_gates_are_heard_and_listening_changes_nothing(form):
    layers, x = Recurrent(FORMS[form], 3, 4, 2).double(), random_input()
    expected, _ = layers(x)
    with trace(layers) as seen:
        y, _ = layers(x)
    exactly(y, expected)
    names = {"state", *layers[0].hook_names}
    assert set(seen) == {f"{n}.{name}_hook" for n in range(2) for name in names}
    assert all(each.shape == (2, 5, 4) for each in seen.values())
    assert torch.equal(seen["1.state_hook"], y)


def test_the_gates_that_are_heard_are_those_of_the_equation():
    layer, x = cell("lstm"), random_input()
    with trace(layer) as seen:
        y, (_, c) = layer(x)
    i, f, g = (seen[f"{name}_hook"] for name in ("input_gate", "forget_gate", "candidate"))
    cells = seen["cell_hook"]
    exactly(cells[:, 1:], f[:, 1:] * cells[:, :-1] + i[:, 1:] * g[:, 1:])
    exactly(y, seen["output_gate_hook"] * cells.tanh())
    exactly(c, cells[:, -1])
    layer = cell("gru")
    with trace(layer) as seen:
        y, _ = layer(x)
    z = seen["update_gate_hook"]
    exactly(y[:, 1:], z[:, 1:] * y[:, :-1] + (1 - z[:, 1:]) * seen["candidate_hook"][:, 1:])
    exactly(seen["reset_gate_hook"][:, :1], layer.input(x)[:, :1, :4].sigmoid())  # h was zero


@pytest.mark.parametrize("form", ["mut1", "mut2"])
def test_a_mutation_reads_x_itself_where_it_is_as_wide_as_h(form):
    layer, x = cell(form, dim_in=4), random_input(dim=4)
    assert layer.input.skip is None
    exactly(layer(x)[0], torch.stack([slow(form, layer, row) for row in x]))
    for given in (layer, cell(form, dim_in=3)):  # seq2seq models use weight and bias
        x = random_input(dim=given.input.in_features)
        exactly(given.input(x), nn.functional.linear(x, given.input.weight, given.input.bias))


def test_the_forget_gate_begins_open():
    layer = LSTM(3, 4)
    assert layer.input.bias.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8
    assert LSTM(3, 1, input_gate=False, forget_bias=2.0).input.bias.tolist() == [2.0, 0.0, 0.0]
    assert [name for name, _ in layer.named_parameters()] == [
        "input.weight",
        "input.bias",
        "hidden.weight",
    ]


def test_a_cell_that_never_forgets_keeps_a_sum():
    layer, x = cell("lstm 1997"), random_input()
    with trace(layer) as seen:
        layer(x)
    written = seen["input_gate_hook"] * seen["candidate_hook"]
    exactly(seen["cell_hook"], written.cumsum(1))


def test_dropout_is_between_layers_and_at_the_top_and_in_training_only():
    torch.manual_seed(0)
    layers, x = Recurrent("gru", 3, 64, 2, dropout=0.5), random_input(dtype=torch.float32)
    layers.train()
    y, last = layers(x)
    assert 0.3 < (y == 0).float().mean() < 0.7
    assert not (last[1][0] == 0).any()  # what goes on in time is whole
    layers.eval()
    assert torch.equal(layers(x)[0], layers(x)[0])
    assert not (layers(x)[0] == 0).any()


def test_what_does_not_fit_is_named():
    with pytest.raises(ConfigError, match="cell 'gruu'"):
        Recurrent("gruu", 3, 4, 1)
    with pytest.raises(ConfigError, match="'befor'"):
        Recurrent({"kind": "gru", "reset": "befor"}, 3, 4, 1)
    for wrong in ([0, 5], [5, 6]):
        with pytest.raises(ShapeError, match=r"lengths \[\d, \d\] must be at least 1 and at most"):
            Recurrent("lstm", 3, 4, 1).double()(random_input(), torch.tensor(wrong))
