"""FBGEMM's layers are as exact as weights in float16, and as activations of 15 bits."""

import threading

import pytest
import torch

from regard.accel import fbgemm_linear
from regard.accel.fbgemm_linear import STEPS, Float16Linear, Int8Linear
from regard.accel.packed import PackedLinear

pytestmark = pytest.mark.skipif(
    not fbgemm_linear.has_exact_int8(), reason="torch has no exact FBGEMM here"
)


@pytest.fixture(autouse=True)
def threads(request, monkeypatch):
    """The number of threads that layers are made for: 1, unless the test is parametrized."""
    number = getattr(request, "param", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)
    return number


def make(outputs, inputs):
    torch.manual_seed(0)
    weight, scale = torch.randn(outputs, inputs), torch.rand(outputs) + 0.1
    rounded = (weight / weight.abs().amax(1, keepdim=True) * 127).round().to(torch.int8)
    return Int8Linear.of(rounded, scale), rounded.double() * scale.double().unsqueeze(1)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("outputs", [50, 51])
@pytest.mark.parametrize("inputs", [2, 37, 256, 512, 768])  # 256 and 768 end with half a block
@pytest.mark.parametrize("rows", [1, 3])
def test_an_int8_layer_rounds_remainders_only(rows, inputs, outputs):
    layer, weight = make(outputs, inputs)
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    expected = x.double() @ weight.T + bias.double()
    rounding = x.abs().amax(1, keepdim=True) / STEPS**2 / 2
    limit = 1.01 * rounding * weight.abs().sum(1)  # sums of integers are exact up to 2^24
    out = torch.empty(rows, outputs)
    assert layer(x, bias, out) is out
    for y in (layer(x, bias), out):
        assert ((y - expected).abs() <= limit + 1e-5).all()
    assert torch.equal(layer(x, None), layer(x, torch.zeros(outputs)))
    assert ((layer(x, None) - x.double() @ weight.T).abs() > 0.01 * limit).any()


@pytest.mark.parametrize("inputs", [64, 768])
def test_one_row_is_multiplied_as_among_others(inputs):
    layer, _ = make(51, inputs)
    x = torch.randn(3, inputs)
    torch.testing.assert_close(layer(x[:1], None), layer(x, None)[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_with_one_thread_two_outputs_per_row_avoid_half_a_block(threads):
    for inputs in (512, 640, 768, 1024):
        layer, _ = make(51, inputs)
        if inputs == 768 and threads == 1:
            assert layer.row_weight[0].shape == (26, 2 * 768 + 2)
        else:
            assert layer.row_weight is layer.weight


@pytest.mark.parametrize("value", [0.0, 1e-36, 1e30, -1e30])
def test_very_small_and_very_large_activations(value):
    layer, weight = make(50, 768)
    y = layer(torch.full((1, 768), value), None)
    expected = weight.sum(1) * value
    tolerance = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(y[0].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_activation_that_is_not_finite_makes_its_row_so(value):
    layer, _ = make(50, 768)
    for position in (0, 5, 767):
        x = torch.randn(1, 768)
        x[0, position] = value
        assert not layer(x, None).isfinite().any()


def test_threads_do_not_share_buffers():
    layer, _ = make(50, 768)
    inputs = [torch.randn(1, 768) for _ in range(4)]
    expected, errors = [layer(x, None) for x in inputs], []

    def multiply(x, y):
        for _ in range(300):
            if not torch.equal(layer(x, None), y):
                errors.append(x)

    threads = [
        threading.Thread(target=multiply, args=pair) for pair in zip(inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("rows", [1, 3])
def test_activations_with_gradients_give_the_same_result(rows):
    """A decoder that is called outside of `no_grad` has them."""
    layer, _ = make(50, 768)
    x = torch.randn(rows, 768)
    torch.testing.assert_close(layer(x.clone().requires_grad_(), None), layer(x, None))


def test_a_buffer_that_was_made_in_inference_mode_is_used_outside_of_it():
    weight = torch.randn(50, 4 * 37)
    layer = PackedLinear(weight).quantize_int8()
    x = torch.randn(1, 4 * 37)
    with torch.inference_mode():
        expected = layer(x)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_float16_is_exact_but_for_the_rounding_of_weights_and_sums(rows, bias, threads):
    torch.manual_seed(0)
    weight, x = torch.randn(51, 770).half(), torch.randn(rows, 770)
    b = torch.randn(51) if bias else None
    expected = x.double() @ weight.double().T + (0.0 if b is None else b.double())
    layer = Float16Linear.of(weight, b)
    assert layer.is_plain == (threads == 1 and fbgemm_linear.has_plain_float16())
    y = layer(x)
    # sums of 770 products of a size of 1
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4)
