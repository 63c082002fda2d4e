"""The device of a run: threads, mixed precision, activation checkpointing, memory."""

import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.accel import float8
from regard.config import RunConfig, TrainConfig
from regard.errors import ConfigError, unknown
from regard.models.cost import training_bytes
from regard.nn.block import Block
from regard.training.parallel import launch
from regard.units import format_bytes

CGROUP = Path("/sys/fs/cgroup")  # the limits of a container (cgroup v2)
MAX_THREADS = 1024  # torch accepts any number, and crashes with a large one
BFLOAT16_TEST = """
import torch
from torch import nn
for width in (8, 64, 100):
    layer = nn.TransformerEncoderLayer(width, 2, 3 * width, batch_first=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = layer(torch.randn(2, 9, width)).float().square().sum()
    loss.backward()
"""


def prepare_device(config: RunConfig) -> torch.device:
    """The device of a run; sets the number of threads and checks that its precision works."""
    device = pick_device(config.device)
    if launch.world_size() > 1:
        _use_gpu_of_rank(device)
    use_threads(config.train.threads)
    if device.type == "cpu" and config.train.precision == "bfloat16":
        _check_bfloat16()
    if config.train.precision == "float8":
        require_float8(config.train, device)
    return device


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` takes the fastest available one."""
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        name = next(option for option in ("cuda", "mps", "cpu") if available[option])
    if not isinstance(name, str) or name not in available:
        raise ConfigError(unknown("device", str(name), ["auto", *available]))
    if not available[name]:
        raise ConfigError(
            f"device={name}: torch finds no {name.upper()} device; use device=cpu or device=auto"
        )
    return torch.device(name)


def _use_gpu_of_rank(device: torch.device) -> None:
    """Use the GPU whose index is the local rank."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device={device.type} does not support several ranks; use device=cpu or device=cuda"
        )
    if device.type == "cuda":
        if (count := torch.cuda.device_count()) < launch.local_world_size():
            raise ConfigError(
                f"{launch.local_world_size()} ranks need as many GPUs, and this machine has "
                f"{count};\n"
                f"start fewer with torchrun --nproc-per-node={count}, or give device=cpu"
            )
        torch.cuda.set_device(launch.local_rank())


def use_threads(threads: int | None) -> None:
    """Set torch's number of threads; by default at most the number of usable cores.

    torch counts the cores of the machine; the CPU quota of a container may be smaller, and more
    threads than that slow each other down.
    """
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"train.threads={threads} must lie between 1 and {MAX_THREADS:,}")
    torch.set_num_threads(
        min(torch.get_num_threads(), usable_cores()) if threads is None else threads
    )


def usable_cores() -> int:
    """The CPU quota of this container in cores; without a quota, all cores."""
    try:
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
        return math.ceil(quota / period)
    except (OSError, ValueError):  # no cgroup, or no limit: "max 100000"
        return os.cpu_count() or 1


def require_float8(settings: TrainConfig, device: torch.device) -> None:
    """Raise `ConfigError` where FP8 training is not supported."""
    reason = float8.unsupported_reason(device)
    if reason is None and settings.compile == "off":
        reason = "it needs train.compile=auto or on"
    if reason is None and launch.world_size() > 1:
        reason = f"it is for one GPU, not {launch.world_size()} ranks"
    if reason is not None:
        raise ConfigError(
            f"train.precision=float8 does not work here: {reason}\n"
            f"leave it out, or set train.precision=bfloat16"
        )


def _check_bfloat16() -> None:
    """Test bfloat16 in a subprocess: on some CPUs, mostly virtual ones, it crashes the process."""
    test = subprocess.run([sys.executable, "-c", BFLOAT16_TEST], capture_output=True, check=False)
    if test.returncode:
        raise ConfigError(
            f"train.precision=bfloat16 does not work on this CPU: a test exited with "
            f"{test.returncode}\nleave it out, or set train.precision=float32"
        )


def autocast(
    settings: TrainConfig, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes an autocast context: bfloat16 on CUDA by default, float32 elsewhere.

    It is `nullcontext` for float32. The weights stay float32.
    """
    precision = settings.precision
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
    if precision == "float32":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16)


def checkpoint_activations(model: nn.Module) -> None:
    """Activation checkpointing: store only the input of each block, recompute the rest in backward.

    Less memory for about a third more arithmetic (Chen et al. 2016). The RNG state is restored
    for the recomputation, so dropout masks and gradients are the same.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise ConfigError(
            "train.activation_checkpointing=true works block by block, and this model has no "
            "blocks; leave it out"
        )
    for block in blocks:  # a wrapper module would change parameter names
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def free_memory(device: torch.device) -> int:
    """The free memory of a device in bytes; where it is unknown, the memory of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines() if ":" in line)
        return int(min(int(lines["MemAvailable"].split()[0]) * 1024, _cgroup_memory()))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_memory() -> float:
    """The free memory of this container; infinite without a limit."""
    try:
        limit, used = ((CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # no cgroup, or no limit: "max"
        return math.inf


def check_memory(
    parameters: int, settings: TrainConfig, device: torch.device, trainable: int | None = None
) -> None:
    """Raise if the weights, gradients and optimizer state do not fit into memory.

    Of `parameters`, only `trainable` (None: all) have gradients and optimizer state.
    """
    trainable = parameters if trainable is None else trainable
    frozen_bytes = 4 if autocast(settings, device) is nullcontext else 2
    needed = training_bytes(trainable, ema=settings.ema > 0) + frozen_bytes * (
        parameters - trainable
    )
    free = free_memory(device)
    if settings.shard != "none":
        needed //= launch.world_size()
    if needed > free:
        raise ConfigError(
            f"{parameters:,} parameters need {format_bytes(needed)} to train "
            f"(weights, gradients, optimizer); {device.type} has {format_bytes(free)}\n"
            "choose a smaller preset, or fewer model.layers or a smaller model.dim"
        )


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and hardware of a run."""
    return {
        "regard": _version(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }


def _version() -> str:
    try:
        return version("regard")
    except PackageNotFoundError:
        return "source"
