"""The data that the page shows: sampler stages, attention maps, figures and structures."""

import math
from dataclasses import asdict, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from regard.api.lecture_figures import figure
from regard.api.model_info import diff, info, presets
from regard.api.run import Run
from regard.config import read_toml
from regard.errors import ConfigError, unknown
from regard.explain.attention import has_attention
from regard.explain.figures import FIGURES
from regard.explain.figures.panels import Table
from regard.explain.render.explorer import PAGE_STYLE, explorer
from regard.explain.render.figure import page, to_svg
from regard.generate.chain import DEFAULT_SAMPLERS
from regard.generate.sampler_spec import format_sampler, parse_sampler
from regard.generate.samplers import SAMPLERS
from regard.generate.samplers.logits_processor import entropy
from regard.generate.sampling_state import SamplingState
from regard.serve.engine_request import formatted_messages
from regard.serve.jobs import input_ids, next_logits
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
MAX_TOKENS = 512  # of the text of attention maps or of a figure


def list_sliders() -> list[dict[str, Any]]:
    """The sliders of the page; at the value `off`, a sampler changes nothing."""
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
    """The next-token distribution of the model, and the distribution after each sampler."""
    logits, ids, _ = next_logits(model, body.text, chat=body.chat)
    chain = model.chain(body.specs(), body.order)
    sampling = SamplingState.from_prompts(
        [ids], 1, seed=body.seed or 0, stop=model.tokenizer.stop_ids
    )
    stages = [(NO_SAMPLER, logits)]
    for trace in chain.run_samplers(logits[None], sampling):
        stages.append((format_sampler(trace.sampler), trace.by_id(trace.after)[0]))
    top_ids = logits.topk(min(body.top, len(logits))).indices
    return {
        "model": model.name,
        "formatted": formatted_messages(model, [("user", body.text)]) if body.chat else None,
        "tokens": [{"id": id, "piece": model.piece(id)} for id in top_ids.tolist()],
        "vocab_size": len(logits),
        "stages": [_stage(name, after, top_ids) for name, after in stages],
    }


def _stage(name: str, logits: Tensor, top_ids: Tensor) -> dict[str, Any]:
    remaining = logits > -torch.inf
    return {
        "sampler": name,
        "probabilities": logits.softmax(-1)[top_ids].tolist(),
        "removed": (~remaining[top_ids]).tolist(),  # a probability may also be rounded to 0
        "remaining": int(remaining.sum()),
        "bits": round(entropy(logits).item() / math.log(2), 3),
    }


def attention_page(model: ServedModel, texts: tuple[str, ...]) -> tuple[str, list[str]]:
    """The page of all attention maps of one or two texts, and the parts not in the vocabulary."""
    run = _text_run(model)
    if not has_attention(run.model):
        raise ConfigError(
            f"the run {model.name!r} is a model of the family {run.config.model['family']}, which "
            "has no attention, so there are no maps"
        )
    if len(texts) != len(run.inputs):
        field = "second_text" if len(texts) < len(run.inputs) else "text"
        raise ConfigError(
            f"{field}: the run {model.name!r} reads {' and '.join(run.inputs)}, not "
            f"{len(texts)} {'text' if len(texts) == 1 else 'texts'}"
        )
    _check_length(model, *texts)
    maps = run.attention(texts if len(texts) > 1 else texts[0])
    return page("attention", explorer(maps), PAGE_STYLE), run.unknown_parts(texts)


def _text_run(model: ServedModel) -> Run:
    """The run, if it reads text; other runs read files, which a client must not name."""
    if model.run.tokenizers is None or "file" in model.run.inputs:
        raise ConfigError(f"the run {model.name!r} does not read text; choose one that does")
    return model.run_copy


def _check_length(model: ServedModel, *texts: str) -> None:
    tokens = sum(len(input_ids(model, text)) for text in texts)
    if not tokens:
        raise ConfigError("text: it has no token; give some text")
    if tokens > MAX_TOKENS:
        raise ConfigError(
            f"text: it has {tokens} tokens, and the limit is {MAX_TOKENS}; shorten it"
        )


def list_figures() -> list[dict[str, Any]]:
    """The figures of the lectures, with their inputs and summaries."""
    return [
        {
            "name": name,
            "summary": entry.summary,
            "topics": list(entry.topics),
            "model": _requirement(entry.inputs, "model"),
            "text": _requirement(entry.inputs, "text"),
        }
        for name, entry in FIGURES.items()
    ]


def _requirement(inputs: dict[str, bool], name: str) -> str:
    required = [inputs[key] for key in (name, f"{name}s") if key in inputs]
    return "none" if not required else "required" if any(required) else "optional"


def draw_figure(name: str, model: ServedModel | None, text: str | None) -> dict[str, Any]:
    """A figure of the lectures as tables or an SVG, and as text for a screen reader."""
    models: list[Run | Path | str] = [] if model is None else [_text_run(model)]
    if model is not None and text:
        _check_length(model, text)
    lecture_figure = figure(name, models, [text] if text else [])
    panels = lecture_figure.data.panels
    only_tables = all(isinstance(panel, Table) for panel in panels)
    return {
        "title": lecture_figure.data.title,
        "caption": lecture_figure.data.caption,
        "tables": [asdict(panel) for panel in panels] if only_tables else [],
        "svg": "" if only_tables else to_svg(lecture_figure.figure()),
        "text": lecture_figure.text(78),
        "numbers": lecture_figure.data.numbers,
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
    """The diagram, the settings and the size of a preset or run."""
    model = info(_preset_or_path(folder, name))
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
    difference = diff(_preset_or_path(folder, first), _preset_or_path(folder, second))
    return {
        "names": [first, second],
        "groups": {
            "sizes": difference.sizes,
            "settings": difference.settings,
            "parameters": difference.parameters,
        },
    }


def _preset_or_path(folder: RunsFolder, name: str) -> str:
    """The name of a preset, or for "run:NAME" the path of that run; other paths are refused."""
    kind, separator, run = name.partition(":")
    if kind == "run" and separator:
        return str(folder.run(run))
    if name not in presets():
        raise ConfigError(unknown("preset", name, presets()))
    return name
