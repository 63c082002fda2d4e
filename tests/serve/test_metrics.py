"""The metrics of a server, read by the rules of Prometheus' text format."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from regard.serve.engine import BatchEngine, EngineConfig
from regard.serve.metrics import HELP, Metrics
from regard.serve.models import Models
from regard.serve.sequences import Counters


class Engine:
    """An engine that has generated 40 tokens."""

    sequences, waiting, inbox, totals = [1, 2], [], [1], BatchEngine.totals

    def __init__(self, prefix_cache=None):
        self.counters, self.prefix_cache = Counters(requests=3, generation_tokens=40), prefix_cache


def served(prefix_cache=None):
    models = Models([], SimpleNamespace(remove=lambda name: None), EngineConfig())
    models.loaded['a "b"'] = SimpleNamespace(engine=Engine(prefix_cache))
    models.loaded["c"] = SimpleNamespace(engine=None)
    return models


def scrape(models):
    metrics = Metrics()
    metrics.count(200)
    return metrics.text(models, True, 5).splitlines()


def test_every_metric_has_a_help_and_a_type_before_its_values():
    lines, names = scrape(served()), []
    for line in lines:
        name = re.match(r"(# (HELP|TYPE) )?(regard_\w+)", line)[3]
        if line.startswith("# HELP"):
            names.append(name)
        assert name == names[-1]
        if line.startswith("# TYPE"):
            assert line.split()[-1] == ("counter" if name.endswith("_total") else "gauge")
    assert sorted(names) == sorted(f"regard_{name}" for name in HELP)


def test_the_hit_rate_of_the_prefix_cache_is_the_ratio_of_two_counters():
    lines = scrape(served(SimpleNamespace(bytes=512, hits=30, lookups=120)))
    assert r'regard_prefix_hit_tokens_total{model="a \"b\""} 30' in lines
    assert r'regard_prefix_lookup_tokens_total{model="a \"b\""} 120' in lines
    assert r'regard_prefix_bytes{model="a \"b\""} 512' in lines
    assert r'regard_generation_tokens_total{model="a \"b\""} 40' in lines
    assert 'regard_http_responses_total{status="200"} 1' in lines
    assert "regard_open_requests 5" in lines


def test_the_counters_of_a_model_stay_when_it_is_unloaded():
    """A counter that vanished or fell would make Prometheus' rates wrong."""
    models = served(SimpleNamespace(bytes=512, hits=30, lookups=120))
    before = [line for line in scrape(models) if "_total{model" in line]
    models.unload('a "b"')
    after = scrape(models)
    assert [line for line in after if "_total{model" in line] == before
    assert not [line for line in after if line.startswith("regard_running{")]  # a gauge may vanish
    models.loaded['a "b"'] = SimpleNamespace(engine=Engine())
    lines = scrape(models)
    assert r'regard_generation_tokens_total{model="a \"b\""} 80' in lines
    assert r'regard_prefix_hit_tokens_total{model="a \"b\""} 30' in lines
