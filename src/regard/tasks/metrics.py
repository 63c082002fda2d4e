"""Numbers that say how good a model is."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from regard.errors import DataError


def mean_loss(task: Any, model: nn.Module, batches: Iterable[Any]) -> float:
    """The loss per scored target over all batches, without dropout or smoothing."""
    training = model.training
    model.eval()
    losses, counts = [], []
    with torch.no_grad():
        for batch in batches:
            losses.append(task.loss(model, batch))
            counts.append(task.count(batch))
    model.train(training)
    if not losses or not (count := torch.stack(counts).sum()):
        raise DataError("nothing to evaluate: the held-out set has no target")
    return float(torch.stack(losses).cpu().double().sum() / count.cpu())  # MPS has no float64


def better(name: str, new: float, old: float) -> bool:
    """Whether a metric has become better: higher if it is an accuracy or an F1, else lower.

    >>> better("loss", 0.9, 1.0), better("accuracy", 0.9, 1.0)
    (True, False)
    """
    return math.isnan(old) or (new > old if name.endswith(("accuracy", "f1")) else new < old)


def perplexity(loss: float) -> float:
    """exp(loss): among how many equally likely tokens the model hesitates."""
    return math.exp(min(loss, 700.0))


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Loss in bits per byte of text, so that models with other tokenizers compare."""
    return loss / math.log(2) / bytes_per_token


def exact_match(written: Sequence[str], wanted: Sequence[str]) -> float:
    """The share of sentences that are right to the last character."""
    return sum(a == b for a, b in zip(written, wanted, strict=True)) / len(wanted)


def bleu(
    written: Sequence[str], wanted: Sequence[str], *, lower: bool = False
) -> tuple[float, str]:
    """Corpus BLEU by sacreBLEU, and the signature that says which BLEU it is."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(lowercase=lower)
    score = metric.corpus_score(list(written), [list(wanted)]).score
    return float(score), str(metric.get_signature())


def chrf(written: Sequence[str], wanted: Sequence[str]) -> tuple[float, str]:
    """Corpus chrF by sacreBLEU, and its signature."""
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    score = metric.corpus_score(list(written), [list(wanted)]).score
    return float(score), str(metric.get_signature())
