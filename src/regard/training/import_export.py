"""Runs from the checkpoints of other libraries, and checkpoints for other libraries from runs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regard.config import Choice, DataConfig, RunConfig, kind_of
from regard.errors import CheckpointError
from regard.files.atomic import atomic_folder, must_be_new, write_json
from regard.files.safetensors import Tensors, read_header
from regard.files.untrusted import path_exists, read_json
from regard.hub.config_json import read_config_as, write_config
from regard.hub.convert_weights import send
from regard.hub.download import fetch
from regard.hub.external_checkpoint import (
    WEIGHTS,
    ExternalCheckpoint,
    open_checkpoint,
    prefixed_rules,
)
from regard.hub.families import vit
from regard.hub.family import Change, Table
from regard.hub.rope_config import interleaved, reordered
from regard.hub.tokenizer_files import write_tokenizers
from regard.hub.verify_export import compare, obstacle
from regard.hub.weight_mapping import plan_export
from regard.models.build import describe, load_model, on_meta, resolve, weights
from regard.pipelines import tokenizer_fingerprint
from regard.text import PairTokenizers, Tokenizer
from regard.training.setup.device import environment, memory
from regard.training.storage.checkpoint import check_tensors
from regard.training.storage.run_folder import RunFolder

NEW = "name another folder"
GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Where a checkpoint was written, as what, and how far the other library's logits are off."""

    path: Path
    family: str
    architecture: str
    difference: float | None  # None: it was not compared
    unchecked: str | None = None  # why not


def open_or_download(source: Path | str) -> ExternalCheckpoint:
    """A checkpoint at a path, or of this name on the hub."""
    return open_checkpoint(source if path_exists(Path(source)) else fetch(str(source)))


def run_config(foreign: ExternalCheckpoint, name: str) -> RunConfig:
    """The settings of a run that begins where a foreign checkpoint ended."""
    tokenizers = foreign.tokenizers
    data = DataConfig() if tokenizers is None else DataConfig(tokenizer=tokenizers.kind)
    return RunConfig(name=name, task=_task(foreign), data=data, model=describe(foreign.config))


def import_run(source: Path | str, out: Path) -> ExternalCheckpoint:
    """Make a run folder of a foreign checkpoint, file to file; all of it or nothing."""
    must_be_new(out, NEW)
    foreign = open_or_download(source)
    name = foreign.path.resolve().name if path_exists(Path(source)) else str(source)
    facts = environment(torch.device("cpu")) | {
        "data": None,
        "tokenizer": tokenizer_fingerprint(foreign.tokenizers),
        "imported": {"family": foreign.family.name, "from": name},
    }
    RunFolder(out).create(run_config(foreign, out.name), facts, foreign.tokenizers, foreign.write)
    return foreign


def export_run(run: Path, out: Path, family: str | None = None) -> ExportResult:
    """Write a run as a folder that transformers opens; where it is installed, see that it does."""
    folder = RunFolder(run)
    config = folder.load_config()
    model: Any = resolve(config.model)
    tokenizers = folder.load_tokenizers(config)
    folder.must_have(tokenizer_fingerprint(tokenizers))
    chosen, table = write_config(model, family)
    change: Change | None = partial(reordered, model) if interleaved(model) else None
    pad = tokenizers.hf_special_id("pad") if isinstance(tokenizers, Tokenizer) else None
    if chosen.shift_positions is not None and pad is not None:
        same, change = chosen.shift_positions(model, pad)
        chosen, table = write_config(same, chosen.name)
    written = read_config_as(chosen, table)
    tensors, dtype = _weights(model, folder.model)
    shapes = {name: weight.shape for name, weight in weights(on_meta(written)).items()}
    plan = plan_export(prefixed_rules(chosen, written), shapes)
    assert not plan.missing, plan.missing  # rules name every tensor of what a family can say
    must_be_new(out, NEW)
    unchecked = obstacle(model, memory(torch.device("cpu")))
    with atomic_folder(out) as new:
        send(tensors, plan.moves, shapes, new, change)
        named = str(dtype).removeprefix("torch.")
        _write_tables(new, table | {"dtype": named, "torch_dtype": named}, tokenizers, config)
        if open_checkpoint(new).config != written:  # nothing is written that reads as another model
            raise CheckpointError(f"{run} cannot be written as {chosen.name}: its ids do not fit")
        difference = None
        if unchecked is None:
            load = folder.kept_weights
            difference = compare(new, model, lambda: load_model(model, load(), str(folder.model)))
    return ExportResult(out, chosen.name, table["architectures"][0], difference, unchecked)


def _weights(model: Any, path: Path) -> tuple[Tensors, torch.dtype]:
    """The weights of a run and their type, if they are those of its model and of one type."""
    tensors = Tensors(read_header(path))
    entries = tensors.entries.items()
    empty = {n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, e in entries}
    load_model(model, empty, str(path))  # or it names what does not fit
    dtypes = {tensor.dtype for tensor in empty.values()}
    if len(dtypes) > 1 or not dtypes <= set(WEIGHTS):
        found, known = (", ".join(sorted(map(str, each))) for each in (dtypes, WEIGHTS))
        raise CheckpointError(f"{path} holds {found}; a run has numbers of one type, of {known}")
    check_tensors(path, tensors)
    return tensors, dtypes.pop()


def _write_tables(
    folder: Path,
    table: Table,
    tokenizers: Tokenizer | PairTokenizers | None,
    config: RunConfig,
) -> None:
    table = dict.fromkeys(GENERATION[:3]) | table  # or their class would name ids of its own
    if tokenizers is not None:
        table = table | write_tokenizers(tokenizers, folder, table)
    kind, options = kind_of(config.task)
    if kind == "classify":
        table = table | vit.labels(options["names"])
        colours = vit.processor(table["image_size"], options["mean"], options["std"])
        write_json(folder / "preprocessor_config.json", colours)
    write_json(folder / "config.json", table)
    if kind in ("causal", "seq2seq"):
        ids = {key: table[key] for key in GENERATION if table.get(key) is not None}
        write_json(folder / "generation_config.json", ids)


def _task(foreign: ExternalCheckpoint) -> Choice:
    """The task, told what only the checkpoint knows: of images, the classes and the colours."""
    if foreign.task != "classify":
        return foreign.task
    path = foreign.path / "preprocessor_config.json"
    processor = read_json(path) if path.exists() else {}
    config: Any = foreign.config
    return vit.image_task(foreign.table, processor, config.channels)
