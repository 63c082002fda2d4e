import pytest
import torch

from regard.errors import ConfigError, ShapeError
from regard.models.nlinear import NLinear, NLinearConfig


def test_a_series_shorter_than_the_context_is_refused():
    model = NLinear(NLinearConfig(context=8, horizon=2))
    with pytest.raises(ShapeError, match="a series of 5 values is shorter than context=8"):
        model.forecast(torch.zeros(1, 5), 3)
    assert model.forecast(torch.ones(1, 8), 3).tolist() == [[1.0] * 3]


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf")])
def test_the_penalty_is_a_finite_number_from_0(ridge):
    with pytest.raises(ConfigError, match=f"ridge={ridge} must be at least 0 and finite"):
        NLinearConfig(ridge=ridge)
