"""Who watches a run sees each row once, whatever happens to the run; and cannot stop it.

TensorBoard, wandb and trackio are asked themselves where they are installed; elsewhere doubles
stand in for them that record what the documented functions are given.
"""

import json
import sys
import types
from importlib.util import find_spec

import pytest

from regard.errors import ConfigError
from regard.training import log, run
from regard.training.storage.run_folder import RunFolder
from regard.training.tracking import trackers
from training import stored
from training.runs import Crash, config, interrupt, write_data

KINDS = ["tensorboard", "wandb", "trackio"]
EARLY = {"steps": 12, "evaluate_every": 4, "save_every": 3}


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path) / "cats.txt"


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    """Make a kind work here; gives what reads back the (step, name, value) that it was given."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def use(kind):
        if find_spec(kind) is not None:
            return getattr(stored, kind)
        calls = []
        for name, module in DOUBLES[kind](calls).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(trackers, "find_spec", lambda name: object())
        return lambda folder: calls

    return use


def tensorboard_double(calls):
    class SummaryWriter:
        def __init__(self, log_dir, purge_step):
            calls[:] = [call for call in calls if call[0] < purge_step]  # as the readers do

        def add_scalar(self, tag, scalar_value, global_step):
            calls.append((global_step, tag, scalar_value))

        def flush(self):
            pass

        def close(self):
            pass

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    return {"torch.utils.tensorboard": module}


def run_double(calls, asked):
    def init(**given):
        assert given["resume"] == "allow"
        asked.append(given)
        log = lambda values, step: calls.extend((step, *each) for each in values.items())  # noqa: E731
        return types.SimpleNamespace(log=log, finish=lambda: None)

    return init


def wandb_double(calls, asked=None):
    module = types.ModuleType("wandb")
    module.init = run_double(calls, [] if asked is None else asked)
    module.Settings = lambda **given: given
    return {"wandb": module}


def trackio_double(calls):
    module = types.ModuleType("trackio")
    module.init, module.finish = run_double(calls, []), lambda: None
    return {"trackio": module}


DOUBLES = {
    "tensorboard": tensorboard_double,
    "wandb": wandb_double,
    "trackio": trackio_double,
}


def logged(folder):
    """What the run itself has written, as those who watch should have it."""
    return [
        (row["step"], name, value)
        for row in RunFolder(folder).rows()
        for name, value in trackers.scalars(row).items()
    ]


def near(found):
    """In one order; TensorBoard and wandb keep their own, and the former only float32."""
    return [(step, name, pytest.approx(value, rel=1e-6)) for step, name, value in sorted(found)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_died_and_went_on_is_seen_once_from_beginning_to_end(
    kind, recorder, data, tmp_path, monkeypatch
):
    seen = recorder(kind)
    path = tmp_path / "run"
    monkeypatch.setattr(log, "FLUSH_STEPS", 1)
    with monkeypatch.context() as patch:
        interrupt(patch, 8)  # the last checkpoint is of step 6, so 7 comes twice
        with pytest.raises(Crash):
            list(run.begin(config(data, trackers=[kind], **EARLY), path))
    before = len(logged(path))
    list(run.resume(path))
    assert 0 < before < len(logged(path))
    assert sorted(seen(path)) == near(logged(path))


def test_what_is_skipped_or_not_finite_is_not_handed_on():
    row = {"step": 3, "loss": None, "lr": 0.1, "grad_norm": None, "targets": 8, "skipped": True}
    assert trackers.scalars(row) == {"train/lr": 0.1, "train/targets": 8}


@pytest.mark.parametrize("mode", [None, "online"])
def test_nobody_logs_in_unless_the_environment_says_so(mode, data, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "wandb", wandb_double([], asked)["wandb"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    choice = {"kind": "wandb", "project": "mine"}
    list(run.begin(config(data, trackers=[choice], steps=2), tmp_path / "run"))
    list(run.resume(tmp_path / "run", {"train": {"steps": 4}}))
    first, second = asked
    assert first["mode"] == (mode or "offline")
    assert (first["project"], first["name"]) == ("mine", "test")
    assert first["id"] == second["id"]


def test_a_package_that_is_not_there_is_named_before_anything_is_written(
    data, tmp_path, monkeypatch
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        list(run.begin(config(data, trackers=["wandb"]), tmp_path / "run"))
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        list(run.begin(config(data, trackers=["tensorbord"]), tmp_path / "run"))
    with pytest.raises(ConfigError, match="did you mean 'project'"):
        list(
            run.begin(config(data, trackers=[{"kind": "wandb", "projekt": "x"}]), tmp_path / "run")
        )
    assert not (tmp_path / "run").exists()


class Mine:
    """A tracker of one's own, with an option."""

    def __init__(self, start, fails_at=None):
        self.fails_at = fails_at

    def __call__(self, row):
        if self.fails_at is not None and row["step"] >= self.fails_at:
            raise OSError("the dashboard is gone")

    def close(self):
        pass


def test_who_fails_to_watch_does_not_stop_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "mine", Mine)
    settings = config(data, trackers=[{"kind": "mine", "fails_at": 3}], **EARLY)
    with pytest.warns(
        UserWarning, match="tracker mine was disabled after an error: the dash"
    ) as warned:
        list(run.begin(settings, tmp_path / "run"))
    assert len(warned) == 1
    assert logged(tmp_path / "run")[-1][0] == 12


def test_who_cannot_begin_is_a_mistake_of_the_settings(data, tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "mine", lambda: 1 / 0)
    with pytest.raises(
        ConfigError, match=r"train\.trackers=mine could not start: division by zero"
    ):
        list(run.begin(config(data, trackers=["mine"]), tmp_path / "run"))


def test_the_clock_goes_on_where_it_stood(data, tmp_path):
    list(run.begin(config(data, **EARLY), tmp_path / "run"))
    clock = tmp_path / "run/clock.json"
    assert 0 < json.loads(clock.read_text())["seconds"] < 600
    clock.write_text('{"seconds": 1000.0}')
    list(run.resume(tmp_path / "run", {"train": {"steps": 13}}))
    assert 1000 < json.loads(clock.read_text())["seconds"] < 1600
