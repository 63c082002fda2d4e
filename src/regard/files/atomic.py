"""Folders that are there whole or not at all: written aside, then renamed."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from types import FrameType

from regard.errors import CheckpointError, ConfigError
from regard.training.storage.disk_space import disk_message
from regard.training.storage.fault_injection import fault


def must_be_new(path: Path, way_out: str) -> None:
    """Refuse a path where there is something: nothing is ever written over."""
    try:
        there = path.exists()
    except OSError as error:
        raise CheckpointError(f"cannot look at {path}: {error.strerror}") from None
    if there:
        raise ConfigError(f"{path} exists already and is not written over;\n{way_out}")


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `path` at the end; of what fails nothing is left.

    Not even when the process is told to end; only a kill leaves `.NAME.tmp-PID` beside it, which
    the next attempt sweeps away.
    """
    folder = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with _leaving():
        try:
            shutil.rmtree(folder, ignore_errors=True)
            _sweep(path)
            folder.mkdir(parents=True)
            yield folder
            fault("new")
            folder.rename(path)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(disk_message(path, error)) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Remove what was left by attempts at `path` whose processes are no more."""
    for left in path.parent.glob(f".{escape(path.name)}.tmp-*"):
        owner = left.name.rpartition("-")[2]
        if not owner.isdigit() or os.name == "nt":  # there, to ask is to end it
            continue
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except OSError:
            pass  # it lives, and is somebody else's


@contextmanager
def _leaving() -> Iterator[None]:
    """Inside, SIGTERM ends the process as an exception does: by way of every `finally`."""
    alone = threading.current_thread() is threading.main_thread()  # only there Python allows it
    if not alone or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would stop the cleaning
    raise SystemExit(128 + number)
