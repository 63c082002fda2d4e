"""Show the progress of a run, then print its result and the next commands."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from regard import api
from regard.api.display import show_events
from regard.cli.output import (
    align_columns,
    common_options,
    format_duration,
    format_number,
    format_size,
    print_json,
    print_status,
)
from regard.config import kind_of

if TYPE_CHECKING:
    from regard.api import Event, Progress, RunFinished, RunSummary

ROUNDING = 1e-9  # relative difference of equal metrics; the order of a sum changes it by 1e-15
DEFAULT_EXAMPLE = "'some words'"
EXAMPLES = {  # example inputs of the commands, by task; the default is DEFAULT_EXAMPLE
    "image_classification": "image.png",
    "masked": "'some <mask> words'",
    "cbow": "some words",
    "forecast": "",
    "caption": "image.png",
    "span": "'a question' 'a text'",
    "instruct": "",
    "handwriting": "--bias 0.5 --out drawings.svg",
}


def show_progress(events: "Callable[[Progress], Iterator[Event]]") -> "RunFinished":
    """Display the events of a run as they come; return the last."""
    finished = show_events(events, quiet=common_options.quiet)
    assert finished is not None
    return finished


def print_result(finished: "RunFinished", *, as_json: bool) -> None:
    """Print the result to stdout, and the next commands to stderr."""
    summary = api.summarize(finished.folder)
    baseline = summary.baseline
    if as_json:
        print_json(
            {
                "run": str(finished.folder),
                "step": finished.step,
                **({} if finished.best_step is None else {"best_step": finished.best_step}),
                "seconds": round(finished.seconds, 1),
                **finished.metrics,
                "evaluated_on": finished.evaluated_on,
                **({"unit": summary.unit} if summary.unit else {}),
                **({} if baseline is None else {"baseline": asdict(baseline)}),
                **({"baselines": baselines} if (baselines := summary.simple_baselines) else {}),
            }
        )
        return
    note = ", stopped early: no improvement" if finished.stopped_early else ""
    if summary.is_fitted_without_gradients:
        note = f", {format_size(summary.stored_values)}"
    duration = format_duration(finished.seconds)
    print_status(f"\ndone in {duration}{note}; validation metrics of the saved model,")
    print_status(f"{describe_evaluation(finished)}{', ' * bool(summary.unit)}{summary.unit}:")
    rows = [(name, format_number(value)) for name, value in finished.metrics.items()]
    for line in align_columns(rows, [1]):
        print(f"  {line}", flush=True)
    is_part = finished.seconds_for_all is not None
    title = "baseline, on all validation data" if is_part else "baseline"
    for line in baseline_lines(summary.simple_baselines, title):
        print(f"  {line}", flush=True)
    if not is_part:
        for line in compare_with_baselines(finished.metrics, summary):
            print(f"  {line}", flush=True)
    for line in (*untrained_warning(finished, summary), *summary.warnings):
        print(f"  {line}", flush=True)
    print_suggestions(next_commands(finished, summary))


def untrained_warning(finished: "RunFinished", summary: "RunSummary") -> list[str]:
    """A line for a run whose best weights are those before the first step."""
    if finished.best_step != 0 or finished.step == 0:
        return []
    metric = summary.config.train.best_metric
    return [
        f"these are the weights before training: no later {metric} was better;",
        "train longer, change train.lr, or keep the last weights with train.best_metric=last",
    ]


def baseline_lines(baselines: dict[str, dict[str, float]], title: str = "baseline") -> list[str]:
    """A table of the metrics of baselines, which are of all validation data."""
    if not baselines:
        return []
    names = list(next(iter(baselines.values())))
    rows = [
        (name, *(format_number(metrics[key]) for key in names))
        for name, metrics in baselines.items()
    ]
    return align_columns([(title, *names), *rows], range(1, 1 + len(names)))


def describe_evaluation(finished: "RunFinished") -> str:
    """The data that the metrics were computed on, and how to compute them on all of it."""
    if finished.seconds_for_all is None:
        return f"on {finished.evaluated_on}"
    run = shlex.quote(str(finished.folder))
    seconds = format_duration(finished.seconds_for_all)
    return (
        f"on {finished.evaluated_on} (evaluating all takes about {seconds}: regard evaluate {run})"
    )


def compare_with_baselines(metrics: dict[str, float], summary: "RunSummary") -> list[str]:
    """How far a model is from the best baseline; where it is worse, how to train the baseline."""
    metric = "bits_per_byte" if summary.baseline is not None else "mse"
    baselines = summary.baselines
    if not baselines or metric not in metrics:
        return []
    name = min(baselines, key=lambda name: baselines[name][metric])
    gain = baselines[name][metric] - metrics[metric]
    baseline = f"the {'best baseline' if len(baselines) > 1 else 'baseline'}: {name}"
    if abs(gain) <= ROUNDING * baselines[name][metric]:
        return [f"equal to {baseline}"]
    comparison = "better" if gain > 0 else "worse"
    difference = f"{format_number(abs(gain))} {metric.replace('_', ' ')} {comparison}"
    settings = summary.baseline_settings.get(name)
    if gain > 0 or settings is None:
        return [f"{difference} than {baseline}"]
    return [f"{difference} than {baseline};", f"to train that model: {settings}"]


def next_commands(finished: "RunFinished", summary: "RunSummary") -> list[tuple[str, str]]:
    """Commands that use the run, with their purpose."""
    run = shlex.quote(str(finished.folder))
    kind = kind_of(summary.config.task)[0]
    purpose = "generate text" if summary.command == "generate" else "use it"
    command = "generate" if summary.command == "draw" else summary.command
    example = EXAMPLES.get(kind, DEFAULT_EXAMPLE)
    paired = kind_of(summary.config.task)[1].get("paired", False)
    if paired:
        example = "'a text' 'another text'"
    text = shlex.quote(kind_of(summary.config.task)[1].get("alphabet", "")[:3])
    if summary.config.model["family"] == "soft_window":
        example = f"{text} --bias 1 --out drawing.svg"
    commands = [(f"regard {command} {run} {example}".rstrip(), purpose)]
    if summary.config.model["family"] == "soft_window":
        commands.append((f"regard explain {run} {text} --out window.svg", "draw its window"))
    if summary.data_kind == "series":
        commands.append((f"regard evaluate {run} --out forecast.svg", "draw its forecasts"))
    elif (
        summary.config.model["family"] == "transformer"
        and summary.data_kind not in ("strokes", "spans", "dialogues")
        and not paired
    ):
        commands.append((f"regard explain {run} {DEFAULT_EXAMPLE}", "show its attention"))
    if summary.data_kind == "captions":
        commands.append((f"regard explain {run} image.png --out words.png", "draw its attention"))
    if summary.data_kind in ("pairs", "captions"):
        commands.append((f"regard evaluate {run}", "BLEU, chrF, exact match"))
    if not summary.is_fitted_without_gradients:
        steps = 2 * finished.step
        commands.append((f"regard resume {run} train.steps={steps}", "continue training"))
    return commands


def print_suggestions(commands: list[tuple[str, str]]) -> None:
    """Print commands to try next."""
    print_status("\nnext")
    for line in align_columns(commands):
        print_status(f"  {line}")
