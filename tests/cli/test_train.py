"""Training from the command line: its output, its files, and how it stops."""

import json
import re
import shutil
import signal
import sys
import time
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from cli.conftest import PAIR_WORDS, TEXT_WORDS, shell
from regard import api
from regard.errors import DataError
from regard.tasks import Causal
from regard.training.storage.evaluation import few_targets_warning


def test_train_prints_the_data_the_settings_and_the_next_commands(regard, materials):
    completed = regard("train", materials / "cats.txt", *TEXT_WORDS)
    assert completed.code == 0
    assert re.search(r"loss +\d", completed.out)
    assert "data " in completed.err
    assert "model.dim=16" in completed.err
    assert "train.optimizer=muon" in completed.err  # chosen for the data, and can be overridden
    assert completed.err.count("validation (the first 128 of 286 tokens): loss") == 2  # first, last
    assert "on all 286 tokens, context 8, stride 6:" in completed.err
    assert "train.best_metric=loss" in completed.err
    assert "regard generate runs/cats" in completed.err
    assert "regard resume runs/cats" in completed.err


def test_quiet_train_prints_results_only(regard, materials):
    completed = regard(
        "train", materials / "cats.txt", *TEXT_WORDS, "--quiet", "--json", "--out", "r"
    )
    result = json.loads(completed.out)
    assert completed.err == ""
    assert {"run", "step", "loss", "perplexity", "bits_per_byte"} <= set(result)
    assert result["run"] == "r"


def test_weights_that_training_did_not_improve_are_said_to_be_untrained(regard, materials):
    words = [materials / "cats.txt", *TEXT_WORDS, "train.lr=10", "train.schedule=constant"]
    completed = regard("train", *words, "--quiet")
    assert "these are the weights before training: no later loss was better" in completed.out
    better = regard("train", materials / "cats.txt", *TEXT_WORDS, "--quiet")
    assert "before training" not in better.out


def test_the_default_folder_is_never_one_that_exists(regard, materials):
    for folder in ("runs/cats", "runs/cats-2"):
        completed = regard("train", materials / "cats.txt", *TEXT_WORDS, "--json")
        assert json.loads(completed.out)["run"] == folder


def test_two_parallel_files_need_no_name(regard, tmp_path):
    (tmp_path / "a.en").write_text("".join(f"{n} cats\n" for n in range(50)))
    (tmp_path / "b.fr").write_text("".join(f"{n} chats\n" for n in range(50)))
    completed = regard("train", "data.source=a.en", "data.target=b.fr", *PAIR_WORDS)
    assert completed.code == 0, completed.err
    assert "regard translate runs/a" in completed.err


def test_a_model_fitted_without_gradients_is_trained_too(regard, materials):
    words = ["model.family=ngram", "model.order=3", "model.context=32", "--out", "counted"]
    asked = ["train.steps=9", "train.lr=1", "train.seed=2"]
    completed = regard("train", materials / "cats.txt", *words, *asked)
    assert completed.code == 0, completed.err
    assert "model.order=3" in completed.err
    assert "no effect  train.steps, train.lr: model.family=ngram is fitted with" in completed.err
    assert "regard resume" not in completed.err
    assert regard("generate", "counted", "the", "-n", "5", "--seed", "1").out.startswith("the")
    assert regard("explain", "counted", "the").code == 2
    model = {"family": "ngram", "context": 32}
    events = api.train_events(materials / "cats.txt", model=model, minutes=5, out="again")
    assert any(line.startswith("no effect  minutes: ") for line in next(events).description)


@pytest.mark.parametrize("family", ["ngram", "hmm"])
def test_a_model_fitted_without_gradients_says_how_many_parameters_it_has(
    regard, materials, family
):
    words = [f"model.family={family}", "model.context=32", "--out", "fitted"]
    completed = regard("train", materials / "cats.txt", *words)
    assert f"model      {family}, fitted without gradients, on cpu" in completed.err
    kept = json.loads(regard("compare", "fitted", "--json").out)["runs"][0]["parameters"]
    assert kept > 0
    assert f", {kept:,} parameters; validation" in completed.err
    assert regard("info", "fitted").out.startswith(f"fitted  run, {family}, {kept:,} parameters")
    assert json.loads(regard("info", "fitted", "--json").out)["parameters"] == kept
    assert regard("info", family).out.startswith(
        f"{family}  preset, {family}, fitted without gradients"
    )


def test_a_folder_of_many_files_is_announced_before_it_is_read(regard, tmp_path, monkeypatch):
    def look(*_, **__):
        raise DataError("looked")

    monkeypatch.setattr("regard.training.setup.configure.open_data", look)
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", ".f", ".git/g", "b/.h/i"):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text("text")
    for limit, message in ((3, ""), (2, f"reading more than 2 files in {tmp_path / 'mine'}; ")):
        monkeypatch.setattr(sys.modules["regard.cli.train"], "MANY_FILES", limit)
        completed = regard("train", "mine/b/..")
        assert completed.err.endswith("regard: looked\n")
        assert completed.err.startswith(message or "regard: ")


def test_minutes_says_that_it_measures(regard, materials, monkeypatch):
    def three_steps(config, choose_model, started, keep, on_timing):
        assert (config.minutes, choose_model) == (1, False)  # model.dim is given
        assert started < time.perf_counter()
        assert "steps" not in keep
        assert "batch" in keep
        on_timing()
        return replace(config, minutes=None, train=replace(config.train, steps=3))

    monkeypatch.setattr("regard.training.setup.configure.fit_to_minutes", three_steps)
    words = [word for word in TEXT_WORDS if not word.startswith("train.steps")]
    completed = regard("train", materials / "cats.txt", *words, "minutes=1")
    assert completed.code == 0
    assert completed.err.startswith("measuring the training speed")


def test_resume_extends_a_run(regard, text_run, tmp_path):
    shutil.copytree(text_run, tmp_path / "copy")
    completed = regard("resume", "copy", "train.steps=6", "--json")
    assert completed.code == 0
    assert json.loads(completed.out)["step"] == 6
    assert "resumed    from step 4" in completed.err


def test_resume_can_go_on_from_an_earlier_step(regard, text_run, tmp_path):
    shutil.copytree(text_run, tmp_path / "copy")
    completed = regard("resume", "copy", "--step", 3)
    assert completed.code == 0
    assert "resumed    from step 3" in completed.err
    assert regard("resume", "copy", "--step", 77).code == 4


@pytest.mark.parametrize(
    ("asked", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.long)],
)  # tests/storm/test_signals.py has the others inside one process
def test_a_signal_saves_the_run_which_then_goes_on(regard, materials, tmp_path, asked, code):
    folder = tmp_path / "stopped"
    words = [*TEXT_WORDS[:-1], "train.steps=100000", "train.evaluate_every=20"]
    process = shell("train", materials / "cats.txt", *words, "--out", folder)
    with process:
        for line in process.stderr:
            if line.startswith("step 20 "):
                process.send_signal(asked)
                break
        stderr = process.stderr.read()
    assert process.returncode == code
    assert "Traceback" not in stderr
    stopped = re.search(rf"^regard: stopped by {asked.name} at step (\d+) of", stderr, re.MULTILINE)
    assert f"regard resume {folder}" in stderr
    step = int(stopped[1])
    assert load_file(folder / "checkpoints" / f"step-{step}" / "model.safetensors")
    after = regard("resume", folder, f"train.steps={step + 2}", "--json")
    assert after.code == 0
    assert json.loads(after.out)["step"] == step + 2


def test_no_color_and_pipes_get_no_escape_codes(regard, materials, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    completed = regard("train", materials / "cats.txt", *TEXT_WORDS)
    assert "\x1b" not in completed.out + completed.err


def test_few_validation_tokens_are_said_before_training_and_with_the_result(regard, tmp_path):
    (tmp_path / "short.txt").write_text("hello there\n")
    completed = regard("train", tmp_path / "short.txt", *TEXT_WORDS, "model.context=2")
    warning = (
        "warning    the validation data has only 1 token to predict: its metrics are unreliable"
    )
    assert warning in completed.err
    assert warning in completed.out.splitlines()[-1]
    assert few_targets_warning(Causal, 99)
    assert few_targets_warning(Causal, 100) == []
