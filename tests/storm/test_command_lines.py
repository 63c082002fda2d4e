"""Thousands of random command lines: no traceback, no hang."""

import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from storm import command_lines
from storm.shell import environment


@pytest.mark.parametrize(
    ("batches", "each"), [(1, 25), pytest.param(9, 250, marks=pytest.mark.long)]
)
def test_no_command_line_ends_in_a_traceback(batches, each, tmp_path):
    added = {"HOME": str(tmp_path), "REGARD_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def run(*words):
        command = [sys.executable, command_lines.__file__, *map(str, words)]
        env = environment(**added)
        return subprocess.run(command, env=env, capture_output=True, check=True).stdout

    sound = tmp_path / "sound"
    sound.mkdir()
    run(sound)
    codes = Counter()
    for seed in range(batches):
        results = json.loads(run(shutil.copytree(sound, tmp_path / f"{seed}"), each, seed))
        assert not results["failures"]
        codes.update(results["codes"])
    print(f"{sum(codes.values())} command lines, by exit code: {dict(sorted(codes.items()))}")
