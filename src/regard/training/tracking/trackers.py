"""Experiment trackers: TensorBoard, wandb and trackio, each imported only when it is used.

`metrics.jsonl` is always written, even if a tracker fails. No tracker logs in to a service: all
write to this machine unless their own environment variables say otherwise.
"""

import io
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.util import find_spec
from inspect import signature
from typing import Any, ClassVar, Protocol

from regard.config import Choice, RunConfig, kind_of, make, to_table
from regard.errors import CheckpointError, ConfigError, RegardWarning, unknown
from regard.files.untrusted import read_json
from regard.training.storage.run_folder import RunFolder
from regard.training.tracking.history import read_seconds

PROVIDED = ("folder", "config", "start")  # arguments provided to a tracker; others are options
CLOCK_SECONDS = 10.0  # between two writes of clock.json

Row = Mapping[str, Any]


class Tracker(Protocol):
    """Called with every row of `metrics.jsonl` as it is written."""

    def __call__(self, row: Row) -> None:
        """Record a row: a step, or an evaluation."""

    def close(self) -> None:
        """End this session of the run."""


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row by the names that trackers display.

    >>> scalars({"step": 3, "loss": 1.5, "lr": 0.1})
    {'train/loss': 1.5, 'train/lr': 0.1}
    >>> scalars({"step": 3, "validation": {"loss": 2.0}, "activations": {"h": {"mean": 0.5}}})
    {'validation/loss': 2.0, 'activations/h/mean': 0.5}
    """
    if "validation" in row:
        values = {f"validation/{name}": value for name, value in row["validation"].items()}
        for hook_point, statistics in row.get("activations", {}).items():
            values |= {
                f"activations/{hook_point}/{name}": value for name, value in statistics.items()
            }
    else:
        excluded = ("step", "skipped")
        values = {f"train/{name}": value for name, value in row.items() if name not in excluded}
    return {name: value for name, value in values.items() if value is not None}


class TensorBoard:
    """Event files in RUN/tensorboard; `tensorboard --logdir runs` shows all runs."""

    package: ClassVar[str] = "tensorboard"

    def __init__(self, folder: RunFolder, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # steps after the checkpoint that a run resumes from are logged again: remove the old ones
        self.writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=start + 1)

    def __call__(self, row: Row) -> None:
        """Add the scalars of a row."""
        for name, value in scalars(row).items():
            self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()  # a kill must not lose rows before the last checkpoint

    def close(self) -> None:
        """Write buffered rows."""
        self.writer.close()


class _ServiceTracker:
    """A tracker that sends each row once: services cannot delete rows, and resuming repeats steps.

    Repeated steps are bit-identical, so they need not be sent again. The last row that was sent,
    and the id of the run at the service, are in RUN/PACKAGE.json.
    """

    package: ClassVar[str]

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.state_file = folder, folder.path / f"{self.package}.json"
        saved: dict[str, Any] = {}
        with suppress(CheckpointError):
            saved = read_json(self.state_file)
        self.id = str(saved.get("id", secrets.token_hex(4)))
        self.last_sent = tuple(saved.get("sent", (0, False)))

    def __call__(self, row: Row) -> None:
        """Send the scalars of a row, unless they were sent before."""
        position = (int(row["step"]), "validation" in row)
        if position > self.last_sent:
            self.last_sent = position
            # before sending: a kill may lose a row but never duplicates one
            self.folder.write_json(self.state_file, {"id": self.id, "sent": position}, sync=False)
            self.send(scalars(row), position[0])

    def send(self, values: dict[str, float], step: int) -> None:
        """Send the scalars of a step."""
        raise NotImplementedError


class Wandb(_ServiceTracker):
    """Weights & Biases, offline unless WANDB_MODE says otherwise; `wandb sync` sends it later."""

    package = "wandb"

    def __init__(self, folder: RunFolder, config: RunConfig, project: str = "regard") -> None:
        super().__init__(folder)
        import wandb

        self.run = wandb.init(
            project=project,
            name=config.name,
            id=self.id,
            resume="allow",
            dir=str(folder.path),
            config=to_table(config),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def send(self, values: dict[str, float], step: int) -> None:
        """Log the scalars of a step."""
        self.run.log(values, step=step)

    def close(self) -> None:
        """Write buffered rows."""
        self.run.finish()


class Trackio(_ServiceTracker):
    """trackio's folder on this machine; `trackio show` opens it."""

    package = "trackio"

    def __init__(self, folder: RunFolder, config: RunConfig, project: str = "regard") -> None:
        super().__init__(folder)
        import trackio

        with redirect_stdout(io.StringIO()):  # trackio prints
            self.run = trackio.init(
                project=project,
                name=f"{config.name}-{self.id}",
                resume="allow",
                config=to_table(config),
                embed=False,
            )

    def send(self, values: dict[str, float], step: int) -> None:
        """Log the scalars of a step."""
        self.run.log(values, step=step)

    def close(self) -> None:
        """Write buffered rows."""
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


class Clock:
    """Writes how long a run has taken, over all its sessions, to RUN/clock.json."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.previous_seconds = folder, read_seconds(folder) or 0.0
        self.started = self.written = time.monotonic()
        self.has_trained = False  # a resume that is refused takes no time

    def __call__(self, row: Row) -> None:
        """Write the time every few seconds."""
        self.has_trained = True
        if time.monotonic() - self.written >= CLOCK_SECONDS:
            self.close()

    def close(self) -> None:
        """Write the time, if anything was logged."""
        if not self.has_trained:
            return
        self.written = time.monotonic()
        seconds = self.previous_seconds + self.written - self.started
        with suppress(OSError):  # a full disk must not end the run here
            self.folder.write_json(self.folder.clock, {"seconds": seconds}, sync=False)


def check_trackers(choices: list[Choice]) -> None:
    """Raise on unknown trackers, unknown options and packages that are not installed."""
    for choice in choices:
        kind, options = kind_of(choice)
        if kind not in TRACKERS:
            raise ConfigError(f"train.trackers: {unknown('tracker', kind, TRACKERS)}")
        known = [name for name in signature(TRACKERS[kind]).parameters if name not in PROVIDED]
        for name in options:
            if name not in known:
                raise ConfigError(f"train.trackers={kind}: {unknown('option', name, known)}")
        package = getattr(TRACKERS[kind], "package", None)
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"train.trackers={kind} needs the package {package}: pip install {package}\n"
                "or leave it out; metrics.jsonl in the run folder is always written"
            )


@contextmanager
def attach_trackers(folder: RunFolder, config: RunConfig, start: int) -> Iterator[None]:
    """A context in which the trackers get every row of the run, which starts at step `start`."""
    check_trackers(config.train.trackers)
    provided = dict(zip(PROVIDED, (folder, config, start), strict=True))
    trackers: dict[str, Tracker] = {"clock": Clock(folder)}
    try:
        for choice in config.train.trackers:
            kind = kind_of(choice)[0]
            try:
                trackers[kind] = make(choice, TRACKERS, "tracker", **provided)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"train.trackers={kind} could not start: {error}") from error
        folder.trackers = [_warn_on_error(name, tracker) for name, tracker in trackers.items()]
        yield
    finally:
        folder.trackers = []
        for name, tracker in trackers.items():
            _warn_on_error(name, tracker.close)()


def _warn_on_error(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """Turn the first error of a tracker into a warning and disable it: training continues."""
    failed = False

    def call(*args: Any) -> None:
        nonlocal failed
        if failed:
            return
        try:
            function(*args)
        except Exception as error:
            failed = True
            message = f"tracker {name} was disabled after an error: {error}"
            warnings.warn(message, RegardWarning, stacklevel=2)

    return call
