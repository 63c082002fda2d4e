"""`regard evaluate`."""

from typing import Annotated

from typer import Argument

from regard.cli.options import Beam, Folder, Json, Penalty
from regard.cli.talk import aligned, number, print_json, say, working


def evaluate(
    run: Folder,
    data: Annotated[
        list[str],
        Argument(
            metavar="DATA",
            help="Other data: one path, or a source and a target file. By default what the run "
            "held out.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    beam: Beam = 5,
    length_penalty: Penalty = 1.0,
    as_json: Json = False,
) -> None:
    """Judge a run by all metrics of its task.

    \b
    regard evaluate runs/my
    regard evaluate runs/my other.txt --json
    regard evaluate runs/pairs test.en test.de --beam 5
    """
    with working(f"evaluating {run}"):
        from regard.api import load

        metrics = load(run).evaluate(*data, beam=beam, length_penalty=length_penalty)
    if as_json:
        print_json(metrics)
        return
    signatures = metrics.pop("signatures", {})
    for line in aligned([(name, number(value)) for name, value in metrics.items()], [1]):
        print(line)
    for name, signature in signatures.items():
        say(f"{name}: {signature}")
