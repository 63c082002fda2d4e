"""`regard classify`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from regard.cli.options import Folder, Json
from regard.cli.talk import aligned, print_json, working


def classify(
    run: Folder,
    images: Annotated[
        list[Path], Argument(metavar="IMAGE", help="PNG or JPEG files.", show_default=False)
    ],
    top: Annotated[int, Option("-n", "--top", metavar="N", min=1, help="How many to show.")] = 3,
    as_json: Json = False,
) -> None:
    """Say which class each image belongs to, the likeliest first.

    \b
    regard classify runs/fashion shoe.png
    regard classify runs/fashion photos/*.jpg -n 1 --json
    """
    with working(f"opening {run}"):
        from regard.api import load

        opened = load(run)
        found = {str(image): opened.classify(image, top=top) for image in images}
    if as_json:
        print_json({image: dict(classes) for image, classes in found.items()})
        return
    rows = [
        (image, *(f"{name} {share:.1%}" for name, share in classes))
        for image, classes in found.items()
    ]
    for line in aligned(rows):
        print(line)
