"""`regard diff`."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

from typer import Argument

from regard import api
from regard.cli.arguments import MODEL_HELP, Json
from regard.cli.output import align_columns, bold, format_value, print_json, spinner

VALUE_WIDTH = 26  # columns of a value; a longer one is wrapped


def _model(metavar: str) -> Any:
    return Argument(metavar=metavar, help=MODEL_HELP, show_default=False)


def diff(
    first: Annotated[str, _model("A")],
    second: Annotated[str, _model("B")],
    as_json: Json = False,
) -> None:
    """Show the settings in which two models differ.

    Their parameter counts are compared too.

    \b
    regard diff gpt2 llama
    regard diff bert-base roberta-base --json
    regard diff runs/my tiny-decoder
    """
    with spinner("comparing"):
        result = api.diff(first, second)
    groups = {"sizes": result.sizes, "settings": result.settings, "parameters": result.parameters}
    if as_json:
        print_json({"models": [first, second], **groups})
    elif result.is_equal:
        print(f"{first} and {second} are the same model")
    else:
        print_columns([first, second], {title: wrap_values(rows) for title, rows in groups.items()})


def print_columns(names: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Print rows under titles, their columns aligned over all groups, under the names."""
    rows = [row for group in groups.values() for row in group]
    lines = iter(align_columns([("", *names), *rows]))
    print(f"  {bold(next(lines), sys.stdout)}")
    for title, group in groups.items():
        if group:
            print(f"\n{bold(title, sys.stdout)}")
        for _ in group:
            print(f"  {next(lines)}")


def wrap_values(rows: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    """A line for each setting, or several where a value is long."""
    lines = []
    for key, values in rows.items():
        columns = [
            textwrap.wrap(format_value(value), VALUE_WIDTH, break_long_words=False) or ["-"]
            for value in values
        ]
        wrapped = zip_longest(*columns, fillvalue="")
        lines += [("" if index else key, *cells) for index, cells in enumerate(wrapped)]
    return lines
