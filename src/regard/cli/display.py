"""What a person sees of a run: a live picture on a terminal, plain lines elsewhere."""

import sys
import textwrap
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from regard.api.settings import choices
from regard.cli.output import clock, harmless, how_large, lively, number, say, settings, width
from regard.training.events import (
    BaselineEvaluated,
    Evaluated,
    Event,
    RunFinished,
    RunStarted,
    StepLogged,
)
from regard.training.parallel import launch
from regard.training.setup.device import pick_device

SAMPLE_LINES = 6
TAP_LINES = 8
BARS = "▁▂▃▄▅▆▇█"
PLAIN_SECONDS = 10.0  # between two lines of progress
LABEL = 11  # cells of the names at the left, as in `RunStarted.description`


class Silent:
    """Shows nothing, as --quiet asks; the others show something of each event."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was."""

    def preparing(self, what: str, done: int, of: int) -> None:
        """The data is being made ready: `done` bytes of `of`."""

    def show(self, event: Event) -> None:
        """Something happened."""


class Lines(Silent):
    """A line for each evaluation, and one every ten seconds in between."""

    def __init__(self) -> None:
        self.spoke = time.monotonic()
        self.latest: StepLogged | None = None

    def preparing(self, what: str, done: int, of: int) -> None:
        """A line every ten seconds."""
        if time.monotonic() - self.spoke >= PLAIN_SECONDS:
            self._say(f"{what}: {done / 1e6:,.0f} of {of / 1e6:,.0f} MB")

    def show(self, event: Event) -> None:
        """A line, where one is due."""
        match event:
            case RunStarted():
                self._say("\n".join(heading(event)))
            case BaselineEvaluated():
                self._say(to_beat(event))
            case StepLogged():
                self.latest = event
                if time.monotonic() - self.spoke >= PLAIN_SECONDS:
                    self._say(
                        f"step {event.step:,} of {event.steps:,}  loss {event.loss:.3f}  "
                        f"{event.targets_per_second:,.0f} targets/s  "
                        f"{clock(event.seconds_left)} left"
                    )
            case Evaluated():
                named = "  ".join(f"{name} {number(v)}" for name, v in event.metrics.items())
                latest = self.latest
                done = "" if latest is None else f" of {latest.steps:,}  loss {latest.loss:.3f}"
                best = "  best so far" if event.best else ""
                self._say(f"step {event.step:,}{done}  held out: {named}{best}")
                for line in tap_lines(event):
                    self._say(f"  {line}")
            case RunFinished():
                pass

    def _say(self, line: str) -> None:
        say(line)
        self.spoke = time.monotonic()


class Picture(Silent):
    """A live picture: how far, how well, how fast, and what the model writes by now."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.doing, self.share = "reading the data", 0.0
        self.begun: RunStarted | None = None
        self.latest: StepLogged | None = None
        self.evaluated: list[Evaluated] = []
        self.ended = False
        self.tallest = 0  # the picture does not shrink: less to make the eye jump
        self.spinner = Spinner("dots", style="cyan")
        self.live = Live(
            console=self.console,
            get_renderable=self.view,
            refresh_per_second=8,
            redirect_stdout=False,
        )

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Leave the last picture standing."""
        self.live.stop()
        if error is not None:
            self.console.print()

    def preparing(self, what: str, done: int, of: int) -> None:
        """Seen at the next drawing."""
        self.doing, self.share = what, done / max(of, 1)

    def show(self, event: Event) -> None:
        """Seen at the next drawing; what was found and chosen stays above."""
        match event:
            case RunStarted():
                self.begun = event
                self._above(*heading(event), "")
            case BaselineEvaluated():
                self._above(to_beat(event), "")
            case StepLogged():
                self.latest = event
            case Evaluated():
                self.evaluated.append(event)
            case RunFinished():
                self.ended = True
        self.live.refresh()

    def view(self) -> RenderableType:
        """The picture as it is now."""
        if self.begun is None:
            percent = f"  {self.share:.0%}" if self.share else ""
            return self._waiting(f"{self.doing}{percent}")
        if self.latest is None and not self.evaluated:
            return self._waiting("first steps")
        parts: list[RenderableType] = []
        if self.latest is not None:
            parts += [self._bar(self.latest), Text()]
        parts.append(self._numbers())
        if self.evaluated:
            parts += [Text(line, "dim") for line in tap_lines(self.evaluated[-1])[:TAP_LINES]]
        if self.evaluated:
            parts += [Text(), *self._sample(self.evaluated[-1])]
        return Group(*parts)

    def _above(self, *lines: str) -> None:
        for line in lines:
            name, rest = line[:LABEL], line[LABEL:]
            self.console.print(Text.assemble((name, "dim"), harmless(rest)))

    def _waiting(self, text: str) -> RenderableType:
        self.spinner.update(text=Text(text, "dim"))
        return self.spinner

    def _bar(self, latest: StepLogged) -> RenderableType:
        left = "done" if self.ended else f"{clock(latest.seconds_left)} left"
        told = f"{latest.step:,} of {latest.steps:,} steps · {left}"
        bar = ProgressBar(
            total=latest.steps,
            completed=latest.step,
            width=max(8, min(48, self.console.width - len(told) - 3)),
            complete_style="cyan",
            finished_style="green",
        )
        row = Table.grid(padding=(0, 2))
        row.add_row(bar, Text(told, no_wrap=True, overflow="ellipsis"))
        return row

    def _numbers(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        if self.latest is not None:
            speed = f"{self.latest.targets_per_second:,.0f} targets a second"
            rows.add_row(
                Text("loss", "dim"), Text(f"{self.latest.loss:.3f}", "bold"), Text(speed, "dim")
            )
        if self.evaluated:
            losses = [each.metrics["loss"] for each in self.evaluated]
            best = "best so far" if self.evaluated[-1].best else f"best was {min(losses):.3f}"
            rows.add_row(
                Text("held out", "dim"),
                Text(f"{losses[-1]:.3f}", "bold"),
                Text.assemble((best, "dim"), "  ", (curve(losses), "cyan")),
            )
        return rows

    def _sample(self, event: Evaluated) -> list[RenderableType]:
        room = max(8, min(self.console.width, 100) - 3)
        text = harmless(event.sample).expandtabs(4)
        lines = [
            piece
            for line in text.strip("\n").split("\n")
            for piece in (Text(line).wrap(self.console, room) or [Text()])
        ]
        shown = lines[:SAMPLE_LINES]
        self.tallest = max(self.tallest, len(shown))
        shown += [Text()] * (self.tallest - len(shown))
        title = Text(f"what it writes at step {event.step:,}", "dim")
        return [title, *(Text.assemble(("│ ", "cyan"), line) for line in shown)]


def tap_lines(event: Evaluated) -> list[str]:
    """A line for every tap that `train.log` names: its mean, norm and share of zeros."""
    length = max(map(len, event.taps), default=0)
    return [
        f"{name:<{length}}  "
        + "  ".join(
            f"{key} {'-' if value is None else number(value)}" for key, value in row.items()
        )
        for name, row in event.taps.items()
    ]


def display() -> Silent:
    """What fits the terminal, or the lack of one."""
    if settings.quiet:
        return Silent()
    return Picture() if lively(sys.stderr) else Lines()


def heading(event: RunStarted) -> list[str]:
    """What was found and what was chosen, so that it can be chosen otherwise."""
    device = pick_device(event.config.device).type
    family = event.config.model["family"]
    ranks = f", {launch.size()} ranks" if launch.size() > 1 else ""
    lines = [
        *event.description,
        f"{'model':<{LABEL}}{family}, {how_large(event.parameters)}, on {device}{ranks}",
        f"{'run':<{LABEL}}{event.folder}",
    ]
    if event.step:
        return [*lines, f"{'from':<{LABEL}}step {event.step:,}"]
    name = "choices"
    for words in choices(event.config):
        for line in textwrap.wrap(
            " ".join(words),
            max(40, min(width(), 100) - LABEL),
            break_long_words=False,
            break_on_hyphens=False,
        ):
            lines.append(f"{name:<{LABEL}}{line}")
            name = ""
    return [*lines, f"{'':<{LABEL}}(any of these can be given after WHAT, as in model.layers=6)"]


def to_beat(event: BaselineEvaluated) -> str:
    """What counting gets from the same text."""
    bits = number(event.metrics["bits_per_byte"])
    told = f"{bits} bits per byte: n-grams of order {event.order}, {event.tokens:,} tokens counted"
    return f"{'to beat':<{LABEL}}{told}"


def curve(values: list[float], most: int = 24) -> str:
    """Numbers as a row of small bars.

    >>> curve([4.0, 2.0, 1.0])
    '█▃▁'
    """
    values = values[-most:]
    low, high = min(values), max(values)
    span = high - low
    return "".join(BARS[round(7 * (v - low) / span)] if span else BARS[0] for v in values)
