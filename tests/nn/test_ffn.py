import pytest
import torch
from torch.autograd import gradcheck

import reference
from regard.nn.block import FFNS, GATED_ACTIVATIONS

pytestmark = pytest.mark.usefixtures("float64")

FORMULAS = {
    "relu": (reference.feed_forward, reference.relu),
    "relu2": (reference.feed_forward, reference.relu2),
    "gelu": (reference.feed_forward, reference.gelu),
    "gelu_tanh": (reference.feed_forward, reference.gelu_tanh),
    "silu": (reference.feed_forward, reference.silu),
    "reglu": (reference.gated, reference.relu),
    "geglu_tanh": (reference.gated, reference.gelu_tanh),
    "swiglu": (reference.gated, reference.silu),
    "geglu": (reference.gated, reference.gelu),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", FFNS)
def test_every_feed_forward_computes_its_formula(name, bias):
    ffn = FFNS[name](dim=6, ffn_dim=10, bias=bias)
    formula, activation = FORMULAS[name]
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(ffn(x), formula(ffn, x, activation), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FFNS)
def test_every_feed_forward_has_the_right_gradient(name):
    ffn = FFNS[name](dim=3, ffn_dim=4)
    x = torch.randn(2, 3, requires_grad=True)
    assert gradcheck(lambda x, *_: ffn(x), (x, *ffn.parameters()))


@pytest.mark.parametrize("name", FFNS)
def test_a_feed_forward_drops_out_only_in_training(name):
    ffn = FFNS[name](dim=6, ffn_dim=32, dropout=0.5)
    x = torch.randn(4, 6)
    assert not torch.equal(ffn(x), ffn(x))
    ffn.eval()
    assert torch.equal(ffn(x), ffn(x))


def test_the_list_of_gated_ones_names_those_with_a_gate():
    assert {name for name in FFNS if hasattr(FFNS[name](dim=2, ffn_dim=2), "gate")} == set(
        GATED_ACTIVATIONS
    )
