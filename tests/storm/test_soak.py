"""Ten thousand steps need no more memory than two thousand."""

import json
import os
import subprocess
import sys

import pytest

from storm.shell import environment

PROGRAM = """
import json, os, sys
from pathlib import Path
from regard.training.events import Evaluated
from regard.training.run import begin
from training.runs import config, write_data

place = Path(sys.argv[1])
settings = config(
    write_data(place) / "cats.txt", steps=10_000, evaluate_every=1000, save_every=500
)
pages = [
    int(Path("/proc/self/statm").read_text().split()[1])
    for event in begin(settings, place / "run")
    if isinstance(event, Evaluated)
]
print(json.dumps([page * os.sysconf("SC_PAGE_SIZE") for page in pages]))
"""


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc to ask for memory")
def test_a_long_run_does_not_grow(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    print([f"{size / 1e6:.1f} MB" for size in sizes])
    assert len(sizes) == 10
    assert max(sizes[2:]) < 1.02 * sizes[1]
