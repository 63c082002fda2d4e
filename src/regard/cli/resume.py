"""`regard resume`."""

from typing import Annotated

from typer import Option

from regard import api
from regard.cli.arguments import Folder, Json, Overrides
from regard.cli.output import spinner
from regard.config import check_overrides, parse_overrides


@api.stoppable()
def resume(
    run: Folder,
    overrides: Overrides = [],  # noqa: B006 -- typer copies it
    step: Annotated[
        int | None,
        Option(metavar="N", help="Continue from this checkpoint instead of the newest."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue a run that was stopped, or extend one that finished.

    \b
    regard resume runs/my
    regard resume runs/my train.steps=5000
    """
    if api.rank():
        api.run_worker()
        return
    check_overrides(parse_overrides(overrides))
    with spinner("loading"):
        from regard.cli.report import print_result, show_progress

        continue_run = api.resume_events  # imports torch
    finished = show_progress(
        lambda progress: continue_run(
            run, *overrides, step=step, progress=progress, started=api.process_start_time()
        )
    )
    print_result(finished, as_json=as_json)
