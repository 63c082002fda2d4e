"""Disk space: checks before a run, and messages when writing fails."""

import re
import shutil
import sys
from pathlib import Path

from regard.errors import CheckpointError
from regard.units import format_bytes

if sys.platform != "win32":
    import resource


def check_disk_space(path: Path, parameters: int, *, checkpoints: int, ema: bool) -> None:
    """Raise `CheckpointError` before step 1 if the checkpoints of a run do not fit on the disk."""
    copies = 3 + ema  # weights, two moments of the optimizer, and the EMA
    # 2 copies of model.safetensors: a better model is written before the old one is removed
    needed = 4 * parameters * (copies * checkpoints + 2)
    existing = sum(file.lstat().st_size for file in path.rglob("*.safetensors"))
    free = _free_bytes(path)
    if needed - existing > free:
        raise CheckpointError(
            f"{path} needs {format_bytes(needed - existing)} for {checkpoints} checkpoints and the "
            f"model; {format_bytes(free)} are free\n"
            "free disk space, lower train.keep_checkpoints, or choose another folder with --out"
        )
    largest, limit = 4 * 2 * parameters, _max_file_size()
    if limit is not None and largest > limit:
        raise CheckpointError(
            f"{path} needs files of {format_bytes(largest)}; this process may write "
            f"{format_bytes(limit)} at most\nallow larger files: ulimit -f unlimited"
        )


def write_error_message(path: Path, error: Exception, needed: int | None = None) -> str:
    """Why a file cannot be written, how many bytes it needs, and how many are free."""
    inner = re.search(r"I/O error: (.+?) \(os error", str(error))  # the format of safetensors
    reason = inner[1] if inner else getattr(error, "strerror", None) or str(error)
    need = "" if needed is None else f"{format_bytes(needed)} needed, "
    return f"cannot write {path}: {reason} ({need}{format_bytes(_free_bytes(path))} free)"


def _free_bytes(path: Path) -> int:
    while not path.is_dir():
        path = path.parent
    return shutil.disk_usage(path).free


def _max_file_size() -> int | None:
    """The file size limit of this process (ulimit -f), if any."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft
