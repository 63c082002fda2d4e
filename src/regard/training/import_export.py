"""Import Hugging Face checkpoints as run folders, and export run folders as checkpoints.

The checkpoint formats are in `hub`, which does not depend on run folders.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from regard.config import RunConfig, kind_of
from regard.errors import CheckpointError, ConfigError, RegardError
from regard.files.atomic import atomic_folder, require_new_path, write_json
from regard.files.directory import Directory
from regard.files.safetensors import TensorReader, read_header
from regard.files.untrusted import path_exists
from regard.hub import MODEL_TYPES
from regard.hub.chat_template_file import FILE as CHAT_TEMPLATE
from regard.hub.chat_template_file import read_chat_template
from regard.hub.class_names import write_class_names
from regard.hub.config_json import read_config_as, write_config
from regard.hub.convert_weights import write_external
from regard.hub.download import download
from regard.hub.external_checkpoint import (
    REGRESSION,
    WEIGHT_DTYPES,
    ExternalCheckpoint,
    is_external_checkpoint,
    open_checkpoint,
    prefixed_rules,
)
from regard.hub.gguf import TYPES as GGUF_TYPES
from regard.hub.gguf import (
    describe_other_types,
    import_gguf,
    model_type_for_gguf,
    write_gguf,
)
from regard.hub.llama_cpp import compare_llama_cpp
from regard.hub.model_type import ConfigDict, TensorTransform
from regard.hub.model_types import vit
from regard.hub.onnx import write_onnx
from regard.hub.peft import write_adapter
from regard.hub.rope_config import is_interleaved, to_half_split
from regard.hub.tokenizer_files import write_tokenizers
from regard.hub.verify_export import compare, compare_unsupported_reason
from regard.hub.weight_mapping import plan_export
from regard.models.build import build_on_meta, family_of, load_model, resolve, weights
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vision import VisionConfig
from regard.nn.lora import Adapter
from regard.pipelines import tokenizer_fingerprint
from regard.renamed import current_tensors
from regard.tasks import TASKS
from regard.text import PairTokenizers, Tokenizer
from regard.training.fine_tuning import LoRA, has_adapter, tuning
from regard.training.setup.device import environment, free_memory
from regard.training.storage.checkpoint import check_tensors, write_tensors
from regard.training.storage.imported import imported_run_config
from regard.training.storage.initial_weights import (
    base_weights,
    open_adapter,
    open_initial_run,
    run_adapter,
    run_jinja_template,
    run_weights,
)
from regard.training.storage.run_folder import RunFolder, is_run

EXISTS_HINT = "choose another folder"
GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The path and type of an exported model, and how much another library's outputs differ."""

    path: Path
    model_type: str  # of transformers; "onnx", or "gguf, " and the model type
    architecture: str  # the class of transformers, or the type of GGUF weights
    difference: float | None  # largest difference of the outputs; None: they were not compared
    unchecked: str | None = None  # why the outputs were not compared, and further notes
    engine: str = "transformers"  # the library whose outputs were compared with ours


def open_or_download(source: Path | str) -> ExternalCheckpoint:
    """Open the checkpoint at a path, or download the one of this name from the hub."""
    return open_checkpoint(source if path_exists(Path(source)) else download(str(source)))


def import_run(
    source: Path | str, out: Path, overrides: Mapping[str, Any] | None = None
) -> ExternalCheckpoint:
    """Write a run folder with the weights of an external checkpoint, atomically.

    `overrides` changes settings of the model that do not change the shape of any tensor, as in
    `{"model": {"position": {"base": 500000}}}`.
    """
    if is_run(Path(source)):
        raise ConfigError(
            f"{source} is already a run: use it directly, as in `regard info {source}`;\n"
            "import is for checkpoints of other libraries"
        )
    settings = model_overrides(overrides or {})
    require_new_path(out, EXISTS_HINT)
    checkpoint = open_or_download(source).with_settings(settings)
    name = checkpoint.path.resolve().name if path_exists(Path(source)) else str(source)
    imported: ConfigDict = {"family": checkpoint.model_type.name, "from": name}
    run_environment = environment(torch.device("cpu")) | {
        "data": None,
        "tokenizer": tokenizer_fingerprint(checkpoint.tokenizers),
        "imported": imported | ({"overrides": settings} if settings else {}),
    }
    config = imported_run_config(checkpoint, out.name)
    template = read_chat_template(checkpoint.path)

    def write_model(path: Path, metadata: Mapping[str, str]) -> None:
        checkpoint.write_weights(path, metadata)
        _write_template(path.parent, template)

    RunFolder(out).create(config, run_environment, checkpoint.tokenizers, write_model)
    return checkpoint


def model_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under `model`; raise if there is any other key."""
    for key in overrides:
        if key != "model":
            raise ConfigError(
                f"import changes settings of the model only, as in model.context=4096, not {key!r}"
            )
    settings = overrides.get("model", {})
    if not isinstance(settings, Mapping):
        raise ConfigError(f"model is a table, set as in model.context=…, not {settings!r}")
    for key in ("family", "preset"):
        if key in settings:
            raise ConfigError(f"model.{key} cannot be changed: the checkpoint determines it")
    return dict(settings)


def export_run(
    run: Path, out: Path, model_type: str | None = None, *, verify: bool = True
) -> ExportResult:
    """Write a run as a folder that transformers opens, and compare the outputs if possible."""
    folder = RunFolder(run)
    config = folder.load_config()
    if has_adapter(config):
        return export_adapter(folder, config, out, model_type)
    model: Any = resolve(config.model)
    tokenizers = folder.load_tokenizers(config)
    folder.check_tokenizer(tokenizer_fingerprint(tokenizers))
    target_type, hf_config = write_config(model, model_type)
    transform: TensorTransform | None = None
    if is_interleaved(model):
        transform = partial(to_half_split, model)
    pad_id = tokenizers.hf_special_id("pad") if isinstance(tokenizers, Tokenizer) else None
    if target_type.shift_positions is not None and pad_id is not None:
        shifted_config, transform = target_type.shift_positions(model, pad_id)
        target_type, hf_config = write_config(shifted_config, target_type.name)
    fold = _fold_statistics(run, config)
    if fold is not None:
        transform = _compose(transform, fold)
    exported_config = read_config_as(target_type, hf_config)
    tensors, dtype = _open_weights(model, folder.model)
    meta_model = build_on_meta(exported_config)
    shapes = {name: weight.shape for name, weight in weights(meta_model).items()}
    plan = plan_export(prefixed_rules(target_type, exported_config), shapes)
    assert not plan.missing, plan.missing  # the rules of a model type cover all its models
    require_new_path(out, EXISTS_HINT)
    unverified_reason = compare_unsupported_reason(model, free_memory(torch.device("cpu")))
    with atomic_folder(out) as temporary:
        write_external(tensors, plan.mappings, shapes, temporary, transform)
        dtype_name = str(dtype).removeprefix("torch.")
        hf_config |= {"dtype": dtype_name, "torch_dtype": dtype_name}
        _write_json_files(temporary, hf_config, tokenizers, config)
        _write_template(temporary, run_jinja_template(folder, config, tokenizers))
        if open_checkpoint(temporary).config != exported_config:
            raise CheckpointError(
                f"{run} cannot be exported as {target_type.name}: the ids of its special tokens do "
                f"not fit {target_type.name}; choose another --model-type"
            )
        difference = None
        if unverified_reason is None and verify:

            def load() -> torch.nn.Module:
                state = folder.load_weights()
                if fold is not None:
                    state = {name: fold(name, tensor) for name, tensor in state.items()}
                return load_model(model, state, str(folder.model))

            difference = compare(temporary, model, load)
    architecture = hf_config["architectures"][0]
    return ExportResult(out, target_type.name, architecture, difference, unverified_reason)


def _compose(first: TensorTransform | None, fold: TensorTransform) -> TensorTransform:
    return lambda name, tensor: fold(name, tensor if first is None else first(name, tensor))


def _fold_statistics(run: Path, config: RunConfig) -> TensorTransform | None:
    """For a regression, fold the standardization of its targets into the head.

    The returned transform changes the weights to W ← std W, b ← std b + mean, so that the exported
    head predicts unstandardized targets.
    """
    kind, options = kind_of(config.task)
    if kind != "text_regression":
        return None
    mean, std = options.get("mean", 0.0), options.get("std", 1.0)
    if mean and not kind_of(config.model["head"])[1].get("bias", True):
        raise ConfigError(
            f"{run} cannot be exported: its head has no bias for the mean of its training targets, "
            f"{mean:.4g}; train with model.head.bias=true"
        )

    def fold(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in ("head.out.weight", "head.out.bias"):
            return tensor
        return tensor * std + (mean if name == "head.out.bias" else 0.0)

    return fold


def export_as(
    run: Path, out: Path, format: str, model_type: str | None, type: str | None = None
) -> ExportResult:
    """`export_run`, `export_onnx` or `export_gguf`, by the name of the format."""
    if type is not None and format != "gguf":
        raise ConfigError(f"type={type!r} is for format='gguf'; leave it out")
    if format == "transformers":
        return export_run(run, out, model_type)
    if format == "gguf":
        return export_gguf(run, out, model_type, type or "f32")
    if format != "onnx":
        raise ConfigError(f"unknown export format {format!r}; use 'transformers', 'onnx' or 'gguf'")
    if model_type is not None:
        raise ConfigError(
            f"model_type={model_type!r} is for format='transformers' and 'gguf', not 'onnx'; "
            "leave it out"
        )
    return export_onnx(run, out)


def export_onnx(run: Path, out: Path) -> ExportResult:
    """Write a run as a folder with model.onnx and its tokenizer, and compare the outputs."""
    folder = RunFolder(run)
    config = folder.load_config()
    settings: Any = resolve(config.model)
    if not isinstance(settings, TransformerConfig):
        raise ConfigError(
            f"{run} cannot be exported as ONNX: only text Transformers are supported, not "
            f"model.family={family_of(settings)}"
        )
    if settings.prefix:
        raise ConfigError(f"{run} cannot be exported as ONNX: it is a prefix LM, model.prefix=true")
    if settings.input_dim:
        raise ConfigError(
            f"{run} cannot be exported as ONNX: only text Transformers are supported, and it reads "
            f"vectors of {settings.input_dim} numbers"
        )
    if settings.char_dim:
        raise ConfigError(
            f"{run} cannot be exported as ONNX: it reads the characters of words, model.char_dim="
            f"{settings.char_dim}"
        )
    tokenizers = folder.load_tokenizers(config)
    folder.check_tokenizer(tokenizer_fingerprint(tokenizers))
    require_new_path(out, EXISTS_HINT)
    model = load_model(settings, run_weights(folder, config), str(folder.model)).float().eval()
    with atomic_folder(out) as temporary:
        difference = write_onnx(cast(Transformer, model), temporary / "model.onnx")
        sides = {"": tokenizers}
        if isinstance(tokenizers, PairTokenizers):
            sides = {"source.": tokenizers.source, "target.": tokenizers.target}
        for side, tokenizer in sides.items():
            if tokenizer is not None:
                cast(Tokenizer, tokenizer).save(temporary / f"{side}tokenizer.json")
    return ExportResult(out, "onnx", settings.architecture, difference, None, "ONNX Runtime")


def export_gguf(run: Path, out: Path, model_type: str | None, type: str) -> ExportResult:
    """Write a run as a folder with model.gguf for llama.cpp, and compare weights and outputs."""
    if type not in GGUF_TYPES:
        raise ConfigError(f"type={type!r} must be one of {', '.join(GGUF_TYPES)}")
    import_gguf()
    folder = RunFolder(run)
    config = folder.load_config()
    tokenizer = folder.load_tokenizers(config)
    settings: Any = resolve(config.model)
    if has_adapter(config):
        raise ConfigError(f"{run} holds an adapter; merge it first: regard merge {run} NEW")
    if not isinstance(tokenizer, Tokenizer) or not isinstance(settings, TransformerConfig):
        raise ConfigError(
            f"{run} cannot be exported as GGUF: only Transformer decoders and BERT are supported, "
            f"not model.family={family_of(settings)}, "
            f"model.architecture={getattr(settings, 'architecture', None)}"
        )
    require_new_path(out, EXISTS_HINT)
    with TemporaryDirectory() as scratch, atomic_folder(out) as temporary:
        model_type = model_type_for_gguf(settings, model_type)
        exported = export_run(run, Path(scratch) / "hf", model_type, verify=False)
        path = temporary / "model.gguf"
        difference = write_gguf(exported.path, tokenizer, path, type)
        note = describe_other_types(path, type)
        (temporary / "Modelfile").write_text("FROM ./model.gguf\n", encoding="utf-8")
        model = load_model(settings, folder.load_weights(), str(folder.model)).float().eval()
        engine = "gguf"
        if (outputs := compare_llama_cpp(path, cast(Transformer, model), type)) is not None:
            difference, engine = outputs, "llama.cpp"
            if type != "f32":  # rounding would hide a wrong layout
                f32_path = Path(scratch) / "f32.gguf"
                write_gguf(exported.path, tokenizer, f32_path, "f32")
                compare_llama_cpp(f32_path, cast(Transformer, model), "f32")
    return ExportResult(out, f"gguf, {exported.model_type}", type, difference, note, engine)


def export_adapter(
    folder: RunFolder, config: RunConfig, out: Path, model_type: str | None = None
) -> ExportResult:
    """Write the adapter of a run as a folder that PEFT opens.

    `model_type` is by default that of its base model.
    """
    tensors = folder.load_weights()
    adapter, model = run_adapter(tensors, config), resolve(config.model)
    lora, base = cast(LoRA, tuning(config.train.tune)), cast(str, config.train.start)
    require_new_path(out, EXISTS_HINT)
    with atomic_folder(out) as temporary:
        model_type = write_adapter(
            temporary,
            adapter,
            model,
            base=base,
            dropout=lora.dropout,
            model_type=model_type or imported_model_type(base),
        )
        free = free_memory(torch.device("cpu"))
        difference: float | str | None = compare_unsupported_reason(model, free, is_adapter=True)
        if difference is None:
            difference = _compare_adapter(folder, config, adapter, temporary, model_type)
    notes = [f"an adapter; to get a full model, merge it: regard merge {folder.path} NEW"]
    if not is_external_checkpoint(Path(base)):
        notes.append(f"to export its base model for PEFT: regard export {base} BASE")
        if is_interleaved(resolve(config.model)):
            notes.append(
                "with regard, use this adapter on the exported base (regard import BASE NEW), not "
                f"on {base}, where RoPE rotates other pairs of dimensions"
            )
    if isinstance(difference, str):  # why the outputs were not compared
        notes, difference = [difference, *notes], None
    return ExportResult(out, model_type, "LoRA adapter", difference, ";\n".join(notes), "PEFT")


def _compare_adapter(
    folder: RunFolder, config: RunConfig, adapter: Adapter, path: Path, model_type: str
) -> float | str:
    """How much the outputs of PEFT with the adapter at `path` differ, or why it is not known."""
    model = resolve(config.model)
    # the base has the head of the run, which is in the adapter if it is trained
    base = {**base_weights(folder, config, adapter.dtype), **adapter.others}
    with TemporaryDirectory() as scratch:
        run, checkpoint = Path(scratch) / "run", Path(scratch) / "hf"
        try:
            _write_full_run(run, config, base, folder.load_tokenizers(config), {})
            export_run(run, checkpoint, model_type, verify=False)
        except (RegardError, OSError) as error:
            return f"its base cannot be written for transformers: {str(error).splitlines()[0]}"
        return compare(
            checkpoint,
            model,
            lambda: load_model(model, adapter.merge(base), str(folder.model)),
            path,
        )


def imported_model_type(path: str) -> str | None:
    """The model type of the checkpoint that a run was imported from or started from.

    None if there is none, or if transformers does not have this model type, as of llama2.c.
    """
    model_type: str | None
    if is_external_checkpoint(Path(path)):
        model_type = open_checkpoint(path).model_type.name
    else:
        folder = RunFolder(path)
        imported: ConfigDict = folder.load_environment().get("imported") or {}
        model_type, start = imported.get("family"), folder.load_config().train.start
        if model_type is None and start is not None:
            return imported_model_type(start)
    return model_type if model_type in MODEL_TYPES else None


def merge_run(run: Path, out: Path, adapter: Path | str | None = None) -> list[str]:
    """Write a run with an adapter merged into its weights; return the names of the changed layers.

    `adapter` is another run or a PEFT folder; by default, the adapter of the run itself is merged.
    """
    start = open_initial_run(run)
    config = start.config
    if adapter is None and not has_adapter(config):
        raise ConfigError(f"{run} has no adapter to merge; give one with --adapter")
    require_new_path(out, EXISTS_HINT)
    tensors = start.tensors()  # with the run's own adapter merged
    if adapter is None:
        layers = run_adapter(RunFolder(run).load_weights(), config).layers
    else:
        other_adapter, config = open_adapter(run, adapter, config, start.tokenizers)
        tensors, layers = other_adapter.merge(tensors), other_adapter.layers
    merged = {"from": str(run), "adapter": None if adapter is None else str(adapter)}
    template = read_chat_template(Path(run))
    _write_full_run(out, config, tensors, start.tokenizers, {"merged": merged}, template)
    return list(layers)


def _write_full_run(
    out: Path,
    config: RunConfig,
    tensors: dict[str, torch.Tensor],
    tokenizers: Tokenizer | PairTokenizers | None,
    origin: dict[str, Any],
    template: str | None = None,
) -> None:
    """Write a run folder with all weights of a model, without data and without a base.

    `origin` is added to its environment.json.
    """
    config = replace(
        config,
        name=out.name,
        data=replace(config.data, path=None, source=None, target=None, validation=[]),
        train=replace(config.train, start=None, tune="all"),
    )
    run_environment = environment(torch.device("cpu")) | {
        "data": None,
        "tokenizer": tokenizer_fingerprint(tokenizers),
        **origin,
    }

    def write_model(path: Path, metadata: Mapping[str, str]) -> None:
        write_tensors(Directory(path.parent), path.name, tensors, metadata)
        _write_template(path.parent, template)

    RunFolder(out).create(config, run_environment, tokenizers, write_model)


def _write_template(folder: Path, template: str | None) -> None:
    if template is not None:
        (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _open_weights(model: Any, path: Path) -> tuple[TensorReader, torch.dtype]:
    """Open the weights of a run after checking that they fit its model and have one dtype."""
    header = read_header(path)
    tensors = TensorReader(current_tensors(header))
    entries = tensors.entries.items()
    meta = {n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, e in entries}
    load_model(model, meta, str(path))  # raises if names or shapes do not fit
    dtypes = {tensor.dtype for tensor in meta.values()}
    if len(dtypes) > 1 or not dtypes <= set(WEIGHT_DTYPES):
        actual, supported = (", ".join(sorted(map(str, d))) for d in (dtypes, WEIGHT_DTYPES))
        raise CheckpointError(
            f"{path} holds {actual}; all tensors of a run have the same dtype, one of {supported}"
        )
    check_tensors(path, TensorReader(header))
    return tensors, dtypes.pop()


def _write_json_files(
    folder: Path,
    hf_config: ConfigDict,
    tokenizers: Tokenizer | PairTokenizers | None,
    config: RunConfig,
) -> None:
    """Write config.json, the tokenizers and all other files except the weights."""
    # null for a missing id: transformers would use the default of the class
    hf_config = dict.fromkeys(GENERATION_KEYS[:3]) | hf_config
    if tokenizers is not None:
        hf_config = hf_config | write_tokenizers(tokenizers, folder, hf_config)
    kind, options = kind_of(config.task)
    methods = TASKS[kind].methods if kind in TASKS else ()
    if options.get("class_names"):
        hf_config = hf_config | write_class_names(options["class_names"])
    if kind == "text_regression":
        hf_config = hf_config | {"problem_type": REGRESSION}
    if "classify" in methods:
        sides = cast(VisionConfig, resolve(config.model)).image_sides
        processor = vit.write_processor(sides, options["mean"], options["std"])
        write_json(folder / "preprocessor_config.json", processor)
    write_json(folder / "config.json", hf_config)
    if "generate" in methods or "translate" in methods:
        ids = {key: hf_config[key] for key in GENERATION_KEYS if hf_config.get(key) is not None}
        write_json(folder / "generation_config.json", ids)
