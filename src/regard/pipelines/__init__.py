"""One pipeline per kind of data: detection, defaults, training and evaluation data, samples."""

from regard.pipelines.prepare import (
    data_fingerprint,
    has_tokenizer,
    load_tokenizers,
    open_split,
    open_validation,
    pair_task,
    prepare_evaluation,
    prepare_training,
    smallest_model,
    tokenizer_fingerprint,
)

__all__ = [
    "data_fingerprint",
    "has_tokenizer",
    "load_tokenizers",
    "open_split",
    "open_validation",
    "pair_task",
    "prepare_evaluation",
    "prepare_training",
    "smallest_model",
    "tokenizer_fingerprint",
]
