"""`regard` in a process of its own, and a run that is small but has all there is to lose."""

import os
import subprocess
import sys

WORDS = [
    "data.tokenizer=char",
    "model.dim=8",
    "model.layers=1",
    "model.heads=2",
    "model.context=8",
    "model.dropout=0.1",
    "train.batch=2",
    "train.ema=0.9",
    "train.evaluate_targets=200",
    "train.save_every=3",
    "train.keep_checkpoints=2",
    "device=cpu",
]
TAKE_TERMINAL = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment(**added):
    """For a process that imports what this one does, on one thread."""
    path = os.pathsep.join(sys.path)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **added}


def on_terminal(*words):
    """Begin Python on a terminal of its own: the process, and our end of the terminal."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, sys.executable, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
        start_new_session=True,
    )
    os.close(theirs)
    return process, ours


def start(*words, **added):
    """Begin a command, with some variables of the environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "regard", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**added),
    )


def regard(*words, **added):
    """Run a command to its end: its exit code, and what it said on stderr."""
    with start(*words, **added) as process:
        _, said = process.communicate()
    assert "Traceback" not in said, said
    return process.returncode, said
