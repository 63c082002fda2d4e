"""The progress of a run: a live panel on a terminal, a table in a notebook, else plain lines."""

import sys
import time
from collections.abc import Callable, Iterator
from html import escape
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from regard import api
from regard.api.event_lines import (
    LABEL_WIDTH,
    RemainingTime,
    activation_lines,
    baseline_line,
    format_progress,
    heading,
    simple_baseline_lines,
    sparkline,
    threads_line,
)
from regard.api.formatting import (
    format_duration,
    format_number,
    is_interactive,
    strip_control,
)
from regard.errors import ConfigError
from regard.training.events import (
    Evaluated,
    Event,
    NGramBaselineEvaluated,
    RunFinished,
    RunStarted,
    SimpleBaselinesEvaluated,
    StepLogged,
    ThreadsChanged,
)

if TYPE_CHECKING:
    from regard.pipelines.base import Progress

SAMPLE_LINES = 6
ACTIVATION_LINES = 8
LINE_SECONDS = 10.0  # between two lines of progress
NOTEBOOK_SECONDS = 0.5  # between two updates of a notebook


class NoDisplay:
    """Shows nothing, for --quiet; base class of the other displays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the terminal."""

    def show_progress(self, phase: str, done: int, total: int) -> None:
        """Show the progress of data preparation, in bytes, or of an evaluation, in targets."""

    def show(self, event: Event) -> None:
        """Show an event."""


class LineDisplay(NoDisplay):
    """A line per evaluation, and one every ten seconds in between."""

    def __init__(self) -> None:
        self.last_print = time.monotonic()
        self.remaining = RemainingTime()
        self.latest: StepLogged | None = None

    def show_progress(self, phase: str, done: int, total: int) -> None:
        """Print a line every ten seconds."""
        self.remaining.add(phase, done, total)
        if time.monotonic() - self.last_print >= LINE_SECONDS:
            self._print(f"{phase}: {format_progress(phase, done, total)}{self.remaining}")

    def show(self, event: Event) -> None:
        """Print a line, where one is due."""
        match event:
            case RunStarted():
                self._print("\n".join(heading(event)))
            case NGramBaselineEvaluated():
                self._print(baseline_line(event))
            case SimpleBaselinesEvaluated():
                self._print("\n".join(simple_baseline_lines(event)))
            case ThreadsChanged():
                self._print(threads_line(event))
            case StepLogged():
                self.latest = event
                if time.monotonic() - self.last_print >= LINE_SECONDS:
                    self._print(
                        f"step {event.step:,} of {event.steps:,}  loss {event.loss:.3f}  "
                        f"{event.targets_per_second:,.0f} targets/s  "
                        f"{format_duration(event.seconds_left)} left"
                    )
            case Evaluated():
                metrics = "  ".join(
                    f"{name} {format_number(value)}" for name, value in event.metrics.items()
                )
                latest = self.latest
                step = "" if latest is None else f" of {latest.steps:,}  loss {latest.loss:.3f}"
                best = "  best so far" if event.is_best else ""
                part = f" ({event.evaluated_on})" if event.evaluated_on else ""
                self._print(f"step {event.step:,}{step}  validation{part}: {metrics}{best}")
                for line in activation_lines(event):
                    self._print(f"  {line}")
            case RunFinished():
                pass

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self.last_print = time.monotonic()


class _StateDisplay(NoDisplay):
    """Stores the latest events, from which subclasses redraw the display."""

    def __init__(self) -> None:
        self.phase, self.phase_done = "reading the data", 0.0
        self.remaining, self.phase_line = RemainingTime(), ""
        self.started: RunStarted | None = None
        self.latest: StepLogged | None = None
        self.evaluations: list[Evaluated] = []
        self.result: RunFinished | None = None

    def show_progress(self, phase: str, done: int, total: int) -> None:
        """Store the progress; it is shown at the next refresh."""
        self.remaining.add(phase, done, total)
        self.phase, self.phase_done = phase, done / max(total, 1)
        self.phase_line = f"{phase}: {format_progress(phase, done, total)}{self.remaining}"

    def show(self, event: Event) -> None:
        """Store the event."""
        match event:
            case RunStarted():
                self.started, self.phase_line = event, ""
            case StepLogged():
                self.latest = event
            case Evaluated():
                self.evaluations.append(event)
            case RunFinished():
                self.result, self.phase_line = event, ""

    @property
    def waiting_for(self) -> str | None:
        """The current phase before the first step, such as "reading the data"; None after it."""
        if self.started is None:
            percent = f"  {self.phase_done:.0%}" if self.phase_done else ""
            return f"{self.phase}{percent}"
        return "first steps" if self.latest is None and not self.evaluations else None

    def metric_rows(self) -> list[tuple[str, str, str]]:
        """The losses: a label, a value, and speed or trend."""
        rows = []
        if self.latest is not None:
            speed = f"{self.latest.targets_per_second:,.0f} targets/s"
            rows.append(("loss", f"{self.latest.loss:.3f}", speed))
        if self.evaluations:
            latest = self.evaluations[-1]
            losses = [evaluation.metrics["loss"] for evaluation in self.evaluations]
            best_losses = [
                evaluation.metrics["loss"] for evaluation in self.evaluations if evaluation.is_best
            ]
            best = (
                f"best was {best_losses[-1]:.3f}  " if best_losses else ""
            )  # by `train.best_metric`
            best = "best so far  " if latest.is_best else best
            rows.append(("validation", f"{losses[-1]:.3f}", f"{best}{sparkline(losses)}"))
            if latest.evaluated_on:
                rows.append(("", "", latest.evaluated_on))
        return rows

    def caption(self, latest: StepLogged) -> str:
        """The steps taken and the remaining time."""
        remaining = (
            "done" if self.result is not None else f"{format_duration(latest.seconds_left)} left"
        )
        return f"{latest.step:,} of {latest.steps:,} steps · {remaining}"


class LiveDisplay(_StateDisplay):
    """A live panel: progress bar, losses, speed, and a sample of the model's output."""

    def __init__(self, *, transient: bool = False) -> None:
        super().__init__()
        self.console = Console(stderr=True, highlight=False)
        self.sample_height = 0  # never shrinks, so that the panel does not jump
        self.spinner = Spinner("dots", style="cyan")
        self.live = Live(
            console=self.console,
            get_renderable=self.panel,
            refresh_per_second=8,
            redirect_stdout=False,
            transient=transient,
        )

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop updating; the last panel stays on the terminal."""
        self.live.stop()
        if error is not None:
            self.console.print()

    def show(self, event: Event) -> None:
        """Update the panel; the heading and the baseline are printed above it."""
        super().show(event)
        match event:
            case RunStarted():
                self._print_above(*heading(event), "")
            case NGramBaselineEvaluated():
                self._print_above(baseline_line(event), "")
            case SimpleBaselinesEvaluated():
                self._print_above(*simple_baseline_lines(event), "")
            case ThreadsChanged():
                self._print_above(threads_line(event))
        self.live.refresh()

    def panel(self) -> RenderableType:
        """The current panel."""
        if self.started is None and self.phase_done:
            return self._bar(self.phase_done, 1.0, self.phase_line)
        if self.waiting_for is not None:
            return self._waiting(self.waiting_for)
        parts: list[RenderableType] = []
        if self.latest is not None:
            parts += [self._progress_bar(self.latest), Text()]
        parts.append(self._metrics())
        if self.phase_line:  # the evaluation at the end
            parts.append(self._waiting(self.phase_line))
        if self.evaluations:
            latest = self.evaluations[-1]
            parts += [Text(line, "dim") for line in activation_lines(latest)[:ACTIVATION_LINES]]
            parts += [Text(), *self._sample(latest)]
        return Group(*parts)

    def _print_above(self, *lines: str) -> None:
        for line in lines:
            label, text = line[:LABEL_WIDTH], line[LABEL_WIDTH:]
            self.console.print(Text.assemble((label, "dim"), strip_control(text)))

    def _waiting(self, text: str) -> RenderableType:
        self.spinner.update(text=Text(text, "dim"))
        return self.spinner

    def _progress_bar(self, latest: StepLogged) -> RenderableType:
        return self._bar(latest.step, latest.steps, self.caption(latest))

    def _bar(self, done: float, total: float, caption: str) -> RenderableType:
        bar = ProgressBar(
            total=total,
            completed=done,
            width=max(8, min(48, self.console.width - len(caption) - 3)),
            complete_style="cyan",
            finished_style="green",
        )
        row = Table.grid(padding=(0, 2))
        row.add_row(bar, Text(caption, no_wrap=True, overflow="ellipsis"))
        return row

    def _metrics(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        for label, value, note in self.metric_rows():
            rows.add_row(Text(label, "dim"), Text(value, "bold"), Text(note, "cyan"))
        return rows

    def _sample(self, event: Evaluated) -> list[RenderableType]:
        width = max(8, min(self.console.width, 100) - 3)
        text = strip_control(event.sample).expandtabs(4)
        lines = [
            wrapped
            for line in text.strip("\n").split("\n")
            for wrapped in (Text(line).wrap(self.console, width) or [Text()])
        ]
        sample_lines = lines[:SAMPLE_LINES]
        self.sample_height = max(self.sample_height, len(sample_lines))
        sample_lines += [Text()] * (self.sample_height - len(sample_lines))
        title = Text(f"sample at step {event.step:,}", "dim")
        return [title, *(Text.assemble(("│ ", "cyan"), line) for line in sample_lines)]


class NotebookDisplay(_StateDisplay):
    """A table in the output of a notebook's cell, which is updated in place."""

    def __init__(self) -> None:
        super().__init__()
        display: Any = import_module("IPython.display").display
        self.lines: list[str] = []  # the heading and the baseline
        self.last_update = time.monotonic()
        self.handle: Any = display(self._mimebundle(), raw=True, display_id=True)

    def show_progress(self, phase: str, done: int, total: int) -> None:
        """Update the output, at most twice a second."""
        super().show_progress(phase, done, total)
        self._update()

    def show(self, event: Event) -> None:
        """Update the output; between evaluations at most twice a second."""
        super().show(event)
        match event:
            case RunStarted():
                self.lines += heading(event)
            case NGramBaselineEvaluated():
                self.lines.append(baseline_line(event))
            case SimpleBaselinesEvaluated():
                self.lines += simple_baseline_lines(event)
            case ThreadsChanged():
                self.lines.append(threads_line(event))
        self._update(always=not isinstance(event, StepLogged))

    def _update(self, *, always: bool = False) -> None:
        if always or time.monotonic() - self.last_update >= NOTEBOOK_SECONDS:
            self.handle.update(self._mimebundle(), raw=True)
            self.last_update = time.monotonic()

    def _mimebundle(self) -> dict[str, str]:
        """The output as HTML and as plain text; the notebook chooses one of them."""
        parts = [f"<pre>{escape(chr(10).join(self.lines))}</pre>"] if self.lines else []
        if self.waiting_for is not None:
            text = self.waiting_for
            return {"text/html": "".join([*parts, f"{escape(text)} …"]), "text/plain": text}
        text = ""
        if self.latest is not None:
            text = self.caption(self.latest)
            step, steps = self.latest.step, self.latest.steps
            parts.append(f'<progress value="{step}" max="{steps}"></progress> {escape(text)}')
        if self.phase_line:  # the evaluation after the last step
            parts.append(f"<div>{escape(self.phase_line)}</div>")
        rows = self.metric_rows()
        if self.result is not None:  # the evaluation of the saved weights
            rows.append(("saved model", "", f"on {self.result.evaluated_on}"))
            rows += [
                (name, format_number(value), "") for name, value in self.result.metrics.items()
            ]
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
        if self.evaluations:
            latest = self.evaluations[-1]
            lines = [
                *activation_lines(latest)[:ACTIVATION_LINES],
                f"sample at step {latest.step:,}",
                *strip_control(latest.sample).strip("\n").split("\n")[:SAMPLE_LINES],
            ]
            parts.append(f'<pre style="white-space: pre-wrap">{escape(chr(10).join(lines))}</pre>')
        plain = [text, self.phase_line, *(f"{label} {value}".strip() for label, value, _ in rows)]
        return {"text/html": "".join(parts), "text/plain": "  ".join(filter(None, plain))}


def make_display(quiet: bool, *, transient: bool = False) -> NoDisplay:
    """The display for a terminal, a notebook or a pipe; ranks above 0 show nothing.

    A `transient` panel disappears from the terminal at the end.
    """
    if quiet or api.rank():
        return NoDisplay()
    if in_notebook():
        return NotebookDisplay()
    return LiveDisplay(transient=transient) if is_interactive(sys.stderr) else LineDisplay()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def show_events(
    events: "Callable[[Progress], Iterator[Event]]",
    *,
    quiet: bool,
    on_event: Callable[[Event], None] | None = None,
    progress: "Progress | None" = None,
) -> RunFinished | None:
    """Display the events of a run as they come, pass them to `on_event`, and return the last.

    Returns None on a rank above 0 that does not train, as for a model fitted without gradients.
    """
    if progress is not None and not callable(progress):
        raise ConfigError(
            f"progress={progress!r} must be a function, called while the data is prepared; "
            "quiet=True turns the display off"
        )
    event: Event | None = None
    with make_display(quiet) as display:

        def show_progress(phase: str, done: int, total: int) -> None:
            display.show_progress(phase, done, total)
            if progress is not None:
                progress(phase, done, total)

        for event in events(show_progress):
            display.show(event)
            if on_event is not None:
                on_event(event)
    return event if isinstance(event, RunFinished) else None
