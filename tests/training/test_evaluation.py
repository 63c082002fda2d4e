"""Evaluations of a run: their cost, their number, and the one at its end."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import regard
from regard import pipelines
from regard.config import RunConfig, TrainConfig, build, merge, to_table
from regard.errors import ConfigError
from regard.models.build import build_model
from regard.pipelines import prepare_training, validation_metrics
from regard.tasks import Tag, TextClassification
from regard.tasks.metrics import is_better
from regard.training import budget, train_state
from regard.training.evaluation_plan import plan_evaluations, with_best_metric
from regard.training.events import Evaluated, RunFinished
from regard.training.run import begin
from regard.training.storage.run_folder import RunFolder
from training.runs import config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(data):
    return prepare_training(config(data / "cats.txt"))


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The events of a run that was evaluated on a part while it was trained, and its folder."""
    path = tmp_path_factory.mktemp("finished") / "cats"
    return list(begin(config(data / "cats.txt", steps=4), path)), path


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[1], tmp_path / "cats")


def test_an_evaluation_reports_the_targets_that_are_done(prepared):
    model, calls = build_model(prepared.model), []
    validation_metrics(prepared, model, CPU, 200, lambda _, *numbers: calls.append(numbers))
    assert calls[-1] == (200, 200)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    calls.clear()
    validation_metrics(prepared, model, CPU, None, lambda _, *numbers: calls.append(numbers))
    assert calls[-1] == (prepared.validation_targets,) * 2 == (prepared.validation_size - 1,) * 2


@pytest.mark.parametrize("stride", [None, 1, 3, 8])
def test_every_token_is_predicted_once_from_the_window_before_it(data, prepared, stride):
    settings = config(data / "cats.txt", evaluate_stride=stride)
    given, model = prepare_training(settings), build_model(prepared.model).eval()
    by, context = stride or 6, 8
    blocks = prepare_training(config(data / "cats.txt", evaluate_stride=context))
    tokens = [next(blocks.validation_batches(None)).ids[0, 0].item()]
    for batch in blocks.validation_batches(None):
        tokens += batch.targets[batch.targets >= 0].tolist()
    losses = []
    for position in range(1, len(tokens)):
        window = 0 if position <= context else -(-(position - context) // by) * by
        with torch.no_grad():
            logits = model.head(model(torch.tensor([tokens[window:position]])))[0, -1]
        losses.append(float(cross_entropy(logits, torch.tensor(tokens[position]))))
    expected = sum(losses) / len(losses)
    assert validation_metrics(given, model, CPU)["loss"] == pytest.approx(expected, abs=1e-5)
    assert given.stride == by


def test_a_stride_outside_of_the_context_or_of_another_task_is_refused(data):
    with pytest.raises(ConfigError, match=r"evaluate_stride=9 must be .* at most the context, 8"):
        prepare_training(config(data / "cats.txt", evaluate_stride=9))
    with pytest.raises(ConfigError, match="task='seq2seq' has none"):
        prepare_training(config(data / "pairs.tsv", evaluate_stride=4))


def test_evaluations_cost_about_a_tenth_of_the_run(prepared):
    # a step reads 16 targets three times, an evaluation each target 8 / 6 times
    def plan(steps, **settings):
        given = TrainConfig(steps=steps, batch=2, accumulate=2, **settings)
        large = replace(prepared, validation_targets=10**9)
        result = plan_evaluations(given, large)
        return result.every, result.at_start, result.limit

    assert plan(5) == (5, True, 128)
    assert plan(200) == (100, True, 128)
    assert plan(1000) == (100, True, 327)
    assert plan(10**7) == (10**6, True, 200_000)
    assert plan(1000, evaluate_every=10) == (10, False, 128)
    assert plan(1000, evaluate_targets=1000) == (500, True, 1000)
    assert plan(1000, evaluate_targets=1000, evaluate_every=3) == (3, False, 1000)
    assert plan_evaluations(TrainConfig(steps=10**6), prepared).limit is None


def test_by_default_a_run_is_evaluated_at_its_start_and_at_its_end(data, tmp_path):
    settings = config(data / "cats.txt", steps=3, evaluate_every=None, evaluate_targets=None)
    events = list(begin(settings, tmp_path / "run"))
    assert [event.step for event in events if isinstance(event, Evaluated)] == [0, 3]


def test_a_number_over_a_part_says_so(finished):
    events, path = finished
    (evaluated,) = (event for event in events if isinstance(event, Evaluated))
    assert evaluated.evaluated_on == "the first 200 of 286 tokens"
    (row,) = (row for row in RunFolder(path).rows() if "validation" in row)
    assert (row["validation_targets"], row["validation_total"]) == (200, 286)


def test_at_the_end_the_best_weights_are_evaluated_on_all_data(finished):
    events, path = finished
    assert isinstance(events[-1], RunFinished)
    assert events[-1].evaluated_on == "all 286 tokens, context 8, stride 6"
    run = regard.load(path, device="cpu")
    assert run.metrics == events[-1].metrics == run.evaluate()
    assert regard.info(path).metrics == run.metrics
    assert regard.info(path).evaluated_on == events[-1].evaluated_on
    (row,) = (row for row in RunFolder(path).rows() if "validation" in row)
    assert row["validation"] != run.metrics


@pytest.mark.parametrize("reason", ["long", "signal"])
def test_an_evaluation_that_takes_too_long_is_left_to_another_command(
    data, tmp_path, monkeypatch, reason
):
    if reason == "long":
        monkeypatch.setattr(budget, "MIN_FINAL_SECONDS", 0.0)
        monkeypatch.setattr(train_state.TrainState, "seconds_for_all", lambda self: 1e9)
    calls, metrics = [], pipelines.validation_metrics

    def counted(data, model, device, limit, progress=None):
        calls.append(limit)
        if limit is None:
            signal.raise_signal(signal.SIGINT)
        return metrics(data, model, device, limit, progress)

    monkeypatch.setattr(pipelines, "validation_metrics", counted)
    *_, end = begin(config(data / "cats.txt", steps=4), tmp_path / "run")
    assert calls == ([200] if reason == "long" else [200, None])
    assert end.evaluated_on == "the first 200 of 286 tokens, context 8, stride 6"
    assert end.seconds_for_all > 0
    run = regard.load(tmp_path / "run", device="cpu")
    assert run.metrics == end.metrics
    metrics_of_all = run.evaluate()  # which stores them
    assert run.metrics == metrics_of_all != end.metrics


def test_new_weights_have_no_evaluation_of_older_ones(copied):
    folder = RunFolder(copied)
    folder.save_weights(folder.load_weights(), folder.load_config())
    assert not folder.evaluation.exists()
    assert folder.load_evaluation().evaluated_on == "the first 200 of 286 tokens"


def test_compare_evaluates_again_what_was_evaluated_on_a_part(finished, copied):
    path = finished[1]
    RunFolder(copied).evaluation.unlink()
    comparison = regard.compare(path, copied)
    losses = comparison.metrics["loss"]
    assert losses[0] == losses[1] == regard.load(path, device="cpu").evaluate()["loss"]
    (note,) = comparison.notes
    assert note == (
        f"{copied}: evaluated on the first 200 of 286 tokens before, now on all 286 tokens, "
        "context 8, stride 6"
    )
    assert regard.compare(path, copied).notes == []  # it was stored


def test_compare_evaluates_with_one_stride(finished, copied):
    folder = RunFolder(copied)
    table = merge(to_table(folder.load_config()), {"train": {"evaluate_stride": 8}})
    folder.save_config(build(RunConfig, table))
    blocks = regard.load(copied, device="cpu").evaluate()
    comparison = regard.compare(finished[1], copied)
    losses = comparison.metrics["loss"]
    assert losses[0] == losses[1] != blocks["loss"]
    assert "stride 8 before, now on all 286 tokens, context 8, stride 6" in comparison.notes[0]
    assert comparison.evaluations["stride"] == ("6 of 8", "6 of 8")


def test_compare_leaves_out_what_cannot_be_compared(finished, copied):
    path, folder = finished[1], RunFolder(copied)
    stored = json.loads(folder.evaluation.read_text())
    folder.evaluation.write_text(json.dumps({**stored, "data": "other"}))
    comparison = regard.compare(path, copied)
    assert comparison.metrics == {}
    assert "different validation data: their metrics cannot be compared" in comparison.notes[0]
    folder.evaluation.unlink()
    folder.model.unlink()
    comparison = regard.compare(path, copied)
    assert comparison.metrics["loss"][1] is None
    assert "its metrics are left out" in comparison.notes[0]


def test_networks_and_ngrams_are_evaluated_on_the_same_targets(data, finished, tmp_path):
    table = to_table(config(data / "cats.txt")) | {"model": {"preset": "ngram", "order": 2}}
    ngram = build(RunConfig, table)
    list(begin(ngram, tmp_path / "ngram"))
    comparison = regard.compare(finished[1], tmp_path / "ngram")
    assert comparison.evaluations["validation targets"] == (286, 286)
    assert comparison.notes == []
    runs = [regard.load(path, device="cpu") for path in (finished[1], tmp_path / "ngram")]
    assert comparison.metrics["loss"] == tuple(run.evaluate()["loss"] for run in runs)


def test_the_best_weights_are_chosen_by_the_metric_of_the_task(data):
    settings = config(data / "cats.txt")
    assert with_best_metric(settings).train.best_metric == "loss"
    for task, metric in (
        ("text_classification", "accuracy"),
        ("tag", "f1"),
        ("image_classification", "accuracy"),
    ):
        assert with_best_metric(replace(settings, task=task)).train.best_metric == metric
    chosen = replace(settings, task="tag", train=replace(settings.train, best_metric="last"))
    assert with_best_metric(chosen).train.best_metric == "last"
    assert (TextClassification.best_metric, Tag.best_metric) == ("accuracy", "f1")


def test_of_equal_accuracies_the_one_with_the_lower_loss_is_better():
    old = {"accuracy": 0.5, "loss": 1.0}
    assert is_better("accuracy", {"accuracy": 0.5, "loss": 0.9}, old)
    assert not is_better("accuracy", {"accuracy": 0.5, "loss": 1.1}, old)
    assert is_better("accuracy", {"accuracy": 0.6, "loss": 2.0}, old)
    assert not is_better("accuracy", {"accuracy": 0.4, "loss": 0.1}, old)
