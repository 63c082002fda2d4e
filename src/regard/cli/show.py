"""`regard show`."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from regard import api
from regard.cli.arguments import Json
from regard.cli.output import (
    align_columns,
    check_output_file,
    is_interactive,
    print_json,
    print_status,
    spinner,
    strip_control,
    terminal_width,
)
from regard.config import parse_overrides


def show(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="The figure; without it, a list of all.")
    ] = None,
    what: Annotated[
        list[str] | None,
        Argument(
            metavar="[RUN] [TEXT] [OPTION=VALUE]…",
            help="A run folder or a preset, a text or a text file, and options of the figure.",
        ),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write a figure: .svg, .png, .pdf or .html.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing FILE.")] = False,
    as_json: Json = False,
) -> None:
    """Show a figure of the lectures, made from your run, a preset or a text.

    \b
    regard show
    regard show next-token runs/my 'To be, or not to be'
    regard show positions kinds=sinusoidal --out positions.svg
    regard show shannon my.txt unit=word orders=3
    regard show samplers runs/my 'To be' top_p=0.9 temperature=1.5

    A preset has random weights. All figures: docs/figures.md
    """
    if name is None:
        _print_list(as_json)
        return
    if out is not None:
        check_output_file(out, force)
    options = [word for word in what or [] if re.match(r"[a-z_0-9]+=", word)]
    others = [word for word in what or [] if word not in options]
    with spinner(f"computing {name}"):
        chain = [word for word in options if _is_sampler(name, word)]
        values = parse_overrides(word for word in options if word not in chain)
        shown = api.show(name, *others, **values, **({"samplers": chain} if chain else {}))
    if out is not None:
        shown.save(out)
    if as_json:
        print_json(shown.table())
    elif out is not None:
        print(out)
    else:
        text = shown.text(terminal_width(), colour=is_interactive(sys.stdout))
        print(text)
        print_status("a figure: --out FILE.svg; the numbers: --json")


def _is_sampler(name: str, word: str) -> bool:
    """Whether a word is a sampler of the figure that shows a chain of them."""
    return name == "samplers" and word.partition("=")[0] in api.SAMPLERS


def _print_list(as_json: bool) -> None:
    """Print the figures with what they need and what they show."""
    entries = api.figures()
    if as_json:
        print_json({"figures": {name: _entry(entry) for name, entry in entries.items()}})
        return
    rows = [
        (name, entry.usage, strip_control(entry.summary.rstrip(".")))
        for name, entry in entries.items()
    ]
    for line in align_columns([("figure", "needs", "shows"), *rows]):
        print(line[: max(60, terminal_width())] if sys.stdout.isatty() else line)
    print_status("\noptions and examples of each: docs/figures.md")


def _entry(entry: Any) -> dict[str, Any]:
    return {
        "needs": entry.usage,
        "shows": entry.summary,
        "topics": list(entry.topics),
        "options": entry.options,
    }
