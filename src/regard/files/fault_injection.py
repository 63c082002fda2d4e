"""Fault injection: `REGARD_FAULT=POINT[:COUNT]` kills this process at a named point of a save.

The signal is SIGKILL, sent when the point is reached for the first or the COUNT-th time: no handler
and no `finally` runs, and no buffer is flushed. Only the kill tests in `tests/storm` set
`REGARD_FAULT`.
"""

import os
import signal
from itertools import count
from typing import Literal, get_args

Point = Literal[
    "new",  # a new run folder is written, not yet renamed
    "weights",  # the best model is written, not yet renamed
    "replace",  # the best model is renamed; its evaluation is not logged
    "log",  # the metrics of an evaluation are logged, its sample is not
    "begin",  # the temporary folder exists, empty
    "tensors",  # one more file of tensors is written
    "state",  # all files are written except the manifest
    "manifest",  # the manifest is written, the folder is not synced
    "rename",  # everything is synced, under the temporary name
    "commit",  # renamed, the parent folder is not synced
    "prune",  # an old checkpoint is renamed, not yet removed
    "end",  # the save is complete
]
POINTS: tuple[Point, ...] = get_args(Point)

_calls = count(1)


def inject_fault(point: Point) -> None:
    """Kill this process if `REGARD_FAULT` names this point."""
    target, _, count_text = os.environ.get("REGARD_FAULT", "").partition(":")
    if point == target and next(_calls) == int(count_text or 1):
        os.kill(os.getpid(), signal.SIGKILL)
