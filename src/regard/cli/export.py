"""`regard export`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from regard.cli.options import Folder, Json
from regard.cli.output import print_json, working


def export(
    run: Folder,
    folder: Annotated[
        Path,
        Argument(
            metavar="FOLDER",
            help="The folder to write; an existing one is refused.",
            show_default=False,
        ),
    ],
    family: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Write it as this model_type. By default the first that has all its choices.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run as a folder that Hugging Face's transformers opens.

    \b
    regard export runs/my exported/my
    regard export runs/my exported/my --family mistral
    """
    with working(f"exporting {run}"):
        from regard.training.import_export import export_run

        done = export_run(run, folder, family)
    if as_json:
        print_json(
            {
                "folder": str(done.path),
                "family": done.family,
                "class": done.architecture,
                "difference": done.difference,
                "unchecked": done.unchecked,
            }
        )
        return
    print(f"{done.path}: {done.family}, {done.architecture}")
    if done.difference is None:
        print(f"not checked: {done.unchecked}")
    else:
        print(f"checked: transformers computes the same, to {done.difference:.1e}")
