"""`regard` without a command: an overview."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from typer import Context, Exit, Option

from regard import api
from regard.cli.output import align_columns, bold, dim

EXAMPLES = [
    ("regard quickstart", "train a model to write numbers in French, in a minute"),
    ("regard train YOUR.txt minutes=5", "train a model on your own text, sized for this machine"),
    ("regard info gpt2", "show the structure of a published model"),
]


def _print_version(requested: bool) -> None:
    if requested:
        try:
            print(f"regard {version('regard')}")
        except PackageNotFoundError:
            print("regard, not installed: it runs from its source folder")
        raise Exit


def overview(
    context: Context,
    show_version: Annotated[
        bool,
        Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Sequence models from n-grams to the Transformer: train, inspect and use them.

    Help for a command: regard COMMAND --help
    """
    if context.invoked_subcommand is not None:
        return
    out = sys.stdout
    print(f"{bold('regard', out)}  sequence models from n-grams to the Transformer:")
    print("        train them, inspect them, use them")
    print(f"\n{dim('this machine', out)}  {machine()}\n\n{dim('three things to try', out)}\n")
    for line in align_columns(EXAMPLES):
        print(f"  {line}")
    print(f"\n{dim('all commands', out)}  regard --help")
    print(f"{dim('check the installation', out)}  regard doctor")


def machine() -> str:
    """Cores, memory and GPU of this machine, as found without torch."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    parts = [f"{cores} core{'s' if cores > 1 else ''}"]
    if "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        parts.append(f"{memory / 2**30:,.0f} GiB of memory")
    return ", ".join([*parts, _gpu()])


def _gpu() -> str:
    names = api.driver_gpus()
    if names:
        return f"{len(names)} × {names[0]}" if len(names) > 1 else names[0]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "Apple GPU"
    return "no GPU found (none is needed)"
