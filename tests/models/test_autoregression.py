"""Auto-regression against numpy's least squares and against series that obey it exactly."""

import math

import numpy as np
import pytest
import torch

from regard.data.batch import SeriesBatch
from regard.errors import ConfigError, DataError, ShapeError
from regard.models.autoregression import Autoregression, AutoregressionConfig


def noise(rows=3, time=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, time, dtype=torch.float64, generator=generator).cumsum(1)


def fit_autoregression(order, *batches):
    model = Autoregression(AutoregressionConfig(order=order))
    model.fit(map(SeriesBatch, batches))
    return model


@pytest.mark.parametrize("order", [1, 2, 5])
def test_the_weights_are_those_of_numpys_least_squares(order):
    first, second = noise(), noise(2, 17, seed=1)
    model = fit_autoregression(order, first, second)
    rows = [
        [1.0, *(row[t - i] for i in range(1, order + 1)), row[t]]
        for batch in (first, second)
        for row in batch.tolist()
        for t in range(order, len(row))
    ]
    rows = np.array(rows)
    expected, *_ = np.linalg.lstsq(rows[:, :-1], rows[:, -1])
    actual = torch.cat([model.bias.unsqueeze(0), model.weight])
    # least squares twice, by two factorizations
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-10)


def test_a_series_that_obeys_two_weights_is_foretold_without_end():
    # cos(wt) = 2 cos(w) cos(w(t-1)) - cos(w(t-2))
    wave = torch.cos(0.3 * torch.arange(300, dtype=torch.float64)).unsqueeze(0)
    model = fit_autoregression(2, wave[:, :50])
    expected = torch.tensor([2 * math.cos(0.3), -1], dtype=torch.float64)
    torch.testing.assert_close(model.weight, expected, rtol=0, atol=1e-10)
    # 250 predictions, each made from the last: errors of 1e-13 add up
    torch.testing.assert_close(model.forecast(wave[:, :50], 250), wave[:, 50:], rtol=0, atol=1e-8)


def test_one_step_ahead_is_the_formula_at_every_place():
    series = noise()
    model = fit_autoregression(3, series)
    predicted = model(series)
    assert predicted.shape == (3, 38)
    for row in range(3):
        for place in range(38):
            expected = model.bias.item()
            for i, weight in enumerate(model.weight.tolist()):
                expected += weight * series[row, place + 2 - i].item()
            assert predicted[row, place].item() == pytest.approx(expected, abs=1e-12)


def test_a_recursive_forecast_reads_its_own_predictions():
    series = noise()
    model = fit_autoregression(3, series)
    one = model.forecast(series, 1)
    torch.testing.assert_close(one, model(series)[:, -1:])
    two = model.forecast(torch.cat([series, one], 1), 1)
    torch.testing.assert_close(model.forecast(series, 2), torch.cat([one, two], 1))


def test_a_constant_series_stays_what_it_is():
    series = torch.full((1, 12), 3.0)
    forecast = fit_autoregression(4, series).forecast(series, 5)
    torch.testing.assert_close(forecast, torch.full_like(forecast, 3.0))


def test_what_is_too_short_is_said():
    with pytest.raises(ConfigError, match="order=0 must be at least 1"):
        AutoregressionConfig(order=0)
    with pytest.raises(DataError, match="order=3 needs series of at least 4 values"):
        fit_autoregression(3)
    with pytest.raises(DataError, match="order=3 needs series of at least 4 values"):
        fit_autoregression(3, noise(2, 3))
    with pytest.raises(ShapeError, match="a series of 2 values is shorter than order=3"):
        fit_autoregression(3, noise())(noise(1, 2))
