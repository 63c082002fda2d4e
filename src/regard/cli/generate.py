"""`regard generate`."""

import sys
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from regard.cli.options import Folder
from regard.cli.talk import dim, shown, stdin_text, working
from regard.errors import ConfigError

if TYPE_CHECKING:
    pass


def generate(
    run: Folder,
    prompt: Annotated[
        str,
        Argument(metavar="PROMPT", help="What to continue; '-' reads stdin.", show_default=False),
    ] = "",
    sampler: Annotated[
        list[str],
        Option(
            "-s",
            "--sampler",
            metavar="NAME=VALUE",
            help="One link of the chain; repeatable. By default temperature=0.8 and top_p=0.95.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    tokens: Annotated[
        int, Option("-n", "--tokens", metavar="N", min=1, help="Stop after this many.")
    ] = 200,
    seed: Annotated[int | None, Option(metavar="N", help="Same seed, same text.")] = None,
    beam: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Search for the likeliest text instead of drawing one."),
    ] = None,
) -> None:
    """Continue a prompt, printing each piece as it comes.

    \b
    regard generate runs/my 'Once upon a time'
    regard generate runs/my 'ROMEO:' -s temperature=0.7 -s top_k=40 --seed 3
    regard generate runs/my 'To be' --beam 5 -n 40
    """
    if beam is not None and (sampler or seed is not None):
        raise ConfigError("--beam searches and draws nothing; leave out --sampler and --seed")
    text = stdin_text() if prompt == "-" else prompt
    with working(f"opening {run}"):
        from regard.api import load

        opened = load(run)
    chain = sampler or ["temperature=0.8", "top_p=0.95"]
    pieces = (
        opened.stream(text, tokens=tokens, sampler=chain, seed=seed)
        if beam is None
        else [opened.search(text, tokens=tokens, beam=beam)]
    )
    out = sys.stdout
    print(dim(shown(text, out), out), end="", flush=True)
    for piece in pieces:
        print(shown(piece, out), end="", flush=True)
    print()
