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
from regard.errors import ConfigError, reject_options

if TYPE_CHECKING:
    from regard.api import Run

DEFAULT_TOP = 3  # classes or tokens of a prediction
LABEL_LENGTH = 80  # characters; if a text is longer, only the first text of an input is shown
Inputs = Iterator[tuple[dict[str, Any], Any]]  # the columns of a row, and its input


def predict(
    run: Folder,
    inputs: Annotated[
        list[str],
        Argument(
            metavar="TEXT|IMAGE|CSV",
            help="Texts, with <mask> for masked tokens, a question and a text, image files, "
            "or time series; '-' reads lines from stdin (two texts of an input with a tab between "
            "them). Without an input, a forecasting run continues its training series.",
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
            help="The column of --data to predict from, its name or number; for a series, the "
            "column that a figure shows.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the predictions as .csv, .tsv or .jsonl, with the columns of --data; the "
            "forecast of a series also as a figure, .svg, .png, .pdf or .html.",
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
    """Make predictions for texts, images or a time series.

    Depending on the task: classes, numbers, tags, answers, masked tokens, translations or values.

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
    and '-', --json prints an object per row; for inputs of two texts, a list of objects.
    """
    check_output_file(out, force, (*api.OUT_SUFFIXES, *api.FIGURE_SUFFIXES))
    if out is not None and out.suffix in api.OUT_SUFFIXES:
        reject_options(
            "--out writes the predictions, to a .jsonl file as JSON", {"--json": as_json}
        )
    if data is not None and inputs:
        raise ConfigError("give texts or images, or --data, not both")
    with spinner(f"opening {run}"):
        loaded_run = api.load(run, adapter=adapter)
    if "predict" in loaded_run.methods and not loaded_run.supports_top:
        reject_options(
            f"--top is for classes, tokens and answers, and {run} predicts none", {"--top": top}
        )
    if "forecast" in loaded_run.methods:
        _forecast(loaded_run, inputs if data is None else [str(data)], steps, out, column, as_json)
        return
    reject_options("--steps is for runs that forecast a series", {"--steps": steps})
    if column is not None and data is None:
        raise ConfigError("--column names a column of --data; give --data FILE too")
    if out is not None and out.suffix in api.FIGURE_SUFFIXES:
        raise ConfigError(f"--out {out}: only forecasts of a series are drawn")
    from_stdin = inputs == ["-"]
    interactive = from_stdin and sys.stdin.isatty()
    if data is not None:
        file_inputs = api.read_inputs(loaded_run, data, column)
        print_status(f"{data}: {file_inputs.description}")
        rows = file_inputs.rows
    elif from_stdin:
        if interactive:
            print_status("one text per line; Ctrl-D ends")
        rows = api.input_lines(loaded_run, stdin_lines(), "stdin")
    elif inputs:
        rows = api.input_texts(loaded_run, inputs)
    else:
        raise ConfigError("no input to predict from; give a text, an image, '-' or --data")
    unknown: dict[str, None] = {}
    rows = _collect_unknown(loaded_run, rows, unknown)
    if out is not None:
        count = api.write_rows(out, api.predict_rows(loaded_run, rows, top=top or 1))
        print_status(f"{count:,} predictions")
        print(out)
    elif as_json and (data is not None or from_stdin):
        for row in api.predict_rows(loaded_run, rows, top=top or DEFAULT_TOP):
            print_json(row)
    elif as_json and len(loaded_run.inputs) > 1:
        print_json(list(api.predict_rows(loaded_run, rows, top=top or DEFAULT_TOP)))
    elif as_json:
        predicted = api.predict_inputs(loaded_run, rows, top=top or DEFAULT_TOP)
        print_json({_label(item): prediction for _, item, prediction in predicted})
    else:
        batch = 1 if interactive else api.BATCH_SIZE
        predicted = api.predict_inputs(loaded_run, rows, top=top or DEFAULT_TOP, batch=batch)
        while predictions := list(islice(predicted, batch)):
            _print_predictions(loaded_run, predictions)
    warn_unknown(list(unknown))


def _collect_unknown(run: "Run", rows: Inputs, unknown: dict[str, None]) -> Inputs:
    """Yield the rows, and collect the parts of their texts that are not in the vocabulary."""
    for row, model_input in rows:
        for text in model_input if isinstance(model_input, tuple) else (model_input,):
            if isinstance(text, str):
                unknown |= dict.fromkeys(run.unknown_parts(text))
        yield row, model_input


def _print_predictions(run: "Run", predicted: Iterable[tuple[dict[str, Any], Any, Any]]) -> None:
    """Print a line per text or image, or per word or mask of a text."""
    rows: list[tuple[str, ...]] = []
    for _, model_input, prediction in predicted:
        if isinstance(prediction, str):  # a translation
            print(text_for(sys.stdout, " ".join(prediction.splitlines())), flush=True)
            continue
        if isinstance(prediction, float):
            rows.append((_label(model_input), f"{prediction:.4g}"))
            continue
        for label, classes in zip(
            _labels(_label(model_input), run.predicts_words), prediction, strict=False
        ):
            cells = (f"{_printable(name)} {probability:.1%}" for name, probability in classes)
            rows.append((label, *cells))
    width = max(map(len, rows), default=0)  # a short context has fewer answers than --top
    for line in align_columns([row + ("",) * (width - len(row)) for row in rows]):
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
    series: list[str | None] = [*paths] or [None]
    if out is not None and out.suffix in api.FIGURE_SUFFIXES:
        if len(paths) > 1:
            raise ConfigError(f"--out {out}: a figure shows one series; give one file")
        figure = run.draw_forecast(*paths, steps=steps, column=column)
        write_file(out, api.encode_figure(figure, out.suffix))
        if as_json:
            print_status(f"figure: {out}")
        else:
            print(out)
            return
    elif column is not None:
        raise ConfigError("--column is the column of a series that a figure shows; give --out too")
    forecasts = {path or "data of the run": run.forecast(path, steps=steps) for path in series}
    if as_json:
        print_json(forecasts)
        return
    columns = _forecast_columns(forecasts)
    dates = run.forecast_dates(series[0], steps=steps) if len(series) == 1 else []
    if out is not None:
        steps_ahead = range(1, len(next(iter(columns.values()))) + 1)
        table: dict[str, Iterable[Any]] = {"step": steps_ahead}
        table |= {"date": dates} if dates else {}
        table |= columns
        rows = zip(*table.values(), strict=True)
        api.write_rows(out, (dict(zip(table, row, strict=True)) for row in rows))
        print(out)
        return
    cells = [[f"{value:.6g}" for value in values] for values in columns.values()]
    header = [] if len(columns) == 1 else [("", *(["date"] if dates else []), *columns)]
    lines = [
        (str(step), *(dates[step - 1 : step]), *row)
        for step, row in enumerate(zip(*cells, strict=True), 1)
    ]
    for line in align_columns([*header, *lines], range(len(lines[0]))):
        print(line)


def _forecast_columns(forecasts: dict[str, Any]) -> dict[str, list[float]]:
    """The values of each series and column; the names of several series begin with their path."""
    columns: dict[str, list[float]] = {}
    for path, forecast in forecasts.items():
        for name, values in forecast.items() if isinstance(forecast, dict) else [("", forecast)]:
            full_name = name if len(forecasts) == 1 else f"{path} {name}".strip()
            columns[full_name or "prediction"] = values
    return columns


def _labels(text: str, by_word: bool) -> Iterable[str]:
    """The label of each line: a word of the text, or the text and blanks for further masks."""
    return text.split() if by_word else chain([text], repeat(""))


def _label(model_input: Any) -> str:
    """An input in one line; two texts with a bar between them, or the first if one is long."""
    if not isinstance(model_input, tuple):
        return str(model_input)
    if max(map(len, model_input)) > LABEL_LENGTH:
        return str(model_input[0])
    return " | ".join(model_input)


def _printable(name: str) -> str:
    """A piece without spaces around it; a line break or a single space as its repr."""
    if not name:  # a question without an answer
        return "no answer"
    name = name.strip(" ")
    return text_for(sys.stdout, name if name and name.isprintable() else repr(name))
