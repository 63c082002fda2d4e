"""What `import regard` sets for torch's CPU threads."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "first", "expected"),
    [
        ({}, "", "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "", "7"),
        ({"OMP_WAIT_POLICY": "active"}, "", "None"),
        ({}, "import types; sys.modules['torch'] = types.ModuleType('torch');", "None"),
    ],
    ids=["nothing", "a number", "a policy", "torch is loaded"],
)
def test_threads_wait_only_briefly_unless_that_is_set_or_too_late(given, first, expected):
    unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    code = f"import os, sys; {first} import regard; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected
