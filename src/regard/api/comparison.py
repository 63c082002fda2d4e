"""Comparison of runs: metrics, cost, curves, and the settings that differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.api.forecasting import errors_by_step
from regard.api.formatting import format_number
from regard.api.model_info import NOT_EVALUATED, Values, differences, full_settings
from regard.api.overrides import WITHOUT_TOKENIZER
from regard.api.run import Run, load
from regard.api.run_figures import by_length_curves, forecast_curves, history_curves
from regard.config import Choice, kind_of, to_table
from regard.errors import ConfigError, RegardError, reject_options
from regard.explain.data_frame import data_frame
from regard.explain.render.figure import encode, page, save, to_svg
from regard.html import html_table
from regard.models.build import resolve
from regard.pipelines.base import Progress
from regard.pipelines.by_length import MetricsByLength
from regard.pipelines.text import default_stride
from regard.tasks import TASKS
from regard.training.storage.evaluation import Evaluation
from regard.training.tracking.history import History, read_history

STATISTICS = ("mean", "std")  # options of a task that are computed from the training data
# settings of one family that mean something else in the others
FAMILY_SPECIFIC = {("cbow", "window"), ("autoregression", "order")}

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The histories of several runs, finished or not, and the settings in which they differ."""

    names: list[str]
    histories: list[History]
    settings: dict[str, Values]  # settings that differ, one value per run
    translations: list[str] = field(default_factory=list)  # translations of `text`, one per run
    by_length: list[MetricsByLength] = field(default_factory=list)
    evaluation_notes: list[str] = field(default_factory=list)  # on runs evaluated again

    @property
    def metrics(self) -> dict[str, tuple[float | None, ...]]:
        """Validation metrics of the saved models, one value per run.

        Metrics that cannot be compared are left out: all if the runs have different tasks or
        validation data, and those of a run that was evaluated on different targets.
        """
        return _columns([history.metrics for history in self._comparable])

    @property
    def evaluations(self) -> dict[str, tuple[Any, ...]]:
        """The number of validation targets and the stride of the metrics, one value per run."""
        tables = []
        for evaluation in (history.evaluation for history in self._comparable):
            windows = evaluation.stride and f"{evaluation.stride:,} of {evaluation.context:,}"
            tables.append({"validation targets": evaluation.targets, "stride": windows})
        return {key: row for key, row in _columns(tables).items() if any(row)}

    @property
    def baselines(self) -> dict[str, tuple[float | None, ...]]:
        """Metrics of the baselines as `NAME: METRIC`, one value per run, on its validation data."""
        return _columns(
            [
                {
                    f"{name}: {metric}": value
                    for name, metrics in history.baselines.items()
                    for metric, value in metrics.items()
                }
                for history in self.histories
            ]
        )

    @property
    def unit(self) -> str:
        """The unit of the metrics, where it is not obvious; "" if the runs have different tasks."""
        kind = kind_of(self.histories[0].config.task)[0]
        return "" if self._has_different_tasks or kind not in TASKS else TASKS[kind].unit

    @property
    def _comparable(self) -> list[History]:
        """The histories, with empty evaluations where they cannot be compared."""
        histories = self.histories
        evaluations = [history.evaluation for history in histories]
        if _is_comparable(evaluations):
            return histories
        standard = [evaluation for evaluation in evaluations if _is_standard(evaluation)]
        comparable = _is_comparable(standard) and not self._has_different_tasks
        return [
            history
            if comparable and _is_standard(history.evaluation)
            else replace(history, evaluation=NOT_EVALUATED)
            for history in histories
        ]

    @property
    def _has_different_tasks(self) -> bool:
        return len({kind_of(history.config.task)[0] for history in self.histories}) > 1

    @property
    def activations(self) -> dict[str, tuple[float | None, ...]]:
        """The last value of every statistic of `train.log`, one value per run."""
        last = [
            {name: points[-1][1] for name, points in history.activations.items()}
            for history in self.histories
        ]
        return _columns(last)

    @property
    def notes(self) -> list[str]:
        """Notes on runs that were evaluated again, and on metrics that cannot be compared."""
        configs = [history.config for history in self.histories]
        if self._has_different_tasks:
            return ["these runs have different tasks: their metrics cannot be compared"]
        notes = list(self.evaluation_notes)
        if len({history.evaluation.data for history in self.histories} - {None}) > 1:
            notes.append(
                "these runs have different validation data: their metrics cannot be compared; "
                "`regard evaluate RUN DATA` evaluates each on the same data"
            )
        elif len({str(config.data.tokenizer) for config in configs}) > 1 and self._has_token_loss:
            has_bits = all("bits_per_byte" in history.metrics for history in self.histories)
            advice = "compare bits_per_byte" if has_bits else "losses cannot be compared"
            notes.append(f"loss is per token, and the tokenizers differ: {advice}")
        return notes

    @property
    def _has_token_loss(self) -> bool:
        """Whether the loss is a mean over tokens, so that it depends on the tokenizer."""
        task = TASKS.get(kind_of(self.histories[0].config.task)[0])
        return task is not None and "perplexity" in task.metric_names

    def figure(self) -> "Figure":
        """The metrics by length if they were computed, else forecasts, else training curves."""
        if self.by_length:
            return by_length_curves(self.names, self.by_length)
        if all(kind_of(history.config.task)[0] == "forecast" for history in self.histories):
            runs = [load(history.path) for history in self.histories]
            forecasts = [run.backtest() for run in runs]
            return forecast_curves(self.names, forecasts, [errors_by_step(run) for run in runs])
        return history_curves(self.names, self.histories)

    def __repr__(self) -> str:
        losses = self.metrics.get("loss", (None,) * len(self.names))
        cells = (
            name if loss is None else f"{name} {format_number(loss)}"
            for name, loss in zip(self.names, losses, strict=True)
        )
        return f"Comparison(validation loss: {', '.join(cells)})"

    def _repr_html_(self) -> str:
        rows = [
            (name, *(v if v is None or isinstance(v, str) else format_number(v) for v in values))
            for name, values in {**self.metrics, **self.baselines, **self._columns()}.items()
        ]
        return html_table(
            [*rows, *((key, *v) for key, v in self.settings.items())], (self.unit, *self.names)
        )

    def to_pandas(self) -> "DataFrame":
        """A row for each run: validation metrics, parameters, steps and seconds."""
        return data_frame(self._columns(), index=self.names)

    def save(self, path: Path | str) -> None:
        """Write the figure as .svg, .png, .pdf, or .html with the table."""
        suffix = Path(path).suffix
        if suffix != ".html":
            save(encode(self.figure(), suffix), path)
            return
        figure = self.figure()
        body = f"{to_svg(figure)}\n{self._repr_html_()}"
        save(page(str(figure.get_label()), body).encode(), path)

    def _columns(self) -> dict[str, Values]:
        return {
            **self.metrics,
            "parameters": tuple(history.parameters for history in self.histories),
            "steps": tuple(h.step if takes_steps(h) else None for h in self.histories),
            "seconds": tuple(history.seconds for history in self.histories),
        }


def compare(
    *runs: "Path | str | Run",
    text: str | None = None,
    by_length: bool = False,
    data: Sequence[Choice] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Compare the logged metrics, the cost and the settings of runs.

    The metrics are those of all validation data. A run that was evaluated on a part of it, or with
    a different stride from the others, is evaluated again.

    With `text`, each run translates it; with `by_length`, each is evaluated separately on short
    and long examples of its validation data, or of `data`.

    >>> regard.compare(run, other).settings["model.dim"]
    (16, 8)
    """
    if not by_length:
        reject_options("data is for by_length=True", {"data": data or None})
    if not runs:
        raise ConfigError("there is no run to compare; give at least one")
    paths = [run.folder.path if isinstance(run, Run) else run for run in runs]
    histories = [read_history(path) for path in paths]
    histories, notes = _with_comparable_evaluations(histories, progress)
    several_families = len({history.config.model["family"] for history in histories}) > 1
    settings = _differences([_settings(history, several_families) for history in histories])
    translations: list[str] = []
    metrics_by_length: list[MetricsByLength] = []
    for path in paths if text is not None or by_length else ():
        run = load(path)
        if text is not None:
            translations.append(run.translate(text))
        if by_length:
            metrics_by_length.append(run.evaluate_by_length(*data))
    return Comparison(run_names(paths), histories, settings, translations, metrics_by_length, notes)


def _with_comparable_evaluations(
    histories: list[History], progress: Progress | None
) -> tuple[list[History], list[str]]:
    """Evaluate again the runs whose metrics cannot be compared with those of the others."""
    tasks = {kind_of(history.config.task)[0] for history in histories}
    if len(tasks) > 1 or _is_comparable([history.evaluation for history in histories]):
        return histories, []
    result, notes = [], []
    for history in histories:
        evaluation = history.evaluation
        if not _is_standard(evaluation):
            before = evaluation.evaluated_on or "no data"
            stride = None
            if history.config.train.evaluate_stride is not None:
                stride = default_stride(resolve(history.config.model).context)
            try:
                run = load(history.path)
                evaluation = run.evaluate_logged_metrics(stride=stride, progress=progress)
            except RegardError as error:
                reason = str(error).splitlines()[0]
                notes.append(
                    f"{history.path}: evaluated on {before}; its metrics are left out, because it "
                    f"cannot be evaluated again: {reason}"
                )
            else:
                now = evaluation.evaluated_on
                notes.append(f"{history.path}: evaluated on {before} before, now on {now}")
        result.append(replace(history, evaluation=evaluation))
    return result, notes


def _is_comparable(evaluations: Sequence[Evaluation]) -> bool:
    """Whether the metrics are of the same targets, in comparable windows.

    Windows are comparable if stride / context is equal; the contexts may differ.
    """
    if len(evaluations) < 2:
        return True
    conditions = {
        (
            evaluation.data,
            evaluation.is_complete or evaluation.targets,
            None if _is_standard(evaluation) else evaluation.overlap,  # its stride is rounded
        )
        for evaluation in evaluations
    }
    return len(conditions) == 1 and evaluations[0].data is not None


def _is_standard(evaluation: Evaluation) -> bool:
    """Whether all validation data was evaluated, with the default stride."""
    stride = None if evaluation.context is None else default_stride(evaluation.context)
    return evaluation.is_complete and evaluation.data is not None and evaluation.stride == stride


def run_names(runs: Sequence[Path | str]) -> list[str]:
    """The names of the folders, or the full paths if two have the same name."""
    names = [Path(run).resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def takes_steps(history: History) -> bool:
    """Whether a run was trained in steps, neither fitted without gradients nor imported."""
    data = history.config.data
    has_data = data.path is not None or data.source is not None
    return has_data and not history.is_fitted_without_gradients


def _columns(tables: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: tuple(table.get(key) for table in tables) for key in keys}


def _differences(tables: Sequence[dict[str, Any]]) -> dict[str, Values]:
    """The settings that apply to several runs and differ between them."""
    rows = _columns(tables)
    applicable = {key: [{key: t[key]} for t in tables if key in t] for key in rows}
    return {
        key: values
        for key, values in rows.items()
        if len(applicable[key]) > 1 and differences(*applicable[key])
    }


def _settings(history: History, several_families: bool) -> dict[str, Any]:
    """The settings that apply to a run, by dotted name.

    With `several_families`, a setting of `FAMILY_SPECIFIC` is named with its family.
    """
    config = history.config
    family = config.model["family"]
    tables = {
        "model": {
            f"{key} of {family}"
            if several_families and (family, key) in FAMILY_SPECIFIC
            else key: value
            for key, value in full_settings(resolve(config.model)).items()
        },
        "train": to_table(config.train) if takes_steps(history) else {},
        "data": to_table(config.data),
    }
    task = TASKS.get(kind_of(config.task)[0])
    if task is not None and task.data_kind in WITHOUT_TOKENIZER:
        del tables["data"]["tokenizer"]
    dotted = {
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }
    return {"task": _without_statistics(config.task), **dotted, "device": config.device}


def _without_statistics(task: Choice) -> Choice:
    """The task without the means and standard deviations of the training data."""
    kind, options = kind_of(task)
    options = {name: value for name, value in options.items() if name not in STATISTICS}
    return {"kind": kind, **options} if options else kind
