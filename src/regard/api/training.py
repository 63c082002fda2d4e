"""Train, resume, import and export runs."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from regard.api.display import show_events
from regard.api.overrides import read_overrides
from regard.api.run import Run, load
from regard.config import Choice, RunConfig, build, is_override, kind_of, overlay, to_table
from regard.models.build import count_parameters, is_fitted_without_gradients
from regard.models.presets import ModelConfig
from regard.pipelines.base import Progress
from regard.tasks import TASKS
from regard.training import run as training_run
from regard.training.baseline import (
    read_baseline_settings,
    read_ngram_baseline,
    read_simple_baselines,
)
from regard.training.edit import edit_run
from regard.training.events import Event, NGramBaselineEvaluated
from regard.training.import_export import ExportResult, export_as, import_run, merge_run
from regard.training.parallel import launch
from regard.training.setup import configure as run_settings
from regard.training.storage.evaluation import few_targets_warning
from regard.training.storage.run_folder import RunFolder, new_folder
from regard.training.study import begin_or_resume, unfinished_runs
from regard.training.tracking.history import stored_parameters

OnEvent = Callable[[Event], None]
Model = str | Mapping[str, Any] | ModelConfig


def train(
    data_or_recipe: str | Path | RunConfig | None = None,
    *overrides: str,
    task: Choice | None = None,
    model: Model | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    tokenizer: Choice | None = None,
    minutes: float | None = None,
    device: str | None = None,
    out: Path | str | None = None,
    quiet: bool = False,
    on_event: OnEvent | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Any:
    """Train a model and return its `Run`; for a recipe with several runs, return the `Study`.

    `data_or_recipe` is a file or folder of your own data, a recipe, a `RunConfig`, or None where
    the settings name the data (`data={"source": …, "target": …}`). Settings are `key=value` strings
    as on the command line, or keywords: those above, every other field of `train` and `data`
    (`patience=3`), or a whole table (`train={"max_grad_norm": 0.5}`). `model` is a preset's name, a
    configuration (`regard.preset`) or a table. `regard.settings()` lists all settings.

    Progress is shown unless `quiet`: on stderr, or in the notebook's cell. `on_event` is called
    with every event of the run, `progress` while the data is prepared. A study that was
    interrupted continues. A rank above 0 that does not train, as for an n-gram model, returns None.

    >>> model = regard.preset("gru", dim=8)
    >>> trained = regard.train(text, "train.batch=2", model=model, steps=2, quiet=True)
    >>> trained.config.model["dim"], trained.config.train.steps
    (8, 2)
    """
    if isinstance(data_or_recipe, str) and is_override(data_or_recipe):
        overrides, data_or_recipe = (data_or_recipe, *overrides), None
    keywords = {"task": task, "model": model, "steps": steps, "batch": batch, "lr": lr}
    keywords |= {"seed": seed, "tokenizer": tokenizer, "minutes": minutes, "device": device}
    table = read_overrides(overrides, keywords | settings)
    if not isinstance(data_or_recipe, RunConfig):
        study = open_study(data_or_recipe, out=out, **table)
        if study is not None:
            study.train(quiet=quiet, on_event=on_event, progress=progress)
            return study
    finished = show_events(
        lambda report: train_events(data_or_recipe, out=out, progress=report, **table),
        quiet=quiet,
        on_event=on_event,
        progress=progress,
    )
    return None if finished is None else load(finished.folder)


def train_events(
    data_or_recipe: str | Path | RunConfig | None,
    *overrides: str,
    out: Path | str | None = None,
    progress: Progress | None = None,
    started: float | None = None,
    **settings: Any,
) -> Iterator[Event]:
    """Train one run and yield its events; the trained model is not loaded.

    `minutes=…` counts from `started` on, a value of `time.perf_counter`; by default from now.
    """
    if launch.rank():
        return training_run.run_worker()
    require_new_folder(out)  # before `minutes` takes time to measure
    started = time.perf_counter() if started is None else started
    table = read_overrides(overrides, settings)
    config = configure(data_or_recipe, started=started, **table)
    folder = new_folder(config.name) if out is None else Path(out)
    notes = run_settings.unused_overrides(config, table)
    return training_run.begin(config, folder, progress, started, notes)


def require_new_folder(out: Path | str | None) -> None:
    """Raise if a run folder exists, unless torchrun has restarted this launch."""
    if out is not None and not launch.restart_count():
        RunFolder(out).require_new_path()


def resume(
    path: Path | str,
    *overrides: str,
    step: int | None = None,
    steps: int | None = None,
    quiet: bool = False,
    on_event: OnEvent | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Run:
    """Continue a run that was stopped, or extend one that finished to more `steps`.

    The run continues from its newest checkpoint, or from that of `step`. The other arguments are
    those of `train`.

    >>> trained = regard.train(text, model=TINY, steps=2, quiet=True)
    >>> regard.resume(trained.folder.path, steps=3, quiet=True).config.train.steps
    3
    """
    table = read_overrides(overrides, {"steps": steps, **settings})
    show_events(
        lambda report: resume_events(path, step=step, progress=report, **table),
        quiet=quiet,
        on_event=on_event,
        progress=progress,
    )
    return load(path)


def resume_events(
    path: Path | str,
    *overrides: str,
    step: int | None = None,
    progress: Progress | None = None,
    started: float | None = None,
    **settings: Any,
) -> Iterator[Event]:
    """Continue a run and yield its events; the trained model is not loaded.

    The rest of its time budget counts from `started` on, as in `train_events`.
    """
    table = read_overrides(overrides, settings)
    return training_run.resume(Path(path), table, step=step, progress=progress, started=started)


def edit(path: Path | str, *overrides: str, **settings: Any) -> list[str]:
    """Change settings of a run without training it; return the changes, with old and new values.

    The weights must fit the settings. Without settings, a config.json that was edited by hand is
    accepted.

    >>> trained = regard.train(text, model=TINY, steps=2, quiet=True)
    >>> regard.edit(trained.folder.path, model={"norm_eps": 1e-6})
    ['model.norm_eps: 1e-05 → 1e-06']
    """
    return edit_run(Path(path), read_overrides(overrides, settings))


def configure(
    data_or_recipe: str | Path | RunConfig | None,
    *overrides: str,
    started: float | None = None,
    on_timing: Callable[[], object] | None = None,
    **settings: Any,
) -> RunConfig:
    """The settings that `train` would use: those of a recipe, or defaults for the data.

    `minutes=…` counts from `started` on, as in `train_events`; `on_timing` is called before the
    first step is timed, when all settings are checked.
    """
    table = read_overrides(overrides, settings)
    if isinstance(data_or_recipe, RunConfig):
        return build(RunConfig, overlay(to_table(data_or_recipe), table))
    path = None if data_or_recipe is None else str(data_or_recipe)
    return run_settings.configure(path, table, started=started, on_timing=on_timing)


@dataclass(frozen=True, slots=True, repr=False)
class Study:
    """The runs of a recipe that trains several, one folder each."""

    folder: Path
    configs: Mapping[str, RunConfig]
    report: Sequence[Choice] = ()  # data of an evaluation by length at the end

    def __repr__(self) -> str:
        return f"Study({str(self.folder)!r}: {', '.join(self.configs)})"

    def remaining(self) -> list[str]:
        """The names of the runs that have not finished; raises if settings have changed."""
        return unfinished_runs(self.configs, self.folder)

    def events(self, name: str, progress: Progress | None = None) -> Iterator[Event]:
        """Train one run of the study, or continue it, and yield its events."""
        return begin_or_resume(self.configs[name], self.folder / name, progress)

    def train(
        self,
        *,
        quiet: bool = False,
        on_event: OnEvent | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Train all runs that have not finished, one after the other; see `regard.train`."""
        for name in self.remaining():
            events = partial(self.events, name)
            show_events(events, quiet=quiet, on_event=on_event, progress=progress)

    def paths(self) -> list[Path]:
        """The folders of the runs, in the order of the recipe."""
        return [self.folder / name for name in self.configs]

    def runs(self, device: str = "auto") -> dict[str, Run]:
        """All runs, loaded."""
        return {name: load(self.folder / name, device) for name in self.configs}


def open_study(
    data_or_recipe: str | Path | None,
    *overrides: str,
    out: Path | str | None = None,
    **settings: Any,
) -> Study | None:
    """The study that a recipe describes; None for other recipes and for data."""
    table = read_overrides(overrides, settings)
    recipe = None if data_or_recipe is None else str(data_or_recipe)
    configs = run_settings.configure_study(recipe, table)
    if recipe is None or not configs:
        return None
    folder = Path("runs", Path(recipe).stem) if out is None else Path(out)
    return Study(folder, configs, run_settings.configure_report(recipe))


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The task, the baseline and the size of a finished run."""

    config: RunConfig
    baseline: NGramBaselineEvaluated | None  # the n-gram baseline, where it was computed
    simple_baselines: dict[str, dict[str, float]]  # metrics, for forecasting and text regression
    baseline_settings: dict[str, str]  # settings that train a baseline, by its name
    unit: str  # unit of the metrics, where it is not obvious
    is_fitted_without_gradients: bool
    stored_values: int  # values stored by a model fitted without gradients
    command: str  # the command that uses the model: "generate", "translate", …
    data_kind: str  # "text", "pairs", "images", …
    warnings: list[str]  # about too little validation data

    @property
    def baselines(self) -> dict[str, dict[str, float]]:
        """The metrics of all baselines, by name."""
        if self.baseline is not None:
            return {self.baseline.name: self.baseline.metrics}
        return self.simple_baselines


def summarize(path: Path | str) -> RunSummary:
    """Read the summary of a run folder; no weights are loaded."""
    folder = RunFolder(path)
    config = folder.load_config()
    without_gradients = is_fitted_without_gradients(config.model["family"])
    task = TASKS[kind_of(config.task)[0]]  # of a trained run; imported ones may have none
    return RunSummary(
        config=config,
        baseline=read_ngram_baseline(folder),
        simple_baselines=read_simple_baselines(folder),
        baseline_settings=read_baseline_settings(folder),
        unit=task.unit,
        is_fitted_without_gradients=without_gradients,
        stored_values=stored_parameters(folder) if without_gradients else 0,
        command=task.methods[0],
        data_kind=task.data_kind,
        warnings=few_targets_warning(task, folder.load_evaluation().total),
    )


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A run that was imported from a Hugging Face checkpoint."""

    path: Path
    model_type: str  # that of config.json, or the file format: "llama2.c", …
    parameters: int
    dtype: str
    task: str
    head: str
    tokenizer: str | None
    command: str | None  # the command that uses the model; None where no task fits its head


def import_checkpoint(
    source: Path | str, out: Path | str, *overrides: str, model: Model | None = None
) -> ImportedRun:
    """Import a Hugging Face checkpoint, a folder or a name on the hub, as a run folder.

    Settings of the model that do not change the shape of a tensor may be overridden, as in
    `import_checkpoint("llama", "runs/llama", "model.position.base=500000")`.
    """
    checkpoint = import_run(source, Path(out), read_overrides(overrides, {"model": model}))
    task = TASKS.get(checkpoint.task)
    return ImportedRun(
        path=Path(out),
        model_type=checkpoint.model_type.name,
        parameters=count_parameters(checkpoint.config),
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        task=checkpoint.task,
        head=checkpoint.head,
        tokenizer=getattr(checkpoint.tokenizers, "kind", None),
        command=None if task is None else task.methods[0],
    )


def import_model(
    source: Path | str, out: Path | str, *overrides: str, model: Model | None = None
) -> Run:
    """Import a Hugging Face checkpoint as a run, and open it; see `import_checkpoint`.

    >>> exported = run.export("exported", model_type="gpt2")
    >>> regard.import_model("exported", "runs/imported").config.model["dim"]
    16
    """
    import_checkpoint(source, out, *overrides, model=model)
    return load(out)


def merge(run: Path | str, out: Path | str, *, adapter: Path | str | None = None) -> list[str]:
    """Write a run with a LoRA adapter merged into its weights; returns the names of the layers.

    The adapter is that of the run, or `adapter`, as in `regard.load`.

    >>> tune = {"start": str(run.folder.path), "tune": {"kind": "lora", "rank": 2}}
    >>> tuned = regard.train(text, steps=2, train=tune, out="runs/tuned", quiet=True)
    >>> regard.merge("runs/tuned", "runs/merged")
    ['decoder.blocks.0.attention.query', 'decoder.blocks.0.attention.value']
    """
    return merge_run(Path(run), Path(out), adapter)


def export(
    run: Path | str,
    out: Path | str,
    *,
    model_type: str | None = None,
    format: Literal["transformers", "onnx", "gguf"] = "transformers",
    type: Literal["f32", "f16", "q8_0", "q4_k"] | None = None,
) -> ExportResult:
    """Write a run as a folder for Hugging Face transformers, or with an ONNX or GGUF file.

    >>> regard.export(run.folder.path, "exported", model_type="gpt2").path
    PosixPath('exported')
    """
    return export_as(Path(run), Path(out), format, model_type, type)
