import pytest
import torch
from torch import nn

from regard.accel import packed
from regard.accel.packed import PackedLinear


def linears(*widths, inputs=64, bias=True):
    torch.manual_seed(0)
    return [nn.Linear(inputs, width, bias=bias) for width in widths]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("widths", [(5, 3, 3), (200,), (64, 64, 64), (4096,), (4000, 200, 13)])
def test_a_packed_layer_gives_what_its_layers_give(widths, rows, bias):
    parts = linears(*widths, bias=bias)
    x = torch.randn(rows, 64)
    assert (PackedLinear.of(*parts).for_cpu().blocks is None) == (sum(widths) < 4096)
    expected = torch.cat([part(x) for part in parts], 1).detach()
    for layer in (PackedLinear.of(*parts), PackedLinear.of(*parts).for_cpu()):
        torch.testing.assert_close(layer(x).detach(), expected)
        out = torch.empty_like(expected)
        layer.write_to(out, x)
        torch.testing.assert_close(out, expected)
        stream = torch.randn(rows, sum(widths))
        torch.testing.assert_close(layer.add_to(stream, x).detach(), stream + expected)
    torch.testing.assert_close(torch.cat([part(x) for part in parts], 1).detach(), expected)


def test_the_weights_are_views_of_the_packed_one():
    parts = linears(5, 3)
    matrix = PackedLinear.of(*parts)
    with torch.no_grad():
        parts[1].weight.fill_(7.0)
    assert (matrix.weight[5:] == 7.0).all()
    assert parts[0].weight.data_ptr() == matrix.weight.data_ptr()


@pytest.mark.parametrize("fbgemm", [True, False])
@pytest.mark.parametrize("inputs", [64, 37])
def test_int8_is_off_by_half_a_step_at_most(inputs, fbgemm, monkeypatch):
    exact = fbgemm and packed.has_exact_int8()
    monkeypatch.setattr(packed, "has_exact_int8", lambda: exact)
    (part,) = linears(50, inputs=inputs)
    with torch.no_grad():
        part.weight[3] = 0.0  # a row without a scale
    whole = PackedLinear.of(part).quantize_int8()
    step = part.weight.abs().amax(1, keepdim=True) / 127
    kept = whole.weight.float() * whole.scale.unsqueeze(1)
    assert whole.weight.dtype == torch.int8
    assert ((kept - part.weight).abs() <= 0.501 * step + 1e-12).all()
    x = torch.randn(2, inputs)
    expected = x @ kept.T + part.bias
    near = {"rtol": 1e-4, "atol": 1e-3} if exact else {"rtol": 0.02, "atol": 0.03}
    torch.testing.assert_close(whole(x).detach(), expected.detach(), **near)
    torch.testing.assert_close(whole.add_to(expected, x).detach(), 2 * expected.detach(), **near)
    zero = whole(torch.zeros(1, inputs))
    torch.testing.assert_close(zero, part.bias.unsqueeze(0), rtol=1e-6, atol=1e-6)
    alone = whole(x[:1]).detach()
    for large in (1e5, torch.inf):  # another row changes nothing
        x[1, 2] = large
        torch.testing.assert_close(whole(x)[:1].detach(), alone, rtol=1e-5, atol=1e-5)
    assert not whole(x)[1].isfinite().any()
    for value in (torch.inf, torch.nan):
        x[1, 2] = value
        assert not whole(x[1:]).isfinite().any()


@pytest.mark.parametrize("fbgemm", [True, False])
def test_float16_rounds_the_weights_only_to_eleven_bits(fbgemm, monkeypatch):
    available = fbgemm and packed.has_fbgemm()
    monkeypatch.setattr(packed, "has_fbgemm", lambda: available)
    (part,) = linears(50, inputs=37)
    whole, x = PackedLinear.of(part).to_float16(), torch.randn(3, 37)
    assert whole.weight.dtype == torch.float16
    expected = part(x).detach()
    torch.testing.assert_close(whole(x).detach(), expected, rtol=1e-3, atol=2e-3)
    assert whole(x).dtype == torch.float32
    assert not torch.equal(whole(x).detach(), expected)
    torch.testing.assert_close(
        whole.add_to(expected, x).detach(), 2 * expected, rtol=1e-3, atol=2e-3
    )


@pytest.mark.parametrize("inputs", [256, 37])
def test_int4_is_off_by_less_than_one_clipped_step(inputs):
    (part,) = linears(50, inputs=inputs)
    with torch.no_grad():
        part.weight[3] = 0.0  # a row without a scale
        part.weight[4, :2] = torch.tensor([-9.0, 9.0])  # 9 is not stored: w is from -8 to 7
    whole = PackedLinear.of(part).quantize_int4()
    assert (whole.bits, whole.inputs % 128, whole.weight.dtype) == (4, 0, torch.int32)
    groups = torch.nn.functional.pad(part.weight, (0, whole.inputs - inputs)).unflatten(
        1, (-1, 128)
    )
    error = (whole.dequantize(torch.float32).view_as(groups) - groups).abs()
    largest = groups.abs().amax(2, keepdim=True)
    assert (error <= 0.31 * largest + 1e-12).all()  # clipped at 0.7
    rounding = (error**2).sum(2) / (largest[..., 0] / 8).square().clamp_min(1e-12)
    assert (rounding <= 128 / 12 + 8).all()  # as if all errors within a step were equally likely
    assert not whole.dequantize(torch.float32)[3].any()
    vector = torch.randn(inputs)
    expected = whole.dequantize(torch.float32)[:, :inputs] @ vector
    torch.testing.assert_close(whole.matvec_float32(vector), expected)
