"""Baselines, fitted before training starts: an n-gram model of text, simple forecasts of series."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import cast

import torch

from regard.config import RunConfig, build
from regard.data.batch import TextBatch
from regard.errors import CheckpointError, ConfigError
from regard.files.untrusted import read_json
from regard.models.ngram import NGram, NGramConfig
from regard.pipelines.base import TrainingData, validation_metrics
from regard.tasks import Causal
from regard.text import Tokenizer
from regard.training.events import BaselineEvaluated, SeriesBaselines
from regard.training.parallel.ranks import Ranks
from regard.training.storage.run_folder import RunFolder

ORDER = 6  # longer n-grams are not better on a text of a few million tokens
MAX_TOKENS = 2_000_000  # fitting them takes one to two seconds
TextBatches = Iterable[TextBatch]


def evaluate_baseline(
    config: RunConfig, data: TrainingData, folder: RunFolder, ranks: Ranks
) -> Iterator[BaselineEvaluated | SeriesBaselines]:
    """Fit and evaluate the baselines of a run, on rank 0; write baseline.json."""
    if ranks.is_rank0:
        yield from evaluate_series_baselines(config, data, folder)
    if not config.train.baseline or not isinstance(data.task, Causal):
        return
    fit = partial(fit_baseline, data, folder)
    baseline = ranks.all_or_fail(fit if ranks.is_rank0 else lambda: None)
    if baseline is not None:
        yield baseline


def evaluate_series_baselines(
    config: RunConfig, data: TrainingData, folder: RunFolder
) -> Iterator[SeriesBaselines]:
    """The baselines of a series; write baseline.json."""
    if config.train.baseline and data.baselines is not None:
        baselines = SeriesBaselines(data.baselines())
        folder.write_json(folder.baseline, asdict(baselines))
        yield baselines


def read_series_baselines(folder: RunFolder) -> dict[str, dict[str, float]]:
    """The metrics of the baselines of a series by their names; empty if there are none."""
    try:
        return build(SeriesBaselines, read_json(folder.baseline)).metrics
    except (CheckpointError, ConfigError):
        return {}


def fit_baseline(data: TrainingData, folder: RunFolder) -> BaselineEvaluated:
    """Fit an n-gram model (modified Kneser–Ney) to the text; evaluate it on all validation text.

    Only the first tokens of a long text are used to fit it.
    """
    task, tokenizer = data.task, data.tokenizers
    assert isinstance(task, Causal)
    assert isinstance(tokenizer, Tokenizer)
    model = NGram(NGramConfig(vocab_size=tokenizer.vocab_size, order=ORDER, smoothing="kneser_ney"))
    train_batches = list(_take(cast(TextBatches, data.all_batches()), MAX_TOKENS))
    model.fit(train_batches)
    tokens = sum(int(task.count(batch)) for batch in train_batches)
    metrics = validation_metrics(data, model, torch.device("cpu"))
    baseline = BaselineEvaluated(ORDER, tokens, metrics)
    folder.write_json(folder.baseline, asdict(baseline))
    return baseline


def read_baseline(folder: RunFolder) -> BaselineEvaluated | None:
    """The baseline that was evaluated when the run began, if any."""
    try:
        baseline = build(BaselineEvaluated, read_json(folder.baseline))
    except (CheckpointError, ConfigError):
        return None
    return baseline if isinstance(baseline.metrics.get("bits_per_byte"), float) else None


def _take(batches: TextBatches, tokens: int) -> Iterator[TextBatch]:
    """The first batches, up to this number of tokens."""
    for batch in batches:
        if tokens <= 0:
            return
        tokens -= batch.ids.numel()
        yield batch
