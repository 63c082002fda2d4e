"""The running mean of the weights."""

import pytest
import torch

from regard.training.optim import EMA


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False)).double()


def change(net, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype))


def test_the_mean_follows_its_recurrence():
    net = model()
    ema = EMA(net, 0.5)
    expected = [param.detach().clone() for param in net.parameters()]
    for step in range(20):
        change(net, step)
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = [
            decay * mean + (1 - decay) * param.detach()
            for mean, param in zip(expected, net.parameters(), strict=True)
        ]
    means = ema.tensors()
    assert list(means) == [name for name, _ in net.named_parameters()]
    for mean, wanted in zip(means.values(), expected, strict=True):
        torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fails", [False, True])
def test_the_weights_come_back_bit_for_bit(fails):
    net = model()
    ema = EMA(net, 0.9)
    change(net, 1)
    ema.update(0)
    own = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(ZeroDivisionError) if fails else ema.average_parameters():
        if fails:
            with ema.average_parameters():
                raise ZeroDivisionError
        for param, mean in zip(net.parameters(), ema.tensors().values(), strict=True):
            assert torch.equal(param, mean)
            assert not torch.equal(param, own[0])
    assert all(map(torch.equal, net.parameters(), own))


def test_without_decay_there_is_no_mean_and_no_cost():
    net = model()
    ema = EMA(net, 0.0)
    change(net, 1)
    ema.update(0)
    own = [param.detach().clone() for param in net.parameters()]
    assert ema.tensors() == {}
    assert ema.averages == []
    with ema.average_parameters():
        assert all(map(torch.equal, net.parameters(), own))
    ema.load({})


def test_a_mean_goes_on_from_what_it_saved():
    net = model()
    ema = EMA(net, 0.9)
    change(net, 1)
    ema.update(0)
    saved = {name: mean.clone() for name, mean in ema.tensors().items()}
    again = EMA(net, 0.9)
    again.load(saved)
    for each in (ema, again):
        each.update(1)
    assert all(map(torch.equal, ema.averages, again.averages))


def test_a_mean_that_was_not_saved_begins_with_the_weights():
    net = model()
    ema = EMA(net, 0.9)
    change(net, 1)
    ema.load({})
    assert all(map(torch.equal, ema.averages, net.parameters()))
