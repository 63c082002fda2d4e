"""Rank and world size, from `torchrun`'s environment variables. Nothing here imports torch."""

import os
import platform


def rank() -> int:
    """The rank of this process; 0 in a single process."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def world_size() -> int:
    """The number of ranks."""
    under_torchrun = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", 1)) if under_torchrun else 1


def local_rank() -> int:
    """The rank within this machine: the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world_size() > 1 else 1


def launch_id() -> str | None:
    """The id of this launch of `torchrun`, the same after its restarts; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {platform.node()} {os.getppid()}"


def restart_count() -> int:
    """How often `torchrun --max-restarts` has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
