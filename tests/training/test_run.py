"""A run from beginning to end, stopped, killed, resumed and extended on the way."""

import inspect
import json
import math
import shutil
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regard
from regard import pipelines
from regard.accel import cublaslt
from regard.config import to_table
from regard.errors import CheckpointError, ConfigError, DataError, DivergedError, TrainingStopped
from regard.training import run
from regard.training.events import Evaluated, RunFinished, RunStarted, StepLogged
from regard.training.loop import Objective
from regard.training.run import begin, resume
from regard.training.storage.checkpoint import digest, read_tensors
from regard.training.storage.run_folder import RunFolder
from regard.training.train_state import TrainState
from training.runs import Crash, config, contents, interrupt, write_data

SOURCE = Path(regard.__file__).parent
WHOLE = {"evaluate_targets": 1000}  # more than there are: no other evaluation at the end
KINDS = ["cats.txt", "pairs.tsv"]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Two runs that nothing interrupted, one on text and one on pairs; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    for kind in KINDS:
        events = list(begin(config(data / kind), folder / kind))
        assert isinstance(events[-1], RunFinished)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of the finished run on text."""
    return shutil.copytree(whole / "cats.txt", tmp_path / "copy")


def go_on(path, *, overrides=None, **options):
    """Resume to the end; the events."""
    return list(resume(path, overrides, **options))


def rows(path, kind="loss"):
    return [row for row in RunFolder(path).rows() if kind in row]


def kept(path):
    return digest(sorted(read_tensors(path).items()))


def steps_of(path):
    return sorted(int(each.name[5:]) for each in (path / "checkpoints").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_tells_what_happens_and_leaves_it_on_disk(whole, kind, data):
    folder = RunFolder(whole / kind)
    assert [row["step"] for row in rows(folder.path)] == list(range(1, 13))
    assert [row["step"] for row in rows(folder.path, "validation")] == [4, 8, 12]
    assert all(math.isfinite(row["loss"]) and row["targets"] > 0 for row in rows(folder.path))
    assert folder.samples.read_text().count("--- step ") == 3
    assert steps_of(folder.path)[-3:] == [6, 9, 12]
    assert folder.load_config().data.path == str(data / kind)
    assert "preset" not in folder.load_config().model  # resolved, with nothing left to default
    assert folder.load_config().model["vocab_size"] > 0


def test_the_events_come_in_order(data, tmp_path):
    events = list(begin(config(data / "cats.txt", steps=4, **WHOLE), tmp_path / "run"))
    assert isinstance(events[0], RunStarted)
    assert events[0].step == 0
    assert events[0].parameters > 500
    progress = [event for event in events if isinstance(event, StepLogged)]
    assert (progress[-1].step, progress[-1].steps, progress[-1].seconds_left) == (4, 4, 0)
    (evaluated,) = (event for event in events if isinstance(event, Evaluated))
    assert evaluated.is_best
    assert evaluated.sample
    assert events[-1].metrics == evaluated.metrics
    assert events[-1].step == 4


def test_a_step_passes_through_at_most_16_files(data, tmp_path, monkeypatch):
    """From the end of step 1 to the end of step 4, with the thread that prefetches batches."""
    files: set[str] = set()
    recording = False

    def record(frame, event, value):
        name = frame.f_code.co_filename
        if recording and name.startswith(str(SOURCE)):
            files.add(str(Path(name).relative_to(SOURCE)))

    def train(*words, steps=run.train, **options):
        nonlocal recording
        for step in steps(*words, **options):
            recording = 1 <= step.index < 4
            yield step

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr("regard.training.log.FLUSH_SECONDS", 60)  # no writing in between
    settings = config(data / "cats.txt", steps=8, evaluate_every=8, save_every=8)
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        list(begin(settings, tmp_path / "run"))
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert {"data/loader.py", "nn/attention.py", "training/loop.py", "training/run.py"} <= files
    files.discard("accel/onednn_matmul.py")  # attached from outside, on some processors
    assert len(files) <= 16, "\n".join(sorted(files))


@pytest.mark.parametrize("function", [begin, resume, run._train, run._train_from])
def test_the_main_functions_of_a_run_fit_a_screen(function):
    assert len(inspect.getsource(function).splitlines()) <= 45


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", [signal.SIGTERM, None], ids=["stopped", "killed"])
def test_an_interrupted_run_ends_as_if_nothing_had_happened(
    kind, asked, data, whole, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    events = begin(config(data / kind), folder)
    reached = []
    for at in (1, 5, 6, 8, 11):
        with monkeypatch.context() as patch:
            interrupt(patch, at, asked=asked)
            with pytest.raises(TrainingStopped if asked else Crash) as raised:
                list(events)
        if asked:
            assert raised.value.exit_code == 75
            assert f"at step {at} of 12" in str(raised.value)
            assert f"regard resume {folder}" in str(raised.value)
        events = resume(folder)
        reached.append(max(steps_of(folder), default=0))
    assert reached == ([1, 5, 6, 8, 11] if asked else [0, 3, 3, 6, 9])
    assert isinstance(list(events)[-1], RunFinished)
    ours, theirs = contents(folder), contents(whole / kind)
    for name in ("metrics.jsonl", "samples.txt", "model.safetensors"):
        assert ours[name] == theirs[name]
    last = [name for name in theirs if "step-12" in name]
    assert len(last) == 3
    assert all(ours[name] == theirs[name] for name in last)


def test_what_was_logged_after_the_checkpoint_is_cut_back(data, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt(patch, 9)
        with pytest.raises(Crash):
            list(begin(config(data / "cats.txt"), folder))
    logged = [row["step"] for row in RunFolder(folder).rows()]
    assert max(logged) == 8  # the evaluation at 8 was written, the last checkpoint is of 6
    assert steps_of(folder)[-1] == 6
    events = resume(folder)
    assert next(events).step == 6
    list(events)
    assert [row["step"] for row in rows(folder)] == list(range(1, 13))
    assert [row["step"] for row in rows(folder, "validation")] == [4, 8, 12]


def test_ctrl_c_has_its_own_exit_code(data, tmp_path, monkeypatch):
    interrupt(monkeypatch, 2, asked=signal.SIGINT)
    with pytest.raises(TrainingStopped, match="stopped by SIGINT at step 2") as raised:
        list(begin(config(data / "cats.txt"), tmp_path / "run"))
    assert raised.value.exit_code == 130


def test_a_signal_in_the_last_step_ends_the_run_as_usual(data, tmp_path, monkeypatch):
    interrupt(monkeypatch, 12, asked=signal.SIGTERM)
    assert isinstance(list(begin(config(data / "cats.txt"), tmp_path / "run"))[-1], RunFinished)


def test_an_existing_folder_is_refused(data, copied):
    before = contents(copied)
    with pytest.raises(ConfigError, match="exists already and is not overwritten"):
        list(begin(config(data / "cats.txt"), copied))
    assert contents(copied) == before


def test_a_finished_run_that_was_killed_before_pruning_is_pruned_by_resume(copied):
    before = contents(copied)
    newest = max((copied / "checkpoints").iterdir(), key=lambda path: int(path.name[5:]))
    shutil.copytree(newest, copied / "checkpoints" / "step-1")
    with pytest.raises(ConfigError, match="is at step 12 already"):
        go_on(copied)
    assert contents(copied) == before


def test_a_finished_run_says_how_to_train_on(copied):
    before = contents(copied)
    with pytest.raises(ConfigError, match="is at step 12 already") as raised:
        go_on(copied)
    assert "train.steps=24" in str(raised.value)
    with pytest.raises(ConfigError, match=r"is at step 12 already, and train\.steps=5"):
        go_on(copied, overrides={"train": {"steps": 5}})
    assert contents(copied) == before
    assert RunFolder(copied).load_config().train.steps == 12


def test_a_finished_run_can_be_extended(copied, monkeypatch):
    algorithms = {"(8, 8, 8) bfloat16→bfloat16": "00ff"}
    monkeypatch.setattr(cublaslt, "_choices", algorithms)
    monkeypatch.setattr(cublaslt, "_preferred", {})
    before = rows(copied)
    events = go_on(copied, overrides={"train": {"steps": 15}})
    assert (events[0].step, events[-1].step) == (12, 15)
    assert rows(copied)[:12] == before
    assert [row["step"] for row in rows(copied)] == list(range(1, 16))
    assert RunFolder(copied).load_config().train.steps == 15
    assert cublaslt._preferred == {}
    go_on(copied, overrides={"train": {"steps": 16}})
    assert cublaslt._preferred == algorithms  # of the checkpoint; what is not offered is said


def test_an_earlier_step_can_be_gone_on_from_and_gives_the_same(copied, whole):
    shutil.rmtree(copied / "checkpoints" / "step-12")
    (copied / "checkpoints" / "step-9" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-9/model.safetensors .*\n.*--step 6"):
        go_on(copied)
    go_on(copied, step=6)
    ours, theirs = contents(copied), contents(whole / "cats.txt")
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("every", [2, 4])
def test_nothing_of_a_dropped_future_stays(every, data, tmp_path, monkeypatch):
    """After going on from an earlier step, the model that is kept is none of the old later ones."""
    folder = tmp_path / "run"
    judged(monkeypatch, [3.0, 2.0, 1.0, 0.5])
    settings = config(
        data / "cats.txt", steps=8, evaluate_every=2, save_every=every, ema=0.0, **WHOLE
    )
    list(begin(settings, folder))
    judged(monkeypatch, [2.5, 2.5])
    with monkeypatch.context() as patch:
        interrupt(patch, 7)
        with pytest.raises(Crash):
            go_on(folder, step=4)
    assert steps_of(folder)[-1] == (6 if every == 2 else 4)
    best = folder / "checkpoints" / "step-4" / "model.safetensors"
    assert kept(folder / "model.safetensors") == kept(best)


def test_a_best_model_that_cannot_be_had_again_is_forgotten(data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    judged(monkeypatch, [1.0, 2.0, 0.5, 3.0])
    settings = config(data / "cats.txt", steps=8, evaluate_every=2, save_every=5, ema=0.0, **WHOLE)
    list(begin(settings, folder))
    judged(monkeypatch, [2.5, 2.4])
    events = go_on(folder, step=5)  # whose best, of step 2, has no checkpoint
    assert events[-1].metrics["loss"] == 2.4
    last = folder / "checkpoints" / "step-8" / "model.safetensors"
    assert kept(folder / "model.safetensors") == kept(last)


def test_a_changed_tokenizer_is_refused(copied):
    file = copied / "tokenizer.json"
    file.write_text(file.read_text().replace('"c"', '"C"'))
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* has changed") as raised:
        go_on(copied, overrides={"train": {"steps": 20}})
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("kind", KINDS)
def test_changed_data_is_refused_and_the_same_elsewhere_is_not(kind, tmp_path, data):
    folder, ours = tmp_path / "run", write_data(tmp_path) / kind
    list(begin(config(ours, steps=3, evaluate_every=3), folder))
    before = ours.read_text()
    ours.write_text(before.replace("cat", "cut", 1))
    with pytest.raises(DataError, match="the data has changed since the run began") as raised:
        go_on(folder, overrides={"train": {"steps": 6}})
    assert raised.value.exit_code == 3
    assert str(ours) in str(raised.value)
    go_on(folder, overrides={"train": {"steps": 6}, "data": {"path": str(data / kind)}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", {"dim": 16}),
        ("model", {"preset": "gpt2"}),
        ("task", {"kind": "seq2seq"}),
        ("data", {"tokenizer": "bpe"}),
        ("train", {"optimizer": "adamw"}),
        ("train", {"seed": 2}),
        ("train", {"start": "elsewhere"}),
    ],
)
def test_what_the_weights_depend_on_cannot_change_on_the_way(copied, key, value):
    before = RunFolder(copied).config.read_text()
    with pytest.raises(
        ConfigError, match=rf"{key}.* cannot change when a run is resumed"
    ) as raised:
        go_on(copied, overrides={key: value})
    assert f"train.start={copied}" in str(raised.value)
    assert RunFolder(copied).config.read_text() == before


def test_averaging_can_begin_and_end_on_the_way(data, tmp_path):
    folder = tmp_path / "run"
    list(begin(config(data / "cats.txt", ema=0.0, steps=3, evaluate_every=3), folder))
    assert not read_tensors(folder / "checkpoints" / "step-3" / "ema.safetensors")
    go_on(folder, overrides={"train": {"steps": 6, "ema": 0.5}})
    assert read_tensors(folder / "checkpoints" / "step-6" / "ema.safetensors")
    go_on(folder, overrides={"train": {"steps": 9, "ema": 0.0}})
    assert not read_tensors(folder / "checkpoints" / "step-9" / "ema.safetensors")


def faulty(monkeypatch, bad):
    """Make the loss of these steps (counted from 1) not a number."""
    forward, calls = Objective.forward, []

    def spoiled(self, batch):
        calls.append(batch)
        step = (len(calls) + 1) // 2  # two micro-batches each
        return forward(self, batch) * (torch.nan if step in bad else 1.0)

    monkeypatch.setattr(Objective, "forward", spoiled)


def test_a_run_of_gradients_that_are_not_finite_ends_the_training(data, tmp_path, monkeypatch):
    faulty(monkeypatch, {7, 8, 9})
    with pytest.raises(
        DivergedError, match="not finite in 3 steps in a row, up to step 9"
    ) as raised:
        list(begin(config(data / "cats.txt"), tmp_path / "run"))
    assert raised.value.exit_code == 5
    assert "train.lr" in str(raised.value)
    assert steps_of(tmp_path / "run")[-1] == 6
    for name in ("model", "optimizer", "ema"):
        tensors = read_tensors(tmp_path / f"run/checkpoints/step-6/{name}.safetensors")
        assert all(tensor.isfinite().all() for tensor in tensors.values())
    logged = rows(tmp_path / "run")
    assert [row["step"] for row in logged if row.get("skipped")] == [7, 8, 9]
    assert all(row["loss"] is None for row in logged if row.get("skipped"))


def test_two_bad_gradients_in_a_row_are_only_told(data, tmp_path, monkeypatch):
    faulty(monkeypatch, {2, 3, 5, 6})
    events = list(begin(config(data / "cats.txt"), tmp_path / "run"))
    assert isinstance(events[-1], RunFinished)
    assert [r["step"] for r in rows(tmp_path / "run") if r.get("skipped")] == [2, 3, 5, 6]
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def judged(monkeypatch, losses):
    """Make the evaluations say this."""
    told = iter(losses)
    monkeypatch.setattr(
        pipelines, "validation_metrics", lambda *words: {"loss": next(told), "other": 1.0}
    )


def test_the_best_model_is_kept_and_so_is_its_checkpoint(data, tmp_path, monkeypatch):
    judged(monkeypatch, [3.0, 1.0, 2.0, 1.5, 1.0, 4.0])
    settings = config(
        data / "cats.txt", evaluate_every=2, save_every=2, keep_checkpoints=2, ema=0.0, **WHOLE
    )
    events = list(begin(settings, tmp_path / "run"))
    assert [e.is_best for e in events if isinstance(e, Evaluated)] == [1, 1, 0, 0, 0, 0]
    assert events[-1].metrics["loss"] == 1.0
    assert steps_of(tmp_path / "run") == [4, 10, 12]
    best = read_tensors(tmp_path / "run/checkpoints/step-4/model.safetensors")
    kept = read_tensors(tmp_path / "run/model.safetensors")
    assert all(torch.equal(kept[name], best[name]) for name in best)


def test_the_best_is_evaluated_again_where_evaluations_have_another_part(
    data, tmp_path, monkeypatch
):
    limits, losses = [], iter([1.0, 3.0, 2.0])  # 3.0 is that of the best weights on the new part
    monkeypatch.setattr(
        pipelines,
        "validation_metrics",
        lambda *words: limits.append(words[3]) or {"loss": next(losses)},
    )
    monkeypatch.setattr(TrainState, "finish", lambda *words: None)
    settings = config(data / "cats.txt", steps=2, evaluate_every=2, evaluate_targets=40)
    list(begin(settings, tmp_path / "run"))
    events = resume(tmp_path / "run", {"train": {"steps": 4, "evaluate_targets": 200}})
    assert [e.is_best for e in events if isinstance(e, Evaluated)] == [True]
    assert limits[0] < limits[1] == limits[2]


def test_the_model_that_is_kept_has_the_mean_weights(whole):
    best = min(rows(whole / "cats.txt", "validation"), key=lambda row: row["validation"]["loss"])
    assert best["step"] == 12
    kept = read_tensors(whole / "cats.txt" / "model.safetensors")
    last = whole / "cats.txt" / "checkpoints" / "step-12"
    mean, own = (read_tensors(last / f"{name}.safetensors") for name in ("ema", "model"))
    assert all(torch.equal(kept[name], mean[name]) for name in mean)
    assert not all(torch.equal(mean[name], own[name]) for name in mean)


def test_best_last_keeps_the_newest(data, tmp_path, monkeypatch):
    judged(monkeypatch, [1.0, 2.0, 3.0])
    events = list(begin(config(data / "cats.txt", best_metric="last", **WHOLE), tmp_path / "run"))
    assert [e.is_best for e in events if isinstance(e, Evaluated)] == [True, True, True]
    assert events[-1].metrics["loss"] == 3.0


def test_an_evaluation_that_is_not_a_number_is_never_the_best(data, tmp_path, monkeypatch):
    judged(monkeypatch, [math.nan, 2.0, math.nan])
    events = list(begin(config(data / "cats.txt", **WHOLE), tmp_path / "run"))
    assert [e.is_best for e in events if isinstance(e, Evaluated)] == [True, True, False]
    assert events[-1].metrics["loss"] == 2.0


def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(data, tmp_path):
    with pytest.raises(ConfigError, match=r"'blue' is not a metric of .* last, loss"):
        list(begin(config(data / "cats.txt", best_metric="blue"), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"schedule": {"kind": "cosine", "warmup": "x"}}, "warmup must be an integer"),
        ({"schedule": {"kind": "cosine", "warmup": -1}}, "warmup=-1 must be at least 0"),
        ({"optimizer": {"kind": "adamw", "beta1": 2.0}}, "beta"),
        ({"batch": 3, "accumulate": 2}, "accumulate=2 must divide train.batch=3"),
    ],
)
def test_wrong_settings_leave_no_folder_behind(wrong, said, data, tmp_path):
    with pytest.raises(ConfigError, match=said):
        list(begin(config(data / "cats.txt", **wrong), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_long_sentence_is_cut_and_told_when_it_is_written(data, tmp_path, caplog):
    long = tmp_path / "long.tsv"
    long.write_text("".join(f"{'a ' * 300}{n}\tb {n}\nc {n}\td {n}\n" for n in range(20)))
    list(begin(config(long, steps=2, evaluate_every=1), tmp_path / "run"))
    regard.load(tmp_path / "run", device="cpu").translate("a " * 300)
    assert "sentence 1 has" in caplog.text


def test_training_stops_early_when_it_gets_no_better(data, tmp_path, monkeypatch):
    judged(monkeypatch, [3.0, 1.0, 2.0, 1.0])
    settings = config(data / "cats.txt", evaluate_every=2, save_every=100, patience=2, **WHOLE)
    events = list(begin(settings, tmp_path / "run"))
    assert events[-1].stopped_early
    assert (events[-1].step, events[-1].metrics["loss"]) == (8, 1.0)
    assert steps_of(tmp_path / "run") == [8]
    with pytest.raises(ConfigError, match="stopped early at step 8: 2 evaluations") as raised:
        go_on(tmp_path / "run")
    assert "train.patience (now 2)" in str(raised.value)
    judged(monkeypatch, [0.5, 0.4])
    events = go_on(tmp_path / "run", overrides={"train": {"patience": 3}})
    assert (events[0].step, events[-1].step, events[-1].stopped_early) == (8, 12, False)


def test_patience_is_remembered_over_a_kill(data, tmp_path, monkeypatch):
    judged(monkeypatch, [1.0, 2.0])
    settings = config(data / "cats.txt", evaluate_every=2, save_every=2, patience=2, **WHOLE)
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(Crash):
            list(begin(settings, tmp_path / "run"))
    judged(monkeypatch, [2.0])
    events = go_on(tmp_path / "run")
    assert (events[-1].step, events[-1].stopped_early) == (6, True)


def test_a_run_can_begin_with_the_weights_of_another(whole, data, tmp_path):
    first = whole / "cats.txt"
    settings = config(data / "cats.txt", steps=1, lr=0.0, ema=0.0, start=str(first))
    list(begin(settings, tmp_path / "run"))
    ours, theirs = (read_tensors(f / "model.safetensors") for f in (tmp_path / "run", first))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (tmp_path / "run/tokenizer.json").read_text() == (first / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("over", "error", "complaint"),
    [
        ({"model": {"dim": 16}}, ConfigError, "model.dim=16 does not fit the weights of"),
        ({"train": {"start": "nowhere"}}, CheckpointError, "no run at nowhere"),
        ({"train": {"start": "pairs"}}, ConfigError, "was trained on pairs; cats holds text"),
    ],
)
def test_weights_that_do_not_fit_leave_no_folder_behind(
    over, error, complaint, whole, data, tmp_path
):
    start = str(whole / "cats.txt")
    if over.get("train", {}).get("start") == "pairs":
        over = {"train": {"start": str(whole / "pairs.tsv")}}
    table = {"train": {"start": start}, **over}
    with pytest.raises(error, match=complaint):
        list(begin(config(data / "cats.txt", table), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_two_runs_cannot_share_a_folder(data, tmp_path):
    events = begin(config(data / "cats.txt"), tmp_path / "run")
    next(events)
    with pytest.raises(CheckpointError, match="is in use by process"):
        go_on(tmp_path / "run")
    events.close()
    assert isinstance(go_on(tmp_path / "run")[-1], RunFinished)


def test_a_checkpoint_of_another_model_is_refused(copied):
    file = copied / "config.json"
    table = json.loads(file.read_text())
    table["model"]["dim"], table["train"]["steps"] = 16, 20
    file.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"json was changed after .*\n  model.dim: 8 → 16"):
        go_on(copied)


NGRAM = {"model": {"preset": "ngram", "order": 3, "context": 32}}
LSTM = {"model": {"preset": "lstm", "dim": 8, "layers": 1, "context": 8, "dropout": 0.1}}


def other(data, model, **train):
    settings = config(data / "cats.txt", **train)
    return replace(settings, model=model["model"])


@pytest.mark.parametrize("model", [NGRAM, LSTM], ids=["ngram", "lstm"])
def test_other_models_are_trained_judged_and_used_by_the_same_verbs(model, data, tmp_path):
    ran = regard.train(other(data, model), out=tmp_path / "run")
    assert ran.metrics["loss"] < 6.0
    again = regard.load(tmp_path / "run")
    assert again.evaluate()["loss"] == pytest.approx(ran.evaluate()["loss"], abs=1e-6)
    assert again.evaluate()["bits_per_byte"] > 0
    text = again.generate("the ", max_new_tokens=20, seed=1)
    assert text == again.generate("the ", max_new_tokens=20, seed=1)
    assert 0 < len(text) <= 20


def test_counts_beat_chance_by_far(data, tmp_path):
    ran = regard.train(other(data, NGRAM), out=tmp_path / "run")
    assert ran.evaluate()["loss"] < 0.5 * math.log(ran.tokenizer.vocab_size)


def test_a_model_that_counts_has_nothing_to_resume(data, tmp_path):
    list(begin(other(data, NGRAM), tmp_path / "run"))
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="was fitted without gradients"):
        go_on(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_model_killed_while_counting_counts_again(data, tmp_path):
    list(begin(other(data, NGRAM), tmp_path / "run"))
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").glob("m*")}
    (tmp_path / "run" / "model.safetensors").unlink()
    assert isinstance(go_on(tmp_path / "run")[-1], RunFinished)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").glob("m*")} == before


def test_an_lstm_goes_on_bit_for_bit(data, tmp_path, monkeypatch):
    list(begin(other(data, LSTM), tmp_path / "whole"))
    with monkeypatch.context() as patch:
        interrupt(patch, 7)
        with pytest.raises(Crash):
            list(begin(other(data, LSTM), tmp_path / "run"))
    go_on(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_python_resumes_too(copied):
    ran = regard.resume(copied, "train.steps=13")
    assert ran.config.train.steps == 13
    assert Path(copied, "checkpoints", "step-13").exists()


def test_the_saved_settings_make_the_same_settings_again(whole):
    found = RunFolder(whole / "pairs.tsv").load_config()
    table = json.loads((whole / "pairs.tsv" / "config.json").read_text())
    assert {"format": 2, **to_table(found)} == table
