import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

import reference
from regard.nn import head
from regard.nn.head import GivenHead, Head, linear_cross_entropy

TARGETS = torch.tensor([3, -1, 0, 6, -1, 2, 2])


@pytest.fixture(params=[1, 3, 100], ids=lambda size: f"{size}-a-chunk")
def _chunks(request, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", request.param * 7)


def parts(bias=True, dtype=torch.float64):
    x = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(7, dtype=dtype, requires_grad=True) if bias else None


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_chunked_loss_computes_the_formula(smoothing):
    x, weight, bias = parts()
    expected = reference.cross_entropy(F.linear(x, weight, bias), TARGETS, smoothing)
    loss = linear_cross_entropy(x, weight, bias, TARGETS, smoothing=smoothing)
    assert abs(loss.item() - expected) < 1e-12


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [True, False])
def test_the_chunked_loss_and_its_gradients_are_those_of_torch(smoothing, biased):
    given = [part for part in parts(biased) if part is not None]
    losses, gradients = [], []
    for loss in (
        linear_cross_entropy(
            *given[:2], given[2] if biased else None, TARGETS, smoothing=smoothing
        ),
        F.cross_entropy(
            F.linear(*given), TARGETS, ignore_index=-1, reduction="sum", label_smoothing=smoothing
        ),
    ):
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(3 * loss, given))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-12)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_chunked_loss_has_the_right_gradient(smoothing):
    assert gradcheck(
        lambda *given: linear_cross_entropy(*given, TARGETS, smoothing=smoothing), parts()
    )


@pytest.mark.parametrize("trained", [0, 1, 2], ids=["x", "weight", "bias"])
def test_the_chunked_loss_trains_any_one_part_alone(trained):
    given = parts()
    for number, part in enumerate(given):
        part.requires_grad_(number == trained)
    assert gradcheck(lambda *given: linear_cross_entropy(*given, TARGETS), given)


def test_the_chunked_loss_refuses_a_second_derivative_rather_than_give_a_wrong_one():
    x, weight, bias = parts()
    loss = linear_cross_entropy(x, weight, bias, TARGETS).square()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


def test_nothing_scored_is_a_loss_of_zero_with_zero_gradients():
    x, weight, bias = parts()
    loss = linear_cross_entropy(x, weight, bias, torch.full((7,), -1))
    loss.backward()
    assert loss.item() == 0
    assert all((part.grad == 0).all() for part in (x, weight, bias))


def test_the_loss_is_summed_in_float32_also_where_the_states_are_not():
    x, weight, bias = parts(dtype=torch.float16)
    loss = linear_cross_entropy(x, weight, bias, TARGETS)
    loss.backward()
    assert loss.dtype == torch.float32
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float16
    expected = reference.cross_entropy(F.linear(x, weight, bias), TARGETS)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_loss_under_autocast_gives_parameters_gradients_of_their_own_type():
    x, weight, bias = parts(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(x, weight, bias, TARGETS)
    loss.backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    expected = F.cross_entropy(F.linear(x, weight, bias), TARGETS, ignore_index=-1, reduction="sum")
    # float16 has eleven bits, and five products are added up
    torch.testing.assert_close(loss, expected, rtol=0.005, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_head_takes_any_leading_axes(smoothing):
    layer = Head(5, 11, bias=True).double()
    torch.nn.init.normal_(layer.bias)
    x, targets = torch.randn(2, 3, 5).double(), torch.randint(0, 11, (2, 3))
    expected = reference.cross_entropy(layer(x).flatten(0, 1), targets.flatten(), smoothing)
    assert layer.loss(x, targets, smoothing=smoothing).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_given_head_scores_the_log_probabilities_it_is_given(smoothing):
    logp = torch.randn(2, 3, 11).double().log_softmax(-1)
    targets = torch.tensor([[1, -1, 10], [0, -1, 4]])
    expected = reference.cross_entropy(logp.flatten(0, 1), targets.flatten(), smoothing)
    layer = GivenHead()
    assert layer(logp) is logp
    assert layer.loss(logp, targets, smoothing=smoothing).item() == pytest.approx(expected)
