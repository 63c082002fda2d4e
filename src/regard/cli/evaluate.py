"""`regard evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from regard.cli.explain import must_be_writable, write
from regard.cli.options import Beam, Folder, Json, Penalty, named_data
from regard.cli.output import aligned, number, print_json, say, working
from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.pipelines.by_length import ByLength


def evaluate(
    run: Folder,
    data: Annotated[
        list[str],
        Argument(
            metavar="DATA",
            help="Other data: one path, a source and a target file, or a built-in set as a table. "
            "By default what the run held out.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    beam: Beam = 5,
    length_penalty: Penalty = 1.0,
    by_length: Annotated[
        bool, Option("--by-length", help="What it writes, apart for short and long sources.")
    ] = False,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="With --by-length, draw it: .svg or .png.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Write over an existing FILE.")] = False,
    as_json: Json = False,
) -> None:
    """Judge a run by all metrics of its task.

    \b
    regard evaluate runs/my
    regard evaluate runs/my other.txt --json
    regard evaluate runs/pairs test.en test.de --beam 5
    regard evaluate runs/pairs --by-length --out lengths.svg
    """
    if out is not None and not by_length:
        raise ConfigError("--out draws what --by-length finds; give both")
    if out is not None:
        must_be_writable(out, force, (".svg", ".png"))
    with working(f"evaluating {run}"):
        from regard.api import load

        opened, named = load(run), named_data(data)
        if not by_length:
            metrics = opened.evaluate(*named, beam=beam, length_penalty=length_penalty)
        else:
            found = opened.evaluate_by_length(*named, beam=beam, length_penalty=length_penalty)
    if by_length:
        _report(run.resolve().name, found, out, as_json)
        return
    if as_json:
        print_json(metrics)
        return
    signatures = metrics.pop("signatures", {})
    for line in aligned([(name, number(value)) for name, value in metrics.items()], [1]):
        print(line)
    for name, signature in signatures.items():
        say(f"{name}: {signature}")


def _report(name: str, found: "ByLength", out: Path | None, as_json: bool) -> None:
    from regard.cli.by_length import as_curves, as_lines, as_table

    if as_json:
        print_json(as_table(found))
    else:
        print(*as_lines(found), sep="\n")
    if out is not None:
        from regard.explain.render.picture import to_png, to_svg

        picture = as_curves([name], [found])
        write(out, to_png(picture) if out.suffix == ".png" else to_svg(picture).encode())
        say(f"curves: {out}")
