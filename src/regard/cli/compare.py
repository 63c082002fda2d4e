"""`regard compare`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from regard import api
from regard.api.display import make_display
from regard.api.formatting import with_prefix
from regard.cli.arguments import Json, parse_data
from regard.cli.by_length import as_groups, as_table
from regard.cli.diff import print_columns, wrap_values
from regard.cli.output import (
    align_columns,
    bold,
    check_output_file,
    common_options,
    format_duration,
    format_number,
    print_json,
    print_status,
    strip_control,
    write_file,
)
from regard.config import Choice
from regard.errors import ConfigError
from regard.html import html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.api import Comparison, History

MAX_COLUMNS = 4  # runs side by side
Groups = dict[str, list[tuple[str, ...]]]


def compare(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN", help="Run folders, finished or not.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="Write the curves: .svg, .png, .pdf, or .html with the table."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing FILE.")] = False,
    text: Annotated[
        str | None, Option(metavar="TEXT", help="Translate this sentence with each run.")
    ] = None,
    by_length: Annotated[
        bool, Option("--by-length", help="Show the metrics of each run by source length.")
    ] = False,
    data: Annotated[
        list[str],
        Option(
            metavar="PATH", help="Other data for --by-length; give it twice for source and target."
        ),
    ] = [],  # noqa: B006 -- typer copies it
    as_json: Json = False,
) -> None:
    """Compare the metrics, cost and settings of runs.

    Only settings that differ are shown.

    \b
    regard compare runs/my runs/my-2
    regard compare runs/* --out curves.svg
    regard compare runs/my runs/my-2 --json
    regard compare runs/lstm runs/attention --text 'ein hund rennt am strand'
    regard compare runs/lstm runs/attention --by-length --out lengths.svg
    """
    if data and not by_length:
        raise ConfigError("--data needs --by-length; give both, or neither")
    check_output_file(out, force)
    show_comparison(
        runs, text=text, by_length=by_length, data=parse_data(data), out=out, as_json=as_json
    )


def show_comparison(
    runs: Sequence[Path],
    *,
    text: str | None = None,
    by_length: bool = False,
    data: Sequence[Choice] = (),
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Compare runs and print the tables, or write them to `out`."""
    with make_display(common_options.quiet, transient=True) as display:
        comparison = api.compare(
            *runs, text=text, by_length=by_length, data=data, progress=display.show_progress
        )
        groups = _groups(comparison)
        extra = as_groups(comparison.by_length) if comparison.by_length else {}
        if text is not None:  # quoted, so that it differs from the other titles
            translations = tuple(map(strip_control, comparison.translations))
            extra[repr(text)] = wrap_values({"translation": translations})
        groups |= extra
    if out is not None:
        write_file(out, _encode(comparison.figure(), out.suffix, comparison.names, groups))
    if as_json:
        _print_json(comparison)
    elif len(runs) > MAX_COLUMNS:
        if comparison.unit:
            print(f"metrics: {comparison.unit}\n")
        _print_many(comparison.names, groups, [*extra])
    else:
        print_columns(comparison.names, groups)
    for note in comparison.notes:
        print_status(note)
    if out is not None:
        print_status(f"curves: {out}")


def _groups(comparison: "Comparison") -> Groups:
    """The rows of the table under their titles, first the metrics."""
    unit = f" ({comparison.unit})" if comparison.unit else ""
    return {
        f"validation{unit}": [
            *((key, *map(_number_or_dash, values)) for key, values in comparison.metrics.items()),
            *((key, *map(_cell, values)) for key, values in comparison.evaluations.items()),
        ],
        "baselines, on all validation data": [
            (key, *map(_number_or_dash, values)) for key, values in comparison.baselines.items()
        ],
        "cost": _costs(comparison.histories),
        "settings": wrap_values(comparison.settings),
        "activations": [
            (key, *map(_number_or_dash, values)) for key, values in comparison.activations.items()
        ],
    }


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _costs(histories: "Sequence[History]") -> list[tuple[str, ...]]:
    def steps(history: "History") -> str:
        planned = history.config.train.steps
        if not api.takes_steps(history):
            return "-"
        done = history.step >= planned
        return f"{history.step:,}" if done else f"{history.step:,} of {planned:,}"

    def seconds(history: "History") -> str:
        return "-" if history.seconds is None else format_duration(history.seconds)

    def flops(history: "History") -> str:
        return "-" if history.flops is None else with_prefix(history.flops, "")

    def size(history: "History", without_gradients: bool) -> str:
        applies = history.is_fitted_without_gradients == without_gradients
        return f"{history.parameters:,}" if applies else "-"

    rows: dict[str, Callable[[History], str]] = {
        "parameters": lambda history: size(history, False),
        "stored values": lambda history: size(history, True),
        "steps": steps,
        "targets": lambda history: f"{history.targets:,}" if history.targets else "-",
        "time": seconds,
        "FLOPs": flops,
    }
    table = {name: tuple(map(cell, histories)) for name, cell in rows.items()}
    return [(name, *cells) for name, cells in table.items() if any(c != "-" for c in cells)]


def _print_many(names: Sequence[str], groups: Groups, extra: Sequence[str]) -> None:
    """Print the table of many runs: metrics and cost with a line for each run, then the rest.

    Groups of `extra` have a line for each run too; in the others, `MAX_COLUMNS` runs at a time are
    side by side.
    """
    in_rows = (next(iter(groups)), "cost")
    _print_rows(names, [row for title in in_rows for row in groups[title]])
    rest = {title: rows for title, rows in groups.items() if title not in (*in_rows, *extra)}
    for start in range(0, len(names), MAX_COLUMNS) if any(rest.values()) else ():
        columns = slice(start, start + MAX_COLUMNS)
        print()
        print_columns(
            names[columns],
            {
                title: [row for key, *cells in rows if any(row := (key, *cells[columns]))]
                for title, rows in rest.items()
            },
        )
    for title in extra:
        print(f"\n{bold(title, sys.stdout)}")
        _print_rows(names, groups[title])


def _print_rows(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One line per run, its values under their names."""
    columns = [("", *names), *rows]
    lines = align_columns(list(zip(*columns, strict=True)), range(1, len(columns)))
    print(bold(lines[0], sys.stdout), *lines[1:], sep="\n")


def _print_json(comparison: "Comparison") -> None:
    tables = [
        _table(name, history)
        for name, history in zip(comparison.names, comparison.histories, strict=True)
    ]
    for table, translation in zip(tables, comparison.translations, strict=False):
        table["translation"] = translation
    for table, by_length in zip(tables, comparison.by_length, strict=False):
        table["by_length"] = as_table(by_length)
    unit = {"unit": comparison.unit} if comparison.unit else {}
    print_json({"runs": tables, **unit, "settings": comparison.settings})


def _table(name: str, history: "History") -> dict[str, Any]:
    return {
        "name": name,
        "path": str(history.path),
        "metrics": history.metrics,
        "evaluated_on": history.evaluation.evaluated_on,
        "parameters": history.parameters,
        "step": history.step,
        "steps": history.config.train.steps,
        "targets": history.targets,
        "seconds": history.seconds,
        "flops": history.flops,
        **({"activations": _last_values(history)} if history.activations else {}),
        "baseline": None if history.baseline is None else asdict(history.baseline),
        "baselines": history.baselines,
    }


def _last_values(history: "History") -> dict[str, float]:
    return {name: points[-1][1] for name, points in history.activations.items()}


def _encode(figure: "Figure", suffix: str, names: Sequence[str], groups: Groups) -> bytes:
    tables = [
        f"<h3>{escape(title)}</h3>\n{html_table(rows, header=('', *names))}"
        for title, rows in groups.items()
        if rows
    ]
    return api.encode_figure(figure, suffix, tables)
