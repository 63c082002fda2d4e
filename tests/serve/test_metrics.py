"""The metrics of a server, read by the rules of Prometheus' text format."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from regard.serve.metrics import HELP, Metrics
from regard.serve.sequences import Counters


def scrape(prefixes=None):
    counters = Counters(requests=3, tokens=40)
    engine = SimpleNamespace(
        counters=counters, sequences=[1, 2], waiting=[], inbox=[1], prefixes=prefixes
    )
    loaded = {'a "b"': SimpleNamespace(engine=engine), "c": SimpleNamespace(engine=None)}
    metrics = Metrics()
    metrics.count(200)
    return metrics.text(SimpleNamespace(loaded=loaded), True, 5).splitlines()


def test_every_metric_has_a_help_and_a_type_before_its_values():
    lines, names = scrape(), []
    for line in lines:
        name = re.match(r"(# (HELP|TYPE) )?(regard_\w+)", line)[3]
        if line.startswith("# HELP"):
            names.append(name)
        assert name == names[-1]
        if line.startswith("# TYPE"):
            assert line.split()[-1] == ("counter" if name.endswith("_total") else "gauge")
    assert sorted(names) == sorted(f"regard_{name}" for name in HELP)


def test_the_hit_rate_of_the_prefix_cache_is_the_ratio_of_two_counters():
    lines = scrape(SimpleNamespace(bytes=512, hits=30, lookups=120))
    assert r'regard_prefix_hit_tokens_total{model="a \"b\""} 30' in lines
    assert r'regard_prefix_lookup_tokens_total{model="a \"b\""} 120' in lines
    assert r'regard_prefix_bytes{model="a \"b\""} 512' in lines
    assert r'regard_tokens_total{model="a \"b\""} 40' in lines
    assert 'regard_http_responses_total{status="200"} 1' in lines
    assert "regard_open_requests 5" in lines
