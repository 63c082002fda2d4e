"""Open a checkpoint of another library, check every tensor, then load it or copy its weights."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.config import kind_of, merge
from regard.errors import CheckpointError, ConfigError, indented_list
from regard.files.safetensors import PICKLE_SUFFIXES, TensorReader, open_tensors, pickle_error
from regard.files.untrusted import path_exists, quote, read_json
from regard.hub import MODEL_TYPES
from regard.hub.class_names import read_class_count, read_class_names
from regard.hub.config_json import NO_MODEL_TYPE, read_config_as, read_model_type
from regard.hub.convert_weights import Shapes, is_finite, read_internal, write_internal
from regard.hub.model_type import CheckpointWithoutConfig, ConfigDict, ModelType
from regard.hub.model_types import e2k, g2p_en, llama2c
from regard.hub.tokenizer_files import check_tokenizers, read_tokenizers
from regard.hub.weight_mapping import (
    Rule,
    TensorMapping,
    WeightPlan,
    matches,
    plan_export,
    plan_import,
)
from regard.models.build import build_on_meta, config_table, resolve, weights
from regard.models.presets import ModelConfig
from regard.text import PairTokenizers, Tokenizer

logger = logging.getLogger(__name__)

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS_WITHOUT_PREFIX = ("none", "pooled")  # their tensors have no prefix: no task head
TASK_FOR_HEAD = {  # by architecture and head of a model; other heads have no task here
    ("encoder", "classification"): "text_classification",
    ("decoder", "classification"): "text_classification",
    ("encoder", "tag"): "tag",
    ("decoder", "tag"): "tag",
    ("decoder", "linear"): "causal",
    ("encoder-decoder", "linear"): "seq2seq",
    ("encoder", "masked"): "masked",
    ("encoder", "span"): "span",
}
ONE_CLASS = "single_label_classification"  # the problem_type of exactly one class per text
REGRESSION = "regression"  # the problem_type of one number per text
TIED_WEIGHTS = {"head.weight": "embed.token.weight"}  # weight tying: output matrix and embedding
Reader = Callable[[Path], CheckpointWithoutConfig]
CHECKPOINT_SUFFIXES = (".safetensors", ".json", ".model")
CHECKPOINT_FOLDER = "give a Hugging Face folder, with config.json and model.safetensors"
FORMATS_WITHOUT_CONFIG: tuple[tuple[Callable[[Path], Path | None], Reader], ...] = (
    (llama2c.find_file, llama2c.open_file),
    (e2k.find_file, e2k.open_file),
    (g2p_en.find_file, g2p_en.open_file),
)


@dataclass(frozen=True, kw_only=True)
class ExternalCheckpoint:
    """A checkpoint of another library whose tensors all fit a model here."""

    path: Path
    model_type: ModelType
    config: ModelConfig
    config_json: ConfigDict  # empty if there is none
    tensors: TensorReader
    plan: WeightPlan
    shapes: Shapes  # of the internal tensors
    tokenizers: Tokenizer | PairTokenizers | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; if they differ, the one to which torch promotes them."""
        dtypes = (self.tensors.entries[m.external].dtype for m in self.plan.mappings)
        return reduce(torch.promote_types, dtypes)

    @property
    def task(self) -> str:
        """The task with which such a model is trained here, or "none"."""
        problem = self.config_json.get("problem_type")
        if getattr(self.config, "input_kind", "text") == "images":
            task = "image_classification" if self.head == "classification" else "none"
        else:
            architecture = getattr(self.config, "architecture", "decoder")
            task = TASK_FOR_HEAD.get((architecture, self.head), "none")
        if (
            task == "text_classification"
            and self.num_outputs == 1
            and problem in (None, REGRESSION)
        ):
            return "text_regression"  # as transformers chooses
        return task if problem in (None, ONE_CLASS) else "none"

    @property
    def head(self) -> str:
        """The kind of the model's head."""
        return _head_kind(self.config)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes of a classifier or a tagger."""
        return read_class_names({"num_labels": self.num_outputs, **self.config_json})

    @property
    def num_outputs(self) -> int | None:
        """The number of outputs of a classification, regression or tagging head."""
        num_outputs: int | None = kind_of(getattr(self.config, "head", "none"))[1].get("classes")
        return num_outputs

    def with_settings(self, settings: Mapping[str, Any]) -> "ExternalCheckpoint":
        """The checkpoint with other model settings, as in `{"position": {"base": 500000}}`.

        The new settings must not change the name or the shape of any tensor.
        """
        if not settings:
            return self
        config = resolve(merge(config_table(self.config), settings))
        shapes = _shapes(config)
        problems = [f"{name} is missing" for name in shapes if name not in self.shapes]
        for name, shape in self.shapes.items():
            if name not in shapes:
                problems.append(f"{name} is in the checkpoint, not in the model")
            elif shape != shapes[name]:
                problems.append(
                    f"{name} has shape {tuple(shape)}, but the model has {tuple(shapes[name])}"
                )
        if problems:
            raise ConfigError(
                f"the tensors in {self.path} do not fit the changed settings:"
                f"{indented_list(problems)}"
            )
        return replace(self, config=config)

    def load(self) -> nn.Module:
        """Load the model, without a second copy of the weights in memory."""
        model = build_on_meta(self.config)
        with self.tensors:
            self._check_duplicates()
            state = dict(read_internal(self.tensors, self.plan.mappings, self.shapes, self.dtype))
        self._report_non_finite([name for name, tensor in state.items() if not is_finite(tensor)])
        model.load_state_dict(state, assign=True)
        return model

    def write_weights(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the weights with their internal names into one safetensors file, by streaming."""
        with self.tensors:
            self._check_duplicates()
        non_finite = write_internal(
            self.tensors, self.plan.mappings, self.shapes, self.dtype, path, metadata
        )
        self._report_non_finite(non_finite)

    def _report_non_finite(self, non_finite: list[str]) -> None:
        if non_finite:
            logger.warning(
                "%s: %d of the tensors have NaN or infinite values, so the outputs of the model "
                "may have them too: %s",
                self.path,
                len(non_finite),
                ", ".join(map(quote, non_finite[:5])) + (", …" if len(non_finite) > 5 else ""),
            )

    def _check_duplicates(self) -> None:
        for name, original in self.plan.duplicates.items():
            if self.tensors.equal(name, original):
                continue
            tied = (
                self.plan.tied & {name, original}
                and "tie_word_embeddings" in self.model_type.fields
            )
            hint = ';\nif the weights are not tied, set "tie_word_embeddings": false in config.json'
            raise CheckpointError(
                f"{self.path}: {quote(name)} and {quote(original)} should be the same tensor, "
                f"but differ{hint if tied else ''}"
            )


def is_external_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint of another library, not a run."""
    hf = _read_config_json(path)
    return "train" not in hf and (bool(hf) or _find_reader(path) is not None)


def _find_reader(path: Path) -> tuple[Reader, Path] | None:
    """The file of a format without config.json at `path`, and the function that reads it."""
    for find_file, open_file in FORMATS_WITHOUT_CONFIG:
        file = find_file(path)
        if file is not None:
            return open_file, file
    return None


def _head_kind(config: Any) -> str:
    """The kind of a model's head; recurrent models have no such setting and a linear head."""
    return kind_of(getattr(config, "head", "linear"))[0]


def _read_config_json(path: Path) -> ConfigDict:
    """The content of config.json; empty if there is none that can be read."""
    try:
        return read_json(path / "config.json")
    except CheckpointError:
        return {}


def _open_without_config(path: Path) -> CheckpointWithoutConfig | None:
    """Open a checkpoint without config.json; None if `path` is a folder that holds none."""
    if path.is_dir() and {"model_type", "architectures"} & _read_config_json(path).keys():
        return None
    reader_and_file = _find_reader(path)
    if reader_and_file is not None:
        reader, file = reader_and_file
        return reader(file)
    if path.is_dir():
        return None
    if path.suffix in PICKLE_SUFFIXES:
        raise pickle_error(path)
    if path.suffix in CHECKPOINT_SUFFIXES:
        raise CheckpointError(f"{path} is one file of a checkpoint; give its folder: {path.parent}")
    raise CheckpointError(f"{path} is not a checkpoint; {CHECKPOINT_FOLDER}")


def open_checkpoint(path: Path | str) -> ExternalCheckpoint:
    """Open a checkpoint and check that every tensor fits; no weight is read yet."""
    path = Path(path)
    if not path_exists(path):
        raise CheckpointError(f"no checkpoint at {path}; {CHECKPOINT_FOLDER}")
    without_config = _open_without_config(path)
    folder = path if path.is_dir() else path.parent
    if without_config is None:
        if not path_exists(path / "config.json"):
            raise CheckpointError(f"{path} has no config.json; {CHECKPOINT_FOLDER}")
        hf = read_json(path / "config.json")
        named_type = read_model_type(hf)
        if named_type is not None:
            read_config_as(named_type, hf)  # reports unsupported settings before reading tensors
        tensors = open_tensors(path)
        model_type = named_type or _identify_model_type(hf, tensors)
        hf = model_type.correct_settings(hf, tensors.entries)
        hf = _drop_wrong_class_names(model_type, hf, tensors)
        config = read_config_as(model_type, hf)
        if not hf.get("architectures"):
            config = _config_with_fitting_head(model_type, hf, tensors) or config
        tokenizers = read_tokenizers(folder, hf)
    else:
        hf, model_type = {}, without_config.model_type
        config, tensors = without_config.config, without_config.tensors
        tokenizers = without_config.tokenizers or read_tokenizers(folder, hf)
    shapes, plan = plan_weights(model_type, config, tensors, path)
    return ExternalCheckpoint(
        path=folder,
        model_type=model_type,
        config=config,
        config_json=hf,
        tensors=tensors,
        plan=plan,
        shapes=shapes,
        tokenizers=check_tokenizers(tokenizers, config, folder),
    )


def plan_weights(
    model_type: ModelType, config: Any, tensors: TensorReader, path: Path
) -> tuple[Shapes, WeightPlan]:
    """The shapes of the model's tensors and the plan that fills them; raises on a mismatch."""
    problems, shapes, plan = _plan(model_type, config, tensors)
    if problems:
        raise CheckpointError(
            f"the tensors in {path} do not match its config.json:{indented_list(problems)}"
        )
    return shapes, plan


def prefixed_rules(model_type: ModelType, config: Any) -> list[Rule]:
    """The rules of a model with full external names, as export writes them."""
    prefix = "" if _head_kind(config) in HEADS_WITHOUT_PREFIX else model_type.prefix
    return [_add_prefix(prefix, rule) for rule in model_type.rules(config)]


def candidate_rules(model_type: ModelType, config: Any) -> list[Rule]:
    """The rules with and without the prefix: a file of any class may have or lack it."""
    prefixes = (model_type.prefix, "")
    return [_add_prefix(prefix, rule) for rule in model_type.rules(config) for prefix in prefixes]


def _add_prefix(prefix: str, rule: Rule) -> Rule:
    is_head = rule.internal_names[0].startswith("head.")
    return rule if is_head else Rule(prefix + rule.external, rule.internal, rule.layout)


def _shapes(config: ModelConfig) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights(build_on_meta(config)).items()}


def _plan(
    model_type: ModelType, config: Any, tensors: TensorReader
) -> tuple[list[str], Shapes, WeightPlan]:
    """All problems of a checkpoint, the shapes that the model expects, and the plan."""
    entries = tensors.entries
    if max(config.depths) > len(entries) and not getattr(config, "shared_layers", False):
        problem = f"{max(config.depths):,} layers, but only {len(entries):,} tensors"
        return [problem], {}, WeightPlan([], [])
    try:
        shapes = _shapes(config)
    except ConfigError:
        raise
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes that torch cannot represent
        return [str(error).splitlines()[0]], {}, WeightPlan([], [])
    aliases = {alias: name for alias, name in TIED_WEIGHTS.items() if alias not in shapes}
    plan = plan_import(candidate_rules(model_type, config), entries, shapes, aliases)
    problems = [f"{name} is missing" for name in _missing_tensors(plan, model_type, config, shapes)]
    unexpected = (name for name in plan.unexpected if not _is_ignored(model_type, name))
    problems += [f"{quote(name)} is unexpected" for name in unexpected]
    mismatches = (_mismatch(mapping, tensors, shapes) for mapping in plan.mappings)
    return problems + [problem for problem in mismatches if problem is not None], shapes, plan


def _missing_tensors(
    plan: WeightPlan, model_type: ModelType, config: Any, shapes: Shapes
) -> Iterator[str]:
    """The external names of missing tensors; one that stores several internal ones appears once."""
    external = {
        name: mapping.external
        for mapping in plan_export(prefixed_rules(model_type, config), shapes).mappings
        for name in mapping.internal
    }
    yield from dict.fromkeys(external.get(name, name) for name in plan.missing)


def _is_ignored(model_type: ModelType, name: str) -> bool:
    short = name.removeprefix(model_type.prefix)
    return any(matches(p, name) or matches(p, short) for p in model_type.ignored_tensors)


def _mismatch(mapping: TensorMapping, tensors: TensorReader, shapes: Shapes) -> str | None:
    """The problem with the dtype or the shape of an external tensor; None if it fits."""
    name, entry = mapping.external, tensors.entries[mapping.external]
    expected = [shapes[internal] for internal in mapping.internal]
    if entry.dtype not in WEIGHT_DTYPES:
        return f"{quote(name)} holds {entry.dtype}, not float32, bfloat16 or float16"
    empty = torch.empty(entry.shape, device="meta")
    try:
        actual = [part.shape for part in mapping.layout.split(empty, expected)]
    except (RuntimeError, IndexError):  # the tensor cannot be split
        actual = []
    if actual == expected:
        return None
    joined = mapping.layout.join([torch.empty(shape, device="meta") for shape in expected])
    return f"{quote(name)} has shape {tuple(entry.shape)}, but the model has {tuple(joined.shape)}"


def _identify_model_type(hf: Mapping[str, Any], tensors: TensorReader) -> ModelType:
    """The only model type whose tensor names and shapes are those of the checkpoint."""
    fitting = []
    for model_type in MODEL_TYPES.values():
        with suppress(ConfigError):
            if _config_with_fitting_head(model_type, hf, tensors) is not None:
                fitting.append(model_type)
    if len(fitting) != 1:
        names = ", ".join(model_type.name for model_type in fitting) or "no model type"
        raise ConfigError(f"{NO_MODEL_TYPE}: they fit {names};\nadd a model_type to config.json")
    logger.warning("config.json has no model_type; the tensors are those of a %s", fitting[0].name)
    return fitting[0]


def _drop_wrong_class_names(
    model_type: ModelType, hf: ConfigDict, tensors: TensorReader
) -> ConfigDict:
    """Drop class names that contradict both `num_labels` and the output layer."""
    count, config = hf.get("num_labels"), read_config_as(model_type, hf)
    if kind_of(getattr(config, "head", "none"))[1].get("classes") in (None, count):
        return hf
    (output,) = plan_export(prefixed_rules(model_type, config), ["head.out.weight"]).mappings
    entry = tensors.entries.get(output.external)
    if entry is None or entry.shape[:1] != (count,):
        return hf
    logger.warning(
        "config.json names %d classes in id2label, but num_labels and the output layer have %d; "
        "the classes are called LABEL_0, LABEL_1, …",
        read_class_count(hf),
        count,
    )
    return {key: value for key, value in hf.items() if key not in ("id2label", "label2id")}


def _config_with_fitting_head(
    model_type: ModelType, hf: Mapping[str, Any], tensors: TensorReader
) -> ModelConfig | None:
    """The configuration with the first head that fits; None if no head does.

    For a config.json that names no class.
    """
    for architecture in model_type.heads:
        config: ModelConfig = read_config_as(model_type, hf, architecture)
        if not _plan(model_type, config, tensors)[0]:
            return config
    return None
