"""Tables of every shape: what is understood, what is inferred, and what is refused."""

import bz2
import gzip
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from regard.config import RunConfig, build
from regard.data.columns import find_input, find_roles
from regard.data.table_files import read_table
from regard.data.text import Text
from regard.errors import ConfigError, DataError
from regard.pipelines import open_data, open_split, prepare_training

TEXTS = [
    "a charming and often affecting journey",
    "one long string of cliches, and no end",
    'it said "no" and then it stopped',
    "what a day; what a lovely day",
    "not for the faint of heart",
    "every scene | is a delight to watch",
    "the plot makes no sense at all",
    "I would see it again tomorrow",
]
LABELS = ["good", "bad"] * 4
ROWS = list(zip(TEXTS, LABELS, strict=True))


def quoted(cell):
    return '"' + cell.replace('"', '""') + '"'


def delimited(delimiter, header=None, rows=ROWS, quote=quoted, end="\n"):
    lines = ([header] if header else []) + [list(row) for row in rows]
    return "".join(delimiter.join(map(quote, line)) + end for line in lines).encode()


def plain(cell):
    return cell


def objects(*names):
    return [dict(zip(names, row, strict=True)) for row in ROWS]


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def questions(*answers):
    rows = [(f"who {n}", f"Ada met Bob in {n}", answers[n % 2]) for n in range(8)]
    return delimited(",", ["question", "context", "answer"], rows)


HEAD = ["review", "sentiment"]
NUMBERED = [(str(n), label, text) for n, (text, label) in enumerate(ROWS)]
TOKENS = {"tokens": ["New", "York", "sleeps"], "ner_tags": ["B-place", "I-place", "O"]}
PAIRED = [{"translation": {"de": f"{t} auf Deutsch", "en": t}} for t in TEXTS]
SERIES = "date;load;heat\n" + "".join(f"2016-07-0{n};{n}.5;3{n}\n" for n in range(1, 9))
UNDERSTOOD = "text=review, label=sentiment"
LONG = [(f"{text} ({n})", label) for n in range(3) for text, label in ROWS]

VARIANTS = {  # file name, content, kind, part of the description
    "comma": ("a.csv", delimited(",", HEAD), "labels", UNDERSTOOD),
    "semicolon": ("a.csv", delimited(";", HEAD), "labels", "semicolon-separated"),
    "tab in a .csv": ("a.csv", delimited("\t", HEAD, quote=plain), "labels", "tab-separated"),
    "pipe": ("a.csv", delimited("|", HEAD), "labels", "pipe-separated"),
    "plain .tsv": ("a.tsv", delimited("\t", HEAD, quote=plain), "labels", UNDERSTOOD),
    "Excel's .tsv": ("a.tsv", delimited("\t", HEAD, end="\r\n"), "labels", UNDERSTOOD),
    "CRLF": ("a.csv", delimited(",", HEAD, end="\r\n"), "labels", "comma-separated"),
    "BOM": ("a.csv", b"\xef\xbb\xbf" + delimited(",", HEAD), "labels", UNDERSTOOD),
    "gzip": ("a.csv.gz", gzip.compress(delimited(",", HEAD)), "labels", UNDERSTOOD),
    "usual names": ("a.csv", delimited(",", ["Sentence", "Class"]), "labels", "label=Class"),
    "names of other columns": (
        "a.csv",
        delimited(",", ["id", "stars", "opinion"], NUMBERED),
        "labels",
        "text=opinion (inferred), label=stars; left out: id",
    ),
    "pandas' index": (
        "a.csv",
        delimited(",", ["", "y", "opinion"], NUMBERED),
        "labels",
        "text=opinion (inferred), label=y (inferred); left out: 1",
    ),
    "no header": ("a.csv", delimited(",", None, LONG), "labels", "label=2 (inferred)"),
    "pairs without header": ("a.tsv", b"one dog\tein Hund\ntwo\tzwei\n", "pairs", "2 rows"),
    "pairs with header": (
        "a.tsv",
        delimited("\t", ["en", "de"], [(t, t.upper()) for t in TEXTS], plain),
        "pairs",
        "source=en (inferred), target=de (inferred)",
    ),
    "pairs by name": (
        "a.csv",
        delimited(",", ["id", "target", "source"], [("1", "ja", "yes"), ("2", "nein", "no")]),
        "pairs",
        "source=source, target=target; left out: id",
    ),
    "JSONL": ("a.jsonl", json_lines(objects("text", "label")), "labels", "one object per line"),
    "JSONL, other keys": ("a.jsonl", json_lines(objects(*HEAD)), "labels", UNDERSTOOD),
    "JSONL called .json": ("a.json", json_lines(objects(*HEAD)), "labels", "one object per line"),
    "JSON array": ("a.json", json.dumps(objects(*HEAD)).encode(), "labels", "JSON objects"),
    "JSON under a key": (
        "a.json",
        json.dumps({"version": 1, "examples": objects(*HEAD)}, indent=1).encode(),
        "labels",
        "JSON objects under 'examples'",
    ),
    "JSON of columns": (
        "a.json",
        json.dumps({"review": TEXTS, "sentiment": LABELS}).encode(),
        "labels",
        "one list per column",
    ),
    "JSONL corpus": (
        "a.jsonl",
        json_lines([{"text": t} for t in TEXTS]),
        "text",
        "8 rows, 257 bytes, one obj",
    ),
    "JSONL corpus with metadata": (
        "a.jsonl",
        json_lines(
            [{"text": t, "meta": {"set": n % 2}, "url": f"x/{n}"} for n, t in enumerate(TEXTS)]
        ),
        "text",
        "text=text; left out: meta.set, url",
    ),
    "gzipped corpus": (
        "a.jsonl.gz",
        gzip.compress(json_lines([{"text": t} for t in TEXTS])),
        "text",
        "8 rows",
    ),
    "nested translations": (
        "a.jsonl",
        json_lines(PAIRED),
        "pairs",
        "source=translation.de, target=translation.en",
    ),
    "words and tags in lists": ("a.jsonl", json_lines([TOKENS] * 4), "tags", "tags=ner_tags"),
    "one column": ("a.csv", delimited(",", ["text"], [(t,) for t in TEXTS]), "text", "8 rows"),
    "series": (
        "a.csv",
        SERIES.encode(),
        "series",
        "2 columns; date: 2016-07-01 to 2016-07-08",
    ),
    "series without header": ("a.csv", b"1,2.5\n3,4.5\n2,5\n", "series", "3 rows, 2 columns"),
    "decimal commas": (
        "a.csv",
        SERIES.replace(".", ",").encode(),
        "series",
        "2 columns; decimal commas in load; date: 2016-07-01",
    ),
    "three decimals and semicolons": (
        "a.csv",
        b"day;load\n1;30,531\n2;5,827\n3;31\n",
        "series",
        "decimal commas in load",
    ),
    "decimal commas without header": ("a.csv", b"1,5;2\n3,5;4\n2,5;5\n", "series", "commas in 1"),
    "few answers": ("a.csv", questions("Ada", "Bob"), "spans", "answers=answer"),
    "answers in no context": (
        "a.csv",
        questions("yes", "no"),
        "labels",
        "label=answer (inferred)",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_thirty_variants_of_a_table_are_understood(tmp_path, variant):
    name, content, kind, description = VARIANTS[variant]
    (tmp_path / name).write_bytes(content)
    opened = open_data(str(tmp_path / name))
    assert opened.kind == kind
    assert description in opened.description
    if kind == "labels" and not opened.is_paired:
        read = [(parts[0], opened.class_names[c]) for parts, (c,) in opened.rows]
        assert read == (ROWS if len(read) == len(ROWS) else LONG)
    if kind == "text" and isinstance(opened, Text):
        assert [chunk for chunk, _ in opened.chunks()] == TEXTS


REFUSED = {  # file name, content, message
    "a row too long": (
        "a.csv",
        b"name,city\nAnna,Ulm\nBo,Bonn\nCy,Rom\n" * 1 + b"Di,Ulm,x\n",
        "line 5",
    ),
    "identifiers": (
        "a.csv",
        b"id,code\n1,a-1\n2,b-2\n3,c-3\n",
        r"its columns are: no column holds texts .*\nits columns, .*: id \('1'\), code \('a-1'\)\n"
        r"choose: data\.text=COLUMN data\.label=COLUMN for texts with .*\nor: data\.source=",
    ),
    "two labels": (
        "a.csv",
        delimited(
            ",", ["t", "x", "y"], [(t, "ab"[n % 2], "cd"[n // 4]) for n, t in enumerate(TEXTS)]
        ),
        r"its columns are: x and y could both be the label\n.*: t \('a charming.*\n"
        r"choose: data\.text=t data\.label=x \(or data\.label=y\) for texts with a class each\n"
        r"or: data\.text=t task=causal for language modelling$",
    ),
    "two texts and a class": (
        "a.csv",
        delimited(",", ["q", "r", "y"], [(t, t[::-1], "ab"[n % 2]) for n, t in enumerate(TEXTS)]),
        r"q and r hold texts, and y a class\n.*\nchoose: data\.text=q data\.text2=r data\.label=y "
        r"for pairs of texts with a class; data\.text=q data\.label=y for one of them; "
        r"data\.source=q data\.target=r for pairs",
    ),
    "thousands separators": (
        "a.csv",
        b"day\tload\n1\t1,234\n2\t2,345\n3\t3,456\n",
        r"load holds numbers with commas, such as '1,234'.*\nwrite them with a decimal point",
    ),
    "numbers in JSON": ("a.json", b"[1, 2]", "not a list of objects"),
    "an empty object": ("a.json", b"{}", r"not a list of objects: an empty object, \{\}\n"),
    "empty objects": ("a.jsonl", b"{}\n{}\n", r"holds only empty objects, \{\}; an object needs"),
    "an object": ("a.json", b'{"a": 1, "b": {}}', "an object with the keys a, b"),
    "SQuAD": (
        "a.json",
        json.dumps({"data": [{"title": "t", "paragraphs": []}], "version": "1.1"}).encode(),
        "has no question",
    ),
    "UTF-16": ("a.csv", "text,label\n".encode("utf-16"), "UTF-16, not UTF-8"),
    "Latin-1": ("a.csv", "text,label\nnaïve,1\n".encode("latin-1"), r"line 2\) is 0xef"),
    "zip": ("a.csv", b"PK\x03\x04rest", "a zip archive"),
    "bzip2": ("a.csv.bz2", bz2.compress(delimited(",", HEAD)), "bzip2"),
    "ragged": ("a.csv", b"text,label\na,1\nb,0,x\n", r"line 3 has 3 columns, the first line 2"),
}


@pytest.mark.parametrize("variant", REFUSED)
def test_a_table_that_is_not_understood_is_refused(tmp_path, variant):
    name, content, message = REFUSED[variant]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_data(str(tmp_path / name))


def test_decimal_commas_are_read_as_points(tmp_path):
    cells = ["0,125", "1.234,5", "-3,5", "7"]
    path = write(tmp_path, "a.csv", ("load;day\n" + "".join(f"{c};1\n" for c in cells)).encode())
    assert open_data(path).values[:, 0].tolist() == [0.125, 1234.5, -3.5, 7]
    path = write(tmp_path, "three.csv", b"load;day\n30,531;1\n5,827;2\n31;3\n")
    assert open_data(path).values[:, 0].tolist() == [30.531, 5.827, 31]
    for thousands in (b"1,234,567", b"1,234.5"):  # in a row of many
        rows = b"5,827;1\n" * 20 + thousands + b";2\n"
        with pytest.raises(DataError, match="may be decimal commas or thousands separators"):
            open_data(write(tmp_path, "thousands.csv", b"load;day\n" + rows))
    path = write(tmp_path, "b.csv", b"load;day\n" + b"1,5;1\n" * 10 + b"many;1\n")
    with pytest.raises(DataError, match="line 12: load is 'many', not a number"):
        open_data(path)


def test_decimal_commas_of_one_file_are_those_of_its_folder(tmp_path):
    write(tmp_path, "a.csv", b"load;day\n1.234;1\n5.678;2\n")
    write(tmp_path, "b.csv", b"load;day\n0,5;3\n1.234,5;4\n")
    write(tmp_path, "c.csv", b'load,day\n"1,234",5\n"5,678",6\n')
    series = open_data(str(tmp_path))
    assert series.values[:, 0].tolist() == [1234, 5678, 0.5, 1234.5, 1.234, 5.678]
    assert "decimal commas in load" in series.description


def test_the_training_data_decide_about_decimal_commas(tmp_path):
    def split(path, *validation):
        data = {"path": str(path), "validation": validation}
        return open_split(build(RunConfig, {"name": "t", "task": "forecast", "data": data}))[1]

    commas = write(tmp_path, "commas.csv", b"load;day\n0,5;1\n1.234,5;2\n")
    points = write(tmp_path, "points.csv", b"load;day\n0.5;1\n1234.5;2\n")
    thousands = write(tmp_path, "thousands.csv", b"load;day;more\n1.234;3;0,5\n5.678;4;1,5\n")
    validation = split(commas, thousands)
    assert validation.values[:, 0].tolist() == [1234, 5678]
    assert validation.values[:, 2].tolist() == [0.5, 1.5]  # not a column of the training data
    assert "decimal commas in load, more" in validation.description
    assert split(points, thousands).values[:, 0].tolist() == [1.234, 5.678]
    with pytest.raises(DataError, match=r"commas.csv: load holds numbers with commas"):
        split(points, commas)
    for number in (b"3.14", b"-0.125"):
        mixed = write(tmp_path, "mixed.csv", b"load;day\n12;3\n" + number + b";4\n")
        with pytest.raises(
            DataError, match=r"mixed.csv, line 3: load is '.*', with a decimal point"
        ):
            split(commas, mixed)
    folder = tmp_path / "splits"
    folder.mkdir()
    write(folder, "train.csv", b"load;day\n0,5;1\n1.234,5;2\n")
    write(folder, "validation.csv", b"load;day\n1.234;3\n5.678;4\n")
    assert split(folder).values[:, 0].tolist() == [1234, 5678]


def test_two_texts_are_decided_by_the_columns_that_the_user_names(tmp_path):
    rows = [(t, t[::-1], "ab"[n % 2]) for n, t in enumerate(TEXTS)]
    path = write(tmp_path, "a.csv", delimited(",", ["q", "r", "y"], rows))
    assert open_data(path, columns={"text": "q"}).rows[0][0] == (TEXTS[0],)
    assert open_data(path, columns={"text2": "r"}).rows[0][0] == (TEXTS[0], TEXTS[0][::-1])
    assert next(open_data(path, "q", "r").rows()) == rows[0][:2]
    with pytest.raises(DataError, match=r"hold series\n.*\na series is a table with columns"):
        open_data(path, kind="series")


def test_the_table_of_variants_in_the_docs_is_what_the_program_understands(tmp_path):
    lines = ["| file | how it is read |", "|---|---|"]
    for variant, (name, content, *_) in {**VARIANTS, **REFUSED}.items():
        file = tmp_path / name
        file.write_bytes(content)
        try:
            understood = open_data(str(file)).description
        except DataError as error:
            understood = f"refused: {error}".splitlines()[0].replace(f"{tmp_path}/", "")
        lines.append(f"| {variant} (`{name}`) | {understood.replace('|', 'pipe')} |")
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert "\n".join(lines) in page, "docs/data.md needs this table:\n" + "\n".join(lines)


def write(folder, name, content):
    (folder / name).write_bytes(content)
    return str(folder / name)


def test_columns_that_the_user_names_are_taken(tmp_path):
    rows = [(t, "ab"[n % 2], "cd"[n // 4]) for n, t in enumerate(TEXTS)]
    path = write(tmp_path, "a.csv", delimited(",", ["t", "x", "y"], rows))
    assert open_data(path, columns={"label": "y"}).class_names == ("c", "d")
    assert open_data(path, columns={"text": "1", "label": "2"}).class_names == ("a", "b")
    assert next(open_data(path, "x", "t").rows()) == ("a", TEXTS[0])
    assert open_data(path, columns={"text": "t"}, kind="text").kind == "text"
    with pytest.raises(
        DataError, match=r"a.csv, line 1 has no column 'z'\nits columns.*: t \('a charm"
    ):
        open_data(path, columns={"text": "z"})
    lower = write(tmp_path, "lower.csv", b"\n" + delimited(",", ["t", "x", "y"], rows))
    with pytest.raises(DataError, match=r"lower.csv, line 2 has no column 'z'"):
        open_data(lower, columns={"text": "z"})
    unnamed = write(tmp_path, "unnamed.tsv", delimited("\t", None, rows, quote=plain))
    with pytest.raises(DataError, match=r"unnamed.tsv has no column 'z'"):
        open_data(unnamed, columns={"text": "z"})
    with pytest.raises(ConfigError, match=r"data\.label='x' names a column, but the task learns"):
        open_data(path, columns={"label": "x"}, kind="pairs")
    with pytest.raises(ConfigError, match=r"data\.label is for tables; copy is built in"):
        open_data("copy", columns={"label": "x"})


@pytest.mark.parametrize("head", [["review", "stars"], ["text", "label"]])
def test_texts_with_classes_are_no_pairs_and_no_series_unless_columns_are_named(tmp_path, head):
    rows = [(f"{text} {number}", "ab"[number % 2]) for number in range(4) for text in TEXTS]
    path = write(tmp_path, "a.csv", delimited(",", head, rows))
    message = rf"holds? labels; text={head[0]}.*learns from pairs\nits columns.*{head[1]}.*\nname"
    with pytest.raises(DataError, match=message + r" them: data\.source=COLUMN data\.target="):
        open_data(path, kind="pairs")
    assert next(open_data(path, *head, kind="pairs").rows()) == rows[0]
    with pytest.raises(DataError, match=r"learns from series\n.*\na series is a table with col"):
        open_data(path, kind="series")


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("text", {"text": "one"}),
        ("labels", {"text": "one", "label": "a"}),
        ("scores", {"text": "one", "score": 0.5}),
        ("pairs", {"source": "one", "target": "eins"}),
    ],
)
def test_a_text_that_is_not_a_string_is_refused_with_its_line(kind, row, tmp_path):
    rows = [row] * 5 + [row | {next(iter(row)): ["a", "list"]}]
    path = write(tmp_path, "a.jsonl", json_lines(rows))
    columns = {"text": "text"} if kind == "text" else {}
    with pytest.raises(DataError, match="line 6: a text is a string, not"):
        open_data(path, kind=kind, columns=columns)


def test_a_table_is_raw_text_only_for_a_language_model(tmp_path):
    path = write(tmp_path, "a.csv", b"id,code\n1,a-1\n2,b-2\n3,c-3\n")
    opened = open_data(path, kind="text")
    assert "read as plain text, not as a table" in opened.description
    reviews = write(tmp_path, "b.csv", delimited(",", HEAD))
    assert [chunk for chunk, _ in open_data(reviews, kind="text").chunks()] == TEXTS


def test_double_quotes_that_enclose_nothing_are_characters(tmp_path):
    rows = [('"quoted" start', "a"), ('"never closed', "b"), ('closed here"', "a"), ("x y", "b")]
    for part in (rows, rows[1:]):
        path = write(tmp_path, "a.tsv", delimited("\t", ["text", "label"], part, plain))
        assert open_data(path).texts() == [text for text, _ in part]


def test_a_cell_in_double_quotes_may_hold_line_ends_and_delimiters(tmp_path):
    rows = [("a\r\nb\tc", "x"), ('say ""no""'.replace('""', '"'), "y")]
    path = write(tmp_path, "a.tsv", delimited("\t", ["text", "label"], rows, end="\r\n"))
    assert open_data(path).texts() == ["a\nb\tc", 'say "no"']


def settings(path, **data):
    table = {
        "task": "text_classification",
        "model": {"preset": "gru", "dim": 8, "layers": 1, "context": 16},
    }
    table |= {"name": "t", "data": {"path": path, "tokenizer": "word", **data}}
    return build(RunConfig, table)


def test_the_first_three_rows_are_shown_before_training(tmp_path):
    config = settings(write(tmp_path, "a.csv", delimited(",", HEAD, ROWS * 3)))
    lines = [line for line in prepare_training(config).description if line.startswith("row ")]
    assert len(lines) == 3
    assert lines[0].startswith("row 1")
    assert "→" in lines[0]


def test_a_folder_of_tables_is_split_as_its_names_say(tmp_path):
    for part, rows in (("train", ROWS * 2), ("validation", ROWS[:3]), ("test", ROWS[:2])):
        write(
            tmp_path,
            f"{part}.jsonl",
            json_lines([dict(zip(HEAD, row, strict=True)) for row in rows]),
        )
    (tmp_path / "README.md").write_text("about it")
    training, validation = open_split(settings(str(tmp_path)))
    assert (len(training), len(validation)) == (16, 3)
    assert "overlap: 3" in validation.description


def test_a_row_of_a_folder_is_located_in_its_file(tmp_path):
    write(tmp_path, "a.csv", b"source;target\none;eins\n\ntwo;zwei\n")
    write(tmp_path, "b.jsonl", b'{"source": "three", "target": "drei"}\n')
    write(tmp_path, "c.csv", b"source;target\nfour;vier\nfive;\n")
    table = read_table(tmp_path)
    numbers = [number for number, _ in table.rows()]
    assert numbers == sorted(set(numbers))
    next(table.rows())  # reading the first row again changes nothing
    lines = ["a.csv, line 2", "a.csv, line 3", "a.csv, line 4", "b.jsonl, line 1"]
    lines += ["c.csv, line 2", "c.csv, line 3"]
    assert [*map(table.location, numbers)] == [f"{tmp_path / line}" for line in lines]
    (tmp_path / "a.csv").unlink()
    description = open_data(str(tmp_path), kind="pairs").description
    assert f"1 with an empty side (the first is {tmp_path / 'c.csv'}, line 3)" in description


def test_validation_files_are_read_by_the_columns_of_the_training_data(tmp_path):
    train = write(tmp_path, "a.csv", delimited(",", HEAD, ROWS * 3))
    other = write(
        tmp_path, "b.csv", delimited(",", [*HEAD, "note"], [(t, s, t * 2) for t, s in ROWS])
    )
    _, validation = open_split(settings(train, validation=[other]))
    assert validation.texts() == TEXTS
    unnamed = write(tmp_path, "c.tsv", delimited("\t", None, quote=plain))
    _, validation = open_split(settings(train, validation=[unnamed], text="review"))
    assert validation.texts() == TEXTS


def test_class_names_of_parquet_files_are_those_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"opinion": datasets.Value("string"), "y": datasets.ClassLabel(names=["bad", "good"])}
    )
    columns = {"opinion": TEXTS, "y": [label == "good" for label in LABELS]}
    data = datasets.Dataset.from_dict(columns, features)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "two")
    for place in (tmp_path / "a.parquet", tmp_path / "one", tmp_path / "two"):
        opened = open_data(str(place), columns={"label": "y"})
        assert [opened.class_names[c] for _, (c,) in opened.rows] == LABELS
    assert len(open_split(settings(str(tmp_path / "two"), label="y"))[1]) == len(ROWS)


@pytest.mark.parametrize("format", ["file", "stream"])
def test_both_formats_of_arrow_are_read(format, tmp_path):
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    table = pyarrow.table({"text": TEXTS, "label": LABELS})
    new = {"file": ipc.new_file, "stream": ipc.new_stream}[format]
    with new(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    opened = open_data(str(tmp_path / "a.arrow"))
    assert opened.texts() == TEXTS
    assert opened.description == f"labels, {len(TEXTS)} texts, 2 classes, Arrow"
    content = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(content[:40])
    with pytest.raises(DataError, match=r"a\.arrow is not Arrow: "):
        open_data(str(tmp_path / "a.arrow"))


def test_a_column_that_is_left_out_is_named_beside_the_usual_names(tmp_path):
    rows = [(str(n), text, label) for n, (text, label) in enumerate(ROWS)]
    path = write(tmp_path, "a.csv", delimited(",", ("id", "text", "label"), rows))
    assert open_data(path).description.endswith("; text=text, label=label; left out: id")


def test_documents_of_a_table_are_not_called_files(tmp_path):
    path = write(tmp_path, "a.jsonl", json_lines([{"text": text} for text in TEXTS]))
    text = open_data(path, kind="text")
    note = f"overlap: {len(TEXTS)} of the {len(TEXTS)} documents are in the training data"
    assert text.note_overlap(text).description.endswith(note)


def test_a_data_set_of_the_hub_goes_by_its_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*names):
        asked.append(names)
        part = datasets.Dataset.from_dict({"opinion": TEXTS, "y": LABELS})
        return datasets.DatasetDict({"train": part, "validation": part})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = settings("hf://datasets/owner/name/part", label="y")
    training, validation = open_split(config)
    assert training.texts() == validation.texts() == TEXTS
    assert asked[0] == ("owner/name", "part")


def test_an_empty_split_of_a_data_set_is_not_replaced_by_another(monkeypatch):
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_dict({"opinion": TEXTS, "y": LABELS})
    for empty in ("train", "validation"):
        splits = datasets.DatasetDict({"train": part, "validation": part, "test": part})
        splits[empty] = part.select([])
        monkeypatch.setattr(datasets, "load_dataset", lambda *names, splits=splits: splits)
        with pytest.raises(DataError, match=f"the split '{empty}' of hf://.* has no rows"):
            open_split(settings("hf://datasets/owner/name", label="y"))


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("regard.data.arrow_files.import_module", missing)
    with pytest.raises(DataError, match=r"is Parquet, .* pip install 'regard\[tables\]'"):
        open_data(write(tmp_path, "a.parquet", b"PAR1"))


def test_rows_can_be_read_again(tmp_path):
    table = read_table(write(tmp_path, "a.csv", delimited(",", HEAD)))
    assert list(table.rows()) == list(table.rows())
    roles = find_roles(table, {}, None)
    assert roles.inferred == frozenset()
    assert find_roles(replace(table, columns=("a", "b")), {}, None).inferred == {"text", "label"}


@pytest.mark.parametrize(
    "header", ["Row #,What they said,Mood (1st)", "quote #,What's said?,Mood", "1st,text $,mood!"]
)
def test_a_header_may_have_any_characters(header, tmp_path):
    moods = ("joy!", "meh", "anger")
    rows = [f"{n},we said {n} things about it,{moods[n % 3]}" for n in range(60)]
    (tmp_path / "odd.csv").write_text("\n".join([header, *rows]))
    assert read_table(tmp_path / "odd.csv").columns == tuple(header.split(","))


def test_a_first_row_of_short_sentences_is_no_header(tmp_path):
    rows = [f"We saw number {n} .\tNous avons vu le {n} ." for n in range(20)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["Hi.\tSalut!", *rows]))
    assert not read_table(tmp_path / "pairs.tsv").header


def test_inferred_columns_of_pairs_are_kept_in_lower_case(tmp_path):
    rows = "".join(f"The cat number {n} sleeps here,Le chat {n} dort bien ici\n" for n in range(30))
    (tmp_path / "pairs.csv").write_text("en,fr\n" + rows)
    found = open_data(str(tmp_path / "pairs.csv"), kind="pairs", lower=True)
    assert found.columns == {"source": "en", "target": "fr"}
    assert next(found.rows()) == ("the cat number 0 sleeps here", "le chat 0 dort bien ici")


def test_a_first_row_with_the_number_of_a_named_column_is_not_a_header(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("".join(f"{text},{2 - n % 2}\n" for n, text in enumerate("abcdefgh")))
    assert path.read_text().startswith("a,2\n")
    data = open_data(str(path), kind="labels", columns={"text": 1, "label": 2})
    assert (len(data), data.class_names) == (8, ("1", "2"))


@pytest.mark.parametrize("named", [{}, {"text": "satz", "label": "klasse"}])
def test_the_header_of_a_validation_file_in_a_folder_is_that_of_the_training_file(tmp_path, named):
    rows = [f"{text.replace(',', '')} {n},{label}\n" for n, (text, label) in enumerate(ROWS * 3)]
    (tmp_path / "train.csv").write_text("satz,klasse\n" + "".join(rows))
    (tmp_path / "test.csv").write_text("satz,klasse\n" + "".join(rows[:2]))
    table = {"task": "text_classification", "data": {"path": str(tmp_path), **named}}
    train, validation = open_split(build(RunConfig, {"name": "x", "model": {}, **table}))
    assert (len(train), len(validation)) == (24, 2)
    assert validation.class_names == train.class_names == ("bad", "good")


def test_integers_that_no_float_can_represent_are_reported_with_their_line(tmp_path):
    path = tmp_path / "large.jsonl"
    numbers = [*range(20), 10**400]
    path.write_text("".join(json.dumps({"text": f"t {n}", "score": n}) + "\n" for n in numbers))
    with pytest.raises(DataError, match="line 21: score is"):
        open_data(str(path), kind="scores")
    path.write_text("".join(json.dumps({"value": n}) + "\n" for n in numbers))
    with pytest.raises(DataError, match="line 21: value is"):
        open_data(str(path), kind="series")


def test_decimals_of_parquet_files_are_numbers(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "prices.parquet"
    values = [Decimal(n * n % 37) / 4 for n in range(40)]
    column = pyarrow.array([*values[:-1], None], pyarrow.decimal128(10, 2))
    parquet.write_table(pyarrow.table({"text": [f"t {n}" for n in range(40)], "n": column}), path)
    rows = [row for _, row in read_table(path).rows()]
    assert [cell for _, cell in rows] == [*map(float, values[:-1]), None]
    prices = pyarrow.table({"price": pyarrow.array(values, pyarrow.decimal128(10, 2))})
    parquet.write_table(prices, path)
    assert open_data(str(path)).column("price").tolist() == [*map(float, values)]


def test_a_table_with_a_header_alone_has_no_rows(tmp_path):
    path = tmp_path / "empty.csv"
    path.write_text("source,target\n")
    with pytest.raises(
        DataError, match="has no rows, only the names of its columns: source, target"
    ):
        open_data(str(path))


def test_a_line_that_may_be_a_header_is_not_all_of_the_training_data(tmp_path):
    path = tmp_path / "header.csv"
    path.write_text("a,b\n")
    with pytest.raises(DataError, match=r"csv has one line, 'a, b', perhaps a header, and no rows"):
        split_for("seq2seq", path)
    path.write_text("a,b,c\n")
    with pytest.raises(DataError, match=r"csv has one line, 'a, b, c', perhaps a header"):
        open_data(str(path))
    path.write_text("1,2\n")  # not a header
    with pytest.raises(DataError, match="the only row of numbers"):
        split_for("forecast", path)


def split_for(task, path):
    return open_split(build(RunConfig, {"name": "t", "task": task, "data": {"path": str(path)}}))


def ambiguity(folder, header, rows, **options):
    """The reason and the last lines of the message for an ambiguous table."""
    path = write(folder, "a.csv", delimited(",", header, rows))
    with pytest.raises(DataError) as caught:
        open_data(path, **options)
    first, _, *choices = str(caught.value).splitlines()
    return first.removeprefix(f"{path}: "), choices


def test_the_message_for_ambiguous_columns_says_why_and_what_decides(tmp_path):
    three = [(t, t[::-1], t.upper()) for t in TEXTS]
    classes = [(t, "ab"[n % 2], "123"[n % 3]) for n, (t, _) in enumerate(LONG)]
    reason, choices = ambiguity(tmp_path, ["my text", "y", "z"], classes)
    assert reason == "cannot tell what its columns are: y and z could both be the label"
    assert choices == [
        "choose: 'data.text=my text' data.label=y (or data.label=z) for texts with a class each",
        "or: 'data.text=my text' data.label=z task=text_regression for texts with a number each; "
        "'data.text=my text' task=causal for language modelling",
    ]
    reason, choices = ambiguity(tmp_path, ["t", "y", "z"], classes, kind="labels")
    assert reason.endswith("which of its columns hold labels: y and z could both be the label")
    assert choices == [
        "for example: data.text=t data.label=y (or data.label=z) for texts with a class each"
    ]
    reason, _ = ambiguity(tmp_path, ["t", "y", "z"], classes, kind="pairs")
    assert reason.endswith("which of its columns hold pairs: only t holds texts")
    header = ["one", "two", "three"]
    reason, choices = ambiguity(tmp_path, header, three)
    assert reason.endswith(": one, two and three hold texts, and no other column holds classes")
    assert choices[0] == "choose: data.source=one data.target=two for pairs of source and target"
    reason, choices = ambiguity(tmp_path, header, three, columns={"source": "two"})
    assert reason.endswith(": one and three could both be the target")
    assert choices == ["choose: data.source=two data.target=one for pairs of source and target"]
    reason, choices = ambiguity(tmp_path, header, three, columns={"text2": "two"})
    assert "data.text2=two data.label=COLUMN for pairs of texts with a class each" in choices[0]
    images = [(f"{n}.png", t, t[::-1]) for n, t in enumerate(TEXTS)]
    reason, choices = ambiguity(tmp_path, ["file", "en", "de"], images)
    assert reason.endswith(": en and de could both be the caption of file")
    assert choices[0].startswith("choose: data.source=file data.target=en for images and their")


def test_the_input_column_of_a_prediction_may_be_named_by_its_number(tmp_path):
    path = tmp_path / "columns.csv"
    path.write_text("id,None,text\n" + "".join(f"{n},a day,a night\n" for n in range(5)))
    table = read_table(path)
    assert find_input(table, "labels", None, 2) == ("None", "")
    assert find_input(table, "labels", None, None) == find_input(table, "labels", None, 9)
    assert find_input(table, "labels", None, None) == ("text", "")
