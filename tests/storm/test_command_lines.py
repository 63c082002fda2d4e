"""Thousands of random command lines: no traceback, no hang."""

import json
import shutil
import subprocess
import sys

import pytest

from storm import command_lines
from storm.shell import environment

BATCHES, EACH = 18, 125


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the script in a process of its own, with a home of its own."""
    home = tmp_path_factory.mktemp("home")
    added = {"HOME": str(home), "REGARD_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "1"}

    def run(*words):
        command = [sys.executable, command_lines.__file__, *map(str, words)]
        env = environment(**added)
        return subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout

    return run


@pytest.fixture(scope="module")
def sound(run, tmp_path_factory):
    """A folder with data and runs; not to be changed."""
    folder = tmp_path_factory.mktemp("sound")
    run(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("seed", range(BATCHES))
def test_no_command_line_ends_in_a_traceback(seed, run, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "lines")
    results = json.loads(run(folder, EACH, seed))
    assert not results["failures"]
    codes = dict(sorted(results["codes"].items()))
    print(f"{sum(codes.values())} command lines, by exit code: {codes}")
    seconds, words = results["slowest"]
    print(f"the slowest took {seconds:.0f} s: {words}")
