"""Asked to stop: saved within a step, the right exit code, and gone on from bit for bit."""

import os
import re
import signal
import time

import pytest

from regard import pipelines
from regard.errors import TrainingStopped
from regard.training import run
from regard.training.run import begin, resume
from regard.training.storage import checkpoint
from regard.training.storage.run_folder import RunFolder
from storm.kills import committed
from storm.shell import WORDS, on_terminal, regard, start
from training.runs import config, contents

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of Unix")
ASKED = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT]


def code_of(asked):
    return 130 if asked == signal.SIGINT else 75


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    list(begin(config(data / "cats.txt"), folder))
    return folder


def asks_once(monkeypatch, owner, name, asked, when=lambda *words: True):
    """Let a signal come in the middle of a call."""
    call, waiting = getattr(owner, name), [asked]

    def asking(*words, **options):
        if waiting and when(*words):
            signal.raise_signal(waiting.pop())
        return call(*words, **options)

    monkeypatch.setattr(owner, name, asking)


@pytest.mark.parametrize(
    ("where", "asked", "saved"),
    [
        ("step", signal.SIGTERM, 1),
        ("save", signal.SIGUSR1, 4),  # of step 3
        ("evaluation", signal.SIGHUP, 4),
        ("sample", signal.SIGINT, 4),
    ],
)
def test_wherever_a_signal_comes_the_run_is_saved_within_a_step(
    where, asked, saved, data, whole, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        if where == "step":
            asks_once(patch, run.EMA, "update", asked)
        elif where == "save":
            asks_once(patch, checkpoint, "inject_fault", asked, lambda point: point == "state")
        elif where == "evaluation":
            asks_once(patch, pipelines, "validation_metrics", asked)
        else:
            asks_once(patch, pipelines, "sample", asked)
        with pytest.raises(
            TrainingStopped, match=f"stopped by {asked.name} at step {saved} of"
        ) as raised:
            list(begin(config(data / "cats.txt"), folder))
    assert raised.value.exit_code == code_of(asked)
    assert committed(folder) == saved
    assert not any("validation" in row for row in RunFolder(folder).rows())  # that can wait
    list(resume(folder))
    ours, theirs = contents(folder), contents(whole)
    assert {name: ours[name] for name in theirs} == theirs


def test_an_evaluation_that_was_put_off_can_end_the_run(data, tmp_path, monkeypatch):
    """Patience runs out after step 8, whose evaluation a signal cut short."""
    bad = [{"loss": loss} for loss in (1.0, 2.0)]
    monkeypatch.setattr(pipelines, "validation_metrics", lambda *words, **options: bad.pop(0))
    asks_once(monkeypatch, pipelines, "sample", signal.SIGTERM, lambda *words: len(bad) == 0)
    folder = tmp_path / "run"
    settings = config(data / "cats.txt", patience=1)
    with pytest.raises(TrainingStopped, match="at step 8 of"):
        list(begin(settings, folder))
    bad += [{"loss": 2.0}, {"loss": 1.0}]  # the last: of the best weights, on all data
    *_, ended = resume(folder)
    assert (ended.step, ended.stopped_early, ended.metrics) == (8, True, {"loss": 1.0})


@pytest.fixture(scope="module")
def words(data):
    return [data / "cats.txt", *WORDS, "train.steps=2000", "train.evaluate_every=50"]


@pytest.fixture(scope="module")
def wanted(words, tmp_path_factory):
    """What the files of a run are when nobody asks it to stop."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert regard("train", *words, "--out", folder)[0] == 0
    return contents(folder)


def wait_for(process, beginning):
    for line in process.stderr:
        if line.startswith(beginning):
            return
    raise AssertionError(f"it never said {beginning!r}")


@pytest.mark.long
@pytest.mark.parametrize("asked", ASKED)
def test_a_process_that_is_asked_saves_and_ends_with_its_code(asked, words, wanted, tmp_path):
    folder = tmp_path / "run"
    with start("train", *words, "--out", folder) as process:
        wait_for(process, "step 50 ")
        process.send_signal(asked)
        _, said = process.communicate()
    assert process.returncode == code_of(asked)
    stopped = re.search(rf"^regard: stopped by {asked.name} at step (\d+) of", said, re.MULTILINE)
    assert committed(folder) == int(stopped[1])
    assert regard("resume", folder)[0] == 0
    assert contents(folder) == wanted


@pytest.mark.long
def test_a_terminal_that_hangs_up_does_not_cost_the_run(words, wanted, tmp_path):
    folder = tmp_path / "run"
    process, terminal = on_terminal("-m", "regard", "train", *words, "--out", folder)
    while committed(folder) < 60:
        os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait() == 75
    assert committed(folder) < 2000
    assert regard("resume", folder)[0] == 0
    assert contents(folder) == wanted


@pytest.mark.long
def test_a_second_ctrl_c_ends_at_once(words, tmp_path):
    slow = ["model.dim=512", "model.layers=8", "model.context=128", "train.batch=64"]
    with start("train", *words, *slow, "--out", tmp_path / "run") as process:
        while not (tmp_path / "run" / "lock").exists():
            time.sleep(0.05)
            assert process.poll() is None
        time.sleep(3)  # it is in its first step, of many seconds
        began = time.monotonic()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        _, said = process.communicate()
    print(f"ended {time.monotonic() - began:.1f} s later")
    assert process.returncode == 130
    assert "checkpoint saved" not in said
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.2, 0.5, 1, 1.5, 2, 2.5, 3])
def test_a_signal_while_it_gets_ready_leaves_nothing_half_done(seconds, words, wanted, tmp_path):
    for verb in (["train", *words, "--out", tmp_path / "run"], ["resume", tmp_path / "run"]):
        with start(*verb) as process:
            time.sleep(seconds)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate()
        assert "Traceback" not in said
        assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]
        # a process that has only just begun knows no better than to die
        assert process.returncode in ((75,) if seconds > 1 else (75, -signal.SIGTERM)), said
        if not (tmp_path / "run").exists():
            return
    assert regard("resume", tmp_path / "run")[0] == 0
    assert contents(tmp_path / "run") == wanted
