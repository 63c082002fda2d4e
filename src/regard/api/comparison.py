"""Comparison of runs: metrics, cost, curves, and the settings that differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.api.model_info import Values, differences, full_settings
from regard.api.pictures import by_length_curves, history_curves
from regard.api.run import load
from regard.config import Choice, kind_of, to_table
from regard.explain.render.picture import Picture
from regard.models.build import is_closed_form, resolve
from regard.pipelines.by_length import ByLength
from regard.training.tracking.history import History, read_history


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs, finished or not."""

    names: list[str]
    histories: list[History]
    settings: dict[str, Values]  # that differ, one value per run
    translations: list[str] = field(default_factory=list)  # of `text`, one per run
    by_length: list[ByLength] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, tuple[float | None, ...]]:
        """Validation metrics of the saved models, one value per run."""
        return _columns([history.metrics for history in self.histories])

    @property
    def taps(self) -> dict[str, tuple[float | None, ...]]:
        """The last value of every statistic of `train.log`, one value per run."""
        last = [
            {name: points[-1][1] for name, points in history.taps.items()}
            for history in self.histories
        ]
        return _columns(last)

    @property
    def notes(self) -> list[str]:
        """Reasons why the runs' metrics may not be comparable."""
        configs = [history.config for history in self.histories]
        if len({kind_of(config.task)[0] for config in configs}) > 1:
            return ["these runs have different tasks: their losses cannot be compared"]
        if len({str(config.data.path or config.data.source) for config in configs}) > 1:
            return ["these runs were evaluated on different data"]
        if len({str(config.data.tokenizer) for config in configs}) > 1:
            return ["loss is per token, and the tokenizers differ: compare bits_per_byte"]
        return []

    def picture(self) -> Picture:
        """Metrics by length where those were computed, else training and validation curves."""
        if self.by_length:
            return by_length_curves(self.names, self.by_length)
        return history_curves(self.names, self.histories)


def compare(
    *runs: Path | str,
    text: str | None = None,
    by_length: bool = False,
    data: Sequence[Choice] = (),
) -> Comparison:
    """Compare runs by what they have logged.

    With `text`, each run translates it; with `by_length`, each is evaluated separately on short
    and long examples of its validation data, or of `data`.

    >>> regard.compare(run.folder.path, other.folder.path).settings["model.dim"]
    (16, 8)
    """
    histories = [read_history(run) for run in runs]
    settings = differences(*map(_settings, histories))
    translations: list[str] = []
    lengths: list[ByLength] = []
    for path in runs if text is not None or by_length else ():
        run = load(path)
        if text is not None:
            translations.append(run.translate(text))
        if by_length:
            lengths.append(run.evaluate_by_length(*data))
    return Comparison(run_names(runs), histories, settings, translations, lengths)


def run_names(runs: Sequence[Path | str]) -> list[str]:
    """The names of the folders, or the whole paths where two have the same name."""
    names = [Path(run).resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def takes_steps(history: History) -> bool:
    """Whether a run was trained here step by step: not a closed-form model, not an import."""
    data = history.config.data
    trained_here = data.path is not None or data.source is not None
    return trained_here and not is_closed_form(history.config.model["family"])


def _columns(tables: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: tuple(table.get(key) for table in tables) for key in keys}


def _settings(history: History) -> dict[str, Any]:
    """All settings of a run by their dotted names."""
    config = history.config
    tables = {
        "model": full_settings(resolve(config.model)),
        "train": to_table(config.train) if takes_steps(history) else {},
        "data": to_table(config.data),
    }
    dotted = {
        f"{part}.{key}": value for part, table in tables.items() for key, value in table.items()
    }
    return {"task": config.task, **dotted, "device": config.device}
