"""Figures of generation: temperature, samplers, the tree of a beam search."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ConfigError
from regard.explain.figures.figure_model import FigureModel, check_positive
from regard.explain.figures.panels import Bars, FigureData, Node, Panel, Tree
from regard.generate import parse_chain
from regard.generate.chain import Chain
from regard.generate.sampler_spec import format_sampler
from regard.generate.sampling_state import SamplingState
from regard.generate.search.beam_search import BeamSearch, Extensions
from regard.models.base import Language

# P of the next token where no run is given.
EXAMPLE = {
    "the": 0.32, "a": 0.2, "his": 0.13, "it": 0.09, "one": 0.07, "some": 0.06,
    "cats": 0.05, "no": 0.03, "fish": 0.02, "blue": 0.015, "of": 0.01, "qua": 0.005,
}  # fmt: skip


def temperature(
    model: FigureModel | None = None,
    text: str | None = None,
    *,
    values: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0),
    top: int = 12,
) -> FigureData:
    r"""The next-token distribution at several temperatures.

    P_T(w) = exp(z_w / T) / sum_v exp(z_v / T)
    """
    if not values or not all(value > 0 for value in values):  # NaN is not above 0
        raise ConfigError(f"values={list(values)} must be temperatures above 0")
    check_positive(top=top)
    labels, logits, _, origin = _distribution(model, text, "temperature")
    probabilities = {T: (logits / T).softmax(-1) for T in values}
    best = logits.topk(min(top, len(logits))).indices.tolist()
    return FigureData(
        title="Softmax at several temperatures",
        caption=f"{origin} A temperature below 1 raises the probability of likely tokens, one "
        "above 1 that of unlikely tokens; at 0 only the most probable is left, at infinity all are "
        "equal.",
        panels=[
            Bars(
                labels=[labels(id) for id in best],
                series={f"T = {T:g}": p[best].tolist() for T, p in probabilities.items()},
                x_label="token",
                y_label="probability",
            )
        ],
        numbers={f"entropy at T = {T:g} (bits)": _entropy(logits / T) for T in values},
    )


def samplers(
    model: FigureModel | None = None,
    text: str | None = None,
    *,
    samplers: tuple[str, ...] = ("temperature=0.7", "top_k=8", "top_p=0.9"),
    order: str | None = None,
    top: int = 12,
) -> FigureData:
    """The next-token distribution before and after each sampler of a chain."""
    check_positive(top=top)
    labels, logits, history, origin = _distribution(model, text, "samplers")
    chain: Chain = parse_chain(samplers, order)
    stop = () if model is None else model.require_tokenizer().stop_ids
    sampling = SamplingState.from_prompts([history], 1, seed=1, stop=stop)
    stages = [
        (trace.sampler, trace.by_id(trace.before)[0].double(), trace.by_id(trace.after)[0].double())
        for trace in chain.run_samplers(logits[None].float(), sampling)
    ]
    distributions = [logits, *(after for _, _, after in stages)]
    largest = torch.stack([stage_logits.softmax(-1) for stage_logits in distributions]).amax(0)
    top_ids = largest.topk(min(top, len(logits))).indices  # likely before or after some sampler
    best = top_ids[logits[top_ids].argsort(descending=True)].tolist()
    names = [labels(id) for id in best]
    panels: list[Panel] = []
    numbers: dict[str, float] = {"entropy of the model (bits)": _entropy(logits)}
    after = logits
    for number, (sampler, before, after) in enumerate(stages, 1):
        remaining = int((after > -torch.inf).sum())
        name = format_sampler(sampler)
        panels.append(
            Bars(
                title=f"{number}. {name}: {remaining:,} of {len(logits):,} tokens left",
                labels=names,
                series={
                    "before": before.softmax(-1)[best].tolist(),
                    "after": after.softmax(-1)[best].tolist(),
                },
                x_label="token",
                y_label="probability",
            )
        )
        numbers[f"entropy after {name} (bits)"] = _entropy(after)
    if not panels:
        raise ConfigError(
            "the chain has no sampler that changes the distribution; give one, as in top_p=0.9"
        )
    numbers["probability of the tokens left, under the model"] = (
        logits.softmax(-1)[after > -torch.inf].sum().item()
    )
    return FigureData(
        title=f"Samplers: {chain}",
        caption=f"{origin} The order matters: in another order, samplers may keep other tokens.",
        panels=panels,
        numbers=numbers,
    )


def _entropy(logits: Float[Tensor, " vocab"]) -> float:
    p = logits.double().softmax(-1)
    return -(p * p.clamp_min(1e-300).log2()).sum().item() + 0.0


def _distribution(
    model: FigureModel | None, text: str | None, figure: str
) -> tuple[Callable[[int], str], Float[Tensor, " vocab"], list[int], str]:
    """A function from ids to labels, the next-token logits, the prompt ids, and their origin."""
    if model is None:
        if text is not None:
            raise ConfigError(f"{figure} of a text needs a run or a preset as well")
        words = list(EXAMPLE)
        logits = torch.tensor(list(EXAMPLE.values()), dtype=torch.float64).log()
        return words.__getitem__, logits, [0], "An invented distribution over 12 words."
    if text is None:
        raise ConfigError(f"{figure} of a run needs a text as well")
    model.require_language_model(figure)
    ids = model.ids(text)
    if not ids:
        raise ConfigError(f"the text is empty; {figure} needs at least one token")
    logits = model.logits(ids)[-1].double()
    origin = f"The next token of {model.name} after {text[-40:]!r}.{model.note}"
    return lambda id: repr(model.pieces([id])[0]), logits, ids, origin


@dataclass(frozen=True, slots=True)
class RecordingBeamSearch(BeamSearch):
    """A beam search that records the extensions of every step, for one prompt."""

    steps: list[Extensions] = field(default_factory=list, repr=False, compare=False)

    def _extensions(self, logits: Tensor, beam_log_probs: Tensor, stops: Tensor) -> Extensions:
        extensions = BeamSearch._extensions(self, logits, beam_log_probs, stops)
        self.steps.append(extensions)
        return extensions


def beam_tree(
    model: FigureModel,
    text: str,
    *,
    width: int = 3,
    max_new_tokens: int = 5,
    length_penalty: float = 1.0,
) -> FigureData:
    r"""The tree of a beam search: the extensions of every beam, pruned or kept, and the best path.

    score(y) = log P(y) / |y|^a
    """
    search = RecordingBeamSearch(width, length_penalty)
    if model.source is not None:
        source, prompt = model.source(text)
    else:
        model.require_language_model("beam-tree")
        source, prompt = None, model.ids(text)
    if not prompt:
        raise ConfigError("the text is empty; beam-tree needs at least one token")
    stop = {*model.require_tokenizer().stop_ids}
    (hypotheses,) = search(
        cast(Language, model.module),
        [prompt],
        max_new_tokens=max_new_tokens,
        stop=stop,
        source=source,
    )
    best = [*hypotheses[0].ids]
    words = text.split() or model.pieces(prompt)  # a blank text has no word
    nodes = [Node(label=words[-1] if source is None else "⟨start⟩", parent=None, value=0.0)]
    beams: list[tuple[int, list[int]]] = [(0, [])]  # the node and the ids of every beam
    finished: list[list[int]] = []
    for parents, next_ids, log_probs in search.steps:
        next_beams: list[tuple[int, list[int]]] = []
        columns = (parents[0].tolist(), next_ids[0].tolist(), log_probs[0].tolist())
        for rank, (parent, id, log_p) in enumerate(zip(*columns, strict=True)):
            if log_p == -math.inf:
                continue
            node, ids = beams[parent]
            path = [*ids, id]
            ends = id in stop and rank < width
            stays = id not in stop and len(next_beams) < width
            nodes.append(
                Node(
                    label=model.pieces([id])[0],
                    parent=node,
                    value=log_p,
                    kept=stays or ends,
                    best=(stays or ends) and _is_prefix(path, best, stop),
                )
            )
            if stays:
                next_beams.append((len(nodes) - 1, path))
            elif ends:
                finished.append(path)
        beams = next_beams
    return FigureData(
        title=f"Beam search of {model.name}, width {width}",
        caption=f"Each step extends every beam by every token and keeps the {width} most probable; "
        "the number is log P of the path. Grey: extensions that were pruned. Orange: the best "
        f"path, by log P / length^{length_penalty:g}."
        f"{model.note}",
        panels=[Tree(nodes=nodes)],
        numbers={"score of the best": hypotheses[0].score, "ended by a stop token": len(finished)},
    )


def _is_prefix(path: list[int], best: list[int], stop: set[int]) -> bool:
    """Whether a path leads to the best hypothesis, whose stop id is not stored."""
    ids = path[:-1] if path[-1] in stop else path
    return ids == best[: len(ids)] and (path[-1] not in stop or len(ids) == len(best))
