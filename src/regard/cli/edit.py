"""`regard edit`."""

from regard import api
from regard.cli.arguments import Folder, Json, Overrides
from regard.cli.output import print_json, spinner
from regard.config import check_overrides, parse_overrides


def edit(
    run: Folder,
    overrides: Overrides = [],  # noqa: B006 -- typer copies it
    as_json: Json = False,
) -> None:
    """Change settings of a run.

    Without settings, a config.json that was changed by hand is accepted. The weights are not
    trained; they must fit the settings. A run whose model was changed cannot be resumed.

    \b
    regard edit runs/my model.position.base=500000
    regard edit runs/my data.path=/new/place/my.txt
    regard edit runs/my
    """
    check_overrides(parse_overrides(overrides))
    with spinner("loading"):
        changes = api.edit(run, *overrides)
    if as_json:
        print_json({"folder": str(run), "changes": changes})
    else:
        print("\n".join(changes) or f"{run}: no setting has changed")
