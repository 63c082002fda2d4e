"""Metrics of models and of generated text."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.errors import DataError


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A context with `model.eval()` and no gradients; the previous mode is restored at its end."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def mean_loss(task: Any, model: nn.Module, batches: Iterable[Any]) -> float:
    """The loss per scored target over all batches, without dropout or label smoothing."""
    losses, counts = [], []
    with evaluation_mode(model):
        for batch in batches:
            losses.append(task.loss(model, batch))
            counts.append(task.count(batch))
    if not losses or not (count := torch.stack(counts).sum()):
        raise DataError("nothing to evaluate: the validation data has no target")
    return float(torch.stack(losses).cpu().double().sum() / count.cpu())  # MPS has no float64


def is_better(name: str, new: Mapping[str, float], old: Mapping[str, float]) -> bool:
    """Whether the metric `name` is better in `new` than in `old`; if equal, whether the loss is.

    Higher is better for accuracy, F1, exact match and correlations, lower for all others.

    >>> is_better("loss", {"loss": 0.9}, {"loss": 1.0})
    True
    >>> is_better("accuracy", {"accuracy": 0.5, "loss": 0.9}, {"accuracy": 0.5, "loss": 1.0})
    True
    """
    if math.isnan(old[name]):
        return True
    if new[name] == old[name] and "loss" in new:
        return new["loss"] < old["loss"]
    higher = name.endswith(("accuracy", "f1", "exact_match", "pearson", "spearman"))
    return new[name] > old[name] if higher else new[name] < old[name]


def perplexity(loss: float) -> float:
    """exp(loss): the number of equally likely tokens with the same uncertainty."""
    return math.exp(min(loss, 700.0))


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Loss in bits per byte of text, which can be compared across tokenizers."""
    return loss / math.log(2) / bytes_per_token


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """The fraction of sentences that are equal to their reference."""
    pairs = zip(hypotheses, references, strict=True)
    return sum(hypothesis == reference for hypothesis, reference in pairs) / len(references)


def bleu(
    hypotheses: Sequence[str], *references: Sequence[str], lower: bool = False
) -> tuple[float, str]:
    """Corpus BLEU by sacreBLEU, and its signature, which states the variant.

    Each of `references` is a list with one reference for each hypothesis.
    """
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(lowercase=lower)
    score = metric.corpus_score(list(hypotheses), list(map(list, references))).score
    return float(score), str(metric.get_signature())


def bleu_is_defined(*references: Sequence[str]) -> bool:
    """Whether a reference has four tokens. Otherwise no 4-gram matches, and BLEU is 0.

    >>> bleu_is_defined(["a red circle"]), bleu_is_defined(["a red circle."])
    (False, True)
    """
    from sacrebleu.metrics.bleu import BLEU

    tokenize = BLEU().tokenizer
    return any(len(tokenize(text).split()) >= 4 for texts in references for text in texts)


def chrf(hypotheses: Sequence[str], *references: Sequence[str]) -> tuple[float, str]:
    """Corpus chrF by sacreBLEU, and its signature."""
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    score = metric.corpus_score(list(hypotheses), list(map(list, references))).score
    return float(score), str(metric.get_signature())
