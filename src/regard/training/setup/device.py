"""Where and how a model runs: device, threads, precision, memory, compilation."""

import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.config import RunConfig, TrainConfig
from regard.errors import ConfigError, unknown
from regard.models.cost import training_bytes
from regard.nn.block import Block
from regard.training.parallel import launch

GROUP = Path("/sys/fs/cgroup")  # what a container may use (cgroup v2)
MOST_THREADS = 1024  # torch takes any number, and dies of a large one
BFLOAT16 = """
import torch
from torch import nn
for width in (8, 64, 100):
    layer = nn.TransformerEncoderLayer(width, 2, 3 * width, batch_first=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = layer(torch.randn(2, 9, width)).float().square().sum()
    loss.backward()
"""


def ready_device(config: RunConfig) -> torch.device:
    """The device of a run, with its threads set and its precision known to work."""
    device = pick_device(config.device)
    if launch.size() > 1:
        _use_gpu_of_rank(device)
    use_threads(config.train.threads)
    if device.type == "cpu" and config.train.precision == "bfloat16":
        _must_do_bfloat16()
    return device


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


def _use_gpu_of_rank(device: torch.device) -> None:
    """Give each of several ranks a GPU of its own."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"several ranks train on cpu or cuda, not on device={device.type}")
    if device.type == "cuda":
        if (count := torch.cuda.device_count()) < launch.local_size():
            raise ConfigError(
                f"{launch.local_size()} ranks need as many GPUs, and this machine has {count};\n"
                f"start fewer with torchrun --nproc-per-node={count}, or give device=cpu"
            )
        torch.cuda.set_device(launch.local_rank())


def use_threads(wanted: int | None) -> None:
    """Compute with so many threads; by default with no more than there are cores to be had.

    torch counts the cores of the machine. A container may be allowed the time of a few of them
    only, and threads beyond those wait for each other.
    """
    if wanted is not None and not 1 <= wanted <= MOST_THREADS:
        raise ConfigError(f"train.threads={wanted} must lie between 1 and {MOST_THREADS:,}")
    torch.set_num_threads(min(torch.get_num_threads(), _cores()) if wanted is None else wanted)


def _cores() -> int:
    """How many cores the time of this container is worth; where nothing limits it, all of them."""
    try:
        quota, period = map(int, (GROUP / "cpu.max").read_text().split())
        return math.ceil(quota / period)
    except (OSError, ValueError):  # no such group, or no limit: "max 100000"
        return os.cpu_count() or 1


def _must_do_bfloat16() -> None:
    """Try it in a process of its own: some CPUs, virtual ones above all, die of it."""
    tried = subprocess.run([sys.executable, "-c", BFLOAT16], capture_output=True, check=False)
    if tried.returncode:
        raise ConfigError(
            f"train.precision=bfloat16 does not work on this CPU: a trial ended with "
            f"{tried.returncode}\nleave it out, or give train.precision=float32"
        )


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


def captures(config: TrainConfig, device: torch.device) -> bool:
    """Whether to replay steps from CUDA graphs: where they are compiled.

    Winding random numbers back, as `recompute` does, cannot be recorded; nor does a model for
    which memory is short wait for its launches.
    """
    return (
        device.type == "cuda" and compiles(config, device) and not config.activation_checkpointing
    )


def packs(model: nn.Module) -> bool:
    """Whether a model packs rows of different lengths, for which the host must know them.

    What asks the host cannot be recorded as a CUDA graph.
    """
    return bool(getattr(model, "packs", False))


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only what enters each block; the backward pass computes what was inside it again.

    Less memory for about a third more arithmetic (Chen et al. 2016). Random numbers are wound
    back, so dropout falls on the same units, and the gradients are equal.
    """
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    if not blocks:
        raise ConfigError(
            "train.activation_checkpointing=true goes block by block, and this model has no "
            "blocks; leave it out"
        )
    for block in blocks:  # of the object, not the class: names of parameters stay as they are
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


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
    """What a container leaves free, where one sets a limit."""
    try:
        most, used = ((GROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        return int(most) - int(used)
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return math.inf


def check_memory(parameters: int, config: TrainConfig, device: torch.device) -> None:
    """Refuse a model whose weights, gradients and optimizer state alone do not fit."""
    needed, free = training_bytes(parameters, ema=config.ema > 0), memory(device)
    if config.shard != "none":
        needed //= launch.size()
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
