"""`regard neighbours`."""

import sys
from itertools import combinations
from typing import Annotated

from typer import Argument, Option

from regard.cli.options import Folder, Json
from regard.cli.output import aligned, print_json, shown, working
from regard.errors import ConfigError


def neighbours(
    run: Folder,
    asked: Annotated[
        list[str],
        Argument(
            metavar="WORD [± WORD] …",
            help="Words, or sums of them, as in: king - man + woman",
            show_default=False,
        ),
    ],
    top: Annotated[int, Option("-n", "--top", metavar="N", min=1, help="How many to show.")] = 10,
    text: Annotated[
        str | None,
        Option(
            "--in",
            metavar="TEXT",
            help="Compare a word with itself, where it stands several times in this text.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which words have a vector like that of a word, and how like.

    \b
    regard neighbours runs/tolstoy war peace
    regard neighbours runs/tolstoy king - man + woman
    regard neighbours runs/tolstoy can --in 'I can buy a can of fish'

    Of any run whose model has a vector for each word. A word's cosine with itself is 1.
    """
    with working(f"opening {run}"):
        from regard.api import load

        opened = load(run)
        if text is not None:
            if len(asked) > 1:
                raise ConfigError(f"--in compares one word with itself, not {' '.join(asked)}")
            alike = opened.compare_occurrences(asked[0], text)
        else:
            found = opened.neighbours(asked, top=top)
    if as_json:
        print_json(found if text is None else alike)
    elif text is None:
        rows = [
            (said if place == 0 else "", shown(word, sys.stdout), f"{cosine:.3f}")
            for said, near in found.items()
            for place, (word, cosine) in enumerate(near)
        ]
        print("\n".join(aligned(rows, [2])))
    else:
        places = alike.pop("places")
        table = [("tokens", *alike)]
        for i, j in combinations(range(len(places)), 2):
            cosines = (f"{each[i][j]:.3f}" for each in alike.values())
            table.append((f"{places[i]} and {places[j]}", *cosines))
        print("\n".join(aligned(table, list(range(1, len(alike) + 1)))))
