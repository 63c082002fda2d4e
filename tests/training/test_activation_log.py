"""`train.log`: statistics of activations at every evaluation."""

import json
from dataclasses import replace

import pytest
import torch

from regard.api.event_lines import activation_lines
from regard.api.run_figures import history_curves
from regard.config import RunConfig, build, merge, to_table
from regard.errors import ConfigError
from regard.explain import trace
from regard.models.build import load_model, resolve
from regard.pipelines import prepare_training
from regard.training.activation_log import find_hook_points, statistics
from regard.training.events import Evaluated
from regard.training.run import begin, resume
from regard.training.storage.run_folder import RunFolder
from regard.training.tracking.history import read_history
from regard.training.tracking.trackers import scalars
from training.runs import config, contents, tiny

LSTM = {"model": {"preset": "lstm", "dim": 6, "layers": 2, "context": 8}}
PATTERNS = {
    "lstm": ["layers.*.forget_gate", "layers.1.state_hook"],
    "transformer": ["decoder.blocks.*.attention.q", "decoder.blocks.0.out"],
}


def settings(data, model, **train):
    whole = {"evaluate_targets": 1000}  # more than there are
    given = config(data / "cats.txt", steps=4, evaluate_every=2, baseline=False, **whole, **train)
    if model == "transformer":
        return given
    table = {key: value for key, value in to_table(given).items() if key != "model"}
    return build(RunConfig, merge(table, LSTM))


def by_hand(x):
    """Mean, mean norm of the vectors along the last axis, and share of zeros, in plain loops."""
    values = x.double().flatten().tolist()
    vectors = x.double().reshape(-1, x.shape[-1]).tolist()
    norms = [sum(value * value for value in vector) ** 0.5 for vector in vectors]
    return {
        "mean": sum(values) / len(values),
        "norm": sum(norms) / len(norms),
        "zeros": values.count(0.0) / len(values),
    }


@pytest.mark.parametrize("model", PATTERNS)
def test_the_logged_statistics_are_those_of_the_first_validation_batch(model, data, tmp_path):
    given = settings(data, model, log=PATTERNS[model])
    events = [e for e in begin(given, tmp_path / "run") if isinstance(e, Evaluated)]
    folder = RunFolder(tmp_path / "run")
    rows = [row for row in folder.rows() if "activations" in row]
    assert [row["step"] for row in rows] == [event.step for event in events] == [2, 4]
    assert [row["activations"] for row in rows] == [event.activations for event in events]
    best = next(row for row in rows if row["validation"] == folder.best_metrics())

    prepared = prepare_training(folder.load_config(), folder.load_tokenizers(given))
    trained = load_model(resolve(folder.load_config().model), folder.load_weights(), "").eval()
    names = find_hook_points(trained, PATTERNS[model])
    assert len(names) == len(best["activations"]) == (3 if model == "lstm" else 2)
    for name in names:
        with trace(trained, name) as seen, torch.no_grad():
            prepared.task.loss(trained, next(prepared.validation_batches(None)))
        assert best["activations"][name.removesuffix("_hook")] == pytest.approx(by_hand(seen[name]))


def test_zeros_are_counted_and_what_is_not_finite_is_none():
    assert statistics(torch.tensor([[3.0, 4.0], [0.0, 0.0]])) == {
        "mean": 1.75,
        "norm": 2.5,
        "zeros": 0.5,
    }
    assert statistics(torch.tensor([[torch.inf, 1.0]])) == {
        "mean": None,
        "norm": None,
        "zeros": 0.0,
    }


def test_training_is_the_same_to_the_bit_with_and_without_hook_points(data, tmp_path):
    for name, log in (("without", []), ("with", ["*"])):
        list(begin(settings(data, "lstm", log=log), tmp_path / name))
    plain, logged = (contents(tmp_path / name) for name in ("without", "with"))
    del plain["metrics.jsonl"], logged["metrics.jsonl"]
    assert plain == logged
    rows = [RunFolder(tmp_path / name).rows() for name in ("without", "with")]
    assert rows[0] == [{k: v for k, v in row.items() if k != "activations"} for row in rows[1]]


def test_a_pattern_that_matches_nothing_is_refused_before_there_is_a_folder(data, tmp_path):
    given = settings(data, "lstm", log=["layers.*.state", "layers.*.forgets"])
    with pytest.raises(
        ConfigError, match=r"train\.log='layers\.\*\.forgets' matches no hook point"
    ) as e:
        list(begin(given, tmp_path / "run"))
    assert "layers.0.forget_gate" in str(e.value)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_may_log_other_hook_points(data, tmp_path):
    list(begin(settings(data, "lstm", log=["layers.0.*"]), tmp_path / "run"))
    with pytest.raises(ConfigError, match="matches no hook point"):
        list(resume(tmp_path / "run", {"train": {"steps": 6, "log": ["nothing"]}}))
    list(resume(tmp_path / "run", {"train": {"steps": 6, "log": ["layers.1.state"]}}))
    *_, last = [row for row in RunFolder(tmp_path / "run").rows() if "activations" in row]
    assert last["step"] == 6
    assert list(last["activations"]) == ["layers.1.state"]


def test_a_model_without_matching_suffix_is_matched_by_its_full_path_too():
    model = tiny()
    assert find_hook_points(model, ["decoder.blocks.0.out"]) == ["decoder.blocks.0.out_hook"]
    assert find_hook_points(model, ["decoder.blocks.0.out_hook"]) == ["decoder.blocks.0.out_hook"]
    assert find_hook_points(model, []) == []


def test_history_curves_trackers_and_display_show_the_hook_points(data, tmp_path):
    given = settings(data, "lstm", log=["layers.0.forget_gate"])
    *_, last = (e for e in begin(given, tmp_path / "run") if isinstance(e, Evaluated))
    history = read_history(tmp_path / "run")
    assert set(history.activations) == {
        f"layers.0.forget_gate.{s}" for s in ("mean", "norm", "zeros")
    }
    assert history.activations["layers.0.forget_gate.mean"][-1] == (
        4,
        last.activations["layers.0.forget_gate"]["mean"],
    )
    titles = {axes.get_title(loc="left") for axes in history_curves(["run"], [history]).axes}
    assert any("forget gate.mean" in title for title in titles), titles
    scores = replace(history, validation={"f1": [(1, 0.001), (2, 0.9)]}, losses=[], activations={})
    *_, panel = history_curves(["run"], [scores]).axes
    assert (panel.get_yscale(), panel.get_ylim()[0]) == ("linear", 0)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "activations/layers.0.forget_gate/norm" in scalars(row)
    (line,) = activation_lines(last)
    assert line.startswith("layers.0.forget_gate  mean 0.")
