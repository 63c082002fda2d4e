"""The runs of a studio: every run in one folder, including those that appear while it is served."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard.config import RunConfig, kind_of
from regard.errors import ConfigError, RegardError
from regard.hub.chat_template_file import read_chat_template
from regard.hub.external_checkpoint import is_external_checkpoint
from regard.pipelines import pipeline_of
from regard.serve.engine import EngineConfig
from regard.serve.models import Models, ServedModel
from regard.serve.worker import EngineThread
from regard.tasks import TASKS
from regard.training.setup.resume_checks import is_finished
from regard.training.storage import checkpoint
from regard.training.storage.initial_weights import run_template
from regard.training.storage.run_folder import RunFolder, is_run
from regard.training.tracking.history import Points, downsample

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TEXTS = "texts"  # the folder of the texts that were pasted or uploaded
MAX_POINTS = 300  # of a curve
MAX_SAMPLES = 6
SAMPLE_BYTES = 1024 * 1024  # of samples.txt, from its end


def check_name(name: str) -> str:
    """Return the name of a run; raise `ConfigError` if it is not a single folder name."""
    if not NAME.fullmatch(name) or name == TEXTS:
        raise ConfigError(
            f"name: {name[:80]!r} cannot be the name of a run; use up to 64 letters, digits, "
            f"'-', '_' and '.', beginning with a letter or digit (and not {TEXTS!r})"
        )
    return name


class RunsFolder:
    """A folder of runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, name: str) -> Path:
        """The folder of an existing run."""
        path = self.path / check_name(name)
        if not (path / "config.json").is_file():
            raise ConfigError(f"name: there is no run {name!r} in {self.path}")
        return path

    def names(self) -> list[str]:
        """The runs, newest first."""
        times = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            with suppress(OSError):  # the run is being deleted
                config = path / "config.json"
                if NAME.fullmatch(path.name) and config.is_file():
                    times.append((config.stat().st_mtime, path.name))
        return [name for _, name in sorted(times, reverse=True)]

    def list(self) -> list[dict[str, Any]]:
        """The name, task, model and state of every run, for the page."""
        return [self._entry(name) for name in self.names()]

    def _entry(self, name: str) -> dict[str, Any]:
        path = self.path / name
        entry: dict[str, Any] = {"name": name, "ready": False, "methods": [], "problem": None}
        try:
            if not is_run(path) and is_external_checkpoint(path):
                return {
                    **entry,
                    "ready": True,
                    "methods": ["generate"],
                    "has_template": read_chat_template(path) is not None,
                    "model": "checkpoint",
                }
            config = RunFolder(path).load_config()
            task = TASKS.get(kind_of(config.task)[0])
            return {
                **entry,
                "ready": (path / "model.safetensors").is_file(),
                "methods": [] if task is None else list(task.methods),
                "data_kind": None if task is None else task.data_kind,
                "inputs": ["text"]
                if task is None
                else list(pipeline_of(config).input_names(config)),
                "has_template": run_template(RunFolder(path), config) is not None,
                "task": kind_of(config.task)[0],
                "model": config.model.get("preset") or config.model.get("family"),
                "steps": config.train.steps,
            }
        except (RegardError, OSError) as error:
            return {**entry, "problem": str(error)}

    def progress(self, name: str, *, training: bool) -> dict[str, Any]:
        """The curves, samples and metrics of a run; `training` says that it is being trained."""
        folder = RunFolder(self.run(name))
        config = folder.load_config()
        rows = folder.rows()
        losses: Points = [
            (row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), int | float)
        ]
        validation: dict[str, Points] = {}
        for row in rows:
            for metric, value in row.get("validation", {}).items():
                if isinstance(value, int | float):
                    validation.setdefault(metric, []).append((row["step"], value))
        try:
            metrics = asdict(folder.load_evaluation())
        except RegardError:
            metrics = {}
        return {
            "name": name,
            "step": max((row["step"] for row in rows), default=0),
            "steps": config.train.steps,
            "finished": not training
            and is_finished(folder, config, checkpoint.latest(folder.checkpoints)),
            "task": kind_of(config.task)[0],
            "loss": downsample(losses, MAX_POINTS),
            "validation": {k: downsample(v, MAX_POINTS) for k, v in validation.items()},
            "metrics": metrics.get("metrics", {}),
            "evaluated_on": metrics.get("evaluated_on", ""),
            "samples": _samples(folder.samples),
            "model": _sizes(config),
        }


def _sizes(config: RunConfig) -> dict[str, Any]:
    keys = ("family", "preset", "layers", "dim", "heads", "context", "vocab_size", "order")
    return {key: config.model[key] for key in keys if config.model.get(key) is not None}


def _samples(path: Path) -> list[dict[str, Any]]:
    """A few samples, evenly spaced over the run, the newest first."""
    try:
        text = read_end(path, SAMPLE_BYTES)
    except OSError:
        return []
    parts = re.split(r"^--- step (\d+)\n", text, flags=re.MULTILINE)
    pairs = list(zip(parts[1::2], parts[2::2], strict=True))
    count = min(MAX_SAMPLES, len(pairs))
    chosen = [pairs[round(n * (len(pairs) - 1) / max(1, count - 1))] for n in range(count)]
    return [{"step": int(step), "text": sample.strip()} for step, sample in reversed(chosen)]


def read_end(path: Path, size: int) -> str:
    """The last `size` bytes of a file, as text."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - size))
        return file.read().decode(errors="replace")


class FolderModels(Models):
    """The models of a folder of runs; a model whose weights have changed is loaded again."""

    preload = False

    def __init__(
        self,
        paths: Sequence[Path],
        worker: EngineThread,
        config: EngineConfig,
        *,
        device: str = "auto",
        idle: float | None = None,
    ) -> None:
        super().__init__([], worker, config, device=device, idle=idle)
        (path,) = paths
        self.folder = RunsFolder(path)
        self._versions: dict[str, tuple[int, int]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Update `paths` to the runs that the folder has now; unload runs that were deleted."""
        self.paths = {name: self.folder.path / name for name in self.folder.names()}
        for name in list(self.loaded):
            if name not in self.paths and self._is_unused(name):
                self.unload(name)

    @property
    def default(self) -> str:
        """The name of the newest run; raise `KeyError` if there is none."""
        if not self.paths:
            raise KeyError(None)
        return next(iter(self.paths))

    async def get(self, name: str | None) -> ServedModel:
        """The model of this name, with its newest weights."""
        self.refresh()
        name = name or self.default
        path = self.paths.get(name)
        if path and self._is_unused(name) and self._versions[name] != _version(path):
            self.unload(name)
        return await super().get(name)

    def _load(self, name: str) -> ServedModel:
        # Before the weights are read: if they change meanwhile, the next request loads them again.
        self._versions[name] = _version(self.paths[name])
        return super()._load(name)

    def _is_unused(self, name: str) -> bool:
        return name in self.loaded and not self.loaded[name].active_requests


def _version(path: Path) -> tuple[int, int]:
    """The modification time and inode of the weights, which change when they are written again."""
    try:
        status = (path / "model.safetensors").stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_ino)
