"""`regard settings`."""

import sys
import textwrap
from typing import Annotated, Any

from typer import Argument

from regard import api
from regard.cli.arguments import Json
from regard.cli.output import bold, print_json, spinner, terminal_width

KEY_WIDTH = 34


def settings(
    pattern: Annotated[
        str,
        Argument(
            metavar="PATTERN",
            help="A part of a key, a glob, or the name of a choice or of an option.",
            show_default=False,
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """List all settings with their defaults and meaning.

    \b
    regard settings
    regard settings train.schedule
    regard settings 'model.*dropout'
    regard settings rotary
    """
    with spinner("loading"):
        rows = api.settings(pattern)
    if as_json:
        print_json({"settings": rows})
        return
    for index, row in enumerate(rows):
        if pattern:
            print("\n" * (index > 0), end="")
            _print_details(row)
        else:
            _print_line(row)


def _print_line(row: dict[str, Any]) -> None:
    """`key=default`, and the description beside it."""
    word = f"{row['key']}={_default(row)}"
    users = api.used_by(row) if row["key"].startswith(("model.", "task.")) else "all"
    note = "" if users == "all" else f" ({users})"
    _print_wrapped(f"{word:<{KEY_WIDTH}}  ", api.sentence(row["description"]) + note)


def _print_details(row: dict[str, Any]) -> None:
    print(f"{bold(row['key'], sys.stdout)}  {row['type']}, default: {_default(row)}")
    _print_wrapped("  ", api.sentence(row["description"]))
    changed = api.other_defaults(row["key"])
    in_recipes = [
        f"{name} {api.format_default(value)}" for name, value in changed.items() if name != "DATA"
    ]
    if in_recipes:
        _print_wrapped("  in recipes      ", ", ".join(in_recipes))
    if "DATA" in changed:
        explanation = "chosen for the data; `regard train DATA --dry-run` shows its value"
        _print_wrapped("  for your data   ", explanation)
    _print_wrapped("  used by tasks   ", ", ".join(row["tasks"]))
    _print_wrapped("  used by models  ", ", ".join(row["models"]))
    plain = [name for name, choice in row["choices"].items() if not choice["description"]]
    if plain:
        _print_wrapped("  one of          ", ", ".join(plain))
    for name, choice in row["choices"].items():
        if choice["description"]:
            _print_wrapped(f"    {name:<14}  ", choice["description"])
        if choice["options"]:
            _print_wrapped(" " * 20, "options: " + ", ".join(api.format_options(choice["options"])))


def _default(row: dict[str, Any]) -> str:
    return "(from the data)" if row["derived"] else api.format_default(row["default"])


def _print_wrapped(start: str, text: str) -> None:
    width = max(terminal_width(), len(start) + 20)
    indent = " " * len(start)
    lines = textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
    )
    print("\n".join(lines))
