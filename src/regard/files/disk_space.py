"""What a disk can hold, and what is said when it cannot."""

import re
import shutil
import sys
from pathlib import Path

from regard.errors import CheckpointError

if sys.platform != "win32":
    import resource


def check_room(path: Path, parameters: int, *, checkpoints: int, averaged: bool) -> None:
    """Refuse a run whose checkpoints and model do not fit on the disk, before its first step."""
    copies = 3 + averaged  # weights, two moments; and their mean
    needed = 4 * parameters * (copies * checkpoints + 2)  # a better model is written beside the old
    there = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    free = _free(path)
    if needed - there > free:
        raise CheckpointError(
            f"{path} needs {_megabytes(needed - there)} for {checkpoints} checkpoints and the "
            f"model; {_megabytes(free)} are free\n"
            "make room, lower train.keep, or name another place with --out"
        )
    largest, most = 4 * 2 * parameters, _largest_file()
    if most is not None and largest > most:
        raise CheckpointError(
            f"{path} needs files of {_megabytes(largest)}; this process may write "
            f"{_megabytes(most)} at most\nallow larger ones: ulimit -f unlimited"
        )


def disk_message(path: Path, error: Exception, needed: int | None = None) -> str:
    """Why a file cannot be written, how many bytes it needs, and how much room there is."""
    inner = re.search(r"I/O error: (.+?) \(os error", str(error))  # as safetensors words it
    reason = inner[1] if inner else getattr(error, "strerror", None) or str(error)
    wanted = "" if needed is None else f"{_megabytes(needed)} needed, "
    return f"cannot write {path}: {reason} ({wanted}{_megabytes(_free(path))} free)"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.{0 if size >= 10**7 else 1}f} MB"


def _free(path: Path) -> int:
    while not path.is_dir():
        path = path.parent
    return shutil.disk_usage(path).free


def _largest_file() -> int | None:
    """How long a file may get, where the system sets a limit."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft
