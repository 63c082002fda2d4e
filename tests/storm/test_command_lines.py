"""Thousands of random command lines: no traceback, no hang."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from storm import command_lines
from storm.shell import environment


@pytest.mark.parametrize(
    ("batches", "each"), [(1, 25), pytest.param(9, 250, marks=pytest.mark.long)]
)
def test_no_command_line_ends_in_a_traceback(batches, each, tmp_path):
    added = {"HOME": str(tmp_path), "REGARD_HOME": str(tmp_path / "cache")}
    codes = Counter()
    for seed in range(batches):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        for words in ([folder], [folder, each, seed]):
            done = subprocess.run(
                [sys.executable, Path(command_lines.__file__), *map(str, words)],
                env=environment(**added),
                capture_output=True,
                check=True,
            )
        results = json.loads(done.stdout)
        assert not results["failures"]
        codes.update(results["codes"])
    print(f"{sum(codes.values())} command lines, by exit code: {dict(sorted(codes.items()))}")
