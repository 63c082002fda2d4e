"""`regard explain`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from regard.cli.options import Json
from regard.cli.output import bold, lively, print_json, say, width, working
from regard.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from regard.explain import AttentionMap


def explain(
    runs: Annotated[
        list[Path],
        Argument(
            metavar="RUN…",
            help="A run folder; with --gradients, one or more.",
            default_factory=list,  # one word alone is taken for the text, and told of below
            show_default=False,
        ),
    ],
    text: Annotated[
        str, Argument(metavar="TEXT", help="What the model reads.", show_default=False)
    ],
    layer: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Which layer, from 0; by default the last, of gradients the first.",
        ),
    ] = None,
    head: Annotated[int | None, Option(metavar="N", help="One head only, from 0.")] = None,
    gradients: Annotated[
        bool,
        Option(
            "--gradients",
            help="Show how strongly the loss of the last token pulls at each one before it.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Draw it: all heads as .svg, gradients as .svg or .png.",
        ),
    ] = None,
    force: Annotated[bool, Option("--force", help="Write over an existing FILE.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a model looks at: its heads, its alignment, or how far back it learns.

    \b
    regard explain runs/my 'To be, or not to be'
    regard explain runs/my 'To be, or not to be' --layer 0 --head 2
    regard explain runs/pairs 'a dog runs' --out alignment.svg
    regard explain runs/elman runs/lstm 'To be, or not to be' --gradients --out reach.svg
    """
    if not runs:
        raise ConfigError(
            f"a run and a text are needed; after {text!r} the text is missing\n"
            "as in: regard explain runs/my 'To be, or not to be'"
        )
    if out is not None:
        must_be_writable(out, force, (".svg", ".png") if gradients else (".svg",))
    if gradients:
        from regard.cli.gradients import show_gradients

        if head is not None:
            raise ConfigError("--head is of attention; --gradients are of a whole --layer")
        show_gradients(runs, text, layer or 0, out, as_json)
        return
    if len(runs) > 1:
        raise ConfigError(
            f"{len(runs)} runs: attention is shown of one, and --gradients of several;\n"
            "a text of several words stands in quotes: 'To be, or not to be'"
        )
    (run,) = runs
    with working(f"opening {run}"):
        from regard.api import load

        opened = load(run)
        ((name, seen),) = opened.explain(text, layer=layer).items()
    heads = len(seen.weights)
    if head is not None and not 0 <= head < heads:
        raise ConfigError(f"--head {head}: there are {heads} heads, 0 to {heads - 1}")
    if as_json:
        weights = seen.weights if head is None else seen.weights[head : head + 1]
        table = {"rows": seen.rows, "columns": seen.columns, "weights": weights.tolist()}
        print_json({"layer": name, **table})
    elif out is not None:
        write(out, _svg(seen, head).encode())
        print(out)
    else:
        print(f"{bold(name, sys.stdout)}, {heads} heads")
        print(picture(seen, head, alignment=seen.rows != seen.columns))
        if head is None:
            say("one head with its words: --head N; all of them as a picture: --out heads.svg")


def picture(seen: "AttentionMap", head: int | None, *, alignment: bool) -> str:
    """The map for the terminal: of one head, or of all as small maps, or their mean if aligned."""
    from regard.explain import heads_overview, heatmap

    colour = lively(sys.stdout)
    if head is None and not alignment:
        return heads_overview(seen.weights, width=width(), colour=colour)
    weights = seen.mean() if head is None else seen.weights[head]
    return heatmap(weights, seen.rows, seen.columns, width=width(), colour=colour)


def must_be_writable(path: Path, force: bool, endings: Sequence[str]) -> None:
    """Refuse a file of another kind, and one that exists."""
    if path.suffix not in endings:
        raise ConfigError(f"--out {path}: only {', '.join(endings)} is known")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; --force writes over it")


def _svg(seen: "AttentionMap", head: int | None) -> str:
    from regard.explain import heatmap_svg

    weights = seen.weights if head is None else seen.weights[head : head + 1]
    headings = None if head is None else [f"head {head}"]
    return heatmap_svg(weights, seen.rows, seen.columns, headings=headings)


def write(path: Path, content: bytes) -> None:
    """Write a picture."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from None
