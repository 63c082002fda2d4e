"""`regard export`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from regard import api
from regard.cli.options import Folder, Json
from regard.cli.output import print_json, spinner


def export(
    run: Folder,
    folder: Annotated[
        Path,
        Argument(
            metavar="FOLDER",
            help="The folder to write; it must not exist.",
            show_default=False,
        ),
    ],
    family: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Write it as this model_type. By default the first that supports its settings.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run as a folder that Hugging Face transformers opens.

    \b
    regard export runs/my exported/my
    regard export runs/my exported/my --family mistral
    """
    with spinner(f"exporting {run}"):
        result = api.export(run, folder, family=family)
    if as_json:
        print_json(
            {
                "folder": str(result.path),
                "family": result.family,
                "class": result.architecture,
                "difference": result.difference,
                "unchecked": result.unchecked,
            }
        )
        return
    print(f"{result.path}: {result.family}, {result.architecture}")
    if result.difference is None:
        print(f"not verified: {result.unchecked}")
    else:
        print(f"verified: outputs in transformers differ by at most {result.difference:.1e}")
