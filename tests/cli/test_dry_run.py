"""`regard train --dry-run`: what would be done, and nothing is trained or written."""

import json
import os

from cli.conftest import TEXT_WORDS


def test_a_dry_run_shows_the_run_and_writes_nothing(regard, materials, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_HOME", str(tmp_path / "cache"))
    completed = regard("train", materials / "cats.txt", *TEXT_WORDS, "--dry-run")
    assert completed.code == 0
    for word in ("would train runs/cats", "data ", "validation ", "tokenizer ", "transformer"):
        assert word in completed.out
    assert "train.steps=4" in completed.out
    assert os.listdir(tmp_path) == []
    assert "warning" not in completed.out
    (tmp_path / "small.txt").write_text("the cat sat on the mat\n" * 6)
    shown = regard("train", tmp_path / "small.txt", "--dry-run").out
    assert (
        "  warning     the validation data has only 14 bytes: its metrics are unreliable;" in shown
    )


def test_json_has_the_same_and_refusals_are_those_of_training(regard, materials, text_run):
    words = ["train", materials / "pairs.tsv", "--dry-run"]
    (run,) = json.loads(regard(*words, "--json").out)["runs"]
    assert run["folder"] == "runs/pairs"
    assert run["parameters"] > 0
    assert regard(*words, "train.lr=-1").code == 2
    assert regard(*words, "--out", text_run).code != 0
    assert "leave one out" in regard(*words, "minutes=1").err


def test_a_study_shows_each_of_its_runs(regard, tmp_path, materials):
    recipe = tmp_path / "two.toml"
    recipe.write_text(
        f'[data]\npath = "{materials / "cats.txt"}"\n[study.a]\n[study.b.model]\nlayers = 2\n'
    )
    out = regard("train", recipe, "--dry-run").out
    assert "would train runs/two/a" in out
    assert "would train runs/two/b" in out


def test_a_dry_run_shows_the_classes_of_the_data_only(regard, tmp_path):
    rows = "".join(f"some words on {name} {n},{name}\n" for n in range(10) for name in "abc")
    (tmp_path / "topics.csv").write_text(f"text,label\n{rows}")
    completed = regard("train", tmp_path / "topics.csv", "--dry-run")
    assert "3 classes" in completed.out
    assert "classes=" not in completed.out


def test_a_dry_run_of_a_series_shows_the_settings_of_training(regard, tmp_path):
    """A short series lets a model read fewer rows than its default."""
    rows = "".join(f"{n % 7},{n % 5}\n" for n in range(200))
    (tmp_path / "load.csv").write_text(f"a,b\n{rows}")
    shown = regard("train", tmp_path / "load.csv", "--dry-run").out
    trained = regard("train", tmp_path / "load.csv", "--out", "run").err
    for part in ('column=["a","b"],context=45', "model.context=45 model.horizon=5"):
        assert part in shown
        assert part in trained
    for label, text in (("forecast    ", shown), ("forecast   ", trained)):
        assert f"{label}all 2 columns; task.column=NAME chooses one" in text
    chosen = ["train", tmp_path / "load.csv", "task.column=a", "--dry-run"]
    assert "all 2 columns" not in regard(*chosen).out
    refused = regard(*chosen, "task.horizon=99999")
    assert refused.code == 3
    assert "lower task.horizon or task.context" in refused.err


def test_columns_that_were_inferred_are_shown_so_and_can_be_turned_around(regard, tmp_path):
    rows = "".join(f"{n};jeden pes {n} nebo dva;one dog {n} or two\n" for n in range(30))
    (tmp_path / "encs.csv").write_text(f"n;cesky;english\n{rows}")
    words = ["train", tmp_path / "encs.csv", "data.tokenizer=char"]
    shown = regard(*words, "--dry-run").out
    tiny = ["train.steps=1", "model.dim=8", "model.heads=2", "model.layers=1", "model.context=64"]
    trained = regard(*words, *tiny, "--out", "run").err
    for heading in (shown, trained):
        assert "source=cesky (inferred), target=english (inferred)" in heading
        assert "data.source=cesky data.target=english" in heading
    turned = regard(*words, "data.source=english", "data.target=cesky", "--dry-run").out
    assert "source=english, target=cesky; left out: n" in turned
    assert "data.source=english data.target=cesky" in turned
    rows = "".join(f"{n};{'ab'[n % 2]};one dog {n} or two\n" for n in range(30))
    (tmp_path / "labels.csv").write_text(f"n;tone;words\n{rows}")
    shown = regard("train", tmp_path / "labels.csv", "--dry-run").out
    assert "text=words (inferred), label=tone (inferred)" in shown
    one = regard("train", tmp_path / "labels.csv", "data.text=words", "--dry-run").out
    assert "text=words, label=tone (inferred)" in one
