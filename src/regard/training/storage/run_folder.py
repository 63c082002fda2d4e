"""A run on disk.

config.json · model.safetensors · tokenizer.json · metrics.jsonl · environment.json
checkpoints/step-N/ · samples.txt · skipped.jsonl · clock.json · baseline.json · lock
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.config import RunConfig, build, to_table
from regard.errors import CheckpointError, DataError
from regard.files.atomic import atomic_folder, must_be_new, remove_leftovers, write_json
from regard.files.disk_space import disk_message
from regard.files.untrusted import open_regular_file, parse_json, path_exists, quote, read_json
from regard.pipelines import has_tokenizer, load_tokenizers
from regard.tasks.metrics import better
from regard.text import PairTokenizers, Tokenizer
from regard.training.parallel.launch import attempt, launch
from regard.training.storage.checkpoint import read_tensors, whole_before
from regard.training.storage.lock import locked

LONGEST_ROW = 100_000  # bytes of a line of metrics


class RunFolder:
    """The files of a run, by name."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.model = self.path / "model.safetensors"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.txt"
        self.skipped = self.path / "skipped.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.clock = self.path / "clock.json"
        self.baseline = self.path / "baseline.json"
        self.lock = self.path / "lock"
        self.trackers: list[Callable[[dict[str, Any]], None]] = []  # who else sees each row

    def must_be_new(self) -> None:
        """Refuse a folder that exists: no run is ever written over."""
        way_out = f"continue it with `regard resume {self.path}`, or name another with --out"
        must_be_new(self.path, way_out)

    def create(
        self,
        config: RunConfig,
        facts: dict[str, Any],
        tokenizers: Tokenizer | PairTokenizers | None,
        write_model: Callable[[Path], None] | None = None,
    ) -> None:
        """Begin a new run here, written aside and then renamed: a kill leaves all of it or none.

        `write_model` writes the weights of one that is not to be trained first.
        """
        self.must_be_new()
        with atomic_folder(self.path) as path:
            new = RunFolder(path)
            new.checkpoints.mkdir()
            new.save_config(config)
            write_json(new.environment, facts)
            if isinstance(tokenizers, PairTokenizers):
                tokenizers.save(path)
            elif tokenizers is not None:
                tokenizers.save(path / "tokenizer.json")
            new.metrics.touch()
            new.samples.touch()
            if write_model is not None:
                write_model(new.model)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process trains here; the system unlocks when this one dies."""
        with locked(self.lock):
            for folder in (self.path, self.checkpoints):
                remove_leftovers(folder, locked=True)
            for leftover in self.path.glob(".tmp*"):  # of the safetensors library
                leftover.unlink(missing_ok=True)
            yield

    def save_config(self, config: RunConfig) -> None:
        """Keep the resolved settings."""
        write_json(self.config, to_table(config))

    def load_config(self) -> RunConfig:
        """The settings of the run, as it resolved them."""
        table = self._json(self.config)
        if "model_type" in table:
            raise CheckpointError(
                f"{self.path} is a checkpoint of another library;\n"
                f"`regard import {self.path} RUN` makes a run of it"
            )
        return build(RunConfig, table)

    def is_of(self, launch: str | None) -> bool:
        """Whether this launch of `torchrun` began the run or went on with it, an attempt ago."""
        return self.environment.exists() and self.load_environment().get("launch") == launch

    def claim(self, launch: str | None) -> None:
        """Note which launch of `torchrun`, if any, has gone on with the run."""
        if launch is not None:
            write_json(self.environment, self.load_environment() | {"launch": launch})

    def load_environment(self) -> dict[str, Any]:
        """What the run was made with, data and tokenizer fingerprints included."""
        return self._json(self.environment)

    def load_tokenizers(self, config: RunConfig) -> PairTokenizers | Tokenizer | None:
        """The tokenizers of the run; None where it began without one, as a run on images does."""
        without = self.load_environment().get("tokenizer") == "none"
        if without and not has_tokenizer(self.path):
            return None
        return load_tokenizers(self.path, config)

    def must_have(self, tokenizer: str) -> None:
        """Refuse a tokenizer with another fingerprint than the run began with."""
        if tokenizer != self._json(self.environment).get("tokenizer"):
            raise CheckpointError(
                f"the tokenizer in {self.path} has changed since the run began; its ids no "
                "longer mean what the model learned"
            )

    def must_be_of(self, data: str) -> None:
        """Refuse data with another fingerprint than the run began with."""
        if data != self._json(self.environment).get("data"):
            given = self.load_config().data
            raise DataError(
                f"the data has changed since the run began: {given.path or given.source}\n"
                "put the old file back, or begin a new run with regard train"
            )

    def kept_metrics(self) -> dict[str, float]:
        """The validation metrics of the model that was kept."""
        name = self.load_config().train.best
        rows = [row["validation"] for row in self.rows() if "validation" in row]
        rows = rows[-1:] if name == "last" else [row for row in rows if name in row]
        if not rows:
            return {}
        first, *others = rows
        for each in others:
            first = each if better(name, each[name], first[name]) else first
        return dict(first)

    def kept_weights(self) -> dict[str, Tensor]:
        """The weights of the model that was kept; where they are damaged, how to get them again."""
        try:
            return read_tensors(self.model)
        except CheckpointError as error:
            good = next(whole_before(self.checkpoints, self.load_config().train.steps), None)
            if good is None and self.model.exists():
                raise
            if good is None:
                how = "none were saved yet; to train on"
                raise CheckpointError(f"{error}; {how}: regard resume {self.path}") from None
            raise CheckpointError(
                f"{error}\nto make it again: regard resume {self.path} --step {good}"
            ) from None

    def append(self, row: dict[str, Any]) -> None:
        """Add a row of metrics."""
        self._add(self.metrics, json.dumps(row) + "\n")
        for watch in self.trackers:
            watch(row)

    def add_sample(self, step: int, sample: str) -> None:
        """Add what the model writes after `step`."""
        self._add(self.samples, f"--- step {step}\n{sample}\n")

    def add_skip(self, row: dict[str, Any]) -> None:
        """Add a step that taught nothing, and what it read."""
        self._add(self.skipped, json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics; a last line without an end is still being written."""
        found = []
        try:
            with open_regular_file(self.metrics) as file:
                for line in iter(partial(file.readline, LONGEST_ROW), b""):
                    if line.endswith(b"\n") or len(line) == LONGEST_ROW:
                        found.append(_row(line))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.metrics} is damaged: {error}") from None
        return found

    def sizes(self) -> dict[str, int]:
        """How long the growing files are on the disk, so that a resumed run can cut them back."""
        sizes = {}
        for path in (self.metrics, self.samples):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                sizes[path.name] = path.stat().st_size
        return sizes

    def cut_back(self, sizes: dict[str, int]) -> None:
        """Drop what was logged after a checkpoint."""
        for name in sizes.keys() & {self.metrics.name, self.samples.name}:  # and of no other file
            with open(self.path / name, "a") as file:
                size = min(sizes[name], file.tell())  # never longer: that would add zero bytes
                file.truncate(size)

    def _add(self, path: Path, text: str) -> None:
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise CheckpointError(disk_message(path, error)) from error

    def _json(self, path: Path) -> dict[str, Any]:
        if not path_exists(path):
            raise CheckpointError(f"no run at {self.path}; `regard train` writes one")
        return read_json(path)


def _row(line: bytes) -> dict[str, Any]:
    """A line of metrics: a step, and numbers by name or, under `validation`, those held out."""
    row = parse_json(line.decode())
    if isinstance(row, dict) and "step" in row and all(_is_value(*each) for each in row.items()):
        return row
    raise ValueError(f"{quote(line.decode())} is no row of metrics")


def _is_value(name: str, value: Any) -> bool:
    if name == "validation":
        return isinstance(value, dict) and all(_is_value("", each) for each in value.values())
    whole = isinstance(value, int) and abs(value) < 1 << 63
    if name in ("step", "targets"):
        return whole
    return whole or isinstance(value, float) or (value is None and name != "")


class ReadOnly(RunFolder):
    """The folder of a run as the other ranks see it: rank 0 alone writes."""

    def save_config(self, config: RunConfig) -> None:
        """Leave it alone."""

    def append(self, row: dict[str, Any]) -> None:
        """Leave it alone."""

    def cut_back(self, sizes: dict[str, int]) -> None:
        """Leave it alone."""

    def _add(self, path: Path, text: str) -> None:
        pass


def new_folder(name: str) -> Path:
    """The first free of runs/NAME, runs/NAME-2, …, or the one that this launch began before."""
    number, path = 1, Path("runs", name)
    while path.exists() and not (attempt() and RunFolder(path).is_of(launch())):
        number += 1
        path = Path("runs", f"{name}-{number}")
    return path
