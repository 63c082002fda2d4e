"""Hundreds of hostile tokenizers, each within 2 s and 500 MB, or refused."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from storm import hostile_tokenizers
from storm.hostile_tokenizers import BYTES, SECONDS
from storm.shell import environment

COUNT = 700


@pytest.mark.long
def test_hostile_tokenizers_are_refused_or_harmless(tmp_path):
    script = Path(hostile_tokenizers.__file__)
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(COUNT), "1"],
        env=environment(RUST_BACKTRACE="0"),
        capture_output=True,
        check=True,
    )
    results = json.loads(done.stdout)
    assert len(results) == COUNT
    for name, outcome, seconds, memory in results:
        assert outcome.startswith(("used", "refused")), (name, outcome)
        assert seconds < SECONDS, (name, outcome)
        assert memory < BYTES, (name, outcome)
    outcomes = Counter(outcome.partition(":")[0] for _, outcome, _, _ in results)
    name, _, seconds, _ = max(results, key=lambda each: each[2])
    print(dict(outcomes), f"{seconds:.2f} s at most, by {name}")
    print(f"{max(each[3] for each in results) / 1e6:.0f} MB at most")
