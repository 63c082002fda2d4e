"""Forecasting against loops over plain lists, and from the command line to the end."""

import json

import pytest
import torch

from cli.conftest import invoke
from regard.data.batch import SeriesBatch
from regard.errors import DataError
from regard.models.autoregression import Autoregression, AutoregressionConfig
from regard.tasks.forecast import Forecast


@pytest.fixture
def fitted():
    generator = torch.Generator().manual_seed(0)
    series = torch.randn(2, 30, dtype=torch.float64, generator=generator).cumsum(1)
    model = Autoregression(AutoregressionConfig(order=3))
    model.fit([SeriesBatch(series)])
    return model, series


def test_errors_are_those_of_a_loop_that_feeds_back_its_forecasts(fitted):
    model, series = fitted
    found = Forecast(horizon=6).metrics(model, [SeriesBatch(series)])
    weight, bias = model.weight.tolist(), float(model.bias)
    near, far = [], {h: [] for h in range(1, 7)}
    for row in series.tolist():
        for t in range(3, len(row)):
            seen = row[:t]
            for h in range(1, 7):
                said = bias + sum(w * x for w, x in zip(weight, reversed(seen), strict=False))
                if h == 1:
                    near.append(said - row[t])
                if t + 6 <= len(row):
                    far[h].append((said - row[t + h - 1]) ** 2)
                seen = [*seen, said]
    means = {h: sum(each) / len(each) for h, each in far.items()}
    expected = {
        "loss": sum(each**2 for each in near) / len(near),
        "mae": sum(map(abs, near)) / len(near),
        "fed_back": sum(means.values()) / 6,
        **{f"fed_back_{h}": means[h] for h in (1, 2, 4, 6)},
    }
    assert found == pytest.approx(expected, abs=1e-10)
    assert list(found) == list(expected)
    loss = Forecast().loss(model, SeriesBatch(series))
    assert float(loss) == pytest.approx(sum(each**2 for each in near), abs=1e-9)


def test_a_series_too_short_for_evaluation_is_refused(fitted):
    model, series = fitted
    with pytest.raises(DataError, match="has 30 values; reading 3 and forecasting 28 takes"):
        Forecast(horizon=28).metrics(model, [SeriesBatch(series)])


def test_a_table_of_numbers_is_trained_on_evaluated_and_forecast(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # x_t = x_t-1 + 2: a straight line, known for ever from two numbers
    rows = [f"2020-01-{n},{5 - n},{2 * n}" for n in range(1, 101)]
    (tmp_path / "line.csv").write_text("\n".join(["date,down,up", *rows]))
    words = ["task.horizon=4", "model.order=2", "--out", "run", "--json"]
    said = invoke(capsys, "train", "line.csv", *words)
    assert said.code == 0, said.err
    trained = json.loads(said.out)
    assert "column     up, mean" in said.err
    assert trained["fed_back_4"] < 1e-12
    judged = json.loads(invoke(capsys, "evaluate", "run", "--json").out)
    assert judged["loss"] == pytest.approx(trained["loss"])
    said = invoke(capsys, "predict", "run", "--steps", 3, "--json")
    assert json.loads(said.out)["its own"] == pytest.approx([202, 204, 206])
    assert invoke(capsys, "predict", "run", "--steps", 2).out == "1  202\n2  204\n"
    (tmp_path / "other.csv").write_text("up\n7\n9\n")
    said = invoke(capsys, "predict", "run", "other.csv", "--steps", 1, "--json")
    assert json.loads(said.out)["other.csv"] == pytest.approx([11])
    (tmp_path / "short.csv").write_text("up\n7\n")
    said = invoke(capsys, "predict", "run", "short.csv")
    assert said.code == 3
    assert "short has 1 rows, but the model needs at least 2" in said.err
    assert invoke(capsys, "generate", "run", "words").code == 2
    said = invoke(capsys, "train", "line.csv", "model.preset=lstm")
    assert said.code == 2
    assert "needs a model of shape 'series'" in said.err
