"""`regard translate`."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated

from typer import Argument, Option

from regard.cli.options import Folder, Searched
from regard.cli.output import say, shown, stdin_lines, warn_of, working

TOGETHER = 64  # lines translated at once when they come from a file


def translate(
    run: Folder,
    text: Annotated[
        str,
        Argument(
            metavar="TEXT",
            help="What to translate; '-', or nothing, reads lines.",
            show_default=False,
        ),
    ] = "-",
    beam: Annotated[
        int | None,
        Option(metavar="N", min=1, help="How many texts to follow at once; 5 if not said."),
    ] = None,
    length_penalty: Annotated[
        float | None,
        Option(metavar="POWER", help="Divide log P by length to this power; 1 if not said."),
    ] = None,
    search: Searched = None,
) -> None:
    """Write sentences, or lines of stdin, in the other language.

    \b
    regard translate runs/pairs 'a dog runs on the beach'
    regard translate runs/pairs < test.en > test.de
    """
    with working(f"opening {run}"):
        from regard.api import load

        opened = load(run)
    typed = text == "-" and sys.stdin.isatty()
    if typed:
        say("one sentence a line; Ctrl-D ends")
    lines = stdin_lines() if text == "-" else iter([text])
    for some in _groups(lines, 1 if typed else TOGETHER):
        full = [line for line in some if line.strip()]
        warn_of([each for line in full for each in opened.unknown(line)])
        written = iter(
            opened.translate(full, beam=beam, length_penalty=length_penalty, search=search)
        )
        for line in some:  # one line for each, an empty one for an empty one
            answer = " ".join(next(written).splitlines()) if line.strip() else ""
            print(shown(answer, sys.stdout), flush=True)


def _groups(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    lines = iter(lines)
    while some := list(islice(lines, size)):
        yield some
