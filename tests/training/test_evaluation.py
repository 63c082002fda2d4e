"""Evaluations of a run: their cost, their number, and the number at the end."""

import pytest
import torch

from regard.config import TrainConfig
from regard.models.build import build_model
from regard.pipelines import prepare_training, validation_metrics
from regard.training.evaluation import time_evaluation

from .runs import config, write_data

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def prepared(data):
    return prepare_training(config(data / "cats.txt"))


def test_an_evaluation_reports_the_targets_that_are_done(prepared):
    model, calls = build_model(prepared.model), []
    validation_metrics(prepared, model, CPU, 200, lambda *numbers: calls.append(numbers))
    assert calls[-1] == (200, 200)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    calls.clear()
    validation_metrics(prepared, model, CPU, None, lambda *numbers: calls.append(numbers))
    assert calls[-1] == (prepared.validation_targets,) * 2 == (prepared.validation_size - 1,) * 2


def test_the_time_of_an_evaluation_is_known_beforehand(prepared, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("regard.training.evaluation.TIMED_SECONDS", 10.0)
    monkeypatch.setattr("regard.training.evaluation.time.perf_counter", lambda: float(next(clock)))
    model = build_model(prepared.model)
    timed = time_evaluation(prepared, model, CPU, TrainConfig())
    assert model.training
    assert timed.targets == prepared.validation_targets
    # no evaluation takes 10 seconds of this clock, so the last one is that of all targets
    assert timed.seconds() == pytest.approx(1.0)
    assert timed.seconds(timed.targets // 2) == pytest.approx(0.5, rel=0.01)
    assert timed.seconds(10 * timed.targets) == timed.seconds()
    assert timed.sample_seconds == 1.0
