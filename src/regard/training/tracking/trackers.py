"""Handing on what a run logs: to TensorBoard, wandb or trackio, each imported when asked for.

`metrics.jsonl` is written always, and whatever happens to those who watch. Nobody logs in: all of
them write to this machine unless their own settings in the environment say otherwise.
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
from regard.errors import CheckpointError, ConfigError, unknown
from regard.files.atomic import write_json
from regard.files.untrusted import read_json
from regard.training.storage.run_folder import RunFolder
from regard.training.tracking.history import spent

GIVEN = ("folder", "config", "start")  # what a tracker may ask for; the rest are its options
CLOCK_SECONDS = 10.0  # between two looks at the clock that are kept

Row = Mapping[str, Any]


class Tracker(Protocol):
    """Whoever sees the rows of `metrics.jsonl` as they are written."""

    def __call__(self, row: Row) -> None:
        """Take in a row: of a step, or of an evaluation."""

    def close(self) -> None:
        """The run goes no further, for now or for good."""


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row by the names that dashboards show.

    >>> scalars({"step": 3, "loss": 1.5, "lr": 0.1})
    {'train/loss': 1.5, 'train/lr': 0.1}
    """
    group, found = "train", row
    if "validation" in row:
        group, found = "validation", row["validation"]
    return {
        f"{group}/{name}": value
        for name, value in found.items()
        if name not in ("step", "skipped") and value is not None
    }


class TensorBoard:
    """Event files in RUN/tensorboard; `tensorboard --logdir runs` shows all runs."""

    package: ClassVar[str] = "tensorboard"

    def __init__(self, folder: RunFolder, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what was seen after the checkpoint that a run goes on from is seen again: forget it
        self.writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=start + 1)

    def __call__(self, row: Row) -> None:
        """Add its numbers."""
        for name, value in scalars(row).items():
            self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()  # nothing that a checkpoint covers may be lost in a kill

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class _Once:
    """Hands on each row once: what was sent cannot be taken back, and a resumed run repeats steps.

    Repeated steps are equal to the last bit, so to skip them loses nothing. How far it got, and
    the name the run goes by over there, are kept in RUN/KIND.json.
    """

    package: ClassVar[str]

    def __init__(self, folder: RunFolder) -> None:
        self.note = folder.path / f"{self.package}.json"
        kept: dict[str, Any] = {}
        with suppress(CheckpointError):
            kept = read_json(self.note)
        self.id = str(kept.get("id", secrets.token_hex(4)))
        self.sent = tuple(kept.get("sent", (0, False)))

    def __call__(self, row: Row) -> None:
        """Send its numbers, unless they were sent before."""
        mark = (int(row["step"]), "validation" in row)
        if mark > self.sent:
            self.sent = mark
            # before it is sent: one row less rather than one twice
            write_json(self.note, {"id": self.id, "sent": mark}, sync=False)
            self.send(scalars(row), mark[0])

    def send(self, values: dict[str, float], step: int) -> None:
        """Hand on some numbers."""
        raise NotImplementedError


class Wandb(_Once):
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
        """Log them."""
        self.run.log(values, step=step)

    def close(self) -> None:
        """Write what is left."""
        self.run.finish()


class Trackio(_Once):
    """trackio's own folder on this machine; `trackio show` opens it."""

    package = "trackio"

    def __init__(self, folder: RunFolder, config: RunConfig, project: str = "regard") -> None:
        super().__init__(folder)
        import trackio

        with redirect_stdout(io.StringIO()):  # it greets
            self.run = trackio.init(
                project=project,
                name=f"{config.name}-{self.id}",
                resume="allow",
                config=to_table(config),
                embed=False,
            )

    def send(self, values: dict[str, float], step: int) -> None:
        """Log them."""
        self.run.log(values, step=step)

    def close(self) -> None:
        """Write what is left."""
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


class Clock:
    """Keeps how long a run took, over all its sessions, in RUN/clock.json."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.before = folder, spent(folder) or 0.0
        self.began = self.kept = time.monotonic()

    def __call__(self, row: Row) -> None:
        """Look at the clock now and then."""
        if time.monotonic() - self.kept >= CLOCK_SECONDS:
            self.close()

    def close(self) -> None:
        """Keep what it shows."""
        self.kept = time.monotonic()
        with suppress(OSError):  # a full disk ends the run, not its clock
            write_json(
                self.folder.clock, {"seconds": self.before + self.kept - self.began}, sync=False
            )


def check_trackers(choices: list[Choice]) -> None:
    """Refuse what nobody knows, and a package that is not installed, before anything is written."""
    for choice in choices:
        kind, options = kind_of(choice)
        if kind not in TRACKERS:
            raise ConfigError(f"train.trackers: {unknown('tracker', kind, TRACKERS)}")
        known = [name for name in signature(TRACKERS[kind]).parameters if name not in GIVEN]
        for name in options:
            if name not in known:
                raise ConfigError(f"train.trackers={kind}: {unknown('option', name, known)}")
        package = getattr(TRACKERS[kind], "package", None)
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"train.trackers={kind} needs the package {package}: pip install {package}\n"
                "or leave it out; metrics.jsonl in the run folder is written anyway"
            )


@contextmanager
def watching(folder: RunFolder, config: RunConfig, start: int) -> Iterator[None]:
    """Inside, all who are asked to watch see each row of the run, which goes on after `start`."""
    check_trackers(config.train.trackers)
    given = dict(zip(GIVEN, (folder, config, start), strict=True))
    trackers: dict[str, Tracker] = {"the clock": Clock(folder)}
    try:
        for choice in config.train.trackers:
            kind = kind_of(choice)[0]
            try:
                trackers[kind] = make(choice, TRACKERS, "tracker", **given)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"train.trackers={kind} could not begin: {error}") from error
        folder.trackers = [_careful(name, each) for name, each in trackers.items()]
        yield
    finally:
        folder.trackers = []
        for name, each in trackers.items():
            _careful(name, each.close)()


def _careful(name: str, act: Callable[..., None]) -> Callable[..., None]:
    """The same, but a failure is a warning, once: nobody who watches may stop a run."""
    failed = False

    def careful(*given: Any) -> None:
        nonlocal failed
        if failed:
            return
        try:
            act(*given)
        except Exception as error:
            failed = True
            warnings.warn(f"{name} stopped watching: {error}", stacklevel=2)

    return careful
