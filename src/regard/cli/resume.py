"""`regard resume`."""

from typing import Annotated

from typer import Option

from regard.cli.options import Folder, Json, Overrides
from regard.cli.output import run_worker, working
from regard.config import check_overrides, parse_overrides
from regard.training.parallel.launch import rank
from regard.training.signals import stoppable


@stoppable()
def resume(
    run: Folder,
    words: Overrides = [],  # noqa: B006 -- typer copies it
    step: Annotated[
        int | None, Option(metavar="N", help="Go on from this checkpoint, not the newest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was stopped, or extend one that ended.

    \b
    regard resume runs/my
    regard resume runs/my train.steps=5000
    """
    if rank():
        run_worker()
        return
    over = parse_overrides(words)
    check_overrides(over)
    with working("getting ready"):
        from regard.cli.report import follow, report
        from regard.training.run import resume as go_on

    report(follow(lambda progress: go_on(run, over, step=step, progress=progress)), as_json=as_json)
