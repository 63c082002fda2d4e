"""A run on disk.

config.json · model.safetensors · tokenizer.json · metrics.jsonl · environment.json
checkpoints/step-N/ · samples.txt
"""

import json
from pathlib import Path
from typing import Any

from regard.config import RunConfig, build, to_table
from regard.errors import CheckpointError, ConfigError
from regard.training.checkpoint import write_json


class Folder:
    """The files of a run, by name."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.model = self.path / "model.safetensors"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.txt"
        self.checkpoints = self.path / "checkpoints"

    def create(self, config: RunConfig, facts: dict[str, Any]) -> None:
        """Begin a new run here; one that exists is never written over."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"{self.path} exists already and is not written over;\n"
                f"continue it with `regard resume {self.path}`, or name another with --out"
            ) from None
        except OSError as error:
            raise CheckpointError(f"cannot make {self.path}: {error.strerror}") from None
        self.checkpoints.mkdir()
        self.save_config(config)
        write_json(self.environment, facts)
        self.metrics.touch()
        self.samples.touch()

    def save_config(self, config: RunConfig) -> None:
        """Keep the resolved settings."""
        write_json(self.config, to_table(config))

    def load_config(self) -> RunConfig:
        """The settings of the run, as it resolved them."""
        return build(RunConfig, self._json(self.config))

    def load_environment(self) -> dict[str, Any]:
        """What the run was made with, data and tokenizer fingerprints included."""
        return self._json(self.environment)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row of metrics."""
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics."""
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def sizes(self) -> dict[str, int]:
        """How long the growing files are now, so that a resumed run can cut them back."""
        return {path.name: path.stat().st_size for path in (self.metrics, self.samples)}

    def cut_back(self, sizes: dict[str, int]) -> None:
        """Drop what was logged after a checkpoint."""
        for name, size in sizes.items():
            with open(self.path / name, "a") as file:
                file.truncate(size)

    def _json(self, path: Path) -> dict[str, Any]:
        try:
            table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"no run at {self.path}; `regard train` writes one") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        return table


def new_folder(name: str) -> Path:
    """The first free of runs/NAME, runs/NAME-2, runs/NAME-3, …"""
    number, path = 1, Path("runs", name)
    while path.exists():
        number += 1
        path = Path("runs", f"{name}-{number}")
    return path
