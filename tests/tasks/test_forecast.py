"""Forecasting against loops over plain lists, and from the command line to the end."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import regard
from cli.conftest import invoke
from regard.api.training import summarize
from regard.cli.report import compare_with_baselines
from regard.config import RunConfig, build
from regard.data.batch import SeriesBatch, WindowBatch
from regard.data.series import from_columns
from regard.errors import ConfigError, DataError
from regard.models.autoregression import Autoregression, AutoregressionConfig
from regard.models.build import build_model, resolve
from regard.models.nlinear import NLinear, NLinearConfig
from regard.pipelines.prepare import prepare_training
from regard.pipelines.series import _evaluation_stride
from regard.pipelines.series_baselines import evaluate_baselines, find_seasonal_period
from regard.pipelines.series_forecasts import backtest, recursive_errors
from regard.tasks.forecast import Forecast

NETWORKS = {
    "elman": {"preset": "elman", "dim": 6, "layers": 1},
    "lstm": {"preset": "lstm", "dim": 6, "layers": 1},
    "gru": {"preset": "gru", "dim": 6, "layers": 1},
    "convolution": {"preset": "convolution", "dim": 6, "layers": 2},
    "encoder": {"preset": "tiny-encoder", "dim": 8, "layers": 1, "heads": 2},
    "decoder": {"preset": "tiny-decoder", "dim": 8, "layers": 1, "heads": 2},
}


def walk(rows=2, time=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, time, dtype=torch.float64, generator=generator).cumsum(1)


def task_of(**fields):
    names = [f"c{n}" for n in range(fields.pop("columns", 2))]
    return Forecast(**{"column": names, "context": 8, "horizon": 3, **fields})


def network(name, task):
    model = build_model(resolve(NETWORKS[name], context=task.positions, **task.model_settings()))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    return model


def test_errors_are_those_of_a_loop_that_feeds_back_its_forecasts():
    series = walk()
    model = Autoregression(AutoregressionConfig(order=3))
    model.fit([SeriesBatch(series)])
    windows = series.unfold(1, 9, 1).flatten(0, 1).unsqueeze(2)
    batch = WindowBatch(windows[:, :3], windows[:, 3:])
    found = Forecast(column="x", horizon=6).metrics(model, [batch])
    weight, bias = model.weight.tolist(), float(model.bias)
    errors = {h: [] for h in range(1, 7)}
    for row in series.tolist():
        for t in range(3, len(row) - 5):
            seen = row[:t]
            for h in range(1, 7):
                said = bias + sum(w * x for w, x in zip(weight, reversed(seen), strict=False))
                errors[h].append(said - row[t + h - 1])
                seen = [*seen, said]
    means = {h: sum(e**2 for e in each) / len(each) for h, each in errors.items()}
    every = [e for each in errors.values() for e in each]
    expected = {
        "loss": sum(means.values()) / 6,
        "mse": sum(means.values()) / 6,
        "mae": sum(map(abs, every)) / len(every),
        **{f"mse_{h}": means[h] for h in (1, 2, 4, 6)},
    }
    assert found == pytest.approx(expected, abs=1e-10)
    assert list(found) == list(expected)
    by_step = Forecast(column="x", horizon=6).mse_by_step(model, [batch])
    assert by_step == pytest.approx([means[h] for h in range(1, 7)], abs=1e-10)


def test_the_linear_layer_is_the_ridge_solution_of_numpy():
    series = walk(2, 40)
    model = NLinear(NLinearConfig(context=4, horizon=3, ridge=0.5))
    model.fit([SeriesBatch(series)])
    rows = np.concatenate([np.lib.stride_tricks.sliding_window_view(s, 7) for s in series.numpy()])
    rows = rows - rows[:, 3:4]
    inputs = np.c_[rows[:, :4], np.ones(len(rows))]
    penalty = np.diag([0.5] * 4 + [0])
    expected = np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ rows[:, 4:])
    np.testing.assert_allclose(model.weight.numpy(), expected[:-1].T, atol=1e-10)
    np.testing.assert_allclose(model.bias.numpy(), expected[-1], atol=1e-10)
    once = model(series[:, :9])
    twice = model(torch.cat([series[:, :9], once], 1))
    torch.testing.assert_close(model.forecast(series[:, :9], 5), torch.cat([once, twice], 1)[:, :5])
    with pytest.raises(DataError, match="needs a training series of at least 7 values"):
        model.fit([SeriesBatch(series[:, :6])])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalize": "window", "channel_independent": True, "patch_length": 3, "patch_stride": 2},
    ],
    ids=["columns together", "patches of each column"],
)
def test_networks_forecast_and_every_weight_learns(name, fields):
    torch.manual_seed(0)
    task = task_of(**fields)
    model = network(name, task)
    series = torch.randn(4, 8, 2) * 3 + 10
    batch = WindowBatch(series, torch.randn(4, 3, 2))
    loss = task.loss(model, batch)
    forecast = task.forecast_once(model, series)
    assert forecast.shape == (4, 3, 2)
    torch.testing.assert_close(loss, (forecast - batch.targets).square().sum())
    loss.backward()
    for weight, parameter in model.named_parameters():
        assert parameter.grad is not None, weight
        assert parameter.grad.any() or weight.endswith("key.bias"), weight
    # what the window is shifted by, the forecast is shifted by
    torch.testing.assert_close(
        task.forecast_once(model, series + 5.0), forecast + 5, rtol=1e-4, atol=1e-3
    )
    if task.channel_independent:  # a column does not depend on the other
        other = series.clone()
        other[..., 1] += torch.randn(4, 8)
        torch.testing.assert_close(task.forecast_once(model, other)[..., 0], forecast[..., 0])
    longer = task.rollout(model, series, 7)
    again = torch.cat([series, forecast], 1)[:, -8:]
    torch.testing.assert_close(longer[:, :3], forecast)
    torch.testing.assert_close(longer[:, 3:6], task.forecast_once(model, again))


@pytest.mark.parametrize("name", ["gru", "convolution", "decoder"])
def test_a_recursive_network_learns_the_next_row_at_every_position(name):
    torch.manual_seed(0)
    task = task_of(direct=False)
    model = network(name, task)
    series, targets = torch.randn(4, 8, 2), torch.randn(4, 3, 2)
    rows = torch.cat([series, targets[:, :1]], 1)
    expected = 0.0
    for t in range(8):  # causal: the prediction from the rows so far
        predicted = model.head(model(series[:, : t + 1]))[:, 0]
        expected += (predicted - rows[:, t + 1]).square().sum().item()
    batch = WindowBatch(series, targets)
    assert task.loss(model, batch).item() == pytest.approx(expected, rel=1e-4)
    assert int(task.count(batch)) == 4 * 8 * 2
    metrics = task.metrics(model, [batch])
    assert metrics["loss"] == pytest.approx(expected / 64, rel=1e-4)
    assert metrics["mse_1"] != pytest.approx(metrics["mse_3"])


def test_a_recursive_network_is_trained_on_the_rows_that_it_forecasts_from():
    torch.manual_seed(0)
    task = task_of(direct=False, patch_stride=2)
    model = network("gru", task)
    series, targets = torch.randn(4, 8, 2), torch.randn(4, 3, 2)
    predicted = model.head(model(series[:, 1::2]))[:, 0]  # every second row, up to the last
    expected = (predicted - targets[:, 0]).square().sum().item()
    batch = WindowBatch(series, targets)
    assert torch.equal(task.forecast_once(model, series)[:, 0], predicted)
    assert task.loss(model, batch).item() == pytest.approx(expected, rel=1e-4)
    assert int(task.count(batch)) == 4 * 2


def test_settings_that_do_not_fit_are_refused():
    for fields, told in [
        ({"column": None, "covariates": ["c1"]}, "also set task.column"),
        (
            {"column": "c0", "covariates": ["c1"], "direct": False},
            "recursive forecast cannot read them",
        ),
        (
            {"column": "c0", "covariates": ["c1"], "channel_independent": True},
            "reads each column alone",
        ),
        ({"horizon": 0}, "task.horizon=0 must be at least 1"),
        ({"patch_length": 9}, "task.patch_length=9 must be at most task.context=8"),
    ]:
        with pytest.raises(ConfigError, match=told):
            task_of(**fields)
    for model, fields, told in [
        ({"preset": "bengio"}, {}, "needs a model that reads vectors"),
        ({"preset": "ngram"}, {}, "needs a model that reads vectors"),
        ({"preset": "tiny-encoder"}, {"direct": False}, "an encoder also reads the rows after"),
        ({"family": "linear"}, {"normalize": "window"}, "task.normalize is for networks"),
        (
            {"family": "linear"},
            {"column": "c0", "covariates": ["c1"]},
            r"task.covariates is for networks; choose one, as in model.preset=gru",
        ),
        (
            {"preset": "bert-base"},
            {},
            r"only an embedding of tokens uses model.segments=2, and a series has .* set "
            r"model.segments=0, or choose another model, as in model.preset=tiny-encoder",
        ),
        ({"family": "linear"}, {"direct": False}, "task.direct is for networks"),
        ({"preset": "tiny-encoder-decoder"}, {}, "needs a model of architecture"),
    ]:
        with pytest.raises(ConfigError, match=told):
            task_of(**fields).check_model(resolve(model, vocab_size=1))
    task = task_of(column="c0", covariates=["c1"])
    model = network("gru", task)
    assert task.rollout(model, torch.randn(1, 8, 2), 3).shape == (1, 3, 1)
    with pytest.raises(ConfigError, match=r"4 steps exceed task\.horizon=3, and task.covariates"):
        task.rollout(model, torch.randn(1, 8, 2), 4)


def test_baselines_are_what_they_are_called():
    time = np.arange(60)
    series = from_columns("s", "", {"c0": np.sin(time * np.pi / 3), "c1": 2.0 * time})
    assert find_seasonal_period(series, 0) == 6
    task = replace(task_of(seasonal_period=6), mean=[0.0, 0.0], std=[1.0, 2.0])
    train, validation = series.split_by_sizes([40, 20])
    found = evaluate_baselines(task, validation, train.values)
    assert list(found) == ["naive", "seasonal naive (6 rows)", "AR(2)", "linear layer, 10 values"]
    wave, rise = series.values[40:, 0], np.array([1.0, 2.0, 3.0])
    far = [[wave[t + h] - series.values[39 + t, 0] for h in range(3)] for t in range(18)]
    expected = (np.square(far).mean() + np.square(rise).mean()) / 2
    assert found["naive"]["mse"] == pytest.approx(expected)
    assert found["seasonal naive (6 rows)"]["mae"] == pytest.approx(6 / 2)  # a rise of 6 in 6 steps
    assert found["linear layer, 10 values"]["mse"] < 0.01
    some = evaluate_baselines(task, validation, train.values, stride=4)  # as a recursive network
    expected = (np.square(far[::4]).mean() + np.square(rise).mean()) / 2
    assert some["naive"]["mse"] == pytest.approx(expected)
    other = replace(validation, history=None)
    far = [[wave[t + 8 + h] - wave[t + 7] for h in range(3)] for t in range(4, 10, 4)]
    expected = (np.square(far).mean() + np.square(rise).mean()) / 2
    some = evaluate_baselines(replace(task, seasonal_period=9), other, None, stride=4)
    assert some["naive"]["mse"] == pytest.approx(expected)  # row 12: the first, 8, has no 9
    assert list(evaluate_baselines(task, other, None)) == ["naive", "seasonal naive (6 rows)"]


def test_the_settings_of_a_baseline_train_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(1).normal(size=240).cumsum()
    (tmp_path / "walk.csv").write_text("x,y\n" + "".join(f"{v},{v * v}\n" for v in noise))
    words = ("train", "walk.csv", "task.horizon=4", "--json")
    trained = json.loads(invoke(capsys, *words, "--out", "run").out)
    settings = summarize(tmp_path / "run").baseline_settings
    assert list(settings) == ["AR(10)", "linear layer, 54 values"]
    for number, (name, text) in enumerate(settings.items()):
        again = json.loads(invoke(capsys, *words, *text.split(), "--out", f"run{number}").out)
        assert again["mse"] == pytest.approx(trained["baselines"][name]["mse"])


def test_the_last_line_of_a_forecast_names_the_best_baseline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [0.0, 0.0]  # x_t = 1.6 x_t-1 - 0.8 x_t-2 + noise
    for noise in np.random.default_rng(1).normal(size=300):
        rows.append(1.6 * rows[-1] - 0.8 * rows[-2] + noise)
    (tmp_path / "waves.csv").write_text("x\n" + "".join(f"{v}\n" for v in rows))
    words = ("train", "waves.csv", "task.horizon=4")
    printed = invoke(capsys, *words, "model.family=autoregression", "model.order=1").out
    best = "the best baseline: AR(13)"
    assert re.search(
        rf" \d\.\d+ mse worse than {re.escape(best)};\n  to train that model:", printed
    )
    settings = printed.splitlines()[-1].partition(": ")[2]
    assert settings == "model.family=autoregression model.order=13"
    assert f"  equal to {best}\n" in invoke(capsys, *words, *settings.split()).out
    (told,) = compare_with_baselines({"mse": 0.0}, summarize(tmp_path / "runs" / "waves"))
    assert told.endswith(f" mse better than {best}")


def test_a_mean_and_deviation_that_are_given_are_used():
    data = {"path": {"kind": "sines", "examples": 200}}

    def prepared(**fields):
        task = {"kind": "forecast", "horizon": 16, "context": 8, "direct": False, **fields}
        table = {"name": "x", "task": task, "data": data, "model": {"preset": "gru", "dim": 4}}
        return prepare_training(build(RunConfig, table))

    found = prepared(std=2.5)
    assert found.task.std == 2.5
    assert found.task.mean == prepared().task.mean
    for fields, told in (({"mean": [1.0, 2.0]}, "has 2 numbers"), ({"std": 0.0}, "above 0")):
        with pytest.raises(ConfigError, match=told):
            prepared(**fields)
    model = build_model(found.model)
    series = replace(found.validation_data, history=None)
    with pytest.raises(DataError, match="has 8 rows, and the model reads 8"):
        backtest(model, found.task, replace(series, values=series.values[:8]))


def test_a_table_of_numbers_is_trained_on_evaluated_and_forecast(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # x_t = x_t-1 + 2: a straight line, known for ever from two numbers
    rows = [f"{5 - n},{2 * n},7" for n in range(1, 101)]
    (tmp_path / "line.csv").write_text("\n".join(["down,up,same", *rows]))
    words = ["task.horizon=4", "task.column=up", "model.family=autoregression", "model.order=2"]
    said = invoke(capsys, "train", "line.csv", *words, "--out", "run", "--json")
    assert said.code == 0, said.err
    trained = json.loads(said.out)
    assert "columns    up, mean" in said.err
    assert trained["mse_4"] < 1e-12
    assert trained["baselines"]["naive"]["mse"] > 1e-6
    judged = json.loads(invoke(capsys, "evaluate", "run", "--json").out)
    assert judged["mse"] == pytest.approx(trained["mse"])
    assert judged["naive: mse"] == trained["baselines"]["naive"]["mse"]
    assert judged["mae [up]"] < 1e-6
    said = invoke(capsys, "predict", "run", "--steps", 3, "--json")
    assert json.loads(said.out)["data of the run"] == pytest.approx([202, 204, 206])
    assert invoke(capsys, "predict", "run", "--steps", 2).out == "1  202\n2  204\n"
    by_default = invoke(capsys, "predict", "run").out.split()
    assert by_default == ["1", "202", "2", "204", "3", "206", "4", "208"]  # the horizon
    (tmp_path / "other.csv").write_text("up\n7\n9\n")
    said = invoke(capsys, "predict", "run", "other.csv", "--steps", 1, "--json")
    assert json.loads(said.out)["other.csv"] == pytest.approx([11])
    (tmp_path / "short.csv").write_text("up\n7\n")
    said = invoke(capsys, "predict", "run", "short.csv")
    assert said.code == 3
    assert "short has 1 rows, but the model needs at least 2" in said.err
    said = invoke(capsys, "train", "short.csv")
    assert said.code == 3
    assert "short.csv, line 2: this is the only row of numbers" in said.err
    assert invoke(capsys, "generate", "run", "words").code == 2
    said = invoke(capsys, "train", "line.csv", "task.column=same", "--out", "x")
    assert "all training values of column 'same' are equal" in said.err
    said = invoke(capsys, "train", "line.csv", "task.column=upp", "--out", "x")
    assert "did you mean 'up'?" in said.err
    with pytest.raises(ConfigError, match=r"steps=2\.5 must be an integer"):
        regard.load("run").forecast(steps=2.5)
    said = invoke(capsys, "evaluate", "run", "--test")
    assert (said.code, "has no test split" in said.err) == (2, True)


def test_constant_columns_are_left_out_and_named_before_training(tmp_path, monkeypatch, capsys):
    """Rounding makes the standard deviation of 0.1, 0.1, 0.1, … greater than 0."""
    monkeypatch.chdir(tmp_path)
    assert np.full(180, 0.1).std() > 0
    rows = [f"{np.sin(n / 3):.3f},0.1,{float(n > 190)}" for n in range(200)]
    (tmp_path / "x.csv").write_text("\n".join(["wave,same,late", *rows]))
    said = invoke(capsys, "train", "x.csv", "--dry-run")
    assert said.code == 0, said.err
    assert "left out    same, late: all training values are equal" in said.out
    assert invoke(capsys, "train", "x.csv", "--out", "run").code == 0
    assert regard.load("run").config.task["column"] == "wave"
    (tmp_path / "two.csv").write_text("up,down\n1,2\n2,1\n")
    said = invoke(capsys, "train", "two.csv", "--dry-run")
    assert (said.code, "two.csv, line 2: this is the only training row" in said.err) == (3, True)


@pytest.mark.parametrize(
    ("horizon", "period", "stride"), [(96, 24, 11), (96, None, 12), (8, 24, 1), (64, 7, 8)]
)
def test_recursive_forecasts_are_evaluated_in_all_phases_of_the_season(horizon, period, stride):
    task = task_of(horizon=horizon, seasonal_period=period, direct=False)
    model = resolve(NETWORKS["gru"], context=8, **task.model_settings())
    assert _evaluation_stride(task, model) == stride
    assert _evaluation_stride(replace(task, direct=True), model) == 1


def test_a_direct_model_is_fed_back_row_by_row_as_in_a_loop():
    data = {"path": {"kind": "sines", "examples": 200}}
    task = {"kind": "forecast", "horizon": 5, "context": 8}
    table = {"name": "x", "task": task, "data": data, "model": {"preset": "gru", "dim": 4}}
    found = prepare_training(build(RunConfig, table))
    model, series = build_model(found.model).eval(), found.validation_data
    rows = torch.from_numpy(np.concatenate([series.history[-8:], series.values])).float()
    rows = (rows - found.task.mean) / found.task.std
    squares = [[] for _ in range(5)]
    for start in range(len(series) - 4):
        window = rows[start : start + 8]
        for step in range(5):
            with torch.no_grad():
                first = found.task.forecast_once(model, window.unsqueeze(0))[0, :1]
            window = torch.cat([window[1:], first])
            squares[step].append(float(first[0, 0] - rows[start + 8 + step, 0]) ** 2)
    expected = [np.mean(errors) for errors in squares]  # of every step, for the figure
    assert recursive_errors(model, found.task, series) == pytest.approx(expected, rel=1e-4)
    end = backtest(model, found.task, series)
    last = (window[-5:] * found.task.std + found.task.mean)[:, 0].tolist()
    assert end.recursive == pytest.approx(last, rel=1e-4)
    assert end.recursive[0] == pytest.approx(end.forecast[0], rel=1e-5)
    assert end.recursive[4] != pytest.approx(end.forecast[4], rel=1e-5)
    recursive = replace(found.task, direct=False)
    assert recursive_errors(model, recursive, series) == []
    assert not recursive.can_forecast_recursively(model, 5)
    assert not replace(found.task, covariates=["other"]).can_forecast_recursively(model, 5)
    assert not found.task.can_forecast_recursively(model, 1)


def test_several_columns_by_a_network_and_their_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    time = np.arange(300)
    columns = np.stack([np.sin(time / 4), 5 + np.cos(time / 9), np.full(300, 7.0)], 1)
    lines = [
        f"{1 + n % 28},{1 + n // 28 % 12},{2000 + n // 336},{a},{b},{c}"
        for n, (a, b, c) in enumerate(columns)
    ]
    (tmp_path / "waves.csv").write_text("\n".join(["day,month,year,a,b,same", *lines]))
    small = ["model.preset=gru", "model.dim=8", "model.layers=1", "train.steps=4", "train.batch=4"]
    words = [*small, "task.horizon=5", "task.context=12", "data.split=[200,60,40]"]
    said = invoke(capsys, "train", "waves.csv", *words, "--out", "run")
    assert said.code == 0, said.err
    assert "left out   same: all training values are equal" in said.err
    assert "  linear layer, 50 values  0.0" in said.out
    assert "nats" not in said.out + said.err
    unit = "columns scaled to standard deviation 1"
    assert f"metrics    mse and mae, {unit}\n" in said.err
    assert f"values, {unit}:\n" in said.err
    said = invoke(capsys, "evaluate", "run", "--test", "--out", "e.svg", "--column", "b", "--json")
    assert said.code == 0, said.err
    measured = json.loads(said.out)
    assert measured["evaluated_on"] == "all 360 values"  # 36 windows of 5 rows and 2 columns
    assert {"mae [a]", "mae [b]", "AR(10): mse"} <= set(measured)
    assert measured["unit"] == f"{unit}; mae [COLUMN]: the unit of the column"
    picture = (tmp_path / "e.svg").read_text()
    for text in (
        "b: forecast of the last 5 values",
        "direct forecast",
        "recursive forecast, row by row",
    ):
        assert text in picture
    said = invoke(capsys, "predict", "run", "--steps", 7)  # beyond the horizon: recursive
    assert said.out.splitlines()[0].split() == ["date", "a", "b"]
    assert len(said.out.splitlines()) == 8
    assert invoke(capsys, "predict", "run", "--steps", 7, "--out", "p.csv").code == 0
    assert (tmp_path / "p.csv").read_text().startswith("step,date,a,b\n1,2000-")
    said = invoke(capsys, "predict", "run", "--steps", 7, "--out", "p.svg", "--column", "b")
    assert said.code == 0, said.err
    picture = (tmp_path / "p.svg").read_text()
    assert "b: forecast of the next 7 values" in picture
    assert "row by row" not in picture  # 7 steps are beyond the horizon, so the one is recursive
    said = invoke(capsys, "predict", "run", "--out", "q.svg", "--column", "c")
    assert (said.code, "unknown column 'c'" in said.err) == (2, True)
    assert invoke(capsys, "evaluate", "run", "waves.csv", "--json").code == 0
    info = invoke(capsys, "info", "run").out
    assert "vectors of 2" in info
    assert "the next 5 values of 2 columns" in info
    assert f"values, {unit})" in info
    assert "FLOPs per position" in info
    for absent in ("vocab_size", "tied", "token", "KV cache"):
        assert absent not in info
    assert json.loads(invoke(capsys, "info", "run", "--json").out)["unit"] == unit
    compared = invoke(capsys, "compare", "run", "run")
    assert f"validation ({unit})" in compared.out
    assert invoke(capsys, "compare", *["run"] * 5).out.startswith(f"metrics: {unit}\n")
    assert json.loads(invoke(capsys, "compare", "run", "run", "--json").out)["unit"] == unit
    said = invoke(capsys, "export", "run", "exported")
    assert said.code != 0
    run = regard.load("run")
    assert set(run.forecast(steps=2)) == {"a", "b"}
    with pytest.raises(ConfigError, match="steps=0 must be an integer of at least 1"):
        run.forecast(steps=0)


def panels(figure):
    """The lines of each panel, without those of the legend."""
    return [[line for line in axes.get_lines() if len(line.get_xdata())] for axes in figure.axes]


def test_figures_show_dates_columns_and_the_error_of_every_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    days = [f"{1 + n % 28}/{1 + n // 28}/2001,{np.sin(n / 4):.4f}\n" for n in range(300)]
    (tmp_path / "a.csv").write_text("day,heat\n" + "".join(days))
    (tmp_path / "b.csv").write_text("heat\n" + "".join(day.split(",")[1] for day in days))
    words = ["task.horizon=12", "task.context=24"]
    for name in "ab":
        assert invoke(capsys, "train", f"{name}.csv", *words, "--out", name).code == 0
    dated, undated = regard.load("a"), regard.load("b")
    figure = dated.draw_evaluation()
    values = figure.axes[0]
    assert [values.get_xlabel(), values.get_ylabel()] == ["day", "heat"]
    (truth, direct, recursive, one_step), (growth, recursive_growth) = panels(figure)
    first = np.datetime64("1970-01-01") + np.timedelta64(int(direct.get_xdata()[0]), "D")
    assert first == dated.backtest().dates[-13]  # from the last value before the forecast
    assert len(direct.get_xdata()) == 13
    assert len({line.get_linestyle() for line in (truth, direct)}) == 1  # solid, truth is wider
    assert truth.get_linewidth() > direct.get_linewidth() > one_step.get_linewidth()
    assert len({str(line._dash_pattern) for line in (direct, recursive, one_step)}) == 3
    for curve in (growth, recursive_growth):
        np.testing.assert_array_equal(curve.get_xdata(), np.arange(1, 13))
    measured = dated.evaluate()
    for step in (1, 2, 4, 8, 12):
        assert growth.get_ydata()[step - 1] == pytest.approx(measured[f"mse_{step}"])
    assert [name for name in measured if name.startswith("mse_")] == [
        f"mse_{step}" for step in (1, 2, 4, 8, 12)
    ]
    figure.canvas.draw()
    labels = [label.get_text() for label in values.get_xticklabels()]
    assert any(label.isalpha() for label in labels)  # the name of a month

    future = undated.draw_forecast(steps=5)
    assert future.axes[0].get_xlabel() == "row"
    _, direct, *_ = panels(future)[0]
    np.testing.assert_array_equal(direct.get_xdata(), np.arange(300, 306))
    (growth,) = panels(future)[1]
    assert len(growth.get_xdata()) == 12
    compared = regard.compare("a", "a").figure()
    assert len(panels(compared)[1][0].get_xdata()) == 12
    (tmp_path / "b.csv").rename("c.csv")  # only the errors that the run has stored are known
    (growth,) = panels(undated.draw_forecast("c.csv"))[1]
    assert growth.get_xdata().tolist() == [1, 2, 4, 8, 12]
    assert growth.get_linestyle() == "None"


def test_the_recipe_for_ett_trains_on_any_table_of_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"{np.sin(n / 4):.4f},{np.cos(n / 9):.4f}\n" for n in range(1000)]
    (tmp_path / "other.csv").write_text("a,b\n" + "".join(rows))
    said = invoke(capsys, "train", "forecast-ett", "data.path=other.csv", "--dry-run")
    assert said.code == 0, said.err
    assert said.out.count("the first 600 rows for training, 60 %, since these are not") == 4
    assert said.out.count("the next 200 rows; then 200 rows for testing") == 4
