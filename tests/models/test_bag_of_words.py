"""The bag of words: the lecture's table, and a classifier that is linear in it."""

import math

import pytest
import torch
import torch.nn.functional as F

from regard.data.batch import LabelBatch
from regard.errors import ConfigError
from regard.models.bag_of_words import BagOfWords, BagOfWordsConfig
from regard.tasks.text_classification import TextClassification
from regard.text import train_tokenizer

BANANAS = ["yes, we have no bananas", "say yes for bananas", "no bananas, we say"]
WORDS = [",", "bananas", "for", "have", "no", "say", "we", "yes"]


def bag(**choices):
    sizes = {"vocab_size": 12, "head": {"kind": "classification", "classes": 3}}
    return BagOfWords(BagOfWordsConfig(**{**sizes, **choices}))


def some_texts():
    ids = torch.randint(12, (4, 9), generator=torch.Generator().manual_seed(1))
    return ids, torch.tensor([9, 4, 1, 7])


def test_the_lecture_s_three_sentences_give_its_table():
    tokenizer = train_tokenizer("word", BANANAS)
    model = bag(vocab_size=tokenizer.vocab_size)
    columns = []
    for sentence in BANANAS:
        counts = model(torch.tensor([tokenizer.encode(sentence)]))[0, 0]
        named = {tokenizer.piece(id): int(counts[id]) for id in range(tokenizer.vocab_size)}
        columns.append("".join(str(named[word]) for word in WORDS))
    assert columns == ["11011011", "01100101", "11001110"]


def test_the_order_of_words_is_lost_and_their_number_is_not():
    ids, lengths = some_texts()
    model = bag()
    assert torch.equal(model(ids), model(ids.flip(1)))
    rows = [row[:n] for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
    expected = [[row.count(word) for word in range(12)] for row in rows]
    assert model(ids, lengths=lengths)[:, 0].tolist() == expected


def test_the_classifier_is_linear_in_the_counts():
    ids, lengths = some_texts()
    model = bag()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    weight, bias = model.head.out.weight.tolist(), model.head.out.bias.tolist()
    logits = model.head(model(ids, lengths=lengths), lengths)
    for row, length, ours in zip(ids.tolist(), lengths.tolist(), logits.tolist(), strict=True):
        slow = [bias[c] + sum(weight[c][id] for id in row[:length]) for c in range(3)]
        assert ours == pytest.approx(slow, abs=1e-5)  # sums in another order, in float32


def test_by_shares_a_long_text_weighs_as_much_as_a_short_one():
    model = bag(head={"kind": "classification", "classes": 3, "pool": "mean"})
    torch.nn.init.normal_(model.head.out.weight)
    ids, twice = torch.tensor([[3, 5]]), torch.tensor([[3, 5, 3, 5]])
    logits = [model.head(model(x), torch.tensor([x.shape[1]])) for x in (ids, twice)]
    torch.testing.assert_close(*logits)


def test_before_it_learns_it_says_nothing_and_its_loss_is_convex():
    ids, lengths = some_texts()
    model, task = bag(), TextClassification()
    batch = LabelBatch(ids, lengths, torch.tensor([0, 2, 1, 1]))
    assert float(task.loss(model, batch).detach()) == pytest.approx(4 * math.log(3))
    task.loss(model, batch).backward()
    counts = model(ids, lengths=lengths)[:, 0]
    gradient = torch.full((4, 3), 1 / 3) - F.one_hot(batch.targets, 3)
    torch.testing.assert_close(model.head.out.weight.grad, gradient.T @ counts)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"context": 0}, "context=0 must be at least 1"),
        ({"head": {"kind": "classification", "pool": "last"}}, "a bag of words has no word order"),
        ({"head": {"kind": "tag", "classes": 2}}, "a bag of words has no word order"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        BagOfWordsConfig(**{"vocab_size": 5, **wrong})
