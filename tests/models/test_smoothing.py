"""Smoothing against a program that nobody here wrote, and what each promises."""

import math
from pathlib import Path

import pytest
import torch

import count_reference as reference
from regard.data.batch import TextBatch
from regard.errors import ConfigError
from regard.models.ngram import NGram, NGramConfig
from regard.models.smoothing import DEFAULT_DISCOUNTS

HERE = Path(__file__).parent


def fit_ngram(rows, vocab_size, order, smoothing):
    """A model of rows of ids, each as long as it is."""
    model = NGram(NGramConfig(vocab_size=vocab_size, order=order, smoothing=smoothing))
    texts = [torch.tensor([row]) for row in rows]
    model.fit([TextBatch(text[:, :-1], text[:, 1:]) for text in texts])
    return model


@pytest.mark.parity
def test_modified_kneser_ney_equals_kenlm():
    # lmplz -o 5 --discount_fallback < kenlm.txt > kenlm.arpa, of kenlm 0.3.0 from the registry
    lines = [line.split() for line in (HERE / "kenlm.txt").read_text().splitlines()]
    words = ["<s>", "</s>", *sorted({word for line in lines for word in line})]
    rows = [[words.index(word) for word in ["<s>", *line, "</s>"]] for line in lines]
    model = fit_ngram(rows, len(words), 5, "kneser_ney")
    with (HERE / "kenlm.arpa").open() as file:
        arpa = reference.Arpa(file)
    assert len(arpa.log) == 494
    assert model.smoothing.discounts[-1].tolist() == list(
        DEFAULT_DISCOUNTS
    )  # kenlm could not tell either
    heads = ["<unk>", *words[1:]]  # what never follows: there an unknown word, here the beginning
    for row in rows[:20]:
        p = model.probabilities(torch.tensor([row[:-1]]))[0]
        for t in range(len(row) - 1):
            history = [words[each] for each in row[max(0, t - 3) : t + 1]]
            expected = torch.tensor([10 ** arpa.log10(word, history) for word in heads])
            # kenlm computes in float32, and writes seven digits of a logarithm
            torch.testing.assert_close(p[t], expected.double(), rtol=2e-6, atol=0)


def test_a_word_that_follows_one_word_only_is_no_guess_elsewhere():
    # san francisco, san francisco, …: often, but after one word; the glasses are anybody's
    san, francisco, glasses, *others = range(8)
    rows = [[san, francisco]] * 9 + [[other, glasses] for other in others]
    kneser_ney = fit_ngram(rows, 8, 2, "kneser_ney").probabilities(torch.tensor([[glasses]]))
    witten_bell = fit_ngram(rows, 8, 2, "witten_bell").probabilities(torch.tensor([[glasses]]))
    assert kneser_ney[0, 0, glasses] > 2 * kneser_ney[0, 0, francisco]
    assert witten_bell[0, 0, glasses] < witten_bell[0, 0, francisco]


def test_add_k_with_more_k_is_closer_to_even():
    rows, spread = [[0, 1, 0, 1, 0, 2]], []
    for k in (0.01, 1.0, 100.0):
        p = fit_ngram(rows, 4, 2, {"kind": "add_k", "k": k}).probabilities(torch.tensor([[0]]))[
            0, 0
        ]
        torch.testing.assert_close(p[1].item(), (2 + k) / (3 + 4 * k), rtol=1e-12, atol=0)
        spread.append((p.max() - p.min()).item())
    assert spread == sorted(spread, reverse=True)


def test_discounts_that_would_leave_nothing_are_replaced():
    # n1 = n2 = 3, n3 = 6: D(2) = 2 - 3 * 1/3 * 6/3 = 0
    rows = [[w] * (count + 1) for w, count in enumerate([1] * 3 + [2] * 3 + [3] * 6)]
    model = fit_ngram(rows, 13, 1, "kneser_ney")
    assert model.smoothing.discounts[0].tolist() == list(DEFAULT_DISCOUNTS)
    assert model(torch.tensor([[0]])).isfinite().all()


@pytest.mark.parametrize("k", [0.0, -1.0, math.inf])
def test_what_cannot_be_added_is_said(k):
    with pytest.raises(ConfigError, match=rf"k={k} must be more than 0"):
        NGram(NGramConfig(vocab_size=3, smoothing={"kind": "add_k", "k": k}))


def test_an_unknown_smoothing_is_named():
    with pytest.raises(ConfigError, match=r"kneser-ney.*kneser_ney"):
        NGram(NGramConfig(vocab_size=3, smoothing="kneser-ney"))
