"""Baselines, evaluated before training: n-grams for text, simple predictions of numbers."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import cast

import torch

from regard.config import RunConfig, build
from regard.data.batch import TextBatch
from regard.errors import CheckpointError, ConfigError
from regard.files.untrusted import read_json
from regard.models.build import is_fitted_without_gradients
from regard.models.ngram import NGram, NGramConfig
from regard.pipelines.base import TrainingData, validation_metrics
from regard.tasks import Causal
from regard.text import Tokenizer
from regard.training.events import NGramBaselineEvaluated, SimpleBaselinesEvaluated
from regard.training.parallel.ranks import Ranks
from regard.training.storage.run_folder import RunFolder

ORDER = 6  # of the n-grams; a higher order is not better on a few million tokens
MAX_TOKENS = 2_000_000  # training tokens of the n-gram model; fitting takes one to two seconds
TextBatches = Iterable[TextBatch]


def evaluate_baselines(
    config: RunConfig, data: TrainingData, folder: RunFolder, ranks: Ranks
) -> Iterator[NGramBaselineEvaluated | SimpleBaselinesEvaluated]:
    """Evaluate the baselines of a run, if it has any, on rank 0, and write baseline.json.

    A model that is fitted without gradients is not compared with an n-gram model.
    """
    uses_gradients = not is_fitted_without_gradients(config.model["family"])

    def evaluate() -> NGramBaselineEvaluated | SimpleBaselinesEvaluated | None:
        if not config.train.baseline:
            return None
        baselines: NGramBaselineEvaluated | SimpleBaselinesEvaluated
        if data.baselines is not None:
            baselines = SimpleBaselinesEvaluated(data.baselines(), data.baseline_settings)
        elif isinstance(data.task, Causal) and uses_gradients:
            baselines = evaluate_ngram(data)
        else:
            return None
        folder.write_json(folder.baseline, asdict(baselines))
        return baselines

    baselines = ranks.all_or_fail(evaluate if ranks.is_rank0 else lambda: None)
    if baselines is not None:
        yield baselines


def evaluate_ngram(data: TrainingData) -> NGramBaselineEvaluated:
    """Fit an n-gram model (modified Kneser–Ney) and evaluate it on all validation text.

    It is fitted to the training text, or to about the first `MAX_TOKENS` tokens of a long one.
    """
    task, tokenizer = data.task, data.tokenizers
    assert isinstance(task, Causal)
    assert isinstance(tokenizer, Tokenizer)
    model = NGram(NGramConfig(vocab_size=tokenizer.vocab_size, order=ORDER, smoothing="kneser_ney"))
    train_batches = list(_take(cast(TextBatches, data.all_batches()), MAX_TOKENS))
    model.fit(train_batches)
    tokens = sum(int(task.count(batch)) for batch in train_batches)
    return NGramBaselineEvaluated(
        ORDER, tokens, validation_metrics(data, model, torch.device("cpu"))
    )


def read_ngram_baseline(folder: RunFolder) -> NGramBaselineEvaluated | None:
    """The n-gram baseline that was evaluated when the run began, if any."""
    try:
        baseline = build(NGramBaselineEvaluated, read_json(folder.baseline))
    except (CheckpointError, ConfigError):
        return None
    return baseline if isinstance(baseline.metrics.get("bits_per_byte"), float) else None


def read_simple_baselines(folder: RunFolder) -> dict[str, dict[str, float]]:
    """The metrics of the other baselines by name; empty if there are none."""
    try:
        return build(SimpleBaselinesEvaluated, read_json(folder.baseline)).metrics
    except (CheckpointError, ConfigError):
        return {}


def read_baselines(folder: RunFolder) -> dict[str, dict[str, float]]:
    """The metrics of all baselines of a run by name, on all its validation data."""
    ngram = read_ngram_baseline(folder)
    if ngram is None:
        return read_simple_baselines(folder)
    # only bits per byte can be compared with runs that have another tokenizer
    bits = {"bits_per_byte": ngram.metrics["bits_per_byte"]}
    return {ngram.name: bits}


def read_baseline_settings(folder: RunFolder) -> dict[str, str]:
    """The settings that train a baseline of a run, by its name; of those that are models."""
    ngram = read_ngram_baseline(folder)
    if ngram is not None:
        return {ngram.name: ngram.settings}
    try:
        return build(SimpleBaselinesEvaluated, read_json(folder.baseline)).settings
    except (CheckpointError, ConfigError):
        return {}


def _take(batches: TextBatches, tokens: int) -> Iterator[TextBatch]:
    """The first batches, until they have at least this number of tokens."""
    for batch in batches:
        if tokens <= 0:
            return
        tokens -= batch.ids.numel()
        yield batch
