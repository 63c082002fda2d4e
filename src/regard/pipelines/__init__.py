"""One pipeline per kind of data, from a path to batches, samples, evaluation and prediction."""

from regard.pipelines.all_pipelines import PIPELINES
from regard.pipelines.base import (
    Data,
    EvalData,
    Pipeline,
    TrainedModel,
    TrainingData,
    validation_metrics,
)
from regard.pipelines.detect import (
    column_settings,
    data_fingerprint,
    is_dataset_name,
    open_data,
    open_split,
    open_validation,
    run_name,
)
from regard.pipelines.prepare import (
    check_data_kind,
    default_settings,
    has_tokenizer,
    load_tokenizers,
    pipeline_of,
    prepare_evaluation,
    prepare_training,
    sample,
    save_tokenizers,
    smallest_model,
    tokenizer_fingerprint,
)

__all__ = [
    "PIPELINES",
    "Data",
    "EvalData",
    "Pipeline",
    "TrainedModel",
    "TrainingData",
    "check_data_kind",
    "column_settings",
    "data_fingerprint",
    "default_settings",
    "has_tokenizer",
    "is_dataset_name",
    "load_tokenizers",
    "open_data",
    "open_split",
    "open_validation",
    "pipeline_of",
    "prepare_evaluation",
    "prepare_training",
    "run_name",
    "sample",
    "save_tokenizers",
    "smallest_model",
    "tokenizer_fingerprint",
    "validation_metrics",
]
