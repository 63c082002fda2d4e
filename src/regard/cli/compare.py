"""`regard compare`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from regard.cli.by_length import as_curves, as_groups, as_table
from regard.cli.diff import Values, differing, print_beside, resolved, wrapped
from regard.cli.explain import must_be_writable, write
from regard.cli.info import amount
from regard.cli.options import Json, named_data
from regard.cli.output import aligned, bold, clock, harmless, number, print_json, say, working
from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.explain.render.picture import Picture
    from regard.pipelines.by_length import ByLength
    from regard.training.tracking.history import History

MOST_BESIDE = 4  # runs in columns; a terminal has room for more only in lines
MOST_POINTS = 120  # of a curve: a picture has no room for more
UNITS = {"loss": "nats a target", "bits_per_byte": "bits a byte", "accuracy": "share right"}
FOLLOWS = ("perplexity",)  # from the loss, so that its curve tells nothing new
STYLE = """body { font: 14px sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin-top: 1em }
th, td { text-align: right; padding: 2px 14px 2px 0 }
th:first-child, td:first-child { text-align: left }
tr.title td { font-weight: bold; padding-top: 1em }"""

Groups = dict[str, list[tuple[str, ...]]]


def compare(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN…", help="Run folders, finished or not.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="Draw the curves: .svg, .png, or .html with the table."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Write over an existing FILE.")] = False,
    text: Annotated[
        str | None, Option(metavar="TEXT", help="What each run makes of this sentence.")
    ] = None,
    by_length: Annotated[
        bool, Option("--by-length", help="What each writes, apart for short and long sources.")
    ] = False,
    data: Annotated[
        list[str],
        Option(metavar="PATH", help="For --by-length: other data, twice for source and target."),
    ] = [],  # noqa: B006 -- typer copies it
    as_json: Json = False,
) -> None:
    """Put runs beside each other: how good, at what cost, what was chosen differently.

    \b
    regard compare runs/my runs/my-2
    regard compare runs/* --out curves.svg
    regard compare runs/my runs/my-2 --json
    regard compare runs/lstm runs/attention --text 'ein hund rennt am strand'
    regard compare runs/lstm runs/attention --by-length --out lengths.svg
    """
    if data and not by_length:
        raise ConfigError("--data is what --by-length judges by; give both")
    if out is not None:
        must_be_writable(out, force, tuple(WRITERS))
    with working("reading"):
        from regard.training.tracking.history import read_history

        found = [read_history(run) for run in runs]
        names = _names(runs)
        metrics = _beside([each.metrics for each in found])
        chosen = differing(*map(_settings, found))
    written, lengths = _tried(runs, text, by_length, data)
    groups: Groups = {
        "held out": [
            (key, *("-" if value is None else number(value) for value in values))
            for key, values in metrics.items()
        ],
        "counting": _counting(found),
        "cost": _costs(found),
        "choices": wrapped(chosen),
    }
    tried: Groups = as_groups(lengths) if lengths else {}
    if text is not None:  # quoted, so that it is no other title and does nothing to a terminal
        tried[repr(text)] = wrapped({"written": tuple(map(harmless, written))})
    groups |= tried
    if out is not None:
        picture = as_curves(names, lengths) if lengths else _picture(names, found)
        write(out, WRITERS[out.suffix](picture, names, groups))
    if as_json:
        tables = [_table(name, each) for name, each in zip(names, found, strict=True)]
        for table, each in zip(tables, written, strict=False):
            table["written"] = each
        for table, length in zip(tables, lengths, strict=False):
            table["by_length"] = as_table(length)
        print_json({"runs": tables, "choices": chosen})
    elif len(runs) > MOST_BESIDE:
        _print_lines(names, [row for title in ("held out", "cost") for row in groups[title]])
        for title in tried:
            print(f"\n{bold(title, sys.stdout)}")
            _print_lines(names, groups[title])
    else:
        print_beside(names, groups)
    for note in _notes(found):
        say(note)
    if out is not None:
        say(f"curves: {out}")


def _tried(
    runs: Sequence[Path], text: str | None, by_length: bool, data: Sequence[str]
) -> "tuple[list[str], list[ByLength]]":
    """What each run writes for a text, and how good it is by length; only what is asked for."""
    written: list[str] = []
    lengths: list[ByLength] = []
    for run in runs if text is not None or by_length else ():
        with working(f"asking {run}"):
            from regard.api import load

            opened = load(run)
            if text is not None:
                written.append(opened.translate(text))
            if by_length:
                lengths.append(opened.evaluate_by_length(*named_data(data)))
    return written, lengths


def _names(runs: Sequence[Path]) -> list[str]:
    """The names of the folders, or the whole paths where two would have the same."""
    short = [run.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]


def _beside(tables: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: tuple(table.get(key) for table in tables) for key in keys}


def _settings(history: "History") -> dict[str, Any]:
    """All choices of a run by the words that set them."""
    from regard.config import to_table
    from regard.models.build import resolve

    config = history.config
    tables = {
        "model": resolved(resolve(config.model)),
        "train": to_table(config.train) if _steps_count(history) else {},
        "data": to_table(config.data),
    }
    found = {f"{part}.{key}": each for part, table in tables.items() for key, each in table.items()}
    return {"task": config.task, **found, "device": config.device}


def _steps_count(run: "History") -> bool:
    """Whether a run learns step by step: one that counts does not, nor one from elsewhere."""
    from regard.models.build import is_closed_form

    there = run.config.data.path is not None or run.config.data.source is not None
    return there and not is_closed_form(run.config.model["family"])


def _costs(found: "Sequence[History]") -> list[tuple[str, ...]]:
    def steps(run: "History") -> str:
        wanted = run.config.train.steps
        if not _steps_count(run):
            return "-"
        return f"{run.step:,}" if run.step >= wanted else f"{run.step:,} of {wanted:,}"

    rows: dict[str, Callable[[History], str]] = {
        "parameters": lambda run: f"{run.parameters:,}",
        "steps": steps,
        "targets": lambda run: f"{run.targets:,}",
        "time": lambda run: "-" if run.seconds is None else clock(run.seconds),
        "FLOPs": lambda run: "-" if run.flops is None else amount(run.flops, ""),
    }
    return [(name, *map(told, found)) for name, told in rows.items()]


def _counting(found: "Sequence[History]") -> list[tuple[str, ...]]:
    """What n-grams of the same text get, where any run has counted them."""
    bits = [
        None if run.baseline is None else run.baseline.metrics["bits_per_byte"] for run in found
    ]
    if not any(bits):
        return []
    return [("bits_per_byte", *("-" if each is None else number(each) for each in bits))]


def _notes(found: "Sequence[History]") -> list[str]:
    """What must be known before one number is held against another."""
    from regard.config import kind_of

    notes = []
    if len({kind_of(run.config.task)[0] for run in found}) > 1:
        notes.append("these runs have different tasks: their losses are not of the same thing")
    elif len({str(run.config.data.path or run.config.data.source) for run in found}) > 1:
        notes.append("these runs were judged on different data")
    elif len({str(run.config.data.tokenizer) for run in found}) > 1:
        notes.append("a loss is per token, and these have different ones: compare bits_per_byte")
    return notes


def _print_lines(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A line for each run, its numbers under their names; what was chosen has no room there."""
    columns = [("", *names), *rows]
    lines = aligned(list(zip(*columns, strict=True)), range(1, len(columns)))
    print(bold(lines[0], sys.stdout), *lines[1:], sep="\n")


def _table(name: str, run: "History") -> dict[str, Any]:
    return {
        "name": name,
        "path": str(run.path),
        "metrics": run.metrics,
        "parameters": run.parameters,
        "step": run.step,
        "steps": run.config.train.steps,
        "targets": run.targets,
        "seconds": run.seconds,
        "flops": run.flops,
        "baseline": None if run.baseline is None else asdict(run.baseline),
    }


# The curves


def _picture(names: Sequence[str], found: "Sequence[History]") -> "Picture":
    from regard.explain.render.curves import Curve, Panel, draw_curves
    from regard.training.tracking.history import downsample

    measures = dict.fromkeys(
        name for run in found for name in run.validation if name not in FOLLOWS
    )
    if any(run.losses for run in found):
        measures = {"loss": None, **measures}
    measures |= dict.fromkeys(name for run in found for name in run.taps)
    if not measures:
        raise ConfigError("nothing to draw: none of these runs has logged a step yet")
    panels = []
    for measure in measures:
        curves = [
            Curve(
                at,
                downsample(run.losses, MOST_POINTS) if measure == "loss" else [],
                run.validation.get(measure) or run.taps.get(measure, []),
            )
            for at, run in enumerate(found)
        ]
        title = measure.replace("_", " ")
        panels.append(Panel(title, UNITS.get(measure, title), curves))
    return draw_curves(names, panels)


def _svg(picture: "Picture", names: Sequence[str], groups: Groups) -> bytes:
    from regard.explain.render.picture import to_svg

    return to_svg(picture).encode()


def _png(picture: "Picture", names: Sequence[str], groups: Groups) -> bytes:
    from regard.explain.render.picture import to_png

    return to_png(picture)


def _html(picture: "Picture", names: Sequence[str], groups: Groups) -> bytes:
    """A page that needs nothing else: the curves, and the table under them."""
    lines = [_html_row("th", ("", *names))]
    for title, rows in groups.items():
        if rows:
            lines.append(
                f'<tr class="title"><td colspan="{1 + len(names)}">{escape(title)}</td></tr>'
            )
            lines += [_html_row("td", row) for row in rows]
    table = "\n".join(lines)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{escape(picture.title)}</title>\n<style>\n{STYLE}\n</style>\n"
        f"{_svg(picture, names, groups).decode()}\n<table>\n{table}\n</table>\n</html>\n"
    ).encode()


def _html_row(cell: str, values: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(value)}</{cell}>" for value in values) + "</tr>"


WRITERS: dict[str, Callable[["Picture", Sequence[str], Groups], bytes]] = {
    ".svg": _svg,
    ".png": _png,
    ".html": _html,
}
