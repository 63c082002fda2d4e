"""A study: several runs of one recipe, from one command."""

import json
import signal

import pytest

from regard.training.storage.checkpoint import read_tensors
from training.runs import interrupt

RECIPE = """
[data]
path = "cats.txt"
tokenizer = "char"
[model]
context = 8
[train]
steps = 3
tokens = 16
[study.counted]
model.family = "ngram"
[study.gru]
model.preset = "gru"
model.dim = 8
[study.lstm]
model = { preset = "lstm", dim = 8, layers = 1 }
train.batch = 4
"""


@pytest.fixture
def recipe(materials, tmp_path):
    (tmp_path / "cats.txt").write_bytes((materials / "cats.txt").read_bytes())
    path = tmp_path / "cells.toml"
    path.write_text(RECIPE)
    return path


REPORTED = """
task = "text_classification"
model = { preset = "elman", dim = 8, layers = 1, one_hot = true, context = 12 }
train = { steps = 2, batch = 4 }
[data]
path = { kind = "parentheses", examples = 40, max_length = 6 }
tokenizer = "char"
[report]
by_length = { kind = "parentheses", examples = 60, max_length = 12, seed = 2 }
[study.one]
train.lr = 1e-3
[study.two]
train.lr = 1e-2
"""


def test_a_study_ends_with_the_evaluation_of_its_report(regard, tmp_path):
    (tmp_path / "longer.toml").write_text(REPORTED)
    completed = regard("train", tmp_path / "longer.toml")
    assert completed.code == 0, completed.err
    table = completed.out.split("accuracy, by characters")[1]
    assert [line.split()[0] for line in table.split("\n") if line] == [
        "2",
        "4",
        "6",
        "8",
        "10",
        "12",
    ]


@pytest.mark.parametrize(
    "report", ["report = 3", "[report]\nlonger = 3", "[report]\nby_length = 'a'\nother = 1"]
)
def test_a_report_has_one_key(regard, tmp_path, report):
    (tmp_path / "wrong.toml").write_text(f"{report}\n[study.one]\ntrain.lr = 1e-3")
    completed = regard("train", tmp_path / "wrong.toml")
    assert "report is for a study and has one key, by_length" in completed.err


def test_a_study_trains_and_compares_all_of_its_runs(regard, recipe):
    completed = regard("train", recipe)
    assert completed.code == 0, completed.err
    assert completed.out.split()[:3] == ["counted", "gru", "lstm"]
    assert [
        line for line in completed.err.splitlines() if " of 3" in line and "step" not in line
    ] == [
        "counted, 1 of 3",
        "gru, 2 of 3",
        "lstm, 3 of 3",
    ]
    saved = {
        name: json.loads((recipe.parent / "runs/cells" / name / "config.json").read_text())
        for name in ("counted", "gru", "lstm")
    }
    assert [run["model"]["family"] for run in saved.values()] == ["ngram", "recurrent", "recurrent"]
    assert [run["train"]["tokens"] for run in saved.values()] == [16, 16, None]
    assert saved["lstm"]["train"]["batch"] == 4
    assert {run["train"]["steps"] for run in saved.values()} == {3}

    again = regard("train", recipe, "--json")
    runs = json.loads(again.out)["runs"]
    assert [run["name"] for run in runs] == ["counted", "gru", "lstm"]
    assert all("bits_per_byte" in run["metrics"] for run in runs)
    assert again.err.count("already finished") == 3

    other = regard("train", recipe, "train.steps=4")
    assert other.code == 2
    assert "was trained with train.steps=3, but now train.steps=4" in other.err


def test_an_interrupted_study_continues_to_the_same_weights(regard, recipe, monkeypatch):
    recipe.write_text(RECIPE.replace("train.batch = 4", "train = { batch = 4, steps = 9 }"))
    with monkeypatch.context() as patch:
        interrupt(patch, 5, asked=signal.SIGINT)  # which only the last run has
        stopped = regard("train", recipe, "--out", "all")
    assert stopped.code == 130, stopped.err
    assert "stopped by SIGINT at step 5 of 9" in stopped.err
    assert "or continue the whole study: run the same command again" in stopped.err
    completed = regard("train", recipe, "--out", "all")
    assert completed.code == 0, completed.err
    assert "gru, 2 of 3: already finished" in completed.err
    assert "lstm, 3 of 3\n" in completed.err
    assert "resumed    from step 5" in completed.err
    assert regard("train", recipe, "--out", "peace").code == 0
    for name in ("gru", "lstm"):
        ended, peace = (
            read_tensors(recipe.parent / place / name / "model.safetensors")
            for place in ("all", "peace")
        )
        assert all(ended[key].equal(peace[key]) for key in peace)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("train.batch = 4", "train.bach = 4", "study.lstm.train.bach: unknown key 'bach'"),
        ("[study.lstm]", "[study]\nlstm = 4\n[other]", "unknown key 'other'"),
        ("[study.lstm]", '[study."../lstm"]', "cannot name a folder"),
        ("model.dim = 8", "model.dim = 8\nmodel.dimm = 8", "dimm"),
    ],
)
def test_a_wrong_key_in_a_study_is_named_with_its_path(regard, recipe, old, new, message):
    recipe.write_text(RECIPE.replace(old, new))
    completed = regard("train", recipe)
    assert completed.code == 2
    assert message in completed.err
    assert "Traceback" not in completed.err


def test_where_one_run_is_asked_for_a_study_is_refused(regard, recipe):
    completed = regard("info", recipe)
    assert completed.code == 2
    assert "a study of several runs: counted, gru, lstm" in completed.err
    completed = regard("train", recipe, "minutes=1")
    assert completed.code == 2
    assert "set train.steps" in completed.err


FAMILIES = """
[data]
path = "cats.txt"
tokenizer = "char"
[model]
context = 8
[train]
steps = 2
batch = 4
[study.ngram]
model.preset = "ngram"
[study.hmm]
model = { preset = "hmm", states = 3, iterations = 2 }
[study.bengio]
model = { preset = "bengio", dim = 8, hidden_dim = 8 }
[study.lstm]
model = { preset = "lstm", dim = 8 }
[study.gru]
model = { preset = "gru", dim = 8 }
[study.convolution]
model = { preset = "convolution", dim = 8, layers = 2 }
[study.transformer]
model = { preset = "tiny-decoder", dim = 8, layers = 1, heads = 2 }
"""


def test_models_of_all_families_are_compared_and_generate(regard, recipe):
    recipe.write_text(FAMILIES)
    completed = regard("train", recipe)
    assert completed.code == 0, completed.err
    metrics, settings = completed.out.split("\n\n", 1)
    head, *lines = metrics.splitlines()
    assert head.split()[:3] == ["loss", "perplexity", "bits_per_byte"]
    names = [line.split()[0] for line in lines]
    parameters = 1 + head.split().index("parameters")
    assert all(int(line.split()[parameters].replace(",", "")) > 0 for line in lines)
    assert "model.family" in settings
    assert names == ["ngram", "hmm", "bengio", "lstm", "gru", "convolution", "transformer"]
    for name in names:
        words = ["generate", f"runs/cells/{name}", "the ", "-n", 12, "--seed", 1]
        wrote = regard(*words)
        assert wrote.code == 0, wrote.err
        assert wrote.out.startswith("the ")
        assert len(wrote.out.strip()) > len("the ")
        assert regard(*words).out == wrote.out
