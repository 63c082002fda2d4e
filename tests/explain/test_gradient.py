"""How strongly a loss pulls at earlier states: against torch's cells and the lecture's formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.errors import RegardError
from regard.explain import gradient_flow, trace
from regard.explain.gradient import GradientFlow
from regard.models.build import build_model, resolve
from regard.nn.recurrent import LSTM, Elman, Recurrent

VOCAB, TIME = 11, 7
MODELS = {
    "elman": {"family": "recurrent", "cell": "elman", "layers": 2},
    "gated": {"family": "recurrent", "cell": "update_gate", "layers": 2},
    "gru": {"family": "recurrent", "cell": {"kind": "gru", "reset": "after"}, "layers": 2},
    "lstm": {"family": "recurrent", "cell": "lstm", "layers": 2},
    "convolution": {"family": "convolution", "layers": 2},
    "bengio": {"family": "feedforward", "order": 4},
    "transformer": {"heads": 2, "layers": 2},
    "albert": {"heads": 2, "layers": 3, "shared_layers": True},
}


def language(name):
    torch.manual_seed(1)
    return build_model(resolve({**MODELS[name], "vocab_size": VOCAB, "dim": 8})).double().eval()


def reading(seed=2):
    return torch.randint(VOCAB, (2, TIME), generator=torch.Generator().manual_seed(seed))


def last_loss(model, ids):
    """The loss of the last token that is read off the last position."""
    return lambda: F.cross_entropy(model.head(model(ids))[:, -1], torch.tensor([3, 4]))


def by_hand(cell, x, state):
    """Step through one of torch's cells; the norm of the gradient of the sum at each state."""
    states = []
    for each in x.unbind(1):
        state = cell(each, state)
        state = tuple(part.clone() for part in (state if isinstance(state, tuple) else (state,)))
        states.append(state)
        state = state if len(state) > 1 else state[0]
    parts = [part for state in states for part in state]
    found = torch.autograd.grad(states[-1][0].sum(), parts, materialize_grads=True)
    return torch.cat(found, -1).unflatten(-1, (len(x[0]), -1)).norm(dim=-1)


@pytest.mark.parametrize(
    ("layer", "cell"), [(Elman, nn.RNNCell), (LSTM, nn.LSTMCell)], ids=["elman", "lstm"]
)
def test_the_flow_through_a_cell_is_that_through_the_cell_of_torch(layer, cell):
    torch.manual_seed(3)
    own, theirs = layer(5, 4).double(), cell(5, 4).double()
    with torch.no_grad():
        theirs.weight_ih.copy_(own.input.weight)
        theirs.weight_hh.copy_(own.hidden.weight)
        theirs.bias_ih.copy_(own.input.bias)
        theirs.bias_hh.zero_()
    x = torch.randn(2, TIME, 5, dtype=torch.float64)
    flow = gradient_flow(nn.ModuleDict({"cell": own}), lambda: own(x)[0][:, -1].sum())
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    expected = by_hand(theirs, x, (zeros, zeros) if cell is nn.LSTMCell else zeros)
    assert list(flow) == ["cell"]
    assert torch.allclose(flow["cell"], expected, rtol=0, atol=1e-12)


def test_the_flow_is_the_lectures_formula():
    torch.manual_seed(4)
    layers = Recurrent("elman", 5, 4, 1).double()
    cell, x = layers[0], torch.randn(1, TIME, 5, dtype=torch.float64)
    flow = gradient_flow(layers, lambda: layers(x)[0][0, -1].sum())["0"][0]
    u, (states,) = cell.hidden.weight.detach(), cell.loop(x, cell.start(1))
    delta = torch.ones(4, dtype=torch.float64)  # of a sum
    for t in range(TIME - 1, -1, -1):
        assert float(flow[t]) == pytest.approx(float(delta.norm()), abs=1e-12)
        h = states[0, t].detach()
        delta = u.T @ (delta * (1 - h**2))  # tanh' at the step from h_{t-1} to h_t


@pytest.mark.parametrize(("size", "grows"), [(0.5, False), (2.0, True)])
def test_a_small_matrix_lets_gradients_vanish_and_a_large_one_explode(size, grows):
    cell = Elman(1, 3, activation="relu")
    with torch.no_grad():
        cell.hidden.weight.copy_(size * torch.eye(3))
        cell.input.weight.fill_(1.0)
    x = torch.ones(1, 11, 1)
    (flow,) = gradient_flow(cell, lambda: cell(x)[0][:, -1].sum()).values()
    assert float(flow[0, 0] / flow[0, -1]) == pytest.approx(size**10)
    assert bool((flow[0, 0] > flow[0, -1]) == grows)


def test_an_open_forget_gate_keeps_the_gradient_at_any_distance():
    cell = LSTM(1, 3)
    with torch.no_grad():
        cell.hidden.weight.zero_()
        cell.input.bias[3:6] = 100.0
    x = torch.ones(1, 200, 1)
    (flow,) = gradient_flow(cell, lambda: cell(x)[0][:, -1].sum()).values()
    assert float(flow[0, 0]) > 0
    assert torch.allclose(flow[0, :-1], flow[0, :1])


def test_the_flow_into_a_block_is_that_out_of_the_one_below():
    model, ids = language("transformer"), reading()
    flow = gradient_flow(model, last_loss(model, ids))
    assert list(flow) == ["decoder.blocks.0", "decoder.blocks.1"]
    with trace(model, "decoder.blocks.0.out_hook") as activations:
        loss = last_loss(model, ids)()
    (gradient,) = torch.autograd.grad(loss, list(activations.values()))
    assert torch.allclose(flow["decoder.blocks.1"], gradient.norm(dim=-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_gradient_flow(name):
    model, ids = language(name), reading()
    before = model(ids)
    flow = gradient_flow(model, last_loss(model, ids))
    sight = {"convolution": 4, "bengio": 3}.get(name, TIME)
    first = next(iter(flow.values()))
    assert first.shape == (2, TIME)
    assert ((first > 0).sum(1) == sight).all()
    assert (first[:, TIME - sight :] > 0).all()
    assert torch.equal(model(ids), before)
    assert all(not module._forward_hooks for module in model.modules())


def test_a_layer_that_is_used_again_is_shown_each_time():
    model = language("albert")
    flow = gradient_flow(model, last_loss(model, reading()))
    path = "decoder.blocks.0"
    assert list(flow) == [path, f"{path}'", f"{path}''"]
    assert not torch.equal(flow[path], flow[f"{path}'"])


def test_frozen_weights_do_not_matter():
    model, ids = language("lstm"), reading()
    expected = gradient_flow(model, last_loss(model, ids))
    flow = gradient_flow(model.requires_grad_(False), last_loss(model, ids))
    assert all(torch.allclose(flow[name], expected[name], rtol=1e-12) for name in expected)


def test_the_cell_that_reads_from_the_end_is_shown_in_the_order_of_the_text():
    layers = Recurrent("elman", 3, 4, 1, bidirectional=True).double()
    x = torch.randn(1, 5, 3, dtype=torch.float64)
    flow = gradient_flow(layers, lambda: layers(x)[0][:, 2].sum())  # of the position in the middle
    assert (flow["0.forward_layer"][0] > 0).tolist() == [True, True, True, False, False]
    assert (flow["0.backward_layer"][0] > 0).tolist() == [False, False, True, True, True]


def test_a_model_that_reads_no_earlier_position_is_refused():
    with pytest.raises(RegardError, match="no layer that reads earlier positions matches"):
        gradient_flow(nn.Linear(2, 2), lambda: torch.zeros(()))
    model = language("elman")
    with pytest.raises(RegardError, match="`loss` must call this model"):
        gradient_flow(model, lambda: torch.zeros(()))


def test_gradient_norms_have_a_short_display_a_table_and_a_picture(tmp_path):
    flow = GradientFlow(["<a>", "b"], {"layers.0": torch.tensor([0.5, 0.25])})
    assert repr(flow) == "GradientFlow(2 tokens, 1 layers)"
    assert "<td>&lt;a&gt;</td><td>0.5</td>" in flow._repr_html_()
    assert list(flow.to_pandas()["layers.0"]) == [0.5, 0.25]
    flow.save(tmp_path / "norms.svg")
    assert "layers.0" in (tmp_path / "norms.svg").read_text()


@pytest.mark.parametrize("norms", [[0.0, 0.0], [torch.inf, 1.0], [torch.inf, 0.0]])
def test_norms_that_vanish_or_explode_have_a_figure(norms):
    flow = GradientFlow(["a", "b"], {"layers.0": torch.tensor(norms)})
    (axes,) = flow.figure().axes
    finite = sum(0 < norm < torch.inf for norm in norms)
    assert max(len(line.get_xdata()) for line in axes.lines) == finite
