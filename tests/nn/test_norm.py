import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

import reference
from regard.nn.norm import NORMS, BatchNorm, LayerNorm, LayerNormStd, RMSNorm, RMSNormPlusOne

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "formula"),
    [(LayerNorm, reference.layer_norm), (LayerNormStd, reference.layer_norm_std)],
)
def test_layer_norm_computes_the_formula(kind, formula, bias):
    norm = kind(8, eps=1e-3, bias=bias)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = 3 * torch.randn(2, 5, 8) + 1
    b = norm.bias.tolist() if bias else None
    expected = reference.each_vector(lambda v: formula(v, norm.weight.tolist(), b, 1e-3), x)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)


def test_a_constant_vector_has_a_finite_gradient():
    x = torch.full((1, 8), 2.0, requires_grad=True)
    y = LayerNormStd(8)(x)
    y.sum().backward()
    assert not y.any()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
def test_batch_norm_computes_the_formula_without_padding(bias):
    norm, lengths = BatchNorm(4, eps=1e-3, bias=bias), torch.tensor([5, 2, 3])
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    valid = torch.arange(5) < lengths.unsqueeze(1)
    x = 3 * torch.randn(3, 5, 4) + 1
    y = norm(x, valid=valid)
    rows = x[valid]  # (positions, dim)
    m, v = rows.mean(0), rows.var(0, correction=0)
    b = norm.bias if bias else 0.0
    expected = (rows - m) / (v + 1e-3).sqrt() * norm.weight + b
    torch.testing.assert_close(y[valid], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(norm.running_mean, 0.1 * m, rtol=0, atol=1e-12)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * v, rtol=0, atol=1e-12)
    x[~valid] = 1e6
    torch.testing.assert_close(norm(x, valid=valid)[valid], expected, rtol=0, atol=1e-12)


def test_batch_norm_reads_positions_in_training_and_averages_in_evaluation():
    norm, x = BatchNorm(4), torch.randn(2, 5, 4)
    changed = x.clone()
    changed[0, 4] += 1
    assert not torch.equal(norm(x)[1, 0], norm(changed)[1, 0])  # another row
    norm.eval()
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    assert torch.equal(norm(x)[:, :4], norm(changed)[:, :4])
    expected = (x - mean) / (variance + norm.eps).sqrt()
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)
    assert torch.equal(norm.running_mean, mean)


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


@pytest.mark.parametrize("name", [name for name in NORMS if name != "batch"])  # of one vector
def test_every_norm_squares_half_precision_in_float32(name):
    norm = NORMS[name](4).to(torch.float16)
    x = torch.tensor([[300.0, -300.0, 300.0, -300.0]], dtype=torch.float16)  # 300^2 > 65504
    y = norm(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.abs(), torch.ones_like(y), rtol=1e-3, atol=0)
