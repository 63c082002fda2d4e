"""The folder of a run.

config.json · model.safetensors · tokenizer.json · metrics.jsonl · environment.json
checkpoints/step-N/ · evaluation.json · samples.txt · skipped.jsonl · clock.json · baseline.json
lock; sample-N.svg of drawings; files of trackers; logs/ of several ranks; adapters/ of the user
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from difflib import get_close_matches
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.config import RunConfig, build, kind_of, to_table
from regard.errors import CheckpointError, ConfigError, DataError, indented_list
from regard.files.atomic import atomic_folder, require_new_path
from regard.files.directory import Directory
from regard.files.disk_space import write_error_message
from regard.files.safetensors import read_metadata
from regard.files.untrusted import open_regular_file, parse_json, path_exists, quote, read_json
from regard.pipelines import has_tokenizer, load_tokenizers, save_tokenizers
from regard.renamed import current_settings
from regard.tasks import TASKS, Task
from regard.tasks.metrics import is_better
from regard.text import PairTokenizers, Tokenizer
from regard.training.parallel.launch import launch_id, restart_count
from regard.training.storage.checkpoint import (
    NO_DIGEST,
    read_tensors,
    valid_steps_before,
    write_digest,
    write_tensors,
)
from regard.training.storage.evaluation import Evaluation, describe_targets
from regard.training.storage.lock import LOCK, hold_lock
from regard.training.storage.weight_settings import as_metadata, changes

logger = logging.getLogger(__name__)
FORMAT = 2  # of config.json; to be raised for changes that `regard.renamed` cannot express
MAX_ROW_BYTES = 1_000_000  # bytes of a line of metrics.jsonl
FILES = (  # files that training writes
    *("config.json", "environment.json", "model.safetensors", "metrics.jsonl", "samples.txt"),
    *("skipped.jsonl", "clock.json", "baseline.json", "evaluation.json", "wandb.json"),
    *("trackio.json", LOCK),
)
FOLDERS = ("checkpoints", "tensorboard", "wandb")
MOVED, LOST = 1, 2  # values of `RunFolder.status`


def is_run(path: Path) -> bool:
    """Whether a folder is a run: its config.json has a format version."""
    try:
        return "format" in read_json(path / "config.json")
    except (CheckpointError, OSError):
        return False


class RunFolder:
    """The files of a run, by name."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        root = self.path.absolute()  # the working directory may change
        self.config = root / "config.json"
        self.environment = root / "environment.json"
        self.model = root / "model.safetensors"
        self.metrics = root / "metrics.jsonl"
        self.evaluation = root / "evaluation.json"
        self.samples = root / "samples.txt"
        self.skipped = root / "skipped.jsonl"
        self.checkpoints = root / "checkpoints"
        self.clock = root / "clock.json"
        self.baseline = root / "baseline.json"
        self.lock = root / LOCK
        self._is_lock_lost: Callable[[], bool] = lambda: False
        self.trackers: list[Callable[[dict[str, Any]], None]] = []  # called with every row

    @cached_property
    def directory(self) -> Directory:
        """The folder, held open; everything is written through it."""
        return Directory(self.path)

    def open_checkpoints(self) -> Directory:
        """The folder of the checkpoints, held open."""
        return self.directory.open_folder(self.checkpoints.name)

    def require_new_path(self) -> None:
        """Raise if the folder exists: no run is ever overwritten."""
        advice = f"continue it with `regard resume {self.path}`, or name another folder with --out"
        require_new_path(self.path, advice)

    def create(
        self,
        config: RunConfig,
        environment: dict[str, Any],
        tokenizers: Tokenizer | PairTokenizers | None,
        write_model: Callable[[Path, Mapping[str, str]], None] | None = None,
    ) -> None:
        """Create the folder atomically: if the process is killed, the folder is complete or absent.

        `write_model` writes the weights of an imported model, with the given metadata.
        """
        self.require_new_path()
        with atomic_folder(self.path) as path:
            new = RunFolder(path)
            new.checkpoints.mkdir()
            new.save_config(config)
            new.write_json(new.environment, environment)
            save_tokenizers(tokenizers, path)
            new.metrics.touch()
            new.samples.touch()
            if write_model is not None:
                write_model(new.model, {"sha256": NO_DIGEST, **as_metadata(config)})
                write_digest(new.model)

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """A context in which no other process trains in this folder; removes temporary files first.

        Raises, before anything is written, if a link, a FIFO or the like is in place of a file.
        """
        with hold_lock(self.directory) as self._is_lock_lost:
            for name in FILES:
                self.directory.require_kind(name, "a file")
            for name in FOLDERS:
                self.directory.require_kind(name, "a folder")
            self.directory.remove_leftovers(FILES.__contains__)
            is_step = re.compile(r"step-\d+").fullmatch
            self.open_checkpoints().remove_leftovers(lambda name: bool(is_step(name)))
            yield

    def status(self) -> int:
        """0 if the folder is at its path, else `MOVED`, or `LOST`: nothing may be written."""
        if self.directory.is_deleted() or self._is_lock_lost():
            return LOST
        return 0 if self.directory.is_at_its_path() else MOVED

    def status_error(self, step: int) -> CheckpointError:
        """The error that ends a run at `step` whose folder is no longer where it was opened."""
        if self._is_lock_lost():
            return CheckpointError(
                f"{self.lock} was deleted or replaced while the run was training, so another "
                f"process may train in this folder\nstopped at step {step:,}, nothing was saved; "
                f"make sure that no other process trains there, then: regard resume {self.path}"
            )
        if self.directory.is_deleted():
            return CheckpointError(
                f"{self.path} was deleted while the run was training; stopped at step {step:,}, "
                "nothing could be saved"
            )
        new_path = self.directory.location()
        return CheckpointError(
            f"{self.path} is no longer the folder in which the run was training: it was moved "
            f"or replaced\nstopped at step {step:,} and saved in the moved folder; "
            f"resume with: regard resume {new_path or 'its new path'}"
        )

    def write_json(self, path: Path, value: Any, *, sync: bool = True) -> None:
        """Write a JSON file of the folder atomically."""
        self.directory.write_json(path.name, value, sync=sync)

    def save_weights(self, tensors: Mapping[str, Tensor], config: RunConfig) -> str:
        """Write model.safetensors with the settings of its weights; returns its sha256.

        evaluation.json, which belongs to the previous weights, is removed.
        """
        if self.directory.kind(self.evaluation.name) is not None:
            self.directory.remove(self.evaluation.name)
        return write_tensors(self.directory, self.model.name, tensors, as_metadata(config))

    def save_config(self, config: RunConfig) -> None:
        """Write the resolved settings."""
        self.write_json(self.config, {"format": FORMAT, **to_table(config)})

    def load_config(self) -> RunConfig:
        """The resolved settings of the run; raise if the weights have other settings."""
        config = self.read_config()
        try:
            changed = changes(read_metadata(self.model), config)
            if changed:
                read_tensors(self.model)  # raises if model.safetensors was changed instead
        except CheckpointError:  # no weights yet, or corrupted: `load_weights` reports it
            return config
        if changed is None:
            _warn_without_settings(self.model)
        elif changed:
            raise CheckpointError(
                f"{self.config} was changed after the weights were trained:"
                f"{indented_list(changed)}\nrestore it, or accept it for these weights: "
                f"regard edit {self.path}"
            )
        return config

    def read_config(self) -> RunConfig:
        """The settings in config.json; they are not compared with those of the weights."""
        table = self._read_json(self.config)
        if "model_type" in table:
            raise CheckpointError(
                f"{self.path} is a checkpoint of another library;\n"
                f"`regard import {self.path} RUN` imports it as a run"
            )
        if (version := table.pop("format", None)) != FORMAT:
            actual = "has no format" if version is None else f"has format {version!r}"
            raise CheckpointError(
                f"{self.config} {actual}, so another version of regard wrote it, and its settings "
                f"have other names; this version reads format {FORMAT}: train the run again, or "
                "use the version that wrote it"
            )
        return build(RunConfig, current_settings(table))

    def belongs_to(self, launch: str | None) -> bool:
        """Whether an earlier attempt of this launch of `torchrun` began or resumed the run."""
        return self.environment.exists() and self.load_environment().get("launch") == launch

    def set_launch(self, launch: str | None) -> None:
        """Record which launch of `torchrun`, if any, resumes the run."""
        if launch is not None:
            self.write_json(self.environment, self.load_environment() | {"launch": launch})

    def load_environment(self) -> dict[str, Any]:
        """Versions, hardware, and the fingerprints of data and tokenizer."""
        return self._read_json(self.environment)

    def load_tokenizers(self, config: RunConfig) -> PairTokenizers | Tokenizer | None:
        """The tokenizers of the run; None if it has none, such as a run on images."""
        no_tokenizer = self.load_environment().get("tokenizer") == "none"
        if no_tokenizer and not has_tokenizer(self.path):
            return None
        return load_tokenizers(self.path, config)

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raise if the tokenizer has changed since the run began."""
        if fingerprint != self._read_json(self.environment).get("tokenizer"):
            raise CheckpointError(
                f"the tokenizer in {self.path} has changed since the run began, and its ids "
                "no longer match the model; restore tokenizer.json"
            )

    def check_data(self, fingerprint: str) -> None:
        """Raise if the data has changed since the run began."""
        if fingerprint != self._read_json(self.environment).get("data"):
            settings = self.load_config().data
            raise DataError(
                f"the data has changed since the run began: {settings.path or settings.source}\n"
                "restore the old file, or begin a new run with regard train"
            )

    def load_evaluation(self) -> Evaluation:
        """The evaluation of model.safetensors: that of all data, else the best while training."""
        if path_exists(self.evaluation):
            try:
                return build(
                    Evaluation, current_settings(read_json(self.evaluation), "evaluation.")
                )
            except ConfigError as error:
                raise CheckpointError(f"{self.evaluation} is corrupted: {error}") from None
        config = self.load_config()
        task = TASKS.get(kind_of(config.task)[0], Task)  # an imported run may have no task
        name = config.train.best_metric or task.best_metric
        rows = [row for row in self.rows() if "validation" in row]
        rows = rows[-1:] if name == "last" else [row for row in rows if name in row["validation"]]
        if not rows:
            return Evaluation(metrics={})
        best, *others = rows
        for row in others:
            best = row if is_better(name, row["validation"], best["validation"]) else best
        targets, total = best.get("validation_targets"), best.get("validation_total")
        return Evaluation(
            metrics=dict(best["validation"]),
            evaluated_on=describe_targets(task, targets, total),
            targets=targets,
            total=total,
        )

    def save_evaluation(self, evaluation: Evaluation) -> None:
        """Write the evaluation of model.safetensors."""
        self.write_json(self.evaluation, asdict(evaluation))

    def best_metrics(self) -> dict[str, float]:
        """The validation metrics of the best model, which is in model.safetensors."""
        return self.load_evaluation().metrics

    def load_weights(self) -> dict[str, Tensor]:
        """The weights of the best model; an error says how to restore a corrupted file."""
        try:
            return read_tensors(self.model)
        except CheckpointError as error:
            steps = self.load_config().train.steps
            valid = next(valid_steps_before(self.checkpoints, steps), None)
            if valid is None and self.model.exists():
                raise
            if valid is None:
                raise CheckpointError(
                    f"{error}; none were saved yet; to continue training: regard resume {self.path}"
                ) from None
            raise CheckpointError(
                f"{error}\nto restore it: regard resume {self.path} --step {valid}"
            ) from None

    def append(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl and send it to the trackers."""
        self._append(self.metrics, json.dumps(row) + "\n")
        for tracker in self.trackers:
            tracker(row)

    def append_sample(self, step: int, sample: str) -> None:
        """Append a sample of the model's output after `step` to samples.txt, and its SVG."""
        self._append(self.samples, f"--- step {step}\n{sample}\n")
        svg = getattr(sample, "svg", None)
        if svg is not None:
            with self.directory.atomic(f"sample-{step}.svg", sync=False) as file:
                file.write(svg.encode())

    def append_skipped(self, row: dict[str, Any]) -> None:
        """Append a skipped step, and the examples it read, to skipped.jsonl."""
        self._append(self.skipped, json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl, without a last line that is still being written."""
        rows = []
        try:
            with open_regular_file(self.metrics) as file:
                for line in iter(partial(file.readline, MAX_ROW_BYTES), b""):
                    if line.endswith(b"\n") or len(line) == MAX_ROW_BYTES:
                        rows.append(_parse_row(line))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.metrics} is corrupted: {error}") from None
        return rows

    def log_sizes(self) -> dict[str, int]:
        """The sizes of the log files on disk, to which a resumed run truncates them."""
        sizes = {}
        for path in (self.metrics, self.samples):
            sizes[path.name] = 0
            with suppress(FileNotFoundError), self.directory.open_reader(path.name) as file:
                os.fsync(file.fileno())
                sizes[path.name] = os.fstat(file.fileno()).st_size
        return sizes

    def truncate_logs(self, sizes: dict[str, int]) -> None:
        """Truncate the log files to the sizes that they had at a checkpoint."""
        for name in sizes.keys() & {self.metrics.name, self.samples.name}:  # never another file
            self.directory.truncate(name, sizes[name])

    def _append(self, path: Path, text: str) -> None:
        try:
            self.directory.append(path.name, text.encode())
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(write_error_message(path, error)) from error

    def _read_json(self, path: Path) -> dict[str, Any]:
        if not path_exists(path):
            raise CheckpointError(f"no run at {self.path}; {self._hint()}")
        return read_json(path)

    def _hint(self) -> str:
        """A sibling folder with a similar name that holds a run; else how to get a run."""
        siblings: dict[str, Path] = {}
        with suppress(OSError):
            siblings = {path.name: path for path in self.path.parent.iterdir()}
        close = get_close_matches(self.path.name, sorted(siblings), n=3)
        runs = [siblings[name] for name in close if path_exists(siblings[name] / "config.json")]
        if runs:
            return f"did you mean {str(runs[0])!r}?"
        return "`regard train` or `regard import` writes one"


@cache  # once for each file
def _warn_without_settings(path: Path) -> None:
    logger.warning(
        "%s does not hold the settings it was trained with, since an earlier version of regard "
        "wrote it, so a change of config.json cannot be detected; to store the settings of "
        "config.json in it: regard edit %s",
        path,
        path.parent,
    )


def _parse_row(line: bytes) -> dict[str, Any]:
    """A line of metrics.jsonl: a step, numbers, and the tables `validation` and `activations`."""
    row = parse_json(line.decode())
    if isinstance(row, dict) and "taps" in row:  # the key in earlier versions
        row["activations"] = row.pop("taps")
    if isinstance(row, dict) and "step" in row and all(_is_valid(*item) for item in row.items()):
        return row
    raise ValueError(f"{quote(line.decode())} is not a row of metrics")


def _is_valid(name: str, value: Any) -> bool:
    """Whether an entry of a row has the type that its name requires."""
    if name == "validation":
        return isinstance(value, dict) and all(map(_is_number, value.values()))
    if name == "activations":
        return isinstance(value, dict) and all(
            isinstance(table, dict) and all(n is None or _is_number(n) for n in table.values())
            for table in value.values()
        )
    if name in ("step", "targets"):
        return _is_integer(value)
    return value is None or _is_number(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 63


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)


class WorkerFolder(RunFolder):
    """The folder as ranks > 0 use it: rank 0 writes the logs; all write shards of checkpoints."""

    def _append(self, path: Path, text: str) -> None:
        """Do nothing."""


def new_folder(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, … that does not exist, or that this launch created."""
    number, path = 1, Path("runs", name)
    while path.exists() and not (restart_count() and RunFolder(path).belongs_to(launch_id())):
        number += 1
        path = Path("runs", f"{name}-{number}")
    return path
