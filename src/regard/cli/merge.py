"""`regard merge`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from regard import api
from regard.cli.arguments import Folder, Json
from regard.cli.output import print_json, spinner


def merge(
    run: Folder,
    new: Annotated[
        Path,
        Argument(
            metavar="NEW", help="The run folder to write; it must not exist.", show_default=False
        ),
    ],
    adapter: Annotated[
        str | None,
        Option(
            "--adapter",
            metavar="NAME",
            help="The LoRA adapter: a run, a PEFT folder, or its name in RUN/adapters; by default "
            "that of RUN.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Merge a LoRA adapter into the weights of its base model.

    A merged weight is W + (alpha / rank) B A.

    \b
    regard merge runs/tuned runs/merged
    regard merge runs/base runs/merged --adapter downloads/adapter

    The new run has all weights, and `regard export` writes it as a complete checkpoint.
    """
    with spinner(f"merging {run}"):
        layers = api.merge(run, new, adapter=adapter)
    if as_json:
        print_json({"run": str(new), "layers": layers})
        return
    print(f"{new}: {len(layers)} layers merged")
