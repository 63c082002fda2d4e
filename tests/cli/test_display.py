"""What a person sees of a run."""

import io
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from regard.api.display import (
    LineDisplay,
    LiveDisplay,
    NoDisplay,
    NotebookDisplay,
    make_display,
    show_events,
)
from regard.api.event_lines import RemainingTime
from regard.api.overrides import format_overrides
from regard.config import RunConfig, build, merge, parse_overrides, to_table
from regard.models.build import resolve
from regard.training.events import Evaluated, RunFinished, RunStarted, StepLogged
from regard.training.storage.run_folder import RunFolder


@pytest.fixture
def begun(text_run):
    return RunStarted(
        Path("runs/x"), RunFolder(text_run).load_config(), ["data       a text"], 1234, 0
    )


def progressed(step):
    return StepLogged(step, 100, 1.5, 1e-3, 1.0, 2000.0, 61.0)


def drawn(picture, columns=80):
    stream = io.StringIO()
    picture.console = Console(file=stream, width=columns, force_terminal=True)
    picture.console.print(picture.panel())
    return stream.getvalue()


def test_a_loss_that_is_not_finite_is_shown(begun):
    picture = LiveDisplay()
    for loss in (4.0, float("nan"), float("inf"), 2.0):
        picture.show(Evaluated(50, {"loss": loss}, False, ""))
    assert picture.metric_rows()[0][2] == "█××▁"


def test_a_run_without_a_last_event_has_no_result():
    assert show_events(lambda progress: iter(()), quiet=True) is None


def test_the_panel_shows_progress_losses_speed_and_a_sample(begun):
    picture = LiveDisplay()
    picture.started = begun
    assert "first steps" in drawn(picture)
    picture.show(progressed(50))
    picture.show(Evaluated(50, {"loss": 1.75}, True, "to be or not"))
    seen = drawn(picture)
    for part in ("50 of 100 steps", "1:01 left", "1.500", "2,000 targets", "1.750", "to be or not"):
        assert part in seen
    picture.show(Evaluated(60, {"loss": 1.75}, True, "x", evaluated_on="the first 9 of 10 tokens"))
    picture.show_progress("evaluating", 1024, 4096)
    seen = drawn(picture)
    assert "the first 9 of 10 tokens" in seen
    assert "evaluating: 1,024 of 4,096 targets" in seen
    picture.show(RunFinished(Path("runs/x"), 100, {}, 3.0))
    assert "evaluating" not in drawn(picture)
    assert "done" in drawn(picture)


@pytest.mark.parametrize("columns", [20, 40, 200])
def test_the_panel_fits_any_terminal(begun, columns):
    picture = LiveDisplay()
    picture.started = begun
    picture.show(progressed(50))
    picture.show(Evaluated(50, {"loss": 1.75}, True, "word " * 100))
    plain = Console(file=io.StringIO(), width=columns)
    picture.console = plain
    plain.print(picture.panel())
    assert all(len(line) <= columns for line in plain.file.getvalue().splitlines())


def test_a_sample_cannot_draw_on_the_terminal(begun):
    picture = LiveDisplay()
    picture.started = begun
    picture.show(Evaluated(50, {"loss": 1.75}, True, "[bold]x[/bold]\x1b[2J\x07\r\u202e[/nothing]"))
    seen = drawn(picture)
    assert "[bold]x[/bold][2J[/nothing]" in seen
    for character in ("\x1b[2J", "\x07", "\r", "\u202e"):
        assert character not in seen


def test_plain_lines_come_with_evaluations_and_every_ten_seconds(begun, capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr("regard.api.display.time.monotonic", lambda: now)
    lines = LineDisplay()
    lines.show(begun)
    completed = capsys.readouterr().err
    assert completed.startswith("data       a text\n")
    lines.show(progressed(10))
    assert capsys.readouterr().err == ""
    now = 10.5
    lines.show(progressed(20))
    assert capsys.readouterr().err.startswith("step 20 of 100  loss 1.500")
    lines.show(Evaluated(20, {"loss": 1.75}, True, "x"))
    assert "validation: loss 1.7500" in capsys.readouterr().err
    lines.show(Evaluated(20, {"loss": 1.75}, True, "x", evaluated_on="the first 9 of 10 tokens"))
    assert "validation (the first 9 of 10 tokens): loss 1.7500" in capsys.readouterr().err
    now = 20.0
    lines.show_progress("evaluating", 512, 4096)
    now = 40.0
    lines.show_progress("evaluating", 1024, 4096)
    assert capsys.readouterr().err == "evaluating: 1,024 of 4,096 targets, 1:00 left\n"


def test_logged_activations_are_shown_at_every_evaluation(begun, capsys, monkeypatch):
    activations = {"layers.0.gate": {"mean": 0.25, "norm": 12.5, "zeros": None}}
    event = Evaluated(20, {"loss": 1.75}, True, "x", activations)
    picture = LiveDisplay()
    picture.started = begun
    picture.show(event)
    LineDisplay().show(event)
    for output in (drawn(picture), capsys.readouterr().err):
        assert "layers.0.gate  mean 0.2500  norm 12.50  zeros -" in output


def test_the_printed_settings_make_the_same_run_again(text_run, pair_run):
    for folder in (text_run, pair_run):
        config = RunFolder(folder).load_config()
        config = replace(config, train=replace(config.train, start="a 'quoted' name, 1"))
        model = config.model | ({"ffn": None} if "ffn" in config.model else {})
        config = replace(config, model=model)  # None is not the default
        words = shlex.split(" ".join(word for group in format_overrides(config) for word in group))
        places = ("path", "source", "target", "validation")
        known = {
            "name": config.name,
            "data": {key: to_table(config.data)[key] for key in places},
            "model": {key: config.model[key] for key in ("family", "vocab_size")},
        }
        again = build(RunConfig, merge(known, parse_overrides(words)))
        assert again.train == config.train
        assert again.task == config.task
        assert again.data == config.data
        assert resolve(config.model | again.model) == resolve(config.model)


class Handle:
    """Stands for the output of a cell, as IPython's `display` returns it."""

    def __init__(self, content, **options):
        assert options == {"raw": True, "display_id": True}
        self.shown = [content]

    def update(self, content, *, raw):
        self.shown.append(content)


@pytest.fixture
def notebook(monkeypatch):
    ipython = types.ModuleType("IPython")
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = Handle
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return ipython


def test_a_notebook_shows_one_table_that_is_updated_in_place(begun, notebook):
    display = make_display(quiet=False)
    assert isinstance(display, NotebookDisplay)
    shown = display.handle.shown
    assert shown[0]["text/plain"] == "reading the data"
    display.show(begun)
    for step in range(1, 50):
        display.show(progressed(step))
    assert len(shown) < 10  # not one update for each step
    display.show(progressed(50))
    display.show(Evaluated(50, {"loss": 1.75}, True, "<img onerror=x>"))
    html = shown[-1]["text/html"]
    for part in ('<progress value="50" max="100">', "50 of 100 steps", "<td>1.750</td>"):
        assert part in html
    assert "&lt;img onerror=x&gt;" in html
    assert "<img" not in html
    assert shown[-1]["text/plain"] == "50 of 100 steps · 1:01 left  loss 1.500  validation 1.750"
    display.show(Evaluated(60, {"loss": 1.7}, False, ""))  # the best is by another metric
    assert "best was 1.750" in shown[-1]["text/html"]
    display.last_update = 0.0
    display.show_progress("evaluating", 10, 100)  # after the last step
    assert "evaluating: 10 of 100 targets" in shown[-1]["text/html"]
    assert "evaluating: 10 of 100 targets" in shown[-1]["text/plain"]
    display.show(RunFinished(Path("run"), 100, {"loss": 1.625}, 9.0, evaluated_on="all 100 tokens"))
    assert "<td>loss</td><td>1.6250</td>" in shown[-1]["text/html"]
    assert "<td>on all 100 tokens</td>" in shown[-1]["text/html"]
    assert shown[-1]["text/plain"].startswith("50 of 100 steps · done")
    assert shown[-1]["text/plain"].endswith("saved model  loss 1.6250")


def test_the_display_fits_the_place(notebook, monkeypatch):
    assert type(make_display(quiet=True)) is NoDisplay
    notebook.get_ipython = lambda: types.SimpleNamespace()  # IPython in a terminal
    assert isinstance(make_display(quiet=False), LineDisplay)
    monkeypatch.setattr("regard.api.process.rank", lambda: 1)
    assert type(make_display(quiet=False)) is NoDisplay


def test_the_remaining_time_is_estimated_anew_when_a_phase_is_repeated(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    remaining = RemainingTime()
    for time, done, expected in (
        (0.0, 1, ""),
        (100.0, 100, ", 0:00 left"),
        (100.0, 1, ""),
        (110.0, 50, ", 0:10 left"),
    ):
        clock[0] = time
        remaining.add("evaluating", done, 100)
        assert str(remaining) == expected
