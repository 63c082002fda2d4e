"""`regard predict`."""

import sys
from typing import Annotated

from typer import Argument, Option

from regard.cli.options import Folder, Json
from regard.cli.talk import aligned, print_json, shown, working


def predict(
    run: Folder,
    what: Annotated[
        list[str],
        Argument(
            metavar="TEXT|IMAGE",
            help="Texts with <mask> where something is missing, or PNG or JPEG files.",
            show_default=False,
        ),
    ],
    top: Annotated[int, Option("-n", "--top", metavar="N", min=1, help="How many to show.")] = 3,
    as_json: Json = False,
) -> None:
    """Say what is in an image, or in the blanks of a text, the likeliest first.

    \b
    regard predict runs/docs 'The <mask> statement raises an exception.'
    regard predict runs/fashion shoe.png
    regard predict runs/fashion photos/*.jpg -n 1 --json

    One line for each image, and for each blank of a text.
    """
    with working(f"opening {run}"):
        from regard.api import load

        opened = load(run)
        found = {each: opened.predict(each, top=top) for each in what}
    if as_json:
        print_json(found)
        return
    rows = [
        (each if place == 1 else "", *(f"{_visible(name)} {share:.1%}" for name, share in likely))
        for each, places in found.items()
        for place, likely in enumerate(places, 1)
    ]
    for line in aligned(rows):
        print(line)


def _visible(name: str) -> str:
    """A piece as one reads it; a line's end or a lone space by its name."""
    name = name.strip(" ")
    return shown(name if name and name.isprintable() else repr(name), sys.stdout)
