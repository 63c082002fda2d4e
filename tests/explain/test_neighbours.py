"""Nearest words against cosines computed word by word."""

import math

import pytest
import torch
from torch import nn

from regard.errors import ConfigError
from regard.explain.neighbours import WordVectors, parse_terms
from regard.text import train_tokenizer

WORDS = "king queen man woman crown field"


@pytest.fixture(scope="module")
def vectors():
    tokenizer = train_tokenizer("word", [WORDS] * 3)
    model = nn.Module()
    model.embed = nn.Embedding(tokenizer.vocab_size, 5)
    return WordVectors.from_model(model, tokenizer)


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.hypot(*a) / math.hypot(*b)


@pytest.mark.parametrize("text", ["king", "king - man + woman"])
def test_the_nearest_words_are_those_with_the_largest_cosines(text, vectors):
    (terms,) = parse_terms(text.split())
    rows = {word: vectors.table[vectors.id(word)].tolist() for word in WORDS.split()}
    query = [sum(sign * rows[word][n] for sign, word in terms) for n in range(5)]
    others = [word for word in rows if word not in text.split()]
    expected = sorted(((cosine(rows[word], query), word) for word in others), reverse=True)
    nearest = vectors.nearest(terms, top=99)
    assert [word for word, _ in nearest] == [word for _, word in expected]
    assert [c for _, c in nearest] == pytest.approx([c for c, _ in expected], abs=1e-6)
    assert vectors.nearest(terms, top=2) == nearest[:2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kings", "'kings' is not in this run's vocabulary; did you mean king?"),
        ("xyzzy", "'xyzzy' is not in .*; try a more frequent word"),
        ("king -", "a word is missing; write for example: king - man"),
        ("- man", "'-' must be between two words"),
        ("king - - man", "'-' must be between two words"),
        ("", "a word is missing"),
    ],
)
def test_words_and_sums_that_cannot_be_read_are_refused(words, message, vectors):
    with pytest.raises(ConfigError, match=message):
        vectors.nearest(parse_terms(words.split())[0])


def test_a_word_is_refused_where_the_vocabulary_is_of_characters():
    tokenizer = train_tokenizer("char", [WORDS])
    vectors = WordVectors(torch.eye(tokenizer.vocab_size), tokenizer)
    with pytest.raises(ConfigError, match="consists of characters;\ngive a character"):
        vectors.id("king")


def test_a_model_without_an_embedding_is_refused(vectors):
    with pytest.raises(ConfigError, match="has no word embedding"):
        WordVectors.from_model(nn.Linear(2, 2), vectors.tokenizer)


def test_a_sample_lists_long_words_with_their_neighbours(vectors):
    ids = vectors.tokenizer.encode("man queen queen woman")
    lines = vectors.sample(torch.tensor(ids).tolist()).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["queen", "woman"]
    assert lines[0] == "queen: " + ", ".join(w for w, _ in vectors.nearest([(1.0, "queen")], 5))
