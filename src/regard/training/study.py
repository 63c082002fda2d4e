"""Studies: several runs of one recipe in one folder, trained one after the other."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from regard.config import RunConfig, flatten, to_table
from regard.errors import ConfigError
from regard.pipelines.base import Progress
from regard.training.evaluation_plan import with_best_metric
from regard.training.events import Event
from regard.training.parallel import launch
from regard.training.run import begin, resume
from regard.training.setup.resume_checks import is_finished
from regard.training.storage import checkpoint
from regard.training.storage.run_folder import RunFolder


def unfinished_runs(runs: Mapping[str, RunConfig], folder: Path) -> list[str]:
    """The names of the runs that `folder` lacks or that are not finished.

    A run that exists with other settings is an error.
    """
    if launch.world_size() > 1:
        raise ConfigError(
            "a study trains its runs one after the other in one process; start it without torchrun"
        )
    unfinished = []
    for name, config in runs.items():
        run = RunFolder(folder / name)
        if run.path.exists():
            _check_settings(run, config)
        if not run.path.exists() or not _is_run_finished(run):
            unfinished.append(name)
    return unfinished


def begin_or_resume(
    config: RunConfig, path: Path, progress: Progress | None = None
) -> Iterator[Event]:
    """Begin a run, or resume it if its folder exists."""
    if path.exists():
        return resume(path, progress=progress)
    return begin(config, path, progress)


def _is_run_finished(folder: RunFolder) -> bool:
    return is_finished(folder, folder.load_config(), checkpoint.latest(folder.checkpoints))


def _check_settings(folder: RunFolder, config: RunConfig) -> None:
    saved = dict(flatten(to_table(folder.load_config())))
    for key, value in flatten(to_table(with_best_metric(config))):
        if key in saved and saved[key] != value:
            raise ConfigError(
                f"{folder.path} was trained with {key}={saved[key]}, but now {key}={value};\n"
                "choose another folder with --out, or remove that one"
            )
