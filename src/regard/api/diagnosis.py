"""Diagnosis of this machine: versions, hardware, and the optional packages of each command."""

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from regard.api.machine import driver_gpus
from regard.files.cache import cache_folder
from regard.training.setup.device import free_memory, pick_device, usable_cores


@dataclass(frozen=True, slots=True)
class OptionalPackage:
    """A package that some commands need, its purpose, and the command that installs it."""

    package: str
    purpose: str
    install: str


OPTIONAL_PACKAGES = [
    OptionalPackage(
        "transformers",
        "regard import of a name on the hub; verification in regard export",
        "pip install 'regard[hf]'",
    ),
    OptionalPackage(
        "pillow",
        "regard train, predict and evaluate on image files",
        "pip install 'regard[images]'",
    ),
    OptionalPackage(
        "matplotlib",
        "figures: --out of regard show, explain, compare, evaluate and predict; regard studio",
        "pip install 'regard[plot]'",
    ),
    OptionalPackage(
        "pyarrow",
        "regard train, predict and evaluate on .parquet and .arrow files",
        "pip install 'regard[tables]'",
    ),
    OptionalPackage("onnxruntime", "regard export --format onnx", "pip install 'regard[onnx]'"),
    OptionalPackage("gguf", "regard export --format gguf", "pip install 'regard[gguf]'"),
    OptionalPackage("jinja2", "chat templates of imported models", "pip install 'regard[chat]'"),
    OptionalPackage("datasets", "regard train hf://datasets/…", "pip install 'regard[datasets]'"),
    OptionalPackage("fastapi", "regard serve, regard studio", "pip install 'regard[serve]'"),
    OptionalPackage("llguidance", "JSON schemas in regard serve", "pip install 'regard[serve]'"),
    OptionalPackage("tensorboard", "train.trackers=tensorboard", "pip install tensorboard"),
    OptionalPackage("wandb", "train.trackers=wandb", "pip install wandb"),
    OptionalPackage("trackio", "train.trackers=trackio", "pip install trackio"),
]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The versions, the hardware and the optional packages that were found."""

    versions: dict[str, str]
    cores: int
    memory: int  # free bytes
    disk: int  # free bytes where runs/ is written
    cache: str
    gpus: list[str]
    device: str  # the device that `device=auto` selects
    packages: dict[str, str | None]  # versions of `OPTIONAL_PACKAGES`; None: not installed
    problems: list[str]


def installed_version(package: str) -> str | None:
    """The version of an installed package.

    >>> installed_version("a-package-that-nobody-wrote") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def doctor() -> Diagnosis:
    """Report versions, cores, memory, GPUs and optional packages of this machine, and problems.

    >>> import regard
    >>> regard.doctor().cores >= 1
    True
    """
    device = pick_device("auto")
    gpus = _gpus()
    return Diagnosis(
        versions={
            "regard": installed_version("regard") or "source",
            "Python": sys.version.split()[0],
            "torch": torch.__version__,
            "triton": installed_version("triton") or "not installed",
            "platform": platform.platform(),
        },
        cores=usable_cores(),
        memory=free_memory(torch.device("cpu")),
        disk=shutil.disk_usage(Path.cwd()).free,
        cache=str(cache_folder()),
        gpus=gpus,
        device=device.type,
        packages={p.package: installed_version(p.package) for p in OPTIONAL_PACKAGES},
        problems=_problems(device.type, gpus),
    )


def _gpus() -> list[str]:
    """The names of the GPUs that torch can use, else of those that the driver lists."""
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return ["Apple GPU"]
    return driver_gpus()


def _problems(device: str, gpus: list[str]) -> list[str]:
    problems = []
    if device == "cpu" and gpus:
        reason = (
            f"torch {torch.__version__} is a build without CUDA; install torch's CUDA build"
            if torch.version.cuda is None
            else f"torch's CUDA {torch.version.cuda} does not work with the driver; update it"
        )
        problems.append(f"{gpus[0]} is not used: {reason}")
    if device == "cuda" and installed_version("triton") is None:
        problems.append(
            "triton is not installed: train.compile and the decoding kernels need it on CUDA"
        )
    if device == "cuda" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        problems.append(
            "there is no C compiler, which triton needs; install gcc, or set train.compile=off"
        )
    if not os.access(Path.cwd(), os.W_OK):
        problems.append(f"{Path.cwd()} cannot be written; regard train writes runs/ there")
    return problems
