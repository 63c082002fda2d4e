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


@pytest.mark.parametrize("count", [12, pytest.param(700, marks=pytest.mark.long)])
def test_hostile_tokenizers_are_refused_or_harmless(count, tmp_path):
    script = Path(hostile_tokenizers.__file__)
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(count), "1"],
        env=environment(RUST_BACKTRACE="0"),
        capture_output=True,
        check=True,
    )
    results = json.loads(done.stdout)
    assert len(results) == count
    for name, outcome, seconds, memory in results:
        assert outcome.startswith(("used", "refused")), (name, outcome)
        assert seconds < SECONDS, (name, outcome)
        assert memory < BYTES, (name, outcome)
    outcomes = Counter(outcome.partition(":")[0] for _, outcome, _, _ in results)
    print(dict(outcomes), f"{max(each[2] for each in results):.2f} s at most")
    print(f"{max(each[3] for each in results) / 1e6:.0f} MB at most")
