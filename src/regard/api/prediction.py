"""Predictions for the rows of a file, with the columns of the file."""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.api.formatting import to_json
from regard.data.columns import find_input, text_pair
from regard.data.table_files import is_table, read_table
from regard.data.tables import Table, text_cell
from regard.data.text_files import looks_like_path, preview, read_lines, scan
from regard.errors import ConfigError, DataError
from regard.files.atomic import atomic_file
from regard.pipelines.base import Inputs
from regard.tasks.vocab_info import MASK
from regard.text import PairTokenizers
from regard.text.tokenizer import check_text

if TYPE_CHECKING:
    from regard.api.run import Run

BATCH_SIZE = 64  # rows, prompts or sentences that are processed together
DELIMITERS = {".csv": ",", ".tsv": "\t"}
OUT_SUFFIXES = (*DELIMITERS, ".jsonl")
ADDED_COLUMNS = ("prediction", "probability")

Row = dict[str, Any]


def read_inputs(run: "Run", path: Path | str, column: str | None = None) -> Inputs:
    """The inputs in a file, for the task of a run.

    Texts are in a column of a table, or on the lines of any other file; words in a table or in a
    CoNLL file. Images are the files of a folder.
    """
    path = Path(path)
    inputs = run.pipeline.read_inputs(run.config, path)
    if column is not None and (inputs is not None or not is_table(path)):
        raise ConfigError(f"column={column!r}: {path} is not a table, so it has no columns")
    if inputs is not None:
        return inputs
    if is_table(path):
        return _table_rows(run, path, column)
    if len(run.inputs) > 1:
        raise ConfigError(
            f"{path} is not a table; an input of the run has {len(run.inputs)} texts: "
            f"give a table with the columns {' and '.join(map(str, run.inputs))}"
        )
    lines = read_lines(path, scan(path))
    return Inputs("one text per line", input_lines(run, lines, str(path)))


def _table_rows(run: "Run", path: Path, column: str | None) -> Inputs:
    default = run.pipeline.input_column(run.config)
    names = [str(name) for name in (column, default, *run.inputs) if name is not None]
    table = read_table(path, names=names)
    for name in ADDED_COLUMNS:
        if name in table.columns:
            raise DataError(f"{path} has a column {name!r} already; rename it or leave it out")
    if len(run.inputs) > 1:
        return _two_texts(run, table, column)
    name, note = find_input(table, run.pipeline.name, column, default)
    index = table.column(name)

    def rows() -> Iterator[tuple[Row, Any]]:
        for number, cells in table.rows():
            row = dict(zip(table.columns, cells, strict=True))
            yield row, _require_text(table.location(number), run.pipeline.cell_text(cells[index]))

    if not table.header:
        note += "; it has no header, so line 1 is a text (a header `text` is recognized)"
    return Inputs(f"{table.format}; texts in column {name!r}{note}", rows())


def _two_texts(run: "Run", table: Table, column: str | None) -> Inputs:
    """The rows of a table with two texts each, in the columns that the run was trained on."""
    if column is not None:
        names = " and ".join(map(repr, run.inputs))
        raise ConfigError(
            f"column={column!r}: the run reads two columns; in the table, name them {names}"
        )
    known = all(table.find(name) is not None for name in run.inputs)
    pair = run.inputs if known else text_pair(table.columns) or run.inputs
    indices = [table.column(name) for name in pair]

    def rows() -> Iterator[tuple[Row, Any]]:
        for number, cells in table.rows():
            row = dict(zip(table.columns, cells, strict=True))
            location = table.location(number)
            yield row, tuple(_require_text(location, cells[index]) for index in indices)

    names = " and ".join(repr(table.columns[index]) for index in indices)
    return Inputs(f"{table.format}; texts in columns {names}", rows())


def _require_text(location: str, cell: Any) -> str:
    text = text_cell(location, cell)
    if not text.strip():
        raise DataError(f"{location}: nothing to predict: the text is empty")
    return text


def input_lines(run: "Run", lines: Iterable[str], location: str) -> Iterator[tuple[Row, Any]]:
    """The inputs on the lines of a file: a text, or the path of an image, on each."""
    if len(run.inputs) > 1:
        return _tabbed_lines(run.inputs, lines, location)
    name = "file" if run.pipeline.predicts_from_files else "text"
    return (
        ({name: line}, _require_text(f"{location}, line {number}", line))
        for number, line in enumerate(lines, 1)
    )


def _tabbed_lines(
    names: Sequence[str], lines: Iterable[str], location: str
) -> Iterator[tuple[Row, Any]]:
    for number, line in enumerate(lines, 1):
        parts = tuple(line.split("\t"))
        if len(parts) != len(names) or not all(part.strip() for part in parts):
            raise DataError(
                f"{location}, line {number}: a line has {' and '.join(names)} with a tab between "
                f"them, not {preview(line)}"
            )
        yield dict(zip(names, parts, strict=True)), parts


def input_texts(run: "Run", texts: Sequence[str]) -> Iterator[tuple[Row, Any]]:
    """Inputs from a list of texts; if an input has two texts, they follow each other in the list.

    Raises if a text looks like the path of a file.
    """
    names = run.inputs
    for text in () if run.pipeline.predicts_from_files else texts:
        if looks_like_path(text):
            advice = f"to predict its rows: --data {text}"
            problem = f"{text} is a file; {advice}" if os.path.exists(text) else f"no file {text}"
            raise ConfigError(
                f"{problem}\nto predict from {text!r} as a text, add a space at its end"
            )
    if len(names) == 1:
        return (({names[0]: text}, text) for text in texts)
    if len(texts) % len(names):
        raise ConfigError(
            f"an input of this run is {' and '.join(names)}: give {len(names)} texts per input "
            f"(given: {len(texts)})"
        )
    groups = [tuple(texts[i : i + len(names)]) for i in range(0, len(texts), len(names))]
    return ((dict(zip(names, group, strict=True)), group) for group in groups)


def check_top(top: int) -> None:
    """Raise `ConfigError` unless `top`, a number of classes or texts, is at least 1."""
    if not isinstance(top, int) or isinstance(top, bool) or top < 1:
        raise ConfigError(f"top={top!r} must be an integer of at least 1")


def predict_values(run: "Run", inputs: Any, top: int) -> Any:
    """The prediction for one input, or for each of a list; a tuple of texts may be one input."""
    check_top(top)
    if inputs is None:
        if "forecast" in run.methods:
            return run.forecast(steps=None)
        raise ConfigError(f"give an input to predict from: {' and '.join(run.inputs)}")
    texts = isinstance(inputs, tuple) and all(isinstance(part, str) for part in inputs)
    is_one_input = texts and len(run.inputs) == len(inputs) > 1
    if isinstance(inputs, list | tuple) and not is_one_input:
        batch = [_normalize(run, item) for item in inputs]
        return run.pipeline.predict_batch(run, batch, top=top) if batch else []
    return run.pipeline.predict(run, _normalize(run, inputs), top=top)


def _normalize(run: "Run", input: Any) -> Any:
    """An input with its texts normalized; raises `DataError` for a text that is not a string."""
    if isinstance(input, tuple):
        return tuple(_normalize(run, part) for part in input)
    if isinstance(input, str):
        return run._normalize(input)
    reads_texts = run.pipeline.tokenizer_type is not None and not run.pipeline.predicts_from_files
    return check_text(input) if reads_texts and not isinstance(input, list) else input


def predict_inputs(
    run: "Run", inputs: Iterable[tuple[Row, Any]], *, top: int, batch: int = BATCH_SIZE
) -> Iterator[tuple[Row, Any, Any]]:
    """The rows, their inputs and their predictions; `batch` rows are predicted at a time."""
    rows = iter(inputs)
    while batch_rows := list(islice(rows, batch)):
        predictions = run.predict([input for _, input in batch_rows], top=top)
        pairs = zip(batch_rows, predictions, strict=True)
        yield from ((*row, prediction) for row, prediction in pairs)


def predict_rows(run: "Run", inputs: Iterable[tuple[Row, Any]], *, top: int = 1) -> Iterator[Row]:
    """The rows with the added columns `prediction` and, for classes, `probability`.

    With `top` above 1, the prediction of a class is a list of pairs of class and probability.
    """
    for row, _, prediction in predict_inputs(run, inputs, top=top):
        yield row | _prediction_columns(run, prediction, top)


def _prediction_columns(run: "Run", prediction: Any, top: int) -> Row:
    """The columns that a prediction adds to its row."""
    if isinstance(prediction, str | float):  # a translation, or a number
        return {"prediction": prediction}
    is_one = not run.predicts_words and len(prediction) == 1
    if top > 1:
        return {"prediction": prediction[0] if is_one else prediction}
    best = [classes[0][0] for classes in prediction]
    if run.predicts_words:
        return {"prediction": best}
    probabilities = [round(classes[0][1], 6) for classes in prediction]  # one for each <mask>
    if is_one:
        return {"prediction": best[0], "probability": probabilities[0]}
    return {"prediction": best, "probability": probabilities}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows atomically as .csv, .tsv or .jsonl, by the suffix; return their number.

    In .csv and .tsv files, words of a list are separated by spaces, and other lists are JSON.
    """
    count = 0
    with (
        atomic_file(path, sync=False) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = None
        for row in rows:
            count += 1
            if path.suffix not in DELIMITERS:
                file.write(to_json(row) + "\n")
                continue
            if writer is None:
                delimiter = DELIMITERS[path.suffix]
                writer = csv.DictWriter(file, [*row], delimiter=delimiter, lineterminator="\n")
                writer.writeheader()
            writer.writerow({name: _cell(value) for name, value in row.items()})
    return count


def _cell(value: Any) -> Any:
    if not isinstance(value, list | tuple | dict):
        return value
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return to_json(value)


def unknown_parts(run: "Run", text: str | tuple[str, ...]) -> list[str]:
    """The parts of a text, or of several, that are not in the run's vocabulary."""
    tokenizer = run.tokenizers
    if isinstance(tokenizer, PairTokenizers):
        tokenizer = tokenizer.source
    if tokenizer is None or "file" in run.inputs:
        return []
    texts = [text] if isinstance(text, str) else text
    mask = MASK if "fill" in run.methods else ""
    texts = [run._normalize(text.replace(mask, " ") if mask else text) for text in texts]
    return list(dict.fromkeys(part for text in texts for part in tokenizer.unknown_parts(text)))
