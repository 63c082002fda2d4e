"""Killed at any moment, a run goes on and ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the workers are forked")


def storm(place, kills, steps, seed):
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("storm.py"),
            place,
            *map(str, [kills, steps, seed]),
        ],
        env={**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    print(figures)
    assert figures["kills"] == kills  # each after a checkpoint that the next attempt went on from
    assert figures["equal"] == figures["runs"]  # losses, samples, weights, optimizer: every byte
    assert figures["older"] == 0  # no kill ever took back a checkpoint
    assert figures["left"] == 0


def test_a_run_survives_three_kills(tmp_path):
    storm(tmp_path, kills=3, steps=60, seed=1)


@pytest.mark.long
def test_runs_survive_twenty_kills(tmp_path):
    storm(tmp_path, kills=20, steps=300, seed=2)
