"""Train, resume, import and export runs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.api.run import Run, load
from regard.config import (
    RunConfig,
    build,
    check_overrides,
    kind_of,
    merge,
    parse_overrides,
    to_table,
)
from regard.models.build import count_parameters, is_closed_form
from regard.pipelines.base import Progress
from regard.tasks import TASKS
from regard.training import run as training_run
from regard.training.baseline import read_baseline
from regard.training.events import BaselineEvaluated, Event, RunStarted
from regard.training.import_export import ExportResult, export_run, import_run
from regard.training.parallel import launch
from regard.training.setup import configure as settings
from regard.training.storage.run_folder import RunFolder, new_folder
from regard.training.study import begin_or_resume, unfinished_runs
from regard.training.tracking.history import stored_parameters

OnEvent = Callable[[Event], None]


def train(
    what: str | Path | RunConfig | None,
    *words: str,
    out: Path | str | None = None,
    on_event: OnEvent = lambda event: None,
    progress: Progress | None = None,
    **overrides: Any,
) -> Any:
    """Train a model and return its `Run`; for a recipe with several runs, return the `Study`.

        regard.train("my.txt")
        regard.train("my.txt", "model.layers=6", minutes=10, out="runs/mine")
        regard.train("cells").runs()["lstm"].generate("To be")

    `words` are `key=value` as on the command line, `overrides` the same as a nested table.
    Without `what`, the settings name the data (`data.source=…`). `on_event` is called with every
    event of the run, `progress` while the data is prepared. A study that was interrupted
    continues.
    """
    if not isinstance(what, RunConfig):
        study = open_study(what, *words, out=out, **overrides)
        if study is not None:
            study.train(on_event=on_event, progress=progress)
            return study
    folder = Path()
    for event in train_events(what, *words, out=out, progress=progress, **overrides):
        folder = event.folder if isinstance(event, RunStarted) else folder
        on_event(event)
    return load(folder)


def train_events(
    what: str | Path | RunConfig | None,
    *words: str,
    out: Path | str | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> Iterator[Event]:
    """Train one run and yield its events; the trained model is not loaded."""
    if launch.rank():
        return training_run.run_worker()
    config = configure(what, *words, **overrides)
    folder = new_folder(config.name) if out is None else Path(out)
    return training_run.begin(config, folder, progress)


def resume(
    path: Path | str,
    *words: str,
    step: int | None = None,
    on_event: OnEvent = lambda event: None,
    progress: Progress | None = None,
    **overrides: Any,
) -> Run:
    """Continue a run that was stopped, or extend one that finished (`train.steps=…`).

    From its newest checkpoint, or from that of `step`.
    """
    for event in resume_events(path, *words, step=step, progress=progress, **overrides):
        on_event(event)
    return load(path)


def resume_events(
    path: Path | str,
    *words: str,
    step: int | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> Iterator[Event]:
    """Continue a run and yield its events; the trained model is not loaded."""
    over = merge(parse_overrides(words), overrides)
    check_overrides(over)
    return training_run.resume(Path(path), over, step=step, progress=progress)


def configure(what: str | Path | RunConfig | None, *words: str, **overrides: Any) -> RunConfig:
    """The settings that `train` would use: a recipe's, or chosen for the given data."""
    over = merge(parse_overrides(words), overrides)
    if isinstance(what, RunConfig):
        return build(RunConfig, merge(to_table(what), over))
    return settings.configure(None if what is None else str(what), over)


@dataclass(frozen=True, slots=True)
class Study:
    """The runs of a recipe that trains several, one folder each."""

    folder: Path
    configs: Mapping[str, RunConfig]

    def remaining(self) -> list[str]:
        """The names of the runs that have not finished; raises if settings have changed."""
        return unfinished_runs(self.configs, self.folder)

    def events(self, name: str, progress: Progress | None = None) -> Iterator[Event]:
        """Train one run of the study, or continue it, and yield its events."""
        return begin_or_resume(self.configs[name], self.folder / name, progress)

    def train(
        self, *, on_event: OnEvent = lambda event: None, progress: Progress | None = None
    ) -> None:
        """Train all runs that have not finished, one after the other."""
        for name in self.remaining():
            for event in self.events(name, progress):
                on_event(event)

    def paths(self) -> list[Path]:
        """The folders of the runs, in the order of the recipe."""
        return [self.folder / name for name in self.configs]

    def runs(self, device: str = "auto") -> dict[str, Run]:
        """All runs, loaded."""
        return {name: load(self.folder / name, device) for name in self.configs}


def open_study(
    what: str | Path | None, *words: str, out: Path | str | None = None, **overrides: Any
) -> Study | None:
    """The study that a recipe describes; None where `what` is not a recipe of several runs."""
    over = merge(parse_overrides(words), overrides)
    configs = settings.configure_study(None if what is None else str(what), over)
    if not configs:
        return None
    return Study(Path("runs", Path(str(what)).stem) if out is None else Path(out), configs)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The task, the baseline and the size of a finished run."""

    config: RunConfig
    baseline: BaselineEvaluated | None  # the n-gram baseline, where it was computed
    is_closed_form: bool
    stored_values: int  # of a closed-form model
    verb: str  # the command that uses the model: "generate", "translate", …
    data_kind: str  # "text", "pairs", "images", …


def summarize(path: Path | str) -> RunSummary:
    """Read the summary of a run folder; no weights are loaded."""
    folder = RunFolder(path)
    config = folder.load_config()
    closed_form = is_closed_form(config.model["family"])
    task = TASKS[kind_of(config.task)[0]]
    return RunSummary(
        config=config,
        baseline=read_baseline(folder),
        is_closed_form=closed_form,
        stored_values=stored_parameters(folder) if closed_form else 0,
        verb=task.verbs[0],
        data_kind=task.data_kind,
    )


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A run that was imported from a Hugging Face checkpoint."""

    path: Path
    family: str
    parameters: int
    dtype: str
    task: str
    head: str
    tokenizer: str | None
    verb: str | None  # the command that uses the model; None where no task fits its head


def import_checkpoint(
    source: Path | str, out: Path | str, *words: str, **overrides: Any
) -> ImportedRun:
    """Import a Hugging Face checkpoint, a folder or a name on the hub, as a run folder.

    Settings of the model that do not change the shape of a tensor may be overridden, as in
    `import_checkpoint("llama", "runs/llama", "model.position.base=500000")`.
    """
    checkpoint = import_run(source, Path(out), merge(parse_overrides(words), overrides))
    task = TASKS.get(checkpoint.task)
    return ImportedRun(
        path=Path(out),
        family=checkpoint.family.name,
        parameters=count_parameters(checkpoint.config),
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        task=checkpoint.task,
        head=checkpoint.head,
        tokenizer=getattr(checkpoint.tokenizers, "kind", None),
        verb=None if task is None else task.verbs[0],
    )


def import_model(source: Path | str, out: Path | str, *words: str, **overrides: Any) -> Run:
    """Import a Hugging Face checkpoint as a run, and open it; see `import_checkpoint`."""
    import_checkpoint(source, out, *words, **overrides)
    return load(out)


def export(run: Path | str, out: Path | str, *, family: str | None = None) -> ExportResult:
    """Write a run as a folder that Hugging Face transformers opens."""
    return export_run(Path(run), Path(out), family)
