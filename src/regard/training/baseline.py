"""What counting gets from the same text: the least that a network has to beat."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import cast

import torch

from regard.config import build
from regard.data.batch import TextBatch
from regard.errors import CheckpointError, ConfigError
from regard.files.atomic import write_json
from regard.files.untrusted import read_json
from regard.models.ngram import NGram, NGramConfig
from regard.pipelines.base import TrainingData
from regard.tasks import Causal
from regard.text import Tokenizer
from regard.training.events import BaselineEvaluated
from regard.training.storage.run_folder import RunFolder

ORDER = 6  # with these discounts longer grams are no better on a text of a few million tokens
MOST_TOKENS = 2_000_000  # counted in a second or two
Texts = Iterable[TextBatch]


def count(material: TrainingData, folder: RunFolder, limit: int) -> BaselineEvaluated:
    """Count n-grams (modified Kneser–Ney) of the text, judge them as the model is, keep that.

    Of a long text the beginning is counted; `limit` held-out targets are judged, as in training.
    """
    task, tokenizer = material.task, material.tokenizers
    assert isinstance(task, Causal)
    assert isinstance(tokenizer, Tokenizer)
    model = NGram(NGramConfig(vocab_size=tokenizer.size, order=ORDER, smoothing="kneser_ney"))
    learned = list(_first(cast(Texts, material.all_batches()), MOST_TOKENS))
    model.fit(learned)
    judged = cast(Texts, material.validation_batches(limit))
    scores = torch.cat([model.scores(each.ids, each.targets) for each in judged])
    tokens = sum(int(task.count(each)) for each in learned)
    counted = BaselineEvaluated(ORDER, tokens, task.measured(-float(scores.mean())))
    write_json(folder.baseline, asdict(counted))
    return counted


def read_baseline(folder: RunFolder) -> BaselineEvaluated | None:
    """What was counted when a run began; None where nothing was."""
    try:
        counted = build(BaselineEvaluated, read_json(folder.baseline))
    except (CheckpointError, ConfigError):
        return None
    return counted if isinstance(counted.metrics.get("bits_per_byte"), float) else None


def _first(batches: Texts, tokens: int) -> Iterator[TextBatch]:
    """The first batches, until there are so many tokens."""
    for batch in batches:
        if tokens <= 0:
            return
        tokens -= batch.ids.numel()
        yield batch
