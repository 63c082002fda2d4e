"""A folder of the Hugging Face world: opened, checked to the last tensor, then loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.config import kind_of
from regard.errors import CheckpointError, ConfigError
from regard.files.safetensors import PICKLE_SUFFIXES, Tensors, open_tensors, pickle_error
from regard.files.untrusted import path_exists, quote, read_json
from regard.hub.config_json import read_config, read_config_as
from regard.hub.convert_weights import Shapes, bring, parts
from regard.hub.families import e2k, g2p_en, llama2c
from regard.hub.family import CheckpointWithoutConfig, Family, Table
from regard.hub.tokenizer_files import check_tokenizers, read_tokenizers
from regard.hub.weight_mapping import Move, Plan, Rule, matches, plan_export, plan_import
from regard.models.build import on_meta, weights
from regard.models.presets import ModelConfig
from regard.text import PairTokenizers, Tokenizer

WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
BASES = ("none", "pooled")  # heads of a checkpoint whose names have no prefix
TASKS = {  # what a model of this shape and head is trained for; all others: for nothing here
    ("decoder", "linear"): "causal",
    ("encoder-decoder", "linear"): "seq2seq",
    ("encoder", "masked"): "masked",
    ("images", "classify"): "classify",
}
TIED = {"head.weight": "embed.token.weight"}  # where the output matrix is the embedding
Reader = Callable[[Path], CheckpointWithoutConfig]
READERS: tuple[tuple[Callable[[Path], Path | None], Reader], ...] = (  # of what has no config.json
    (llama2c.find, llama2c.open_file),
    (e2k.find, e2k.open_file),
    (g2p_en.find, g2p_en.open_file),
)


@dataclass(frozen=True, kw_only=True)
class ExternalCheckpoint:
    """A checkpoint of another library that fits one of our models in every tensor."""

    path: Path
    family: Family
    config: ModelConfig
    table: Table  # its config.json
    tensors: Tensors
    plan: Plan
    shapes: Shapes  # of our tensors
    tokenizers: Tokenizer | PairTokenizers | None

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers: where there are several, the one that holds them all."""
        dtypes = (self.tensors.entries[move.theirs].dtype for move in self.plan.moves)
        return reduce(torch.promote_types, dtypes)

    @property
    def task(self) -> str:
        """The task that trains such a model; "none" where there is none."""
        shape = getattr(self.config, "shape", "images")
        return TASKS.get((shape, _head(self.config)), "none")

    def load(self) -> nn.Module:
        """The model, its weights read straight into place."""
        model = on_meta(self.config)
        with self.tensors:
            self._check_copies()
            state = dict(parts(self.tensors, self.plan.moves, self.shapes, self.dtype))
        model.load_state_dict(state, assign=True)
        return model

    def write(self, path: Path) -> None:
        """Write the weights under our names into one file, without a model in memory."""
        with self.tensors:
            self._check_copies()
        bring(self.tensors, self.plan.moves, self.shapes, self.dtype, path)

    def _check_copies(self) -> None:
        for name, original in self.plan.copies.items():
            if self.tensors.equal(name, original):
                continue
            tied = self.plan.tied & {name, original} and "tie_word_embeddings" in self.family.fields
            way_out = ';\nif they are two, say so in config.json: "tie_word_embeddings": false'
            raise CheckpointError(
                f"{self.path}: {quote(name)} and {quote(original)} should be one and the same "
                f"tensor, and differ{way_out if tied else ''}"
            )


def is_external_checkpoint(path: Path) -> bool:
    """Whether a path holds a checkpoint of another library rather than a run."""
    table = _described(path)
    return "model_type" in table or ("train" not in table and _find(path) is not None)


def _find(path: Path) -> tuple[Reader, Path] | None:
    """The file that no config.json describes, and who reads it."""
    found = ((open_file, find(path)) for find, open_file in READERS)
    return next(((reader, file) for reader, file in found if file is not None), None)


def _head(config: Any) -> str:
    """The kind of its head; a recurrent model has only the one."""
    return kind_of(getattr(config, "head", "linear"))[0]


def _described(path: Path) -> Table:
    """What config.json says, where there is one."""
    try:
        return read_json(path / "config.json")
    except CheckpointError:
        return {}


def _bare(path: Path) -> CheckpointWithoutConfig | None:
    """What is meant where no config.json speaks of another."""
    if path.is_dir() and "model_type" in _described(path):
        return None
    found = _find(path)
    if found is not None:
        reader, file = found
        return reader(file)
    if path.is_dir():
        return None
    if path.suffix in PICKLE_SUFFIXES:
        raise pickle_error(path)
    raise CheckpointError(f"{path} is one file of a checkpoint; give its folder: {path.parent}")


def open_checkpoint(path: Path | str) -> ExternalCheckpoint:
    """Open a checkpoint; nothing is loaded before everything is known to fit."""
    path = Path(path)
    if not path_exists(path):
        raise CheckpointError(f"no folder at {path}")
    bare = _bare(path)
    folder = path if path.is_dir() else path.parent
    if bare is None:
        table = read_json(path / "config.json")
        family, config = read_config(table)
        tensors = open_tensors(path)
        if not table.get("architectures"):
            config = _fitting(family, table, tensors) or config
        tokenizers = read_tokenizers(folder, table)
    else:
        table, family, config, tensors = {}, bare.family, bare.config, bare.tensors
        tokenizers = bare.tokenizers or read_tokenizers(folder, table)
    shapes, plan = plan_weights(family, config, tensors, path)
    return ExternalCheckpoint(
        path=folder,
        family=family,
        config=config,
        table=table,
        tensors=tensors,
        plan=plan,
        shapes=shapes,
        tokenizers=check_tokenizers(tokenizers, config, folder),
    )


def plan_weights(
    family: Family, config: Any, tensors: Tensors, path: Path
) -> tuple[dict[str, torch.Size], Plan]:
    """The shapes of our tensors and what fills them; or all that does not fit, by name."""
    problems, shapes, plan = _planned(family, config, tensors)
    if problems:
        more = f"\n  … and {len(problems) - 5} more" if len(problems) > 5 else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:5])
        raise CheckpointError(
            f"the tensors in {path} are not those that its config.json describes:{listed}{more}"
        )
    return shapes, plan


def prefixed_rules(family: Family, config: Any) -> list[Rule]:
    """The rules of a model with full names, as they are written."""
    prefix = "" if _head(config) in BASES else family.prefix
    return [_below(prefix, rule) for rule in family.rules(config)]


def _below(prefix: str, rule: Rule) -> Rule:
    of_head = rule.parts[0].startswith("head.")
    return rule if of_head else Rule(prefix + rule.theirs, rule.ours, rule.layout)


def _planned(
    family: Family, config: Any, tensors: Tensors
) -> tuple[list[str], dict[str, torch.Size], Plan]:
    entries = tensors.entries
    if max(config.depths) > len(entries) and not getattr(config, "shared_layers", False):
        problem = f"{max(config.depths):,} layers, of {len(entries):,} tensors in all"
        return [problem], {}, Plan([], [])
    try:
        shapes = {name: tensor.shape for name, tensor in weights(on_meta(config)).items()}
    except ConfigError:
        raise
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond all bounds
        return [str(error).splitlines()[0]], {}, Plan([], [])
    rules = family.rules(config)
    # Published files have the prefix or not, whatever class they are of.
    either = [_below(prefix, rule) for rule in rules for prefix in (family.prefix, "")]
    aliases = {new: old for new, old in TIED.items() if new not in shapes}
    plan = plan_import(either, entries, shapes, aliases)
    names = {
        part: move.theirs
        for move in plan_export(prefixed_rules(family, config), shapes).moves
        for part in move.ours
    }
    missing = dict.fromkeys(names.get(name, name) for name in plan.missing)  # packed ones once
    problems = [f"{name} is missing" for name in missing]
    unknown = (name for name in plan.unknown if not _ignored(family, name))
    problems += [f"{quote(name)} is not known" for name in unknown]
    misfits = (_misfit(move, tensors, shapes) for move in plan.moves)
    return problems + [problem for problem in misfits if problem is not None], shapes, plan


def _ignored(family: Family, name: str) -> bool:
    bare = name.removeprefix(family.prefix)
    return any(matches(pattern, each) for pattern in family.ignored for each in (name, bare))


def _misfit(move: Move, tensors: Tensors, shapes: Shapes) -> str | None:
    """What is wrong with the type or the shape of one of their tensors."""
    entry, wanted = tensors.entries[move.theirs], [shapes[name] for name in move.ours]
    if entry.dtype not in WEIGHTS:
        return f"{quote(move.theirs)} holds {entry.dtype}, not float32, bfloat16 or float16"
    empty = torch.empty(entry.shape, device="meta")
    try:
        found = [part.shape for part in move.layout.split(empty, wanted)]
    except (RuntimeError, IndexError):  # it cannot even be cut
        found = []
    if found == wanted:
        return None
    theirs = move.layout.join([torch.empty(shape, device="meta") for shape in wanted]).shape
    return f"{quote(move.theirs)} has shape {tuple(entry.shape)}, the model {tuple(theirs)}"


def _fitting(family: Family, table: Mapping[str, Any], tensors: Tensors) -> Any | None:
    """The configuration with the first head that fits, where config.json names no class."""
    for architecture in family.heads:
        config = read_config_as(family, table, architecture)
        if not _planned(family, config, tensors)[0]:
            return config
    return None
