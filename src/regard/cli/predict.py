"""`regard predict`."""

import sys
from collections.abc import Iterable
from itertools import chain, repeat
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from regard import api
from regard.cli.options import Folder, Json
from regard.cli.output import align_columns, print_json, spinner, text_for
from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.api import Run


def predict(
    run: Folder,
    what: Annotated[
        list[str],
        Argument(
            metavar="[TEXT|IMAGE|CSV]",
            help="Texts, with <mask> for masked tokens, PNG or JPEG files, or time series; "
            "without one, a forecasting run continues its training series.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    top: Annotated[int, Option("-n", "--top", metavar="N", min=1, help="How many to show.")] = 3,
    steps: Annotated[
        int, Option(metavar="N", min=1, help="How many values of a series to forecast.")
    ] = 24,
    as_json: Json = False,
) -> None:
    """Predict classes, tags, masked tokens or the next values of a series, best first.

    \b
    regard predict runs/docs 'The <mask> statement raises an exception.'
    regard predict runs/reviews 'one long string of cliches'
    regard predict runs/fashion shoe.png
    regard predict runs/fashion photos/*.jpg -n 1 --json
    regard predict runs/sines --steps 96

    One line per text or image, per word or mask of a text, or per value of a forecast.
    """
    with spinner(f"opening {run}"):
        opened = api.load(run)
    if "forecast" in opened.verbs:
        _print_forecast(opened, what, steps, as_json)
        return
    if not what:
        raise ConfigError("no input to predict from; give a text or an image")
    with spinner("predicting"):
        predictions = {item: opened.predict(item, top=top) for item in what}
    if as_json:
        print_json(predictions)
        return
    rows = [
        (label, *(f"{_printable(name)} {probability:.1%}" for name, probability in classes))
        for item, positions in predictions.items()
        for label, classes in zip(_labels(item, opened.predicts_words), positions, strict=False)
    ]
    for line in align_columns(rows):
        print(line)


def _print_forecast(run: "Run", paths: list[str], steps: int, as_json: bool) -> None:
    """Print the next values of each series, a line per step."""
    series: list[str | None] = [*paths] or [None]
    forecasts = {path or "its own": run.forecast(path, steps=steps) for path in series}
    if as_json:
        print_json(forecasts)
        return
    columns = [[f"{value:.6g}" for value in values] for values in forecasts.values()]
    heads = [] if len(forecasts) == 1 else [("", *forecasts)]
    rows = [(str(step), *row) for step, row in enumerate(zip(*columns, strict=True), 1)]
    for line in align_columns([*heads, *rows], range(1 + len(forecasts))):
        print(line)


def _labels(text: str, by_word: bool) -> Iterable[str]:
    """The label of each line: a word of the text, or the text and blanks for further masks."""
    return text.split() if by_word else chain([text], repeat(""))


def _printable(name: str) -> str:
    """A piece without spaces around it; a line break or a single space as its repr."""
    name = name.strip(" ")
    return text_for(sys.stdout, name if name and name.isprintable() else repr(name))
