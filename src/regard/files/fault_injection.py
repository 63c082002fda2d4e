"""Death on purpose: `REGARD_FAULT=POINT[:COUNT]` kills this process at a named point of a save.

By SIGKILL, at the first or COUNT-th time it gets there: no handler, no `finally` and no buffer
survives. The storms in `tests/` set it; nobody else does.
"""

import os
import signal
from itertools import count
from typing import Literal, get_args

Point = Literal[
    "new",  # a new run is written aside, not yet in place
    "weights",  # the best model is written aside, not yet in place
    "replace",  # the best model is in place; nothing tells of it
    "log",  # the metrics of an evaluation are written, its sample is not
    "begin",  # the folder aside is there, empty
    "tensors",  # one more file of tensors is on the disk
    "state",  # all files are, but for the manifest
    "manifest",  # the manifest is written, the folder not synced
    "rename",  # all is on the disk, under the name aside
    "commit",  # renamed, the folder above not synced
    "prune",  # an old checkpoint is out of the way, not yet removed
    "end",  # the save is over
]
POINTS: tuple[Point, ...] = get_args(Point)

_times = count(1)


def fault(point: Point) -> None:
    """Die here if `REGARD_FAULT` says so."""
    wanted, _, times = os.environ.get("REGARD_FAULT", "").partition(":")
    if point == wanted and next(_times) == int(times or 1):
        os.kill(os.getpid(), signal.SIGKILL)
