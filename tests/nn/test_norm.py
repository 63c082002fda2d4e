import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

import reference
from regard.nn.block import NORMS, LayerNorm, RMSNorm, RMSNormPlusOne

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_computes_the_formula(bias):
    norm = LayerNorm(8, eps=1e-3, bias=bias)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = 3 * torch.randn(2, 5, 8) + 1
    b = norm.bias.tolist() if bias else None
    expected = reference.each_vector(
        lambda v: reference.layer_norm(v, norm.weight.tolist(), b, 1e-3), x
    )
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)


def test_rms_norm_computes_the_formula():
    norm = RMSNorm(8, eps=1e-3)
    nn.init.normal_(norm.weight)
    x = 3 * torch.randn(2, 5, 8) + 1
    expected = reference.each_vector(lambda v: reference.rms_norm(v, norm.weight.tolist(), 1e-3), x)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)


def test_rms_norm_plus_one_is_rms_norm_with_its_scale_moved():
    norm, plain = RMSNormPlusOne(8), RMSNorm(8)
    assert not norm.weight.any()
    nn.init.normal_(norm.weight)
    plain.weight.data = 1 + norm.weight.data
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(norm(x), plain(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_has_the_right_gradient(name):
    norm = NORMS[name](6)
    x = torch.randn(2, 6, requires_grad=True)
    assert gradcheck(lambda x, *_: norm(x), (x, *norm.parameters()))


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_squares_half_precision_in_float32(name):
    norm = NORMS[name](4).to(torch.float16)
    x = torch.tensor([[300.0, -300.0, 300.0, -300.0]], dtype=torch.float16)  # 300^2 > 65504
    y = norm(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.abs(), torch.ones_like(y), rtol=1e-3, atol=0)
