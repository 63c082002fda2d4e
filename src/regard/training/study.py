"""Several runs of one recipe in one folder: which of them there are already, and how far."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.config import RunConfig, kind_of, to_table
from regard.errors import ConfigError
from regard.pipelines.base import Progress
from regard.training.events import Event
from regard.training.parallel import launch
from regard.training.run import begin, resume
from regard.training.setup.resume_checks import is_finished
from regard.training.storage import checkpoint
from regard.training.storage.run_folder import RunFolder


def left_to_train(runs: Mapping[str, RunConfig], place: Path) -> list[str]:
    """The names of the runs that have not come to their end in `place`; the others are there.

    A run that was made with other settings is refused: it would stand for what it is not.
    """
    if launch.size() > 1:
        raise ConfigError(
            "a study trains its runs one after the other in one process; start it without torchrun"
        )
    left = []
    for name, config in runs.items():
        folder = RunFolder(place / name)
        if folder.path.exists():
            _must_be_as_asked(folder, config)
        if not folder.path.exists() or not _is_complete(folder):
            left.append(name)
    return left


def train_or_go_on(
    config: RunConfig, path: Path, progress: Progress | None = None
) -> Iterator[Event]:
    """Begin a run, or go on with it where it was stopped."""
    if path.exists():
        return resume(path, progress=progress)
    return begin(config, path, progress)


def _is_complete(folder: RunFolder) -> bool:
    return is_finished(folder, folder.load_config(), checkpoint.latest(folder.checkpoints))


def _must_be_as_asked(folder: RunFolder, config: RunConfig) -> None:
    there = dict(_settings(to_table(folder.load_config())))
    for key, asked in _settings(to_table(config)):
        if key in there and there[key] != asked:
            raise ConfigError(
                f"{folder.path} was trained with {key}={there[key]}, and now it is {asked};\n"
                "name another folder with --out, or remove that one"
            )


def _settings(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Every single setting by its dotted name; a choice is its kind and its options."""
    for key, value in table.items():
        if key == "task":
            kind, options = kind_of(value)
            value = {"kind": kind, **options}
        if isinstance(value, Mapping):
            yield from _settings(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value
