"""Texts with labels and tags: what files become, and what is refused with file and line."""

import csv
import gzip
import json
from collections import Counter

import pytest

from regard.data.labels import LabelledText
from regard.data.pairs import Pairs
from regard.data.text import Text
from regard.errors import ConfigError, DataError
from regard.pipelines import open_data

REVIEWS = [
    ("a charming, affecting journey", "good"),
    ("one long string of cliches", "bad"),
    ('it said "no"\nand stopped', "bad"),
    ("what a day", "good"),
]


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(folder, name="reviews.csv", header=("text", "label"), rows=REVIEWS):
    with (folder / name).open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return folder / name


def contents(data):
    return [
        (" ".join(parts), [data.class_names[each] for each in classes])
        for parts, classes in data.rows
    ]


def test_a_table_with_texts_and_labels_is_labels(tmp_path):
    opened = open_data(str(table(tmp_path)))
    assert opened.kind == "labels"
    assert opened.class_names == ("bad", "good")
    assert contents(opened) == [(text, [label]) for text, label in REVIEWS]
    assert opened.description == "labels, 4 texts, 2 classes, comma-separated"


def test_columns_may_be_others_and_stand_anywhere(tmp_path):
    rows = [(n, label, text) for n, (text, label) in enumerate(REVIEWS)]
    path = table(tmp_path, header=("\ufeffid", "Class", "Sentence"), rows=rows)
    assert contents(open_data(str(path))) == contents(open_data(str(table(tmp_path, "b.csv"))))


def test_tables_of_every_kind_and_their_gzip_are_the_same(tmp_path):
    rows = [(text.replace("\n", " "), label) for text, label in REVIEWS]
    tsv = "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    paths = [
        table(tmp_path, rows=rows),
        write(tmp_path, "reviews.tsv", tsv),
        write(tmp_path, "reviews.jsonl", lines),
        write(tmp_path, "zipped.tsv.gz", gzip.compress(tsv.encode())),
        write(tmp_path, "zipped.jsonl.gz", gzip.compress(lines.encode())),
    ]
    assert len({open_data(str(path)).fingerprint() for path in paths}) == 1


def test_a_tsv_without_names_is_pairs_unless_labels_are_asked_for(tmp_path):
    path = write(tmp_path, "sent.tsv", "".join(f"{t!r}\t{label}\n" for t, label in REVIEWS))
    assert isinstance(open_data(str(path)), Pairs)
    assert open_data(str(path), kind="labels").class_names == ("bad", "good")


def test_tables_without_labels_stay_text(tmp_path):
    path = write(tmp_path, "plain.jsonl", '{"title": "a", "body": "b"}\n')
    assert isinstance(open_data(str(path)), Text)


def test_labels_that_are_numbers_keep_their_order(tmp_path):
    rows = [(f"text {n}", n) for n in (10, 2, 1)]
    assert open_data(str(table(tmp_path, rows=rows))).class_names == ("1", "2", "10")


CONLL = "#lucky\tO\nNew\tB-place\nYork\tI-place\n\n\n Paris\tB-place\n"


def test_words_with_tags_are_read_line_by_line(tmp_path):
    opened = open_data(str(write(tmp_path, "small.conll", CONLL)))
    assert opened.kind == "tags"
    assert contents(opened) == [
        ("#lucky New York", ["O", "B-place", "I-place"]),
        (" Paris", ["B-place"]),
    ]
    spaced = write(tmp_path, "tags.txt", "U.N.  NNP I-NP I-ORG\nofficial NN I-NP O\n")
    assert isinstance(open_data(str(spaced)), Text)
    assert contents(open_data(str(spaced), kind="tags")) == [("U.N. official", ["B-ORG", "O"])]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "text,label\nx,1\n\ny\n",
            r"a\.csv, line 4 has 1 column, the first line 2: 'y'\neach line needs 2 cells",
        ),
        ("a.csv", 'text,label\n"x,1\ny\n', r"a\.csv, line \d is not CSV"),
        (
            "a.csv",
            "text,label\nx,\ny,1\n",
            r"a\.csv: 1 of 2 rows has an empty cell: line 2 \(label\)",
        ),
        ("a.csv", "text,label\nx,1\ny,1\n", "every text has the same class, '1'"),
        ("a.csv", "text,label\n ,1\n", "no text with a label"),
        ("a.tsv", "text\tlabel\nx\ty\tz\n", r"a\.tsv, line 2 has 3 columns, the first line 2"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{\n', r"a\.jsonl, line 2 is not JSON"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": "y"}',
            r"1 of 2 rows has an empty cell: line 2 \(label\)\nfill in",
        ),
        ("a.jsonl", '{"text": "x", "label": [1]}', "line 1: a label is a string or"),
        ("a.conll", "New\tO\nYork\n", r"a\.conll, line 2 has one column: 'York'"),
        ("a.conll", "New\tO\n\nYork\tO\n", "every word has the same class, 'O'"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        open_data(str(write(tmp_path, name, content)))


def test_all_rows_with_an_empty_cell_are_counted_and_the_first_are_named(tmp_path):
    rows = [(text, label) for text, label in REVIEWS if "\n" not in text]  # three lines
    path = table(tmp_path, rows=[*rows, ("", "good"), ("a night", ""), *rows, (" ", "bad")])
    with path.open("a") as file:
        file.write("\n")  # an empty line is not a row
    with pytest.raises(DataError) as caught:
        open_data(str(path))
    assert str(caught.value) == (
        f"{path}: 3 of 9 rows have an empty cell: line 5 (text), line 6 (label), line 10 (text)\n"
        "fill in the empty cells of label, or delete their row; rows with an empty text are skipped"
    )
    path = table(tmp_path, rows=[(text, "") for text in "abcdefg"])
    expected = r"7 of 7 rows .*, line 6 \(label\), …\nfill in the empty cells, or delete these rows"
    with pytest.raises(DataError, match=expected):
        open_data(str(path))
    scores = [*((text, "0.5") for text in "abcde"), ("f", "1"), ("g", "")]
    path = table(tmp_path, header=("text", "score"), rows=scores)
    with pytest.raises(DataError, match=r"1 of 7 rows has an empty cell: line 8 \(score\)"):
        open_data(str(path))


def test_two_settings_that_name_the_same_column_are_refused(tmp_path):
    path = table(tmp_path, header=("opinion", "stars"))
    for columns, settings in (
        ({"text": "opinion", "label": "opinion"}, "data.text=opinion and data.label=opinion"),
        ({"text": 1, "label": "opinion"}, "data.text=1 and data.label=opinion"),
        ({"text": "1", "text2": "1"}, "data.text=1 and data.text2=1"),
        ({"source": "stars", "target": 2}, "data.source=stars and data.target=2"),
        ({"text": "stars", "tags": "stars"}, "data.text=stars and data.tags=stars"),
    ):
        with pytest.raises(ConfigError, match=f"{settings} name the same column of .*csv"):
            open_data(str(path), columns=columns)


def test_a_column_that_a_setting_names_is_not_inferred_for_another_role(tmp_path):
    rows = [(f"img{n}.png", f"{n}.5", f"a dog runs {n} times") for n in range(8)]
    path = table(tmp_path, header=("file", "number", "what"), rows=rows)
    assert open_data(str(path), columns={"target": "file"}).columns["source"] == "what"
    with pytest.raises(DataError, match="the task learns from scores"):
        open_data(str(path), columns={"text": "number"}, kind="scores")


def test_a_csv_that_names_no_columns_is_refused_where_labels_are_asked_for(tmp_path):
    path = write(tmp_path, "a.csv", "x,y\n1,2\n")
    with pytest.raises(
        DataError, match=r"hold series, and the task learns from labels\n.*: x \('1'\), y \('2'\)"
    ):
        open_data(str(path), kind="labels")


def test_rows_without_a_text_are_skipped_and_counted(tmp_path):
    opened = open_data(str(table(tmp_path, rows=[("a", "1"), (" ", "0"), ("b", "0")])))
    assert len(opened) == 2
    assert opened.description.endswith("skipped: 1 without a text (the first is line 3)")


def many_texts(count=400):
    rows = [((f"text {n % (count // 2)}",), (n % 2,)) for n in range(count)]
    return LabelledText("labels", "many", "labels", rows, ("no", "yes"))


def test_equal_texts_never_stand_on_both_sides():
    data = many_texts()
    train, held = data.split(0.25, seed=3)
    assert len(train) + len(held) == 400
    assert 60 < len(held) < 140
    assert not set(train.texts()) & set(held.texts())
    assert held.fingerprint() == data.split(0.25, seed=3)[1].fingerprint()
    assert held.fingerprint() != data.split(0.25, seed=4)[1].fingerprint()
    with pytest.raises(ConfigError, match=r"data\.validation_fraction=1 must lie between 0 and 1"):
        data.split(1, seed=1)


def test_classes_go_by_their_names_or_by_their_numbers():
    data = many_texts()
    assert data.with_class_names(["yes", "no"]).rows[1] == (("text 1",), (0,))
    numbered = LabelledText("labels", "n", "", [(("a",), (0,)), (("b",), (1,))], ("0", "1"))
    assert numbered.with_class_names(["no", "yes"]).class_names == ("no", "yes")
    with pytest.raises(DataError, match="many has a class 'no' that the model does not have"):
        data.with_class_names(["good", "bad"])


def test_validation_texts_in_the_training_data_are_counted():
    assert "overlap: 400 of the 400" in many_texts().note_overlap(many_texts()).description
    assert many_texts().lowercase().note_overlap(many_texts()).description.count("overlap") == 1


@pytest.mark.parametrize("types", [1, 5])
def test_half_of_the_brackets_are_balanced_and_counting_does_not_tell_which(types):
    table = {"kind": "parentheses", "examples": 2000, "max_length": 20, "types": types}
    opened = open_data(table)
    assert opened.class_names == ("unbalanced", "balanced")
    counts = {name: Counter() for name in opened.class_names}
    for (symbols,), (number,) in opened.rows:
        counts[opened.class_names[number]].update(symbols)
        assert len(symbols) % 2 == 0
        left = symbols
        pairs = [f"{each}{9 - each}" for each in range(5)]
        while any(pair in left for pair in pairs):  # take innermost pairs out until none is left
            for pair in pairs:
                left = left.replace(pair, "")
        assert (left == "") is bool(number)
        for each in range(5):
            assert symbols.count(str(each)) == symbols.count(str(9 - each))
    assert Counter(number for _, (number,) in opened.rows) == {0: 1000, 1: 1000}
    lengths = Counter(len(symbols) for (symbols,), _ in opened.rows)
    assert set(lengths) == set(range(2, 21, 2))
    total = {name: sum(each.values()) for name, each in counts.items()}
    assert total["unbalanced"] == pytest.approx(total["balanced"], rel=0.05)


def test_some_of_the_unbalanced_brackets_are_wrong_in_two_places_only():
    opened = open_data({"kind": "parentheses", "examples": 2000, "max_length": 20})
    unbalanced = [symbols for (symbols,), (number,) in opened.rows if not number]
    hopeless = sum(symbols[0] > "4" or symbols[-1] < "5" for symbols in unbalanced)
    assert 0.3 < hopeless / len(unbalanced) < 0.6
