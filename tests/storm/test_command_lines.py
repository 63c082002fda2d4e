"""Thousands of random command lines: no traceback, no hang."""

import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from storm import command_lines
from storm.shell import environment

BATCHES, EACH = 9, 250


@pytest.mark.long
def test_no_command_line_ends_in_a_traceback(tmp_path):
    added = {"HOME": str(tmp_path), "REGARD_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def run(*words):
        command = [sys.executable, command_lines.__file__, *map(str, words)]
        env = environment(**added)
        return subprocess.run(command, env=env, capture_output=True, check=True).stdout

    sound = tmp_path / "sound"
    sound.mkdir()
    run(sound)
    codes = Counter()
    for seed in range(BATCHES):
        results = json.loads(run(shutil.copytree(sound, tmp_path / f"{seed}"), EACH, seed))
        assert not results["failures"]
        codes.update(results["codes"])
    print(f"{sum(codes.values())} command lines, by exit code: {dict(sorted(codes.items()))}")
