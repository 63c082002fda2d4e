"""Where and how a model runs: device, precision, memory, compilation."""

import math
import os
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regard.config import TrainConfig
from regard.errors import ConfigError, unknown


def pick_device(wanted: str) -> torch.device:
    """The device of this name; `auto` takes the fastest there is."""
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if wanted == "auto":
        wanted = next(name for name in ("cuda", "mps", "cpu") if there[name])
    if wanted not in there:
        raise ConfigError(unknown("device", wanted, ["auto", *there]))
    if not there[wanted]:
        raise ConfigError(f"device={wanted} is not to be had here; try device=auto or device=cpu")
    return torch.device(wanted)


def autocast(
    config: TrainConfig, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """bfloat16 arithmetic where asked for, and by default on CUDA; the weights stay float32."""
    wanted = config.precision
    if wanted == "auto":
        wanted = "bfloat16" if device.type == "cuda" else "float32"
    if wanted == "float32":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16)


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Whether to compile: by default on CUDA only, where it pays within a minute or so."""
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


def memory(device: torch.device) -> int:
    """How many bytes are free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines() if ":" in line)
        return int(min(int(lines["MemAvailable"].split()[0]) * 1024, _group_memory()))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_memory() -> float:
    """What a container leaves free, where one sets a limit (cgroup v2)."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        return int(most) - int(used)
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return math.inf


def check_memory(parameters: int, config: TrainConfig, device: torch.device) -> None:
    """Refuse a model whose weights, gradients and optimizer state alone do not fit."""
    copies = 4 + (1 if config.average else 0)  # weights, gradients, two moments; and their mean
    needed, free = 4 * copies * parameters, memory(device)
    if needed > free:
        raise ConfigError(
            f"{parameters:,} parameters need {needed / 1e9:,.1f} GB to train "
            f"(weights, gradients, optimizer); {device.type} has {free / 1e9:,.1f} GB\n"
            "choose a smaller preset, or fewer model.layers or a smaller model.dim"
        )


def environment(device: torch.device) -> dict[str, Any]:
    """What a run was made with."""
    return {
        "regard": version("regard") if _installed() else "source",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }


def _installed() -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        version("regard")
    except PackageNotFoundError:
        return False
    return True
