"""`regard predict`."""

import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from regard import api
from regard.cli.arguments import AdapterOption, Folder, Json
from regard.cli.output import (
    FIGURE_SUFFIXES,
    align_columns,
    check_output_file,
    print_json,
    print_status,
    spinner,
    stdin_lines,
    text_for,
    warn_unknown,
    write_file,
)
from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.api import Run

BATCH = 64  # inputs predicted at once
SHOWN = 3  # classes or tokens of a prediction
LABEL_LENGTH = 80  # characters of a text of two that are both shown
Inputs = Iterator[tuple[dict[str, Any], Any]]  # the columns of a row, and its input


def predict(
    run: Folder,
    what: Annotated[
        list[str],
        Argument(
            metavar="[TEXT|IMAGE|CSV]",
            help="Texts, with <mask> for masked tokens, a question and a text, PNG or JPEG files, "
            "or time series; '-' reads lines from stdin (two texts of an input with a tab between "
            "them). Without one, a forecasting run continues its training series.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    data: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Predict each row of a table, each line of a text file, each text of a CoNLL "
            "file, or each image of a folder.",
        ),
    ] = None,
    column: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="The column of --data to predict from, its name or number; of a series, the "
            "column that a figure shows.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the predictions as .csv, .tsv or .jsonl, with the columns of --data; the "
            "forecast of a series also as a figure, .svg or .png.",
        ),
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing FILE.")] = False,
    top: Annotated[
        int | None,
        Option(
            "-n",
            "--top",
            metavar="N",
            min=1,
            help="How many classes or tokens to show; by default 3, and 1 with --out.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            help="How many values of a series to forecast; by default task.horizon of the run.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    adapter: AdapterOption = None,
) -> None:
    """Predict classes, numbers, tags, answers, masked tokens, translations, or a series.

    \b
    regard predict runs/docs 'The <mask> statement raises an exception.'
    regard predict runs/reviews 'one long string of cliches'
    regard predict runs/reviews - < reviews.txt
    regard predict runs/reviews --data new.csv --out predicted.csv
    regard predict runs/squad 'Who wrote it?' 'Ada wrote the notes in 1843.'
    regard predict runs/fashion shoe.png
    regard predict runs/fashion photos/*.jpg -n 1 --json
    regard predict runs/sines --steps 96
    regard predict runs/ett new.csv --steps 96 --out forecast.svg --column OT

    One line per text or image, per word or mask of a text, or per value of a forecast. With --data
    and '-', --json prints an object per row; of two texts for each input, a list of objects.
    """
    if out is not None:
        check_output_file(out, force, (*api.OUT_SUFFIXES, *FIGURE_SUFFIXES))
    if data is not None and what:
        raise ConfigError("give texts or images, or --data, not both")
    with spinner(f"opening {run}"):
        opened = api.load(run, adapter=adapter)
    if "forecast" in opened.methods:
        _forecast(opened, what if data is None else [str(data)], steps, out, column, as_json)
        return
    if column is not None and data is None:
        raise ConfigError("--column names a column of --data; give --data FILE too")
    if out is not None and out.suffix in FIGURE_SUFFIXES:
        raise ConfigError(f"--out {out}: only forecasts of a series are drawn")
    interactive = what == ["-"] and sys.stdin.isatty()
    if data is not None:
        inputs = api.read_inputs(opened, data, column)
        print_status(f"{data}: {inputs.description}")
        rows = inputs.rows
    elif what == ["-"]:
        if interactive:
            print_status("one text per line; Ctrl-D ends")
        rows = api.input_lines(opened, stdin_lines(), "stdin")
    elif what:
        rows = api.input_texts(opened, what)
    else:
        raise ConfigError("no input to predict from; give a text, an image, '-' or --data")
    unknown: dict[str, None] = {}
    rows = _note_unknown(opened, rows, unknown)
    if out is not None:
        count = api.write_rows(out, api.predict_rows(opened, rows, top=top or 1))
        print_status(f"{count:,} predictions")
        print(out)
    elif as_json and (data is not None or what == ["-"]):
        for row in api.predict_rows(opened, rows, top=top or SHOWN):
            print_json(row)
    elif as_json and len(opened.inputs) > 1:
        print_json(list(api.predict_rows(opened, rows, top=top or SHOWN)))
    elif as_json:
        predicted = _predict(opened, rows, top or SHOWN)
        print_json({_label(item): prediction for _, item, prediction in predicted})
    else:
        batch = 1 if interactive else BATCH
        predicted = _predict(opened, rows, top or SHOWN, batch)
        while part := list(islice(predicted, batch)):
            _print_predictions(opened, part)
    warn_unknown(list(unknown))


def _predict(
    run: "Run", rows: Inputs, top: int, batch: int = BATCH
) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    return api.predict_inputs(run, rows, top=top, batch=batch)


def _note_unknown(run: "Run", rows: Inputs, unknown: dict[str, None]) -> Inputs:
    """The same rows; the parts of their texts that are not in the vocabulary are collected."""
    for row, what in rows:
        for text in what if isinstance(what, tuple) else (what,):
            if isinstance(text, str):
                unknown |= dict.fromkeys(run.unknown_parts(text))
        yield row, what


def _print_predictions(run: "Run", predicted: Iterable[tuple[dict[str, Any], Any, Any]]) -> None:
    """Print a line per text or image, or per word or mask of a text."""
    rows: list[tuple[str, ...]] = []
    for _, what, prediction in predicted:
        if isinstance(prediction, str):  # a translation
            print(text_for(sys.stdout, " ".join(prediction.splitlines())), flush=True)
            continue
        if isinstance(prediction, float):
            rows.append((_label(what), f"{prediction:.4g}"))
            continue
        for label, classes in zip(
            _labels(_label(what), run.predicts_words), prediction, strict=False
        ):
            shown = (f"{_printable(name)} {probability:.1%}" for name, probability in classes)
            rows.append((label, *shown))
    for line in align_columns(rows) if rows else []:
        print(line, flush=True)


def _forecast(
    run: "Run",
    paths: list[str],
    steps: int | None,
    out: Path | None,
    column: str | None,
    as_json: bool,
) -> None:
    """Print, write or draw the next values of each series, a line per step."""
    if out is not None and out.suffix in FIGURE_SUFFIXES:
        if len(paths) > 1:
            raise ConfigError(f"--out {out}: a figure shows one series; give one file")
        figure = run.draw_forecast(*paths, steps=steps, column=column)
        write_file(out, api.encode_figure(figure, out.suffix))
        print(out)
        return
    if column is not None:
        raise ConfigError("--column is the column of a series that a figure shows; give --out too")
    series: list[str | None] = [*paths] or [None]
    forecasts = {path or "its own": run.forecast(path, steps=steps) for path in series}
    if as_json and out is None:
        print_json(forecasts)
        return
    named = {  # a list of values for each series and column
        ("" if key is None else key) if len(forecasts) == 1 else f"{path} {key or ''}".strip(): row
        for path, prediction in forecasts.items()
        for key, row in (
            prediction.items() if isinstance(prediction, dict) else [(None, prediction)]
        )
    }
    dates = run.forecast_dates(series[0], steps=steps) if len(series) == 1 else []
    if out is not None:
        columns = {name or "prediction": values for name, values in named.items()}
        rows = enumerate(zip(*columns.values(), strict=True), 1)
        api.write_rows(
            out,
            (
                {
                    "step": n,
                    **({"date": dates[n - 1]} if dates else {}),
                    **dict(zip(columns, row, strict=True)),
                }
                for n, row in rows
            ),
        )
        print(out)
        return
    cells = [[f"{value:.6g}" for value in values] for values in named.values()]
    heads = [] if len(named) == 1 else [("", *(["date"] if dates else []), *named)]
    lines = [
        (str(step), *(dates[step - 1 : step]), *row)
        for step, row in enumerate(zip(*cells, strict=True), 1)
    ]
    for line in align_columns([*heads, *lines], range(len(lines[0]))):
        print(line)


def _labels(text: str, by_word: bool) -> Iterable[str]:
    """The label of each line: a word of the text, or the text and blanks for further masks."""
    return text.split() if by_word else chain([text], repeat(""))


def _label(what: Any) -> str:
    """An input in one line; two texts with a bar between them, or the first if one is long."""
    if isinstance(what, tuple) and max(map(len, what)) > LABEL_LENGTH:
        return str(what[0])
    return " | ".join(what) if isinstance(what, tuple) else str(what)


def _printable(name: str) -> str:
    """A piece without spaces around it; a line break or a single space as its repr."""
    if not name:  # of a question without an answer
        return "no answer"
    name = name.strip(" ")
    return text_for(sys.stdout, name if name and name.isprintable() else repr(name))
