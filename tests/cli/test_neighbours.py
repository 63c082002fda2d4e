"""`regard train … task=cbow` and `regard neighbours`."""

import json

import pytest

from cli.conftest import trained

WORDS = ["task=cbow", "model.dim=8", "train.steps=20", "train.batch=8", "train.evaluate_every=20"]
LSTM = ["model.preset=lstm", "model.dim=8", "model.layers=1", "train.steps=2", "train.batch=2"]


@pytest.fixture(scope="session")
def vectors(materials, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("vectors") / "cats", materials / "cats.txt", WORDS)


def test_a_text_and_the_task_are_enough(regard, materials):
    completed = regard("train", materials / "cats.txt", *WORDS, "--out", "run")
    assert completed.code == 0
    assert "tokenizer  word, " in completed.err
    assert "model      cbow, " in completed.err
    assert "regard neighbours run some words" in completed.err
    assert "accuracy" in regard("evaluate", "run").out
    assert "logits of the centre word" in regard("info", "run").out


def test_neighbours_are_listed_under_their_query(regard, vectors):
    completed = regard("neighbours", vectors, "cat", "cat", "-", "mat", "+", "dogs", "-n", 2)
    lines = [line.split() for line in completed.out.splitlines()]
    assert [line[:-2] for line in lines] == [["cat"], [], ["cat", "-", "mat", "+", "dogs"], []]
    assert all(-1 <= float(line[-1]) <= 1 for line in lines)
    output = json.loads(regard("neighbours", vectors, "cat", "-n", 2, "--json").out)
    assert [[word, f"{cosine:.3f}"] for word, cosine in output["cat"]] == [
        x[-2:] for x in lines[:2]
    ]


def test_a_word_is_compared_at_its_positions_in_a_text(regard, materials, vectors):
    text = "the cat and the dogs"
    completed = regard("neighbours", vectors, "the", "--in", text)
    assert [line.split() for line in completed.out.splitlines()] == [
        ["tokens", "embedding"],
        ["1", "and", "4", "1.000"],
    ]
    regard("train", materials / "cats.txt", *LSTM, "data.tokenizer=word", "--out", "lstm")
    header, row = regard("neighbours", "lstm", "the", "--in", text).out.splitlines()
    assert header.split() == ["tokens", "embedding", "last", "layer"]
    assert row.split()[:4] == ["1", "and", "4", "1.000"]
    assert float(row.split()[4]) < 0.999
    output = json.loads(regard("neighbours", "lstm", "the", "--in", text, "--json").out)
    assert output["last layer"][0][1] == pytest.approx(float(row.split()[4]), abs=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["catt"], "'catt' is not in this run's vocabulary; did you mean cat"),
        (["cat", "dogs", "--in", "cat cat"], "--in compares one word with itself, not cat dogs"),
        (["cat", "--in", "a cat"], "'cat' occurs 1 time in the text"),
        (["cat", "+"], "a word is missing"),
    ],
)
def test_a_typing_error_is_named(regard, vectors, words, message):
    completed = regard("neighbours", vectors, *words)
    assert completed.code == 2
    assert message in completed.err


def test_a_model_fitted_without_gradients_has_no_embedding(regard, materials):
    regard("train", materials / "cats.txt", "model.preset=ngram", "--out", "run")
    completed = regard("neighbours", "run", "cat")
    assert completed.code == 2
    assert "this model has no word embedding" in completed.err
