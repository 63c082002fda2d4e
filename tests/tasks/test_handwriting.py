"""Handwriting: densities against loops, sampling without NaN, and drawings from the shell."""

import json
import math
import re

import numpy as np
import pytest
import torch

import regard
from cli.conftest import invoke
from regard.data.strokes import from_npz
from regard.errors import ConfigError, DataError
from regard.explain.render.strokes import strokes, to_svg, to_text
from regard.models.build import build_model, resolve
from regard.nn.mixture_density import END, MixtureDensityHead, log_density
from regard.pipelines import prepare_training
from regard.tasks.handwriting import Handwriting
from regard.training.setup.configure import configure

NETWORKS = {
    "lstm": {"preset": "lstm", "dim": 12, "layers": 1},
    "decoder": {"preset": "tiny-decoder", "dim": 8, "layers": 1, "heads": 2},
    "window": {"family": "soft_window", "dim": 8, "components": 3},
}


def reference(parameters, m, dx, dy):
    """The density of a mixture of normal distributions, by its definition."""
    p = parameters.tolist()
    weights = [math.exp(x) for x in p[:m]]
    total = 0.0
    for k in range(m):
        (mx, my), (lx, ly) = p[m + 2 * k : m + 2 * k + 2], p[3 * m + 2 * k : 3 * m + 2 * k + 2]
        sx, sy, rho = math.exp(lx), math.exp(ly), 0.99 * math.tanh(p[5 * m + k])
        u, v = (dx - mx) / sx, (dy - my) / sy
        z = u * u + v * v - 2 * rho * u * v
        norm = 2 * math.pi * sx * sy * math.sqrt(1 - rho * rho)
        total += weights[k] / sum(weights) * math.exp(-z / (2 * (1 - rho * rho))) / norm
    return total


def test_the_density_is_the_formula():
    torch.manual_seed(0)
    head = MixtureDensityHead(3, components=4)
    for _ in range(5):
        parameters, offset = torch.randn(27), torch.randn(2)
        found = log_density(head.mixture(parameters), offset).item()
        expected = reference(parameters, 4, *offset.tolist())
        assert found == pytest.approx(math.log(expected), rel=1e-4, abs=1e-4)  # float32
    # the loss is that and the cross-entropy of the pen, of the scored points only
    x, targets = torch.randn(2, 3, 3), torch.cat([torch.randn(2, 3, 2), torch.ones(2, 3, 1)], 2)
    scored = torch.tensor([[True, True, False], [True, False, False]])
    mixture = head.mixture(head(x))
    nll = -log_density(mixture, targets[..., :2]) - mixture.pen.log_softmax(-1)[..., 1]
    torch.testing.assert_close(head.loss(x, targets, scored), nll[scored].sum())


@pytest.mark.parametrize("size", [0.0, 1e3, 1e20])
def test_the_loss_and_its_gradient_are_finite_for_any_output(size):
    head = MixtureDensityHead(2, components=3)
    torch.nn.init.normal_(head.out.weight, std=1.0)
    x = (torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(1)) * size).requires_grad_()
    targets = torch.zeros(4, 5, 3)
    targets[..., 0] = 1e3
    if size < 1e10:
        head.loss(x, targets, torch.ones(4, 5, dtype=torch.bool)).backward()
        assert x.grad.isfinite().all()
    for bias in (0.0, 1.0, 1e6):
        drawn = head.sample(head(x.detach()).flatten(0, 1), bias, torch.Generator().manual_seed(0))
        assert not drawn.isnan().any()


def network(name, **fields):
    task = Handwriting(std=50.0, max_points=20, **fields)
    torch.manual_seed(0)
    model = build_model(resolve(NETWORKS[name], **task.model_settings())).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return task, model


def check_sampling(name, steps):
    written = {"text": "abba"} if name == "window" else {}
    task, model = network(name, alphabet="ab" if written else "")
    rows, length = 50, 20 if name == "decoder" else max(20, steps // 200)
    for bias in (0.0, 0.5, 5.0, 1e6):
        for seed in range(-(-steps // (4 * rows * length))):
            drawn = task.draw(
                model, rows, bias=bias, seed=seed, steps=length, ignore_end=True, **written
            )
            assert len(drawn) == rows
            for points in drawn:
                assert len(points) == length
                assert np.isfinite(points).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_no_point_is_nan_at_any_bias(name):
    check_sampling(name, 1000)


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_no_point_is_nan_in_a_hundred_thousand_steps(name):
    check_sampling(name, 100_000)


def test_a_bias_narrows_the_distribution():
    head = MixtureDensityHead(1, components=2)
    parameters = torch.randn(1, 15, generator=torch.Generator().manual_seed(0)).expand(500, -1)
    generator = torch.Generator().manual_seed(0)
    spread = [head.sample(parameters, bias, generator)[:, :2].std(0).max() for bias in (0, 1, 9)]
    assert spread[0] > 1.5 * spread[1] > 1.5 * spread[2]
    mixture = head.mixture(parameters)
    neat = head.sample(parameters, 1e6, generator)[:, :2]
    best = mixture.mean[0, mixture.log_weights[0].argmax()]
    torch.testing.assert_close(neat, best.expand(500, 2))


def test_drawings_are_batched_with_their_class_and_end():
    task = Handwriting(std=2.0, max_points=4, class_names=["a", "b"])
    short, long = np.array([[2, 4, 0], [6, 0, 1]], np.float32), np.ones((5, 3), np.float32)
    batch = task.collate(([short, long], [1, 0], None), torch.Generator())
    assert batch.lengths.tolist() == [2, 4]
    assert batch.targets[0, :2].tolist() == [[1, 2, 0], [3, 0, END]]
    assert batch.targets[1, 3].tolist() == [0.5, 0.5, 1]  # cut, so it does not end
    assert batch.inputs[0, 0].tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert batch.inputs[0, 1].tolist() == [1, 2, 1, 0, 0, 0, 1]
    assert batch.mask.sum() == task.count(batch) == 6
    assert task.class_index("b") == 1
    with pytest.raises(ConfigError, match="this model is conditioned on a class; give one of a, b"):
        task.class_index(None)
    with pytest.raises(ConfigError, match="unknown class 'c'; known: a, b"):
        task.class_index("c")


GOOD = {"xyp": np.array([[1, 2, 0], [3, 4, 1], [5, 6, 0]]), "off": np.array([0, 2, 3])}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"xyp": np.zeros((3, 2))}, r"xyp is float64 of shape \(3, 2\); it must be numbers of"),
        ({"off": np.array([0, 2, 9])}, "off must start with 0 and end with the 3 points"),
        ({"off": np.array([0, 2, 1, 3])}, "drawing 1 of off goes from point 2 to 1"),
        ({"xyp": np.array([[1, 2, 0], [3, np.nan, 1], [5, 6, 0]])}, r"row 1 \(drawing 0\)"),
        ({"xyp": np.array([[1, 2, 0], [3, 4, 1], [5, 6, 7]])}, r"row 2 \(drawing 1\) is .*lift 0"),
        ({"label": np.array(["a"])}, r"label has shape \(1,\), and there are 2 drawings"),
        ({"text": np.array(["a"])}, r"text is <U1 of shape \(1,\), and there are 2 drawings"),
        (
            {"text": np.array(["a", ""])},
            r"text, row 1 is empty; give the text of the drawing",
        ),
        (
            {
                "test_xyp": np.zeros((1, 3)),
                "test_off": np.array([0, 1]),
                "text": np.array(["a", "b"]),
            },
            "some splits have texts",
        ),
    ],
)
def test_ragged_strokes_are_refused_with_file_and_row(tmp_path, change, told):
    np.savez(tmp_path / "s.npz", **{**GOOD, **change})
    with pytest.raises(DataError, match=told) as error:
        from_npz(tmp_path / "s.npz")
    assert "s.npz" in str(error.value)


def test_pictures_have_a_line_for_each_stroke():
    points = np.array([[0, 0, 0], [10, 0, 1], [0, 10, 0], [-10, 0, 0]], np.float32)
    first, second = strokes(points)
    assert first.tolist() == [[0, 0], [10, 0]]
    assert second.tolist() == [[10, 10], [0, 10]]
    svg = to_svg([points, points[:1]])
    assert svg.count("<polyline") == 3
    assert 'points="8.0,8.0 92.0,8.0"' in svg
    text = to_text([points], 4).splitlines()
    assert text[0].startswith("\u2809\u2809")  # the upper line, two dots of four
    huge = np.full((3, 3), 3e38, np.float32)
    assert "nan" not in to_svg([huge])


def test_from_an_archive_to_drawings_by_class(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    circle = [[10 * math.cos(t / 2), 10 * math.sin(t / 2), 0] for t in range(12)]
    corner = [[0, 30, 0], [0, 30, 1], [30, -60, 0], [0, 60, 0]]
    drawings = [circle, corner] * 20
    np.savez(
        "s.npz",
        xyp=np.concatenate(drawings),
        off=np.cumsum([0, *map(len, drawings)]),
        label=np.array(["circle", "corner"] * 20),
    )
    small = ["model.dim=24", "train.steps=60", "train.batch=8", "train.lr=1e-2"]
    small += ["train.schedule.warmup=5", "train.evaluate_every=20"]
    said = invoke(capsys, "train", "s.npz", *small, "--out", "run", "--json")
    assert said.code == 0, said.err
    assert "strokes, 40 drawings of up to 12 points, 2 classes" in said.err
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in log.splitlines()]
    losses = [row["validation"]["loss"] for row in rows if "validation" in row]
    assert json.loads(said.out)["loss"] < losses[0] - 0.3
    assert (tmp_path / "run" / "sample-60.svg").read_text().count("<polyline") >= 16
    words = ["--count", 3, "--bias", 2, "--seed", 1]
    said = invoke(capsys, "generate", "run", "circle", *words, "--out", "d.svg")
    assert (said.code, said.out) == (0, "d.svg\n")
    assert (tmp_path / "d.svg").read_text().startswith("<svg")
    assert invoke(capsys, "generate", "run", "corner", *words, "--out", "d.png").code == 0
    assert invoke(capsys, "generate", "run", "circle", *words).out.count("\n") >= 8
    said = invoke(capsys, "generate", "run", "cirkle", "--out", "x.svg")
    assert (said.code, "did you mean 'circle'?" in said.err) == (2, True)
    run = regard.load("run")
    lengths = {
        name: np.mean([len(points) for points in run.draw(name, count=40, bias=3.0, seed=0)])
        for name in ("circle", "corner")
    }
    assert lengths["circle"] > lengths["corner"] + 2
    assert run.draw("corner", seed=1)[0].tolist() == run.draw("corner", seed=1)[0].tolist()
    with pytest.raises(ConfigError, match=r"bias=-1\.0 must be at least 0"):
        run.draw("corner", bias=-1.0)
    assert "distribution of the next point" in invoke(capsys, "info", "run").out
    said = invoke(capsys, "export", "run", "exported")
    assert (said.code, "no Hugging Face model type" in said.err) == (2, True)
    said = invoke(capsys, "predict", "run", "circle")  # there is no command `draw`
    assert (said.code, "use `regard generate`, in Python `run.draw`" in said.err) == (2, True)
    judged = json.loads(invoke(capsys, "evaluate", "run", "--json").out)
    assert judged["evaluated_on"] == "all 48 points"


@pytest.mark.parametrize(
    ("model", "lr"), [("lstm", "0.003"), ("elman", "0.003"), ("tiny-decoder", None)]
)
def test_recurrent_networks_have_a_larger_learning_rate(model, lr, capsys):
    said = invoke(capsys, "train", "digits", f"model.preset={model}", "--dry-run")
    assert said.code == 0, said.err
    rates = re.findall(r"train\.lr=(\S+)", said.out)
    assert rates == ([] if lr is None else [lr])  # 0.001 is the default of the setting


def test_a_text_is_drawn_and_its_window_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = "data.path={kind='digits', examples=40, max_length=3}"
    small = [data, "model.dim=8", "train.steps=3", "train.batch=8", "train.schedule.warmup=1"]
    said = invoke(capsys, "train", "handwriting-digits", *small, "--out", "run")
    assert said.code == 0, said.err
    assert "alphabet   0123456789" in said.err
    assert "regard explain run 012 --out window.svg" in said.err
    words = ["--count", 2, "--seed", 1, "--out", "d.svg"]
    assert invoke(capsys, "generate", "run", "12", *words).out == "d.svg\n"
    said = invoke(capsys, "generate", "run", "1a", *words, "--force")
    assert (said.code, "'a' is not in the alphabet of the training texts" in said.err) == (2, True)
    said = invoke(capsys, "generate", "run", *words, "--force")
    assert (said.code, "this model is conditioned on a text; give the text" in said.err) == (
        2,
        True,
    )
    (attention,) = regard.load("run").explain("07").values()
    assert attention.columns == ["0", "7", "end"]
    assert attention.weights.shape[1:] == (len(attention.rows), 3)
    states = regard.load("run").states("07")
    assert all(cell.rows == attention.rows for cell in states.values())
    refused = invoke(capsys, "explain", "run", "07", "--layer", "4", "--words")
    assert "one map, its soft window; leave out layers, words" in refused.err
    assert invoke(capsys, "explain", "run", "07", "--out", "w.svg").code == 0
    assert "soft window over the text" in invoke(capsys, "info", "run").out
    assert "unknown" not in invoke(capsys, "evaluate", "run", "--json").err
    np.savez("plain.npz", **GOOD)
    said = invoke(capsys, "evaluate", "run", "plain.npz")
    assert "drawings have no texts, and the run was trained on texts" in said.err
    np.savez("more.npz", xyp=np.eye(40, 3), off=np.arange(0, 41, 2))
    said = invoke(capsys, "train", "more.npz", "model.family=soft_window", "--out", "no")
    assert "drawings have no texts for model.family=soft_window" in said.err


def test_a_split_without_labels_has_no_classes(tmp_path):
    drawings = {"xyp": np.eye(40, 3), "off": np.arange(0, 41, 2)}
    valid = {"valid_xyp": np.eye(4, 3), "valid_off": np.array([0, 2, 4])}
    path = tmp_path / "partly.npz"
    np.savez(path, **drawings, **valid, label=np.array(["a", "b"] * 10))
    with pytest.raises(DataError, match="drawings have classes none"):
        prepare_training(configure(str(path)))
    np.savez(path, **drawings, **valid, valid_label=np.array(["a", "b"]))
    assert prepare_training(configure(str(path))).task.class_names == []
