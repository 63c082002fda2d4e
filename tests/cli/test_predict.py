"""`regard train` on images, and `regard predict`."""

import csv
import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

import regard as library


def table(path, delimiter=","):
    """The rows of a delimited file."""
    return list(csv.DictReader(Path(path).read_text().splitlines(), delimiter=delimiter))


WORDS = ["model.dim=8", "model.layers=1", "model.heads=2", "train.steps=2", "train.batch=4"]


@pytest.fixture
def photos(tmp_path):
    """A folder for each of two classes, with small images in colour."""
    image = pytest.importorskip("PIL.Image", reason="image files need Pillow")
    for name, colour in (("sea", (0, 0, 200)), ("wood", (0, 200, 0))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            shape = (12 + number, 14, 3)
            array = np.broadcast_to(np.array(colour, np.uint8), shape)
            image.fromarray(array).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_a_folder_of_images_is_enough(regard, photos):
    completed = regard("train", photos, *WORDS, "--out", "run")
    assert completed.code == 0
    assert "12 images, 6 sizes" in completed.err
    assert "resized to" in completed.err
    assert "classes    sea, wood" in completed.err
    assert "mean=" not in completed.err  # a fact of the data, no choice
    assert "regard predict run image.png" in completed.err
    assert "accuracy" in completed.out
    for name in ("evaluate", "info"):
        assert "accuracy" in regard(name, "run").out


def test_images_are_classified_one_line_each(regard, photos):
    regard("train", photos, *WORDS, "--out", "run")
    files = [photos / "sea" / "0.png", photos / "wood" / "5.png"]
    lines = regard("predict", "run", *files, "-n", 1).out.splitlines()
    assert [line.split()[0] for line in lines] == [str(file) for file in files]
    output = json.loads(regard("predict", "run", *files, "--json").out)
    assert sum(share for _, share in output[str(files[0])][0]) == pytest.approx(1)
    assert regard("predict", "run", "--data", photos, "--out", "classes.csv").code == 0
    rows = table("classes.csv")
    assert [row["file"] for row in rows] == sorted(str(file) for file in photos.rglob("*.png"))
    (classes,) = output[rows[0]["file"]]
    assert rows[0]["prediction"] == classes[0][0]
    assert float(rows[0]["probability"]) == pytest.approx(classes[0][1], abs=1e-5)
    completed = regard("predict", "run", photos / "none.png")
    assert completed.code == 3
    assert "none.png cannot be read: No such file" in completed.err


def test_a_run_on_images_does_not_generate(regard, photos):
    regard("train", photos, *WORDS, "--out", "run")
    completed = regard("generate", "run", "once")
    assert completed.code == 2
    assert "cannot generate; use `predict` instead" in completed.err


REVIEWS = [("a glad day", "good"), ("so dull it was", "bad"), ("fine", "good"), ("sad film", "bad")]


@pytest.fixture(scope="module")
def label_run(tmp_path_factory):
    """A classifier of texts."""
    folder = tmp_path_factory.mktemp("labels")
    rows = [
        {"text": f"{text} {n % 5}", "label": label} for n in range(20) for text, label in REVIEWS
    ]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"steps": 30, "batch": 16, "lr": 0.02, "ema": 0.0}
    library.train(
        str(folder / "reviews.jsonl"),
        out=folder / "run",
        model={"dim": 8, "context": 8},
        train=train,
    )
    return folder / "run"


@pytest.fixture(scope="module")
def tag_run(tmp_path_factory):
    """A tagger: what begins with a capital is a name."""
    folder = tmp_path_factory.mktemp("tags")
    lines = [f"word{n % 3} O\nAnn{n % 4} B-name\n\n" for n in range(60)]
    (folder / "names.conll").write_text("".join(lines))
    train = {"steps": 30, "batch": 16, "lr": 0.02, "ema": 0.0}
    model = {"dim": 8, "context": 8}
    library.train(str(folder / "names.conll"), out=folder / "run", model=model, train=train)
    return folder / "run"


def test_the_columns_do_not_depend_on_the_number_of_masks(regard):
    Path("cats.txt").write_text("".join(f"the cat {n} sat on the mat\n" for n in range(60)))
    words = ["model.preset=tiny-encoder", "task=masked", "data.tokenizer=char", "train.steps=1"]
    words += ["model.dim=8", "model.layers=1", "model.heads=2", "model.context=32", "train.batch=2"]
    assert regard("train", "cats.txt", *words, "--out", "run").code == 0
    Path("new.csv").write_text("text\nthe <mask>at s<mask>t\nthe <mask>at\n")
    assert regard("predict", "run", "--data", "new.csv", "--out", "out.csv").code == 0
    two, one = table("out.csv")
    assert (len(two["prediction"].split(" ")), len(json.loads(two["probability"]))) == (2, 2)
    assert 0 < float(one["probability"]) <= 1


def test_values_that_json_does_not_have_are_written_as_others(regard, label_run):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    when = datetime(2024, 5, 1, 12)
    columns = {"text": ["fine"], "when": [when], "score": [float("nan")]}
    parquet.write_table(arrow.table(columns), "new.parquet")
    assert regard("predict", label_run, "--data", "new.parquet", "--out", "out.jsonl").code == 0
    completed = regard("predict", label_run, "--data", "new.parquet", "--json")
    for text in (Path("out.jsonl").read_text(), completed.out):
        row = json.loads(text)
        assert (row["when"], row["score"]) == ("2024-05-01 12:00:00", None)


def test_lists_in_a_table_are_json(tmp_path):
    rows = [{"scores": [0.5, float("nan")], "days": [datetime(2024, 5, 1)]}]
    assert library.api.write_rows(tmp_path / "out.csv", rows) == 1
    (row,) = table(tmp_path / "out.csv")
    assert json.loads(row["scores"]) == [0.5, None]
    assert json.loads(row["days"]) == ["2024-05-01 00:00:00"]


def test_rows_of_a_table_are_predicted_into_another(regard, label_run):
    Path("new.csv").write_text('id,review\n7,"a glad, zebra day"\n8,dull\n')
    completed = regard("predict", label_run, "--data", "new.csv", "--out", "out.csv")
    assert completed.code == 0
    assert "texts in column 'review'" in completed.err
    assert "not in the run's vocabulary, read as unknown tokens: " in completed.err
    assert "'zebra'" in completed.err
    rows = table("out.csv")
    assert [[row["id"], row["review"], row["prediction"]] for row in rows] == [
        ["7", "a glad, zebra day", "good"],
        ["8", "dull", "bad"],
    ]
    run = library.load(label_run)
    both = ["--data", "new.csv", "--out", "both.jsonl", "-n", 2]
    assert regard("predict", label_run, *both).code == 0
    lists = [json.loads(line)["prediction"] for line in Path("both.jsonl").read_text().splitlines()]
    assert [[name for name, _ in classes] for classes in lists] == [
        ["good", "bad"],
        ["bad", "good"],
    ]
    ((best, share),) = run.predict("dull", top=1)[0]
    assert (rows[1]["prediction"], float(rows[1]["probability"])) == (best, round(share, 6))
    hint = "new.csv is a file; to predict its rows: --data new.csv"
    for name, message in (("new.csv", hint), ("x.txt", "no file x.txt")):
        refused = regard("predict", label_run, name)
        assert (refused.code, message in refused.err) == (2, True)
    again = regard("predict", label_run, "--data", "new.csv", "--out", "out.csv")
    assert again.code == 2
    assert "out.csv exists already; --force overwrites it" in again.err
    words = ["predict", label_run, "--data", "new.csv", "--out"]
    assert regard(*words, "out.csv", "--force", "--column", 2).code == 0
    assert regard(*words, "out.jsonl").code == 0
    objects = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert objects == list(run.predict_file("new.csv"))
    assert [row["id"] for row in objects] == ["7", "8"]


def test_a_table_without_a_header_is_described_as_such(regard, label_run):
    Path("plain.csv").write_text("opinion\na glad day\na dull day\n")
    completed = regard("predict", label_run, "--data", "plain.csv")
    assert "it has no header, so line 1 is a text" in completed.err
    Path("named.csv").write_text("text\na glad day\na dull day\n")
    completed = regard("predict", label_run, "--data", "named.csv")
    assert "texts in column 'text'" in completed.err
    assert "header" not in completed.err


def test_lines_of_stdin_are_predicted_one_after_the_other(regard, label_run, stdin):
    stdin(b"a glad day\nso dull\n")
    lines = regard("predict", label_run, "-", "-n", 1).out.splitlines()
    assert [line.split()[-2] for line in lines] == ["good", "bad"]
    stdin(b"a glad day\nso dull\n")
    lines = regard("predict", label_run, "-", "--json").out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["text"] for row in rows] == ["a glad day", "so dull"]
    assert [row["prediction"][0][0] for row in rows] == ["good", "bad"]
    Path("lines.txt").write_text("a glad day\nso dull\n")
    same = regard("predict", label_run, "--data", "lines.txt", "--json").out.splitlines()
    assert same == lines
    assert library.load(label_run).predict(["a glad day", "so dull"]) == [
        [[tuple(pair) for pair in row["prediction"]]] for row in rows
    ]


@pytest.mark.parametrize(
    ("content", "words", "code", "message"),
    [
        ("a,b\nx,y\n", [], 3, "cannot tell which of its columns to predict from\nits columns"),
        ("id,text\n1,y\n", ["--column", "review"], 3, "has no column 'review'\nits columns"),
        ("id,text\n1,y\n2, \n", [], 3, "line 3: nothing to predict: the text is empty"),
        ("id,text,prediction\n1,x,y\n", [], 3, "has a column 'prediction' already"),
    ],
)
def test_a_file_that_cannot_be_predicted_is_refused(
    regard, label_run, content, words, code, message
):
    Path("new.csv").write_text(content)
    completed = regard("predict", label_run, "--data", "new.csv", "--out", "out.csv", *words)
    assert completed.code == code
    assert message in completed.err
    assert not Path("out.csv").exists()


def test_an_empty_text_or_a_wrong_option_is_refused(regard, label_run, stdin):
    mistakes = {
        (" ",): "nothing to predict: the text is empty",
        ("good", ""): "nothing to predict: text 2 of 2 is empty",
        ("good", "--column", "text"): "--column names a column of --data",
        ("good", "--data", "new.csv"): "give texts or images, or --data, not both",
        ("good", "--out", "x.txt"): "the suffix must be .csv or .tsv or .jsonl",
        (): "no input to predict from; give a text, an image, '-' or --data",
    }
    for words, message in mistakes.items():
        completed = regard("predict", label_run, *words)
        assert completed.code == 2
        assert message in completed.err
    stdin(b"good\n\n")
    completed = regard("predict", label_run, "-")
    assert completed.code == 3
    assert "stdin, line 2: nothing to predict: the text is empty" in completed.err


def test_tags_of_a_table_and_of_a_conll_file(regard, tag_run):
    Path("new.jsonl").write_text('{"tokens": ["word1", "Ann2"]}\n{"tokens": ["Ann1"]}\n')
    assert regard("predict", tag_run, "--data", "new.jsonl", "--out", "out.jsonl").code == 0
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in rows] == [["O", "B-name"], ["B-name"]]
    Path("new.conll").write_text("word1 O\nAnn2 O\n\nAnn1 O\n")
    assert regard("predict", tag_run, "--data", "new.conll", "--out", "out.tsv").code == 0
    assert Path("out.tsv").read_text().splitlines() == [
        "text\tprediction",
        "word1 Ann2\tO B-name",
        "Ann1\tB-name",
    ]


def test_pairs_are_translated(regard, pair_run):
    Path("new.tsv").write_text("id\tsource\n1\t100 cats\n2\t999 cats\n")
    assert regard("predict", pair_run, "--data", "new.tsv", "--out", "out.tsv").code == 0
    rows = table("out.tsv", "\t")
    run = library.load(pair_run)
    assert [row["prediction"] for row in rows] == run.translate(["100 cats", "999 cats"])
    assert (
        regard("predict", pair_run, "100 cats").out == regard("translate", pair_run, "100 cats").out
    )


def test_a_forecast_is_written(regard):
    assert regard("train", "sines", "--out", "run").code == 0
    assert regard("predict", "run", "--steps", 3, "--out", "out.csv").code == 0
    rows = table("out.csv")
    values = [float(row["prediction"]) for row in rows]
    assert values == pytest.approx(library.load("run").forecast(steps=3))
