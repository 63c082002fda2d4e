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
    said = regard("train", materials / "cats.txt", *WORDS, "--out", "run")
    assert said.code == 0
    assert "tokenizer  word, " in said.err
    assert "model      cbow, " in said.err
    assert "regard neighbours run some words" in said.err
    assert "accuracy" in regard("evaluate", "run").out
    assert "logits of the middle word" in regard("info", "run").out


def test_a_line_for_each_neighbour_under_what_was_asked(regard, vectors):
    said = regard("neighbours", vectors, "cat", "cat", "-", "mat", "+", "dogs", "-n", 2)
    lines = [line.split() for line in said.out.splitlines()]
    assert [line[:-2] for line in lines] == [["cat"], [], ["cat", "-", "mat", "+", "dogs"], []]
    assert all(-1 <= float(line[-1]) <= 1 for line in lines)
    found = json.loads(regard("neighbours", vectors, "cat", "-n", 2, "--json").out)
    assert [[word, f"{cosine:.3f}"] for word, cosine in found["cat"]] == [x[-2:] for x in lines[:2]]


def test_a_word_is_compared_with_itself_where_it_stands_twice(regard, materials, vectors):
    text = "the cat and the dogs"
    said = regard("neighbours", vectors, "the", "--in", text)
    assert [line.split() for line in said.out.splitlines()] == [
        ["tokens", "table"],
        ["1", "and", "4", "1.000"],
    ]
    regard("train", materials / "cats.txt", *LSTM, "data.tokenizer=word", "--out", "lstm")
    header, row = regard("neighbours", "lstm", "the", "--in", text).out.splitlines()
    assert header.split() == ["tokens", "table", "last", "layer"]
    assert row.split()[:4] == ["1", "and", "4", "1.000"]
    assert float(row.split()[4]) < 0.999
    found = json.loads(regard("neighbours", "lstm", "the", "--in", text, "--json").out)
    assert found["last layer"][0][1] == pytest.approx(float(row.split()[4]), abs=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["catt"], "'catt' is not in this run's vocabulary; did you mean cat"),
        (["cat", "dogs", "--in", "cat cat"], "--in compares one word with itself, not cat dogs"),
        (["cat", "--in", "a cat"], "'cat' occurs 1 times in the text"),
        (["cat", "+"], "a word is missing"),
    ],
)
def test_a_slip_is_named(regard, vectors, words, message):
    said = regard("neighbours", vectors, *words)
    assert said.code == 2
    assert message in said.err


def test_a_model_that_counts_has_no_vectors(regard, materials):
    regard("train", materials / "cats.txt", "model.preset=ngram", "--out", "run")
    said = regard("neighbours", "run", "cat")
    assert said.code == 2
    assert "NGram, has no embedding" in said.err
