"""What the page shows of a model: sampler stages, attention maps, figures, structure."""

import math
from dataclasses import asdict, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from regard.api.explanation import source_and_translation
from regard.api.lecture_figures import figure
from regard.api.model_info import diff, info, presets
from regard.api.run import Run
from regard.config import read_toml
from regard.errors import ConfigError, unknown
from regard.explain.figures import FIGURES
from regard.explain.figures.panels import Table
from regard.explain.render.explorer import PAGE_STYLE, explorer
from regard.explain.render.figure import page, to_svg
from regard.generate.chain import DEFAULT_SAMPLERS
from regard.generate.sampler_spec import format_sampler, parse_sampler
from regard.generate.samplers import SAMPLERS
from regard.generate.samplers.logits_processor import entropy
from regard.generate.sampling_state import SamplingState
from regard.models.base import Language
from regard.serve.engine_request import source_ids
from regard.serve.jobs import MAX_EXPLAINED, tokenize
from regard.serve.models import ServedModel
from regard.serve.studio.bodies import DistributionBody
from regard.serve.studio.folder import RunsFolder
from regard.training.setup.configure import RECIPES, recipes

NO_SAMPLER = "the model"
SLIDERS = {  # of samplers, in the order in which they are applied: smallest, largest, step
    "repetition": (1, 2, 0.05),
    "temperature": (0, 2, 0.05),
    "top_k": (0, 50, 1),
    "top_p": (0.05, 1, 0.01),
    "min_p": (0, 0.5, 0.01),
}
MAX_TOKENS = 256  # of a text whose figures are drawn


def list_sliders() -> list[dict[str, Any]]:
    """The sliders of the page; `off` is where the sampler changes nothing."""
    defaults = {spec.partition("=")[0]: parse_sampler(spec) for spec in DEFAULT_SAMPLERS}
    sliders = []
    for name, (low, high, step) in SLIDERS.items():
        first = fields(cast(Any, SAMPLERS[name]))[0]
        off = first.metadata["off"]
        value = getattr(defaults[name], first.name) if name in defaults else off
        sliders.append(
            {"name": name, "min": low, "max": high, "step": step, "value": value, "off": off}
        )
    return sliders


@torch.inference_mode()
def distribution(model: ServedModel, body: DistributionBody) -> dict[str, Any]:
    """The next-token distribution of the model, and what is left of it after each sampler."""
    logits, ids = _next_logits(model, body.text)
    chain = model.chain(body.specs(), body.order)
    sampling = SamplingState.from_prompts(
        [ids], 1, seed=body.seed or 0, stop=model.tokenizer.stop_ids
    )
    stages = [(NO_SAMPLER, logits)]
    for trace in chain.run_samplers(logits[None], sampling):
        stages.append((format_sampler(trace.sampler), trace.by_id(trace.after)[0]))
    shown = logits.topk(min(body.top, len(logits))).indices
    return {
        "model": model.name,
        "tokens": [{"id": id, "piece": model.piece(id)} for id in shown.tolist()],
        "vocab_size": len(logits),
        "stages": [_stage(name, after, shown) for name, after in stages],
    }


def _stage(name: str, logits: Tensor, shown: Tensor) -> dict[str, Any]:
    probabilities = logits.softmax(-1)
    return {
        "sampler": name,
        "probabilities": [round(p, 6) for p in probabilities[shown].tolist()],
        "remaining": int((logits > -torch.inf).sum()),
        "bits": round(entropy(logits).item() / math.log(2), 3),
    }


def _next_logits(model: ServedModel, text: str) -> tuple[Tensor, list[int]]:
    """The logits after a text, on the CPU, and the ids before; of pairs, those of the target."""
    run = model.run_copy
    if model.engine is None:
        raise ConfigError(f"the model {model.name!r} does not generate text")
    language = cast(Language, run.model)
    source = None
    if model.takes_source:
        source_ids(model, text)  # refuses one that is too long
        source, _ = source_and_translation(run, text, "")
        ids = list(run._pair_task().prompt)
    else:
        ids = run._prompt(text)[-(model.context or 2**31) :]
    state = language.start(1, len(ids), source)
    logits, _ = language.step(torch.tensor([ids], device=language.device), state)
    return logits[0, -1].float().cpu(), ids


def attention_page(model: ServedModel, text: str) -> tuple[str, list[str]]:
    """The page of all attention maps of a text, and what of it is not in the vocabulary."""
    run = _text_run(model)
    _check_length(model, text, MAX_EXPLAINED)
    maps = run.attention(text)
    return page("attention", explorer(maps), PAGE_STYLE), run.unknown_parts(text)


def _text_run(model: ServedModel) -> Run:
    """The run, if it reads text: of others the input is the name of a file."""
    if model.run.tokenizers is None or "file" in model.run.inputs:
        raise ConfigError(f"the run {model.name!r} does not read text; choose one that does")
    return model.run_copy


def _check_length(model: ServedModel, text: str, most: int) -> None:
    ids = source_ids(model, text) if model.takes_source else tokenize(model, text, special=True)
    if len(ids) > most:
        raise ConfigError(f"text: it has {len(ids)} tokens, and at most {most} are shown here")


def list_figures() -> list[dict[str, Any]]:
    """The figures of the lectures: what they take and what they show."""
    return [
        {
            "name": name,
            "shows": entry.summary,
            "topics": list(entry.topics),
            "model": _need(entry.inputs, "model"),
            "text": _need(entry.inputs, "text"),
        }
        for name, entry in FIGURES.items()
    ]


def _need(inputs: dict[str, bool], what: str) -> str:
    needed = [inputs[key] for key in (what, f"{what}s") if key in inputs]
    return "no" if not needed else "needed" if any(needed) else "possible"


def draw_figure(name: str, model: ServedModel | None, text: str | None) -> dict[str, Any]:
    """A figure of the lectures as tables or an SVG, and as text for a screen reader."""
    models: list[Run | Path | str] = [] if model is None else [_text_run(model)]
    if model is not None and text:
        _check_length(model, text, MAX_TOKENS)
    shown = figure(name, models, [text] if text else [])
    panels = shown.data.panels
    only_tables = all(isinstance(panel, Table) for panel in panels)
    return {
        "title": shown.data.title,
        "caption": shown.data.caption,
        "tables": [asdict(panel) for panel in panels] if only_tables else [],
        "svg": "" if only_tables else to_svg(shown.figure()),
        "text": shown.text(78),
        "numbers": shown.data.numbers,
    }


def list_recipes() -> list[dict[str, str]]:
    """The recipes of one run whose data comes with the library."""
    entries = []
    for name in recipes():
        file = RECIPES / f"{name}.toml"
        table = read_toml(file)
        path = table.get("data", {}).get("path")
        if "study" in table or path is None or "/" in str(path):
            continue
        lines = takewhile(lambda line: line.startswith("#"), file.read_text("utf-8").splitlines())
        entries.append({"name": name, "about": " ".join(line[1:].strip() for line in lines)})
    return entries


def structure(folder: RunsFolder, name: str) -> dict[str, Any]:
    """The drawing, the settings and the size of a preset or run."""
    model = info(_known(folder, name))
    published = model.published
    return {
        "name": name,
        "kind": model.kind,
        "family": model.family,
        "parameters": model.parameters,
        "diagram": "\n".join(model.diagram()),
        "parts": model.cost.parts,
        "settings": {k: v for k, v in model.settings.items() if v not in (None, False)},
        "notes": model.notes,
        "published": None if published is None else asdict(published),
    }


def differences(folder: RunsFolder, first: str, second: str) -> dict[str, Any]:
    """The settings and parameter counts in which two presets or runs differ."""
    difference = diff(_known(folder, first), _known(folder, second))
    return {
        "names": [first, second],
        "groups": {
            "sizes": difference.sizes,
            "choices": difference.choices,
            "parameters": difference.parameters,
        },
    }


def _known(folder: RunsFolder, name: str) -> str:
    """A preset, or the path of a run: of "run:NAME"; nothing else that `info` would open."""
    kind, separator, run = name.partition(":")
    if kind == "run" and separator:
        return str(folder.run(run))
    if name not in presets():
        raise ConfigError(unknown("preset", name, presets()))
    return name
