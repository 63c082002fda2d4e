"""`regard explain`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from regard import api
from regard.cli.arguments import Json
from regard.cli.output import (
    bold,
    check_output_file,
    is_interactive,
    print_json,
    print_status,
    replace_unencodable,
    spinner,
    terminal_width,
    warn_unknown,
)
from regard.errors import ConfigError, reject_options

if TYPE_CHECKING:
    from regard.api import AttentionMap


def explain(
    runs: Annotated[
        list[str],
        Argument(
            metavar="RUN",
            help="A run folder; with --gradients, one or more. For a run that reads two "
            "texts: RUN, then the first text.",
            default_factory=list,  # a single word is parsed as the text; an error below says so
            show_default=False,
        ),
    ],
    text: Annotated[
        str,
        Argument(
            metavar="TEXT",
            help="The input of the model: a text or an image file.",
            show_default=False,
        ),
    ],
    layer: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Which layer, from 0; by default the last, with --gradients the first.",
        ),
    ] = None,
    head: Annotated[int | None, Option(metavar="N", help="One head only, from 0.")] = None,
    gradients: Annotated[
        bool,
        Option(
            "--gradients",
            help="Show the gradient norm of the last token's loss at every earlier position.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write a figure: .svg, .png, .pdf, or .html, which has all layers unless --layer "
            "or --head is given.",
        ),
    ] = None,
    words: Annotated[
        bool, Option("--words", help="Merge the tokens of a word into one row and column.")
    ] = False,
    force: Annotated[bool, Option("--force", help="Overwrite an existing FILE.")] = False,
    as_json: Json = False,
) -> None:
    """Show attention maps or gradient norms.

    \b
    regard explain runs/my 'To be, or not to be'
    regard explain runs/my 'To be, or not to be' --layer 0 --head 2
    regard explain runs/pairs 'a dog runs' --out alignment.svg
    regard explain runs/squad 'Who wrote it?' 'Ada wrote the notes in 1843.'
    regard explain runs/my 'To be, or not to be' --words --out attention.html
    regard explain runs/elman runs/lstm 'To be, or not to be' --gradients --out gradients.svg
    """
    if not runs:
        raise ConfigError(
            f"give a run and a text; the text after {text!r} is missing\n"
            "as in: regard explain runs/my 'To be, or not to be'"
        )
    check_output_file(out, force)
    if gradients:
        from regard.cli.gradients import show_gradients

        reject_options(
            "--head and --words are for attention maps, not for --gradients",
            {"--head": head, "--words": words},
        )
        show_gradients(list(map(Path, runs)), text, layer or 0, out, as_json)
        return
    run, *texts = runs
    one_layer = layer is not None or head is not None
    page = maps = None  # all layers for an .html page, otherwise one layer
    with spinner(f"opening {run}"):
        loaded_run = api.load(run)
        if texts and len(loaded_run.inputs) == 1:
            raise ConfigError(
                f"{len(runs)} runs: attention maps are for one run, --gradients for several;\n"
                "quote a text of several words: 'To be, or not to be'"
            )
        model_input = (*texts, text) if texts else text
        if out is not None and out.suffix == ".html" and not one_layer:
            page = loaded_run.attention(model_input, words=words)
        if page is None or as_json:
            maps = loaded_run.explain(model_input, layer=layer, words=words)
    warn_unknown(loaded_run.unknown_parts(model_input))
    if out is not None and page is not None:
        page.save(out)
        modules = "1 module" if len(page) == 1 else f"{len(page)} modules"
        print_status(f"{modules} with attention: {', '.join(page)}")
    if maps is not None:
        ((name, attention),) = maps.items()
        heads = len(attention.weights)
        if head is not None and not 0 <= head < heads:
            raise ConfigError(f"--head {head}: there are {heads} heads, 0 to {heads - 1}")
        if out is not None and page is None:
            attention.save(out, head, title=name)
            print_status(f"{name}, {_count_heads(heads) if head is None else f'head {head}'}")
        if as_json:
            print_json({"layer": name, **_table(attention, head)})
        elif out is None:
            _print_map(name, attention, head)
    if out is not None and as_json:
        print_status(f"figure: {out}")
    elif out is not None:
        print(out)


def _table(attention: "AttentionMap", head: int | None) -> dict[str, Any]:
    weights = attention.weights if head is None else attention.weights[head : head + 1]
    return {"rows": attention.rows, "columns": attention.columns, "weights": weights.tolist()}


def _count_heads(heads: int) -> str:
    return "1 head" if heads == 1 else f"{heads} heads"


def _print_map(name: str, attention: "AttentionMap", head: int | None) -> None:
    """Print a map as text, and the options that show more."""
    heads = len(attention.weights)
    is_mean = head is None and heads > 1 and attention.kind == "cross"
    shown_heads = f"mean of {_count_heads(heads)}" if is_mean else _count_heads(heads)
    if head is not None:
        shown_heads = f"head {head} of {heads}"
    print(f"{bold(name, sys.stdout)}, {shown_heads}")
    colour = is_interactive(sys.stdout)
    text_map = attention.text(head, width=terminal_width(), colour=colour)
    print(replace_unencodable(text_map, sys.stdout))
    if head is None:
        hints = ["as a figure: --out heads.svg"]
        if attention.kind == "self":
            hints.insert(0, "one head with its tokens: --head N")
        elif is_mean:
            hints.insert(0, "one head: --head N")
        print_status("; ".join(hints))
