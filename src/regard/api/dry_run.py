"""Preview of a training run: data and settings are read and checked, nothing is trained."""

from dataclasses import dataclass, replace
from pathlib import Path

from regard.api.overrides import format_overrides
from regard.config import Choice, RunConfig, kind_of
from regard.models.build import (
    build_on_meta,
    config_table,
    count_parameters,
    is_fitted_without_gradients,
)
from regard.models.presets import ModelConfig
from regard.pipelines import open_split, pipeline_of, smallest_model
from regard.pipelines.prepare import check_compatible
from regard.text import PairTokenizers, train_pair, train_tokenizer
from regard.training.fine_tuning import format_tuning, frozen_warning, tuning
from regard.training.setup.setting_checks import check_before_data
from regard.training.storage.evaluation import FEW_TARGETS, describe_few
from regard.training.storage.initial_weights import check_initial_model, initial_tokenizers
from regard.training.storage.run_folder import RunFolder, new_folder


@dataclass(frozen=True, slots=True)
class TrainingPreview:
    """The folder, the data, the model and the settings of a run that `train` would begin."""

    folder: str  # the run folder that would be written
    data: str
    validation: str
    notes: dict[str, str]  # such as the loss mask of a dialogue, or a warning
    tokenizer: str | None  # its kind, or the run that it is taken from; None without text
    family: str
    parameters: int  # with a vocabulary of one token; 0 for models fitted without gradients
    device: str
    settings: list[list[str]]  # `key=value` arguments that differ from the defaults, in groups


def preview(config: RunConfig, out: Path | str | None = None) -> TrainingPreview:
    """Preview training with these settings; raise errors that would stop it before a step."""
    folder = new_folder(config.name) if out is None else Path(out)
    RunFolder(folder).require_new_path()
    device = check_before_data(config)
    if config.train.start is not None:
        check_initial_model(config)
    training, validation = open_split(config)
    tokenizers = initial_tokenizers(config)
    check_compatible(config, training, tokenizers)
    pipeline = pipeline_of(config)
    pipeline.check_splits(config, training, validation)
    if tokenizers is not None:
        pipeline.check_tokenizers(config, tokenizers)
    elif pipeline.tokenizer_type is not None:
        _check_tokenizer_options(config.data.tokenizer, pipeline.tokenizer_type)
    notes = pipeline.preview(config, training, validation, tokenizers)
    size = pipeline.text_bytes(validation)
    if size is not None and size < FEW_TARGETS:
        notes = {**notes, "warning": describe_few(size, "byte" if size == 1 else "bytes")}
    config = pipeline.complete_settings(config, training)
    smallest = smallest_model(config)
    model = config_table(smallest)
    without_gradients = is_fitted_without_gradients(model["family"])
    if not without_gradients:
        notes = _with_tuning(notes, config, smallest)
    kind, options = kind_of(model.get("head") or "none")
    if "classes" in options:  # the classes of the data are counted when training begins
        model["head"] = {"kind": kind, **{k: v for k, v in options.items() if k != "classes"}}
    tokenizer = None
    if pipeline.tokenizer_type is not None:
        start = config.train.start
        tokenizer = kind_of(config.data.tokenizer)[0] if start is None else f"that of {start}"
    return TrainingPreview(
        folder=str(folder),
        data=training.description,
        validation=validation.description,
        notes=notes,
        tokenizer=tokenizer,
        family=model["family"],
        parameters=0 if without_gradients else count_parameters(smallest),
        device=device.type,
        settings=format_overrides(replace(config, model=model)),
    )


def _check_tokenizer_options(choice: Choice, tokenizer_type: type) -> None:
    """Raise if the options of a tokenizer are wrong: train it on a word."""
    if tokenizer_type is PairTokenizers:
        train_pair(choice, lambda: iter([("word", "word")]))
    else:
        train_tokenizer(choice, ["word"])


def _with_tuning(notes: dict[str, str], config: RunConfig, model: ModelConfig) -> dict[str, str]:
    """The notes with one on `train.tune`; raise if it does not fit the model."""
    meta_model = build_on_meta(model)
    tuning(config.train.tune).prepare(meta_model)
    warnings = [notes.get("warning"), frozen_warning(config)]
    new = {
        "trainable": format_tuning(config, meta_model),
        "warning": "; ".join(filter(None, warnings)),
    }
    return {**notes, **{label: note for label, note in new.items() if note}}
