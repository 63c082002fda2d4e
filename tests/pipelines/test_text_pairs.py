"""Pairs of texts with a class: detection, inputs of encoders and decoders, predictions."""

import json

import pytest
import torch

import regard
from cli.commands import command
from regard.api.prediction import read_inputs
from regard.data.columns import text_pair
from regard.data.labels import from_rows
from regard.errors import ConfigError, DataError
from regard.explain.attention import attention_maps
from regard.models.build import resolve
from regard.pipelines import open_data
from regard.pipelines.encoded_texts import encode
from regard.pipelines.text_pairs import pair_template
from regard.text import train_tokenizer
from regard.training.setup.configure import configure

COLOURS, THINGS = ["red", "green", "blue", "grey"], ["car", "house", "boat"]
SETTINGS = ("model.dim=32", "model.layers=1", "model.heads=2", "data.tokenizer=word")
SETTINGS += ("train.steps=60", "train.batch=32", "train.lr=5e-3", "train.ema=0", "model.dropout=0")


def entailment(count=240):
    """A class that depends on a word of each text."""
    rows = []
    for n in range(count):
        colour, claim = COLOURS[n % 4], ("big", "small")[n // 4 % 2]
        premise = f"a {colour} {THINGS[n // 24 % 3]} number {n}"
        label = f"{'warm' if colour == 'red' else 'cold'}-{claim}"
        rows.append({"premise": premise, "hypothesis": f"it is {claim}", "label": label})
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    path = folder / "nli.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in entailment()))
    model = ("model.preset=tiny-encoder", "model.segments=2", "model.context=24")
    return regard.train(str(path), *model, *SETTINGS, out=folder / "run")


def test_named_columns_have_the_context_of_detected_ones(tmp_path):
    path = tmp_path / "nli.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in entailment()))
    named = {"data": {"text": "premise", "text2": "hypothesis", "label": "label"}}
    detected, given = (configure(str(path), more) for more in ({}, named))
    assert detected.model["context"] == given.model["context"] >= 16


def test_two_texts_and_a_class_are_learned_by_an_encoder(run, tmp_path, capsys):
    assert run.config.data.text2 == "hypothesis"
    assert run.inputs == ("premise", "hypothesis")
    assert run.evaluate()["accuracy"] > 0.9
    big, small = run.predict([("a red car", "it is big"), ("a red car", "it is small")], top=1)
    assert (big[0][0][0], small[0][0][0]) == ("warm-big", "warm-small")
    ((best, _),) = run.predict(("a blue boat", "it is big"), top=2)
    assert best[0] == "cold-big"
    folder = str(run.folder.path)
    assert command("predict", folder, "a grey house", "it is small", "-n", "1") == 0
    assert "cold-small" in capsys.readouterr().out
    table = tmp_path / "new.csv"
    table.write_text("premise,hypothesis\na red car,it is big\na blue car,it is small\n")
    predictions = [row["prediction"] for row in run.predict_file(table)]
    assert predictions == ["warm-big", "cold-small"]
    with pytest.raises(ConfigError, match="a tuple of two texts, not 'a red car'"):
        run.predict("a red car")
    ids = run.tokenizer.encode("a red car"), run.tokenizer.encode("it is big")
    template = pair_template(run.model.config, run.tokenizer)
    joined, begin = template.join(*ids)
    batch_ids, lengths = torch.tensor([joined.tolist()]), torch.tensor([len(joined)])
    segments = (torch.arange(len(joined)) >= begin).long()[None]
    with torch.no_grad():
        x = run.model(batch_ids, lengths=lengths, segments=segments)
        expected = run.model.head(x, lengths).softmax(-1).max().item()
    ((predicted,),) = run.predict(("a red car", "it is big"), top=1)
    assert predicted[1] == pytest.approx(expected, rel=1e-5)
    ((path, shown),) = run.explain(("a red car", "it is big")).items()
    maps = attention_maps(run.model, lambda: run.model(batch_ids, segments=segments), pattern=path)
    torch.testing.assert_close(shown.weights, maps[path][0])
    pieces = ["<cls>", "a", "red", "car", "<sep>", "it", "is", "big", "<sep>"]
    assert shown.rows == pieces
    assert run.attribution(("a red car", "it is big")).output == predicted[0]
    assert command("explain", folder, "a red car", "it is big", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == pieces
    with pytest.raises(ConfigError, match=r"premise and hypothesis: give 2 texts.*, not 1"):
        run.explain("a red car")


@pytest.mark.parametrize(
    ("preset", "pieces"),
    [
        ("tiny-encoder", ["<cls>", "A", "<sep>", "B", "<sep>"]),
        ("tiny-decoder", ["<start>", "A", "<sep>", "B", "<cls>"]),
        ({"preset": "lstm", "bidirectional": True}, ["A", "<sep>", "B"]),
    ],
)
def test_a_model_reads_two_texts_with_special_tokens_between_them(preset, pieces):
    tokenizer = train_tokenizer("word", ["one two three four five six seven"])
    settings = {"preset": preset} if isinstance(preset, str) else preset
    head = {"kind": "classification", "classes": 2, "pool": "max"}
    model = resolve(settings, vocab_size=tokenizer.vocab_size, context=9, head=head)
    texts = {"A": "one two", "B": "three"}
    rows = [(tuple(texts.values()), ("x",)), (("one " * 9, "two " * 9), ("y",))]
    short, long = encode(from_rows("labels", "x", "", rows), tokenizer, model)
    expected = " ".join(texts.get(piece, piece) for piece in pieces).split()
    assert [tokenizer.piece(id) for id in short.ids] == expected
    assert short.ids[short.second_start] == tokenizer.encode("three")[0]
    assert (short.truncated, long.truncated, len(long.ids)) == (False, True, 9)


def test_columns_of_two_texts_are_found_by_their_names(tmp_path):
    rows = entailment(40)
    for names in (("sentence1", "sentence2"), ("phrase_a", "phrase_b"), ("question", "context")):
        named = [dict(zip((*names, "answer"), row.values(), strict=True)) for row in rows]
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in named))
        data = open_data(str(path))
        assert data.kind == "labels"
        assert "40 pairs of texts, 4 classes" in data.description, names
        assert dict(data.columns) == {"text": names[0], "text2": names[1], "label": "answer"}
    path.write_text("".join(json.dumps({**row, "premise": ""}) + "\n" for row in rows[:2]))
    with pytest.raises(DataError, match="no text with a label"):
        open_data(str(path))
    assert text_pair(["a", "b", "x1", "y2"]) is None


def test_columns_that_training_named_by_numbers_are_those_of_predictions(tmp_path):
    path = tmp_path / "numbers.csv"
    rows = [f"{n},a b {n},c d e {n},{n % 2}" for n in range(40)]
    path.write_text("\n".join(["id,premise,hypothesis,label", *rows]))
    columns = {"text": 3, "text2": 2, "label": 4}
    model = {"preset": "lstm", "dim": 8, "layers": 1}
    out = tmp_path / "run"
    run = regard.train(str(path), data=columns, model=model, steps=1, batch=4, out=out, quiet=True)
    inputs = read_inputs(run, path)
    assert next(iter(inputs.rows))[1] == ("c d e 0", "a b 0")


def test_the_header_of_a_short_file_is_found_by_the_columns_of_the_training_data(tmp_path):
    path, short = tmp_path / "german.csv", tmp_path / "short.csv"
    rows = [f"ein langer Satz {n},{'gut' if n % 2 else 'schlecht'}" for n in range(40)]
    path.write_text("\n".join(["satz,klasse", *rows]))
    short.write_text("satz\nnoch ein Satz\n")
    model = {"preset": "lstm", "dim": 8, "layers": 1}
    columns = {"text": "satz", "label": "klasse"}
    out = tmp_path / "run"
    run = regard.train(str(path), data=columns, model=model, steps=1, batch=4, out=out, quiet=True)
    assert [text for _, text in read_inputs(run, short).rows] == ["noch ein Satz"]
