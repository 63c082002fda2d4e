"""`regard translate`."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated

from typer import Argument

from regard import api
from regard.cli.arguments import AdapterOption, Beam, Folder, Penalty, SearchOption
from regard.cli.output import print_status, spinner, stdin_lines, text_for, warn_unknown


def translate(
    run: Folder,
    texts: Annotated[
        list[str],
        Argument(
            metavar="TEXT",
            help="The sentences to translate; '-', or nothing, reads lines from stdin.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    beam: Beam = None,
    length_penalty: Penalty = None,
    search: SearchOption = None,
    adapter: AdapterOption = None,
) -> None:
    """Translate sentences, or lines of stdin.

    \b
    regard translate runs/pairs 'a dog runs on the beach' 'a cat sleeps'
    regard translate runs/pairs < test.en > test.de
    """
    with spinner(f"opening {run}"):
        loaded_run = api.load(run, adapter=adapter)
    from_stdin = texts in ([], ["-"])
    interactive = from_stdin and sys.stdin.isatty()
    if interactive:
        print_status("one sentence per line; Ctrl-D ends")
    lines = stdin_lines() if from_stdin else iter(texts)
    for batch in _batches(lines, 1 if interactive else api.BATCH_SIZE):
        sentences = [line for line in batch if line.strip()]
        warn_unknown([part for line in sentences for part in loaded_run.unknown_parts(line)])
        translations = iter(
            loaded_run.translate(sentences, beam=beam, length_penalty=length_penalty, search=search)
        )
        for line in batch:  # an empty line for an empty line
            translation = " ".join(next(translations).splitlines()) if line.strip() else ""
            print(text_for(sys.stdout, translation), flush=True)


def _batches(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    lines = iter(lines)
    while batch := list(islice(lines, size)):
        yield batch
