"""Watch a run to its end, and say how it ended and what can be done with it."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict

from regard.cli.display import display
from regard.cli.output import aligned, clock, how_large, number, print_json, say
from regard.config import RunConfig, kind_of
from regard.models.build import is_closed_form
from regard.pipelines.base import Progress
from regard.tasks import TASKS
from regard.training.baseline import read_baseline
from regard.training.events import BaselineEvaluated, Event, RunFinished
from regard.training.storage.run_folder import RunFolder
from regard.training.tracking.history import stored_parameters

EXAMPLES = {"classify": "image.png", "masked": "'some <mask> words'", "cbow": "some words"}
EXAMPLES |= {"forecast": "--steps 24"}


def follow(events: Callable[[Progress], Iterator[Event]]) -> RunFinished:
    """Show each event of a run as it comes."""
    with display() as shown:
        for event in events(shown.preparing):
            shown.show(event)
    assert isinstance(event, RunFinished)
    return event


def report(ended: RunFinished, *, as_json: bool) -> None:
    """The result on stdout, and the next commands on stderr."""
    folder = RunFolder(ended.folder)
    counted = read_baseline(folder)
    if as_json:
        print_json(
            {
                "run": str(ended.folder),
                "step": ended.step,
                "seconds": round(ended.seconds, 1),
                **ended.metrics,
                **({} if counted is None else {"baseline": asdict(counted)}),
            }
        )
        return
    config = folder.load_config()
    more = ", since it got no better" if ended.stopped_early else ""
    if is_closed_form(config.model["family"]):
        more = f", {how_large(0, stored_parameters(folder))}"
    say(f"\ndone in {clock(ended.seconds)}{more}; held out, the model that was kept:")
    for line in aligned([(name, number(value)) for name, value in ended.metrics.items()], [1]):
        print(f"  {line}", flush=True)
    if counted is not None:
        print(f"  {beaten(ended.metrics, counted)}", flush=True)
    suggest(next_commands(ended, config))


def beaten(metrics: dict[str, float], counted: BaselineEvaluated) -> str:
    """By how much a model is better than counting."""
    less = counted.metrics["bits_per_byte"] - metrics["bits_per_byte"]
    return f"{number(abs(less))} bits per byte {'better' if less >= 0 else 'worse'} than counting"


def next_commands(ended: RunFinished, config: RunConfig) -> list[tuple[str, str]]:
    """What can be done with this run, and what it is good for."""
    run = shlex.quote(str(ended.folder))
    kind = kind_of(config.task)[0]
    task, what = TASKS[kind], EXAMPLES.get(kind, "'some words'")
    use = "let it write" if task.verb == "generate" else "use it"
    commands = [(f"regard {task.verb} {run} {what}", use)]
    if config.model["family"] == "transformer":
        commands.append((f"regard explain {run} 'some words'", "see what it looks at"))
    if task.learns == "pairs":
        commands.append((f"regard evaluate {run}", "BLEU, chrF, exact match"))
    if not is_closed_form(config.model["family"]):
        commands.append((f"regard resume {run} train.steps={2 * ended.step}", "train on"))
    return commands


def suggest(commands: list[tuple[str, str]]) -> None:
    """Say what to try next."""
    say("\nnext")
    for line in aligned(commands):
        say(f"  {line}")
