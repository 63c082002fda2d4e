"""Runs from the checkpoints of other libraries, and checkpoints for other libraries from runs."""

import json
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regard.config import Choice, RunConfig, kind_of
from regard.errors import CheckpointError, ConfigError
from regard.hub import vit
from regard.hub.check import compare
from regard.hub.config import read_as, write_config
from regard.hub.download import fetch
from regard.hub.family import Table
from regard.hub.files import Tensors, read_header, read_json
from regard.hub.folder import Foreign, all_rules, open_folder
from regard.hub.rope import interleaved, reordered
from regard.hub.rules import outward
from regard.hub.stream import send
from regard.hub.tokenizers import write_tokenizers
from regard.models.build import describe, hollow, loaded, resolve, weights
from regard.training.checkpoint import disk_message, read_tensors
from regard.training.device import environment
from regard.training.folder import Folder
from regard.training.prepare import load_tokenizers, tokenizer_fingerprint

GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True, slots=True)
class Exported:
    """Where a checkpoint was written, as what, and how far the other library's logits are off."""

    path: Path
    family: str
    architecture: str
    difference: float | None  # None: there was nobody to ask


def open_foreign(source: Path | str) -> Foreign:
    """A checkpoint at a path, or of this name on the hub."""
    return open_folder(source if Path(source).exists() else fetch(str(source)))


def run_config(foreign: Foreign, name: str) -> RunConfig:
    """The settings of a run that begins where a foreign checkpoint ended."""
    return RunConfig(name=name, task=_task(foreign), model=describe(foreign.config))


def import_run(source: Path | str, out: Path) -> Foreign:
    """Make a run folder of a foreign checkpoint, file to file; all of it or nothing."""
    _must_be_new(out)
    foreign = open_foreign(source)
    facts = environment(torch.device("cpu")) | {
        "data": None,
        "tokenizer": tokenizer_fingerprint(foreign.tokenizers),
        "imported": {"family": foreign.family.name, "from": foreign.path.resolve().name},
    }
    Folder(out).create(run_config(foreign, out.name), facts, foreign.tokenizers, foreign.write)
    return foreign


def export_run(run: Path, out: Path, family: str | None = None) -> Exported:
    """Write a run as a folder that transformers opens; where it is installed, see that it does."""
    folder = Folder(run)
    config = folder.load_config()
    model: Any = resolve(config.model)
    chosen, table = write_config(model, family)
    written = read_as(chosen, table)
    tensors = Tensors(read_header(folder.model))
    shapes = {name: weight.shape for name, weight in weights(hollow(written)).items()}
    plan = outward(all_rules(chosen, written), shapes)
    change = partial(reordered, model) if interleaved(model) else None
    assert not plan.missing, plan.missing  # rules name every tensor of what a family can say
    _must_be_new(out)
    aside = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        dtype = str(next(iter(tensors.entries.values())).dtype).removeprefix("torch.")
        send(tensors, plan.moves, shapes, aside, change)
        _write_tables(aside, table | {"dtype": dtype, "torch_dtype": dtype}, folder, config)
        open_folder(aside)  # nothing is written that could not be read again
        difference = compare(
            aside, model, lambda: loaded(model, read_tensors(folder.model), str(folder.model))
        )
        aside.rename(out)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(disk_message(out, error)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(out, chosen.name, table["architectures"][0], difference)


def _must_be_new(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} exists already and is not written over; name another folder")


def _write_tables(aside: Path, table: Table, folder: Folder, config: RunConfig) -> None:
    tokenizers = load_tokenizers(folder.path, config)
    table = dict.fromkeys(GENERATION[:3]) | table  # or their class would name ids of its own
    if tokenizers is not None:
        table = table | write_tokenizers(tokenizers, aside, table)
    kind, options = kind_of(config.task)
    if kind == "classify":
        table = table | vit.labels(options["names"])
        colours = vit.processor(table["image_size"], options["mean"], options["std"])
        _write_json(aside / "preprocessor_config.json", colours)
    _write_json(aside / "config.json", table)
    if kind in ("causal", "seq2seq"):
        ids = {key: table[key] for key in GENERATION if table.get(key) is not None}
        _write_json(aside / "generation_config.json", ids)


def _write_json(path: Path, table: Table) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _task(foreign: Foreign) -> Choice:
    """The task, told what only the checkpoint knows: of images, the classes and the colours."""
    if foreign.task != "classify":
        return foreign.task
    path = foreign.path / "preprocessor_config.json"
    processor = read_json(path) if path.exists() else {}
    config: Any = foreign.config
    return vit.image_task(foreign.table, processor, config.channels)
