"""`regard show`."""

import re
import sys
import textwrap
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
    replace_unencodable,
    spinner,
    strip_control,
    terminal_width,
)
from regard.config import parse_overrides
from regard.errors import reject_options


def show(
    name: Annotated[
        str | None, Argument(metavar="NAME", help="The figure; without it, a list of all.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="RUN|TEXT|OPTION=VALUE",
            help="A run folder or a preset, a text or a text file, and options of the figure.",
        ),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write a figure: .svg, .png, .pdf or .html.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing FILE.")] = False,
    as_json: Json = False,
) -> None:
    """Show a figure of the lectures.

    \b
    regard show
    regard show next-token runs/my 'To be, or not to be'
    regard show positions kinds=sinusoidal --out positions.svg
    regard show cost lengths=256,512,1024
    regard show shannon my.txt unit=word orders=3
    regard show samplers runs/my 'To be' top_p=0.9 temperature=1.5

    A figure is made from your run, a preset (with random weights) or a text. All figures:
    docs/figures.md
    """
    check_output_file(out, force)
    if name is None:
        reject_options("without a NAME, the figures are listed", {"--out": out})
        _print_list(as_json)
        return
    options = [word for word in arguments or [] if re.match(r"[a-z_0-9]+=", word)]
    inputs = [word for word in arguments or [] if word not in options]
    with spinner(f"computing {name}"):
        chain = [word for word in options if _is_sampler(name, word)]
        values = _parse_options(name, [word for word in options if word not in chain])
        figure = api.show(name, *inputs, **values, **({"samplers": chain} if chain else {}))
    if out is not None:
        figure.save(out)
    if as_json:
        print_json(figure.to_dict())
    elif out is not None:
        print(out)
    else:
        text = figure.text(terminal_width(), colour=is_interactive(sys.stdout))
        print(replace_unencodable(text, sys.stdout))
        print_status("a figure: --out FILE.svg; the numbers: --json")


def _is_sampler(name: str, word: str) -> bool:
    """Whether a word is a sampler: in `samplers`, every `key=value` that is not an option."""
    return name == "samplers" and word.partition("=")[0] not in api.figures()[name].options


def _parse_options(name: str, words: list[str]) -> dict[str, Any]:
    """The options of a figure; a list is written as `lengths=64,128` or `lengths=[64, 128]`."""
    values = parse_overrides(words)
    lists = api.figures()[name].list_options if name in api.figures() else set()
    for option in lists & values.keys():
        value = values[option]
        if isinstance(value, str) and value != "none":
            parts = value.split(",")
            values[option] = [parse_overrides([f"{option}={part}"])[option] for part in parts]
        elif isinstance(value, int | float):
            values[option] = [value]
    return values


def _print_list(as_json: bool) -> None:
    """Print the figures with their inputs and summaries."""
    entries = api.figures()
    if as_json:
        print_json({"figures": {name: _entry(entry) for name, entry in entries.items()}})
        return
    inputs = [(name, entry.usage) for name, entry in entries.items()]
    prefixes = [f"{line}  " for line in align_columns([("figure", "inputs"), *inputs])]
    margin = max(map(len, prefixes))
    summaries = ["summary", *(entry.summary.rstrip(".") for entry in entries.values())]
    width = max(60, terminal_width()) if sys.stdout.isatty() else sys.maxsize
    for start, summary in zip(prefixes, summaries, strict=True):
        first, *others = textwrap.wrap(strip_control(summary), width - margin)
        print(start.ljust(margin) + first)
        for line in others:
            print(" " * margin + line)
    print_status("\noptions and examples of each: docs/figures.md")


def _entry(entry: Any) -> dict[str, Any]:
    return {
        "inputs": entry.usage,
        "summary": entry.summary,
        "topics": list(entry.topics),
        "options": entry.options,
    }
