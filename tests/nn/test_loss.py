import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

import reference
from regard.nn import loss as losses
from regard.nn.loss import linear_cross_entropy, soft_cap

TARGETS = torch.tensor([3, -1, 0, 6, -1, 2, 2])


@pytest.fixture(params=[0, 1, 3, 100], ids=lambda size: f"{size}-a-chunk" if size else "whole")
def _chunks(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(losses, "UNCHUNKED_ELEMENTS", 0)
        monkeypatch.setattr(losses, "CHUNK_ELEMENTS", request.param * 7)


@pytest.fixture
def _chunked(monkeypatch):
    monkeypatch.setattr(losses, "UNCHUNKED_ELEMENTS", 0)


def parts(bias=True, dtype=torch.float64):
    x = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(7, dtype=dtype, requires_grad=True) if bias else None


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_chunked_loss_computes_the_formula(label_smoothing):
    x, weight, bias = parts()
    expected = reference.cross_entropy(F.linear(x, weight, bias), TARGETS, label_smoothing)
    loss = linear_cross_entropy(x, weight, bias, TARGETS, label_smoothing=label_smoothing)
    assert abs(loss.item() - expected) < 1e-12


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [True, False])
def test_the_chunked_loss_and_its_gradients_are_those_of_torch(label_smoothing, biased, cap):
    given = [part for part in parts(biased) if part is not None]
    values, gradients = [], []
    for loss in (
        linear_cross_entropy(
            *given[:2],
            given[2] if biased else None,
            TARGETS,
            label_smoothing=label_smoothing,
            cap=cap,
        ),
        F.cross_entropy(
            soft_cap(F.linear(*given), cap),
            TARGETS,
            ignore_index=-1,
            reduction="sum",
            label_smoothing=label_smoothing,
        ),
    ):
        values.append(loss.detach())
        gradients.append(torch.autograd.grad(3 * loss, given))
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-12)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_chunked_loss_has_the_right_gradient(label_smoothing):
    assert gradcheck(
        lambda *given: linear_cross_entropy(*given, TARGETS, label_smoothing=label_smoothing),
        parts(),
    )


@pytest.mark.usefixtures("_chunked")
@pytest.mark.parametrize("trained", [0, 1, 2], ids=["x", "weight", "bias"])
def test_the_chunked_loss_trains_any_one_part_alone(trained):
    given = parts()
    for number, part in enumerate(given):
        part.requires_grad_(number == trained)
    assert gradcheck(lambda *given: linear_cross_entropy(*given, TARGETS), given)


@pytest.mark.usefixtures("_chunked")
def test_the_chunked_loss_refuses_a_second_derivative_rather_than_give_a_wrong_one():
    x, weight, bias = parts()
    loss = linear_cross_entropy(x, weight, bias, TARGETS).square()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.usefixtures("_chunked")
def test_nothing_scored_is_a_loss_of_zero_with_zero_gradients():
    x, weight, bias = parts()
    loss = linear_cross_entropy(x, weight, bias, torch.full((7,), -1))
    loss.backward()
    assert loss.item() == 0
    assert all((part.grad == 0).all() for part in (x, weight, bias))


@pytest.mark.usefixtures("_chunked")
def test_the_loss_is_summed_in_float32_also_where_the_states_are_not():
    x, weight, bias = parts(dtype=torch.float16)
    loss = linear_cross_entropy(x, weight, bias, TARGETS)
    loss.backward()
    assert loss.dtype == torch.float32
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float16
    logits = F.linear(x, weight).float() + bias.float()
    assert loss.item() == pytest.approx(reference.cross_entropy(logits, TARGETS), rel=1e-5)


@pytest.mark.usefixtures("_chunked")
def test_the_loss_under_autocast_gives_parameters_gradients_of_their_own_type():
    x, weight, bias = parts(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(x, weight, bias, TARGETS)
    loss.backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    expected = F.cross_entropy(F.linear(x, weight, bias), TARGETS, ignore_index=-1, reduction="sum")
    # float16 has eleven bits, and five products are added up
    torch.testing.assert_close(loss, expected, rtol=0.005, atol=0)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_loss_held_whole_is_the_chunked_one(cap, monkeypatch):
    x, weight, bias = parts()
    whole = linear_cross_entropy(x, weight, bias, TARGETS, label_smoothing=0.1, cap=cap)
    monkeypatch.setattr(losses, "UNCHUNKED_ELEMENTS", 0)
    chunked = linear_cross_entropy(x, weight, bias, TARGETS, label_smoothing=0.1, cap=cap)
    torch.testing.assert_close(whole, chunked, rtol=0, atol=1e-12)


def test_a_soft_cap_limits_logits_and_none_does_not():
    x = torch.tensor([-100.0, 0.0, 0.1, 100.0])
    assert soft_cap(x, None) is x
    torch.testing.assert_close(
        soft_cap(x, 5.0), torch.tensor([-5.0, 0.0, 0.1, 5.0]), atol=1e-4, rtol=0
    )
