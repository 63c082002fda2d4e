"""Texts and pairs of texts with a number: detection, training, predictions, export."""

import numpy as np
import pytest
import torch

import regard
from cli.commands import command
from regard.cli.report import compare_with_baselines
from regard.errors import DataError
from regard.pipelines import open_data
from regard.pipelines.text_pairs import encode_pair
from regard.tasks.metrics import is_better
from regard.tasks.text_regression import TextRegression, correlation, ranks

THINGS, ACTS = ["dog", "cat", "horse", "cow"], ["runs", "sleeps", "eats", "jumps"]
SETTINGS = ("model.preset=bert", "model.dim=32", "model.layers=1", "model.heads=2")
SETTINGS += ("model.ffn_dim=32", "model.context=24", "data.tokenizer=word", "model.dropout=0")
SETTINGS += ("model.head.hidden=tanh", "train.steps=80", "train.batch=32", "train.lr=5e-3")
SETTINGS += ("train.ema=0",)


def similar(count=256):
    """Lines of two texts and a number to which a word of each contributes."""
    lines = []
    for n in range(count):
        a, b = (n % 4, n // 4 % 4), (n // 16 % 4, n // 64 % 4)
        texts = [f"the {THINGS[thing]} {ACTS[act]}" for thing, act in (a, b)]
        score = 10 + 2.5 * (a[0] == 0) + 1.5 * (b[1] == 1)
        lines.append(f"{texts[0]},{texts[1]},{score}\n")
    return lines


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    path = folder / "sts.csv"
    path.write_text("sentence1,sentence2,similarity\n" + "".join(similar()))
    return regard.train(str(path), *SETTINGS, out=folder / "run", quiet=True)


def test_the_similarity_of_two_texts_is_learned(run, tmp_path, capsys):
    assert run.config.task["kind"] == "text_regression"
    assert run.inputs == ("sentence1", "sentence2")
    metrics = run.evaluate()
    assert metrics["pearson"] > 0.8
    assert metrics["loss"] == pytest.approx(metrics["mse"] / run.config.task["std"] ** 2)
    summary = regard.api.training.summarize(run.folder.path)
    assert metrics["mse"] < 0.6 * summary.baselines["training mean"]["mse"]
    (told,) = compare_with_baselines(metrics, summary)
    assert told.endswith(" mse better than the baseline: training mean")
    (told,) = compare_with_baselines({"mse": 100.0}, summary)  # no settings train a mean
    assert told.endswith(" mse worse than the baseline: training mean")
    same, other = ("the dog runs", "the dog sleeps"), ("the cow runs", "the cow eats")
    near, far = run.predict([same, other])
    assert near > far + 1
    assert run.predict(same) == pytest.approx(near, rel=1e-4)
    folder = str(run.folder.path)
    assert command("predict", folder, *same) == 0
    assert f"{near:.4g}" in capsys.readouterr().out
    table = tmp_path / "new.csv"
    table.write_text("sentence1,sentence2\nthe dog runs,the dog sleeps\n")
    assert [row["prediction"] for row in run.predict_file(table)] == [pytest.approx(near)]
    assert {"pearson", "mae"} <= set(run.evaluate_by_length().ranges[0].metrics)


def test_an_exported_head_gives_the_numbers(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    run.export(tmp_path / "hf")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    assert (model.config.problem_type, model.config.num_labels) == ("regression", 1)
    pair = ("the dog runs", "the cow runs")
    ids, segments = encode_pair(run.model.config, run.tokenizer, *pair)
    with torch.no_grad():
        logits = model(
            torch.tensor([ids]), token_type_ids=torch.tensor([segments or [0] * len(ids)])
        ).logits
    assert logits.item() == pytest.approx(run.predict(pair), abs=1e-4)
    regard.import_model(tmp_path / "hf", tmp_path / "back")
    back = regard.load(tmp_path / "back")
    assert back.config.task == "text_regression"


@pytest.mark.parametrize(
    ("header", "row", "columns", "inferred"),
    [
        ("sentence1,sentence2,score", "a b c,a b d,", "text=sentence1, text2=sentence2", ""),
        ("first,then,value", "some words {n},other words {n},", "text2=then (inferred)", "value"),
        ("review,price", "good value {n},", "text=review", "price"),
    ],
)
def test_texts_and_a_column_of_numbers_are_detected(tmp_path, header, row, columns, inferred):
    path = tmp_path / "numbers.csv"
    rows = [f"{row.format(n=chr(97 + n % 26) * (1 + n // 26))}{n / 8 + 0.3}" for n in range(60)]
    path.write_text("\n".join([header, *rows]) + "\n")
    data = open_data(str(path))
    assert data.kind == "scores"
    assert columns in data.description
    assert f"label={inferred} (inferred)" in data.description or not inferred
    assert data.numbers()[:2] == [0.3, 0.425]


def test_whole_numbers_are_classes_unless_the_task_says_otherwise(tmp_path):
    path = tmp_path / "stars.csv"
    rows = (f"text {'abcdefgh'[n % 8] * (n + 1)},{n % 5}\n" for n in range(40))
    path.write_text("review,stars\n" + "".join(rows))
    assert open_data(str(path)).kind == "labels"
    assert open_data(str(path), kind="scores").numbers()[:3] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("number", ["confidence", "score"])
def test_a_column_of_labels_comes_before_one_of_numbers(tmp_path, number):
    path = tmp_path / "labels.csv"
    rows = (f"some text {chr(97 + n)},{['good', 'bad'][n % 2]},0.{n + 1}\n" for n in range(20))
    path.write_text(f"text,label,{number}\n" + "".join(rows))
    assert open_data(str(path)).class_names == ("bad", "good")


def test_classes_under_any_name_come_before_numbers_under_any_name(tmp_path):
    path = tmp_path / "labels.csv"
    rows = (f"some text {chr(97 + n)},{['good', 'bad'][n % 2]},0.{n + 1}\n" for n in range(20))
    path.write_text("review,category,price\n" + "".join(rows))
    assert open_data(str(path)).class_names == ("bad", "good")


@pytest.mark.parametrize("named", [{}, {"text": "text", "label": "height"}])
def test_a_cell_that_is_no_number_does_not_make_classes_of_numbers(tmp_path, named):
    path = tmp_path / "bad.csv"
    cells = [*(f"{n}.5" for n in range(30)), "high"]
    rows = (f"text {chr(97 + n % 26)} number,{value}\n" for n, value in enumerate(cells))
    path.write_text("text,height\n" + "".join(rows))
    with pytest.raises(DataError, match="line 32: height is 'high', not a finite number"):
        open_data(str(path), columns=named)


@pytest.mark.parametrize(
    ("cell", "message"),
    [("high", "line 4: score is 'high', not a finite"), ("nan", "line 4: score"), ("", "line 4")],
)
def test_a_cell_that_is_no_number_is_named_with_its_line(tmp_path, cell, message):
    path = tmp_path / "bad.csv"
    cells = [f"{n}.5" for n in range(30)]
    cells[2] = cell
    rows = (f"text {chr(97 + n % 26)} number,{value}\n" for n, value in enumerate(cells))
    path.write_text("text,score\n" + "".join(rows))
    with pytest.raises(DataError, match=message):
        open_data(str(path))


def test_equal_numbers_and_empty_texts(tmp_path):
    path = tmp_path / "same.csv"
    path.write_text("text,score\n" + "some words,1.5\n" * 4)
    with pytest.raises(DataError, match="every text has the same number"):
        open_data(str(path), kind="scores")
    path.write_text("text,score\nsome words,1.5\n,2.5\nother words,3\n")
    assert "skipped: 1 without a text (the first is line 3)" in open_data(str(path)).description


def test_correlations_equal_their_definitions():
    a, b = np.array([1.0, 2.0, 2.0, 5.0, 4.0]), np.array([0.5, 0.1, 3.0, 9.0, 3.0])
    assert correlation(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert ranks(a).tolist() == [1.0, 2.5, 2.5, 5.0, 4.0]
    assert correlation(np.ones(5), b) == 0.0
    assert correlation(np.full(3, 0.1), np.full(3, 0.1)) == 0.0  # whose mean is not exactly 0.1
    assert is_better("spearman", {"spearman": 0.9}, {"spearman": 0.8})
    metrics = TextRegression(std=2.0).metrics_of_predictions(a, b)
    assert metrics["loss"] == pytest.approx(np.square(a - b).mean() / 4)
