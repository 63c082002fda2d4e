"""Arguments and options that several commands share."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from regard.cli.output import common_options
from regard.config import Choice, parse_overrides
from regard.errors import ConfigError

Folder = Annotated[
    Path,
    Argument(
        metavar="RUN",
        help="A run folder, written by `regard train` or `regard import`.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str],
    Argument(
        metavar="KEY=VALUE",
        help="Settings to change, as in train.steps=2000.",
        show_default=False,
    ),
]
ModelOverrides = Annotated[
    list[str],
    Argument(
        metavar="KEY=VALUE",
        help="Settings of the model to change, as in model.context=4096.",
        show_default=False,
    ),
]
MODEL_HELP = "A preset, a recipe, a run folder or a checkpoint folder."
Out = Annotated[
    Path | None,
    Option(
        metavar="FOLDER",
        help="The run folder to write; it must not exist. By default runs/NAME.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print the result as one JSON object.")]
Beam = Annotated[
    int | None,
    Option(metavar="N", min=1, help="Beam width, 5 by default; 1 is greedy search."),
]
Penalty = Annotated[
    float | None,
    Option(
        "--length-penalty",
        metavar="POWER",
        help="Length penalty: divide log P by the length raised to this power, 1 by default; "
        "0 disables it.",
    ),
]
SearchOption = Annotated[
    str | None,
    Option(
        "--search",
        metavar="NAME=VALUE",
        help="Beam or contrastive search, in place of --beam: 'beam={width=6, groups=3}'.",
    ),
]
AdapterOption = Annotated[
    str | None,
    Option(
        "--adapter",
        metavar="NAME",
        help="Merge this LoRA adapter first: a run, a PEFT folder, or its name in RUN/adapters.",
    ),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print results only, no progress.")]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]


def parse_data(arguments: Sequence[str]) -> list[Choice]:
    """Parse the arguments of `data`: a path stays as it is, a built-in dataset becomes a table.

    >>> parse_data(["my.tsv", "{ kind = 'copy', max_length = 9 }"])
    ['my.tsv', {'kind': 'copy', 'max_length': 9}]
    """
    return [parse_overrides([f"data={w}"])["data"] if w.startswith("{") else w for w in arguments]


def _check_utf8(name: str, text: str) -> None:
    """Raise on bytes that are not UTF-8; safetensors cannot read files of such a name either."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"character {error.start + 1} of {text!r}"
        raise ConfigError(f"{name.upper()} must be UTF-8, and {place} is not") from None


def with_common_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all commands have, --quiet and --debug, to a command."""

    @wraps(function)
    def run(*, quiet: bool, debug: bool, **arguments: Any) -> None:
        common_options.quiet, common_options.debug = quiet, debug
        for name, value in arguments.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str | Path):
                    _check_utf8(name, str(text))
        function(**arguments)

    common = {"quiet": Quiet, "debug": Debug}
    signature = inspect.signature(function)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in common.items()
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *added]
    )
    run.__annotations__ = {**function.__annotations__, **common}
    return run
