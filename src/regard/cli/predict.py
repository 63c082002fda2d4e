"""`regard predict`."""

import sys
from collections.abc import Iterable
from itertools import chain, repeat
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from regard.cli.options import Folder, Json
from regard.cli.output import aligned, print_json, shown, working
from regard.config import kind_of
from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.api import Run


def predict(
    run: Folder,
    what: Annotated[
        list[str],
        Argument(
            metavar="[TEXT|IMAGE|CSV]",
            help="Texts, with <mask> where something is to be filled in, PNG or JPEG files, or "
            "series to go on with; without one, a run on a series goes on with its own.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    top: Annotated[int, Option("-n", "--top", metavar="N", min=1, help="How many to show.")] = 3,
    steps: Annotated[
        int, Option(metavar="N", min=1, help="How many numbers of a series to foretell.")
    ] = 24,
    as_json: Json = False,
) -> None:
    """Say what a text, each of its words or an image is, or fill in blanks, the likeliest first.

    \b
    regard predict runs/docs 'The <mask> statement raises an exception.'
    regard predict runs/reviews 'one long string of cliches'
    regard predict runs/fashion shoe.png
    regard predict runs/fashion photos/*.jpg -n 1 --json
    regard predict runs/sines --steps 96

    One line for each text or image, for each word or blank of a text, or for each number to come.
    """
    with working(f"opening {run}"):
        from regard.api import load

        opened = load(run)
    if kind_of(opened.config.task)[0] == "forecast":
        _foretell(opened, what, steps, as_json)
        return
    if not what:
        raise ConfigError("nothing to predict; give a text or an image")
    with working("predicting"):
        found = {each: opened.predict(each, top=top) for each in what}
    if as_json:
        print_json(found)
        return
    by_word = kind_of(opened.config.task)[0] == "tag"
    rows = [
        (asked, *(f"{_visible(name)} {share:.1%}" for name, share in likely))
        for each, places in found.items()
        for asked, likely in zip(_asked(each, by_word), places, strict=False)
    ]
    for line in aligned(rows):
        print(line)


def _foretell(run: "Run", series: list[str], steps: int, as_json: bool) -> None:
    """What comes after each series, a line for each step."""
    asked: list[str | None] = [*series] or [None]
    found = {name or "its own": run.forecast(name, steps=steps) for name in asked}
    if as_json:
        print_json(found)
        return
    columns = [[f"{each:.6g}" for each in told] for told in found.values()]
    heads = [] if len(found) == 1 else [("", *found)]
    rows = [(str(step), *row) for step, row in enumerate(zip(*columns, strict=True), 1)]
    for line in aligned([*heads, *rows], range(1 + len(found))):
        print(line)


def _asked(text: str, by_word: bool) -> Iterable[str]:
    """What each line is about: a word of the text, or the text and its further blanks."""
    return text.split() if by_word else chain([text], repeat(""))


def _visible(name: str) -> str:
    """A piece as one reads it; a line's end or a lone space by its name."""
    name = name.strip(" ")
    return shown(name if name and name.isprintable() else repr(name), sys.stdout)
