"""Samplers in request bodies, as the texts that `regard generate -s` takes."""

import pytest

from regard.config import parse_overrides
from regard.errors import ConfigError
from regard.serve.schema import MAX_LIST, Sampling, to_spec


@pytest.mark.parametrize(
    "value", ["plain", "😀 and \x7f", ["a b", '"', "\n"], {"multiplier": 0.5, "on": True, "n": 3}]
)
def test_a_value_is_restored_from_its_text(value):
    assert parse_overrides([to_spec("sampler", value)])["sampler"] == value


@pytest.mark.parametrize("value", [list(range(MAX_LIST + 1)), {"tokens": [1] * (MAX_LIST + 1)}])
def test_a_list_that_is_too_long_is_refused(value):
    with pytest.raises(ConfigError, match="1,025 entries are more than 1,024"):
        Sampling(ban=value).specs()
    with pytest.raises(ConfigError, match="null is not a value"):
        Sampling(ban=["a", None]).specs()
