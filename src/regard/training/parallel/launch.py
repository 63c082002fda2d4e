"""Which process of how many this is, as `torchrun` says. Nothing here imports torch."""

import os
import platform


def rank() -> int:
    """The number of this process; 0 where it is alone."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def size() -> int:
    """How many processes train together."""
    known = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", 1)) if known else 1


def local_rank() -> int:
    """The number of this process on its machine: its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_size() -> int:
    """How many processes of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if size() > 1 else 1


def launch() -> str | None:
    """What all attempts of one `torchrun` have in common; None where it did not start this."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {platform.node()} {os.getppid()}"


def attempt() -> int:
    """How often `torchrun --max-restarts` has begun again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
