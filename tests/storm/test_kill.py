"""Killed at any moment, a run goes on and ends as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regard.files.fault_injection import POINTS
from storm.kills import committed
from storm.shell import WORDS, environment, regard
from training.runs import contents


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the workers are forked")
@pytest.mark.parametrize(
    ("runs", "steps"), [(6, 18), pytest.param(100, 36, marks=pytest.mark.long)]
)
def test_every_run_of_a_storm_ends_as_if_nothing_had_happened(tmp_path, runs, steps):
    program = Path(__file__).with_name("kills.py")
    done = subprocess.run(
        [sys.executable, program, *map(str, [tmp_path, runs, steps, 1])],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    print(figures)
    assert figures["equal"] == runs  # losses, samples, weights, optimizer: every byte
    assert figures["older"] == 0  # each went on from the newest checkpoint, and none was lost
    assert figures["left"] == 0
    assert all(figures["at a point"].values())


@pytest.fixture(scope="module")
def words(data):
    return [data / "cats.txt", *WORDS, "train.steps=18", "train.evaluate_every=6"]


@pytest.fixture(scope="module")
def wanted(words, tmp_path_factory):
    """What the files of a run are when nobody disturbs it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert regard("train", *words, "--out", folder)[0] == 0
    return contents(folder)


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_the_verbs_survive_a_kill_inside_a_save(point, words, wanted, tmp_path):
    folder = tmp_path / "run"
    before = 0
    begin, go_on = ["train", *words, "--out", folder], ["resume", folder]
    for command, times in ((begin, 1), (begin, 1)) if point == "new" else ((begin, 2), (go_on, 1)):
        code, said = regard(*command, REGARD_FAULT=f"{point}:{times}")
        assert code == -signal.SIGKILL
        began = re.search(r"from +step (\d+)", said)
        assert (int(began[1]) if began else 0) == before
        before = committed(folder)
    assert regard(*(begin if point == "new" else go_on))[0] == 0
    assert contents(folder) == wanted
    assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]
