"""`regard fill`."""

import sys
from typing import Annotated

from typer import Argument, Option

from regard.cli.options import Folder, Json
from regard.cli.talk import aligned, number, print_json, shown, working


def fill(
    run: Folder,
    text: Annotated[
        str,
        Argument(
            metavar="TEXT", help="With <mask> where something is missing.", show_default=False
        ),
    ],
    top: Annotated[int, Option("-n", "--top", metavar="N", min=1, help="How many to show.")] = 5,
    as_json: Json = False,
) -> None:
    """Say what may stand in the blanks of a text, and how likely it is.

    \b
    regard fill runs/docs 'The <mask> statement raises an exception.'
    """
    with working(f"opening {run}"):
        from regard.api import load

        found = load(run).fill(text, top=top)
    if as_json:
        print_json({"blanks": [[[piece, p] for piece, p in each] for each in found]})
        return
    for blank, pieces in enumerate(found, 1):
        if blank > 1:
            print()
        rows = [
            (shown(piece.strip(" ") or repr(piece), sys.stdout), number(p)) for piece, p in pieces
        ]
        for line in aligned(rows, [1]):
            print(line)
