"""Numbers that say how good a model is, against others' code and by hand."""

import math

import pytest
import sacrebleu
import torch
from torch import nn

from regard.data.batch import TextBatch
from regard.errors import DataError
from regard.tasks import Causal
from regard.tasks.metrics import (
    bits_per_byte,
    bleu,
    bleu_is_defined,
    chrf,
    evaluation_mode,
    exact_match,
    mean_loss,
    perplexity,
)

WRITTEN = ["The cat sat on the mat.", "A dog!", "two men are Walking", ""]
WANTED = ["the cat sat on a mat.", "A dog!", "Two men walk down the street", "nothing"]


@pytest.mark.parametrize("lower", [False, True])
def test_bleu_is_sacrebleus(lower):
    score, signature = bleu(WRITTEN, WANTED, lower=lower)
    theirs = sacrebleu.corpus_bleu(WRITTEN, [WANTED], lowercase=lower)
    assert score == theirs.score
    assert 0 < score < 100
    assert f"case:{'lc' if lower else 'mixed'}|" in signature
    assert f"version:{sacrebleu.__version__}" in signature


def test_chrf_is_sacrebleus():
    score, signature = chrf(WRITTEN, WANTED)
    assert score == sacrebleu.corpus_chrf(WRITTEN, [WANTED]).score
    assert 0 < score < 100
    assert "nc:6" in signature


def test_bleu_is_undefined_without_four_tokens_in_a_reference():
    captions = ["a red circle", "two dogs"]
    assert sacrebleu.corpus_bleu(captions, [captions]).score == 0
    assert not bleu_is_defined(captions)
    assert bleu_is_defined(captions, ["a red circle.", "dogs"])  # 13a separates the period


def test_a_perfect_translation_has_all_the_points():
    assert bleu(WANTED, WANTED)[0] == pytest.approx(100)
    assert chrf(WANTED, WANTED)[0] == pytest.approx(100)
    assert exact_match(WANTED, WANTED) == 1.0


def test_exact_match_is_the_share_that_is_right_to_the_last_character():
    assert exact_match(WRITTEN, WANTED) == 0.25
    assert exact_match(["a "], ["a"]) == 0.0
    with pytest.raises(ValueError, match="zip"):
        exact_match(["a"], ["a", "b"])


def test_perplexity_is_the_number_of_equally_likely_choices():
    assert perplexity(math.log(27)) == pytest.approx(27)
    assert math.isfinite(perplexity(1e9))


def test_bits_per_byte_of_a_guess_among_bytes_is_eight():
    assert bits_per_byte(math.log(256), bytes_per_token=1) == pytest.approx(8)
    assert bits_per_byte(math.log(256), bytes_per_token=4) == pytest.approx(2)


class Chance(nn.Module):
    """Finds every one of 4 ids equally likely."""

    def __init__(self):
        super().__init__()
        self.head = ChanceHead()

    def forward(self, ids):
        return ids


class ChanceHead(nn.Module):
    def loss(self, hidden, targets, *, label_smoothing=0.0):
        return (targets != -1).sum() * math.log(4)


def test_the_loss_is_per_target_over_all_batches():
    batches = [
        TextBatch(torch.zeros(1, 4, dtype=torch.long), torch.tensor([[1, 2, -1, -1]])),
        TextBatch(torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)),
    ]
    assert mean_loss(Causal(), Chance(), batches) == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    "batches", [[], [TextBatch(torch.zeros(1, 2).long(), -torch.ones(1, 2).long())]]
)
def test_nothing_to_evaluate_is_an_error(batches):
    with pytest.raises(DataError, match="nothing to evaluate"):
        mean_loss(Causal(), Chance(), batches)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_mode_ends_with_an_error_too(training):
    model = nn.Linear(2, 2).train(training)

    def evaluate():
        with evaluation_mode(model):
            assert not model.training
            assert not model(torch.ones(2)).requires_grad
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate()
    assert model.training == training
    assert model(torch.ones(2)).requires_grad
