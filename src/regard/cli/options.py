"""What several verbs take."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from regard.cli.output import settings
from regard.config import Choice, parse_overrides

Folder = Annotated[
    Path,
    Argument(metavar="RUN", help="A run folder written by `regard train`.", show_default=False),
]
Overrides = Annotated[
    list[str],
    Argument(
        metavar="KEY=VALUE",
        help="Settings to change, as in train.steps=2000.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    Option(
        metavar="DIR",
        help="The run folder to write; an existing one is refused. By default runs/NAME.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print the result as one JSON object.")]
Beam = Annotated[
    int, Option(metavar="N", min=1, help="How many texts to follow at once; 1 is greedy.")
]
Penalty = Annotated[
    float,
    Option(
        "--length-penalty",
        metavar="POWER",
        help="Divide log P by length to this power; 0: not at all.",
    ),
]
Searched = Annotated[
    str | None,
    Option(
        "--search",
        metavar="NAME=VALUE",
        help="Search by beam or contrastive, in place of --beam: 'beam={width=6, groups=3}'.",
    ),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Results only, no talk.")]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of a mistake.")]


def named_data(words: Sequence[str]) -> list[Choice]:
    """Paths as they are; a built-in data set with its options as the table that it is.

    >>> named_data(["my.tsv", "{ kind = 'copy', longest = 9 }"])
    ['my.tsv', {'kind': 'copy', 'longest': 9}]
    """
    return [parse_overrides([f"data={w}"])["data"] if w.startswith("{") else w for w in words]


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Add what every verb takes, so that each can leave it out: --quiet and --debug."""

    @wraps(function)
    def run(*, quiet: bool, debug: bool, **given: Any) -> None:
        settings.quiet, settings.debug = quiet, debug
        function(**given)

    common = {"quiet": Quiet, "debug": Debug}
    own = inspect.signature(function)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in common.items()
    ]
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, **common}
    return run
