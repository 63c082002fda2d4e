"""This process: its rank under `torchrun`, its device, and how it reacts to signals."""

from regard.training.parallel.launch import rank, world_size
from regard.training.signals import stoppable

__all__ = ["device_of", "rank", "run_worker", "stoppable", "world_size"]


def device_of(setting: str) -> str:
    """The type of the device that a `device` setting selects, as in "cuda" for "auto"."""
    from regard.training.setup.device import pick_device

    return pick_device(setting).type


def run_worker() -> None:
    """Train as rank > 0: wait for rank 0's launch plan, join its run, without output."""
    from regard.training.run import run_worker as events

    for _ in events():
        pass
