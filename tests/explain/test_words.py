"""Tokens as words."""

import pytest
import torch

from regard.explain.words import merge_words, word_groups, words_of
from regard.text import train_tokenizer

TEXT = "The cat didn't sit, the cats sat on 12 mats.\n"


@pytest.mark.parametrize("kind", ["char", "word", "bpe", "wordpiece", "unigram"])
def test_tokens_of_every_kind_form_the_same_words(kind):
    size = {} if kind in ("char", "word") else {"vocab_size": 300}
    tokenizer = train_tokenizer({"kind": kind, **size}, [TEXT] * 4)
    ids = tokenizer.encode("the cat sat on 12 mats")
    groups = word_groups(tokenizer, ids)
    assert [word.strip() for word in words_of(tokenizer, ids, groups)] == [
        "the", "cat", "sat", "on", "12", "mats",
    ]  # fmt: skip
    assert [place for group in groups for place in group] == list(range(len(ids)))


def test_punctuation_and_special_tokens_are_words():
    tokenizer = train_tokenizer("char", [TEXT])
    ids = [tokenizer.eos_id, *tokenizer.encode("cat, didn't"), tokenizer.eos_id]
    words = words_of(tokenizer, ids, word_groups(tokenizer, ids))
    assert words == [tokenizer.piece(ids[0]), "cat", ",", "didn't", tokenizer.piece(ids[0])]


def test_weights_to_a_word_are_added_and_those_from_it_averaged():
    weights = torch.tensor([[[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]]])
    merged = merge_words(weights, [[0], [1, 2]], [[0, 1], [2]])
    torch.testing.assert_close(merged, torch.tensor([[[1.0, 0.0], [0.75, 0.25]]]))
