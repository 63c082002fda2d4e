"""This process: its rank under `torchrun`, its device, and how it reacts to signals."""

import os
import time
from pathlib import Path

from regard.training.parallel.launch import rank, world_size
from regard.training.signals import stoppable

__all__ = ["device_of", "process_start_time", "rank", "run_worker", "stoppable", "world_size"]


def process_start_time() -> float:
    """When this process began, as a value of `time.perf_counter`; approximate outside Linux."""
    try:
        row = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start = int(row[19]) / os.sysconf("SC_CLK_TCK")  # seconds after boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - start
    except (OSError, AttributeError, IndexError, ValueError):
        age = time.process_time()
    return time.perf_counter() - age


def device_of(setting: str) -> str:
    """The type of the device that a `device` setting selects, as in "cuda" for "auto"."""
    from regard.training.setup.device import pick_device

    return pick_device(setting).type


def run_worker() -> None:
    """Train as rank > 0: wait for rank 0's launch plan, join its run, without output."""
    from regard.training.run import run_worker as events

    for _ in events():
        pass
