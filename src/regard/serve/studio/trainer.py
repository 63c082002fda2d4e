"""The training process of the studio, one at a time: `regard train` or `regard resume`."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from regard.errors import ConfigError
from regard.files.atomic import atomic_file
from regard.serve.studio.folder import TEXTS, RunsFolder, check_name, read_end

SUFFIXES = (".txt", ".md", ".tsv", ".csv", ".jsonl")  # of uploaded files
COMMAND = (sys.executable, "-m", "regard.cli.training_process")
LOG_BYTES = 16 * 1024  # the end of the output that is shown
STOPPED = 75  # exit code of a training process that was stopped and can be resumed
STOP_SECONDS = 30  # for the training process to save when the studio ends


class Busy(ConfigError):
    """Another run is being trained."""


class Trainer:
    """Starts and stops the training process, and reports its state."""

    def __init__(self, folder: RunsFolder, command: Sequence[str] = COMMAND) -> None:
        self.folder, self.command = folder, command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._final_output = ""  # once `_log` is closed
        self._name = ""
        self._started = 0.0
        self._stopping = False

    def train_text(self, name: str, text: str, suffix: str, overrides: Sequence[str]) -> None:
        """Save a text in the folder and train on it."""
        path = self.folder.path / TEXTS / f"{check_name(name)}{suffix}"
        with self._lock:
            self._check_name_unused(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path, sync=False) as temporary:
                temporary.write_text(text, encoding="utf-8", newline="")
            self._start(
                name, ["train", str(path), *overrides, "--out", str(self.folder.path / name)]
            )

    def train_recipe(self, name: str, recipe: str, overrides: Sequence[str]) -> None:
        """Train the model of a recipe."""
        with self._lock:
            self._check_name_unused(check_name(name))
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self._start(name, ["train", recipe, *overrides, "--out", str(self.folder.path / name)])

    def resume(self, name: str, overrides: Sequence[str]) -> None:
        """Continue a run of the folder."""
        path = self.folder.run(name)
        with self._lock:
            self._check_idle()
            self._start(name, ["resume", str(path), *overrides])

    def stop(self) -> None:
        """Send SIGTERM to the training process, so that it saves and ends."""
        with self._lock:
            if self._running:
                assert self._process is not None
                self._stopping = True
                self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Stop the training process and wait until it has saved."""
        self.stop()
        with self._lock:
            process = self._process
        if process is not None:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            cast(IO[bytes], process.stdin).close()
        with self._lock:
            if self._log is not None:
                self._final_output = self._output()
                self._log.close()
                self._log = None

    def state(self) -> dict[str, Any]:
        """Whether the training process runs, how it ended, and the end of its output."""
        with self._lock:  # a process that starts replaces them all
            process, name = self._process, self._name
            started, stopping = self._started, self._stopping
            code = None if process is None else process.poll()
            output = self._output()
        if process is None:
            return {"name": None, "running": False, "message": None, "failed": False, "output": ""}
        return {
            "name": name,
            "running": code is None,
            "stopping": code is None and stopping,
            "seconds": round(time.monotonic() - started, 1),
            "message": None if code is None else _outcome(name, code, output),
            "failed": code not in (None, 0, STOPPED, -signal.SIGTERM),
            "output": output,
        }

    @property
    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _check_idle(self) -> None:
        if self._running:
            raise Busy(
                f"{self._name!r} is being trained, and one run is trained at a time; "
                "stop it or wait until it ends"
            )

    def _check_name_unused(self, name: str) -> None:
        self._check_idle()
        if (self.folder.path / name).exists():
            raise ConfigError(
                f"name: there is a run {name!r} already; choose another name, or resume it"
            )

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        if self._log is not None:
            self._log.close()
        if self._process is not None:
            cast(IO[bytes], self._process.stdin).close()
        self._log = tempfile.NamedTemporaryFile("ab")  # noqa: SIM115 -- open while it is read
        self._process = subprocess.Popen(
            [*self.command, *arguments],
            stdin=subprocess.PIPE,  # closed when the studio ends, by whatever signal
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C reaches the server only, which stops it
        )
        self._name, self._started, self._stopping = name, time.monotonic(), False

    def _output(self) -> str:
        if self._log is None:
            return self._final_output
        return read_end(Path(self._log.name), LOG_BYTES)


def _outcome(name: str, code: int, output: str) -> str:
    if code == 0:
        return f"{name} is trained."
    _, separator, error = output.rpartition("regard: ")
    if code == STOPPED and "checkpoint saved" in error:
        return f"{name} is stopped and saved; resume continues it."
    if code in (STOPPED, -signal.SIGTERM):
        return f"{name} was stopped before its first step or after its last; resume continues it."
    return error.strip() if separator else f"training {name} ended with exit code {code}."
