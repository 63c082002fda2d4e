"""The figure of position encodings: their values, and the similarity of two positions."""

import torch
from torch import nn

from regard.config import make
from regard.errors import ConfigError, unknown
from regard.explain.figures.figure_model import FigureModel
from regard.explain.figures.panels import FigureData, Heatmap, LinePlot, Panel
from regard.explain.projection import position_indices, position_similarity
from regard.nn.position import POSITIONS, ALiBi, Position, Rotary, T5Bias

KINDS = tuple(kind for kind in POSITIONS if kind != "none")


def positions(
    model: FigureModel | None = None,
    *,
    kinds: tuple[str, ...] = KINDS,
    length: int = 48,
    dim: int = 64,
    heads: int = 8,
    seed: int = 1,
) -> FigureData:
    r"""The values of position encodings, and the dot product or bias of every two positions.

    sinusoidal, learned    p_t . p_s
    rotary                 q_t . k_s  of  q = k = (1, ..., 1) / sqrt(d)
    alibi, t5              the bias that is added to the score of query t and key s
    """
    for name, value in (("length", length), ("dim", dim), ("heads", heads)):
        if value < 2:
            raise ConfigError(f"{name}={value} must be at least 2")
    if model is None:
        if not kinds:
            raise ConfigError(f"kinds=[] is empty; give some of {', '.join(KINDS)}")
        for kind in kinds:
            if kind not in KINDS:
                raise ConfigError(unknown("position encoding", kind, KINDS))
        sizes = {"dim": dim, "head_dim": dim, "heads": heads, "context": length, "causal": False}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encodings = {kind: make(kind, POSITIONS, "position", **sizes) for kind in kinds}
        note = " Learned vectors and T5's biases are random here; give a run to see trained ones."
        note = note if {"learned", "t5"} & {*kinds} else ""
    else:
        encodings, note = _model_encodings(model), model.note
    panels: list[Panel] = []
    for kind, encoding in encodings.items():
        panels += _panels(kind, encoding, length)
    return FigureData(
        title="Position encodings" + ("" if model is None else f" of {model.name}"),
        caption="Left: the encoding that is added or multiplied at each position. Right: the "
        "similarity of two positions: the dot product of their vectors, of rotated unit vectors, "
        f"or the bias of their attention score. Red is above 0, blue below.{note}",
        panels=panels,
    )


def _model_encodings(model: FigureModel) -> dict[str, Position]:
    """The position encodings of a model, by path; raise if there are none."""
    modules = {
        name: module
        for name, module in model.module.named_modules()
        if isinstance(module, Position) and type(module) is not Position
    }
    if not modules:
        raise ConfigError(
            f"{model.name} has no position encoding; it is a {type(model.module).__name__}"
            if not _has_position(model.module)
            else f"{model.name} has position='none'; give a model with {', '.join(KINDS)}"
        )
    return {f"{name} ({type(module).__name__})": module for name, module in modules.items()}


def _has_position(model: nn.Module) -> bool:
    return any(isinstance(module, Position) for module in model.modules())


def _panels(kind: str, encoding: Position, length: int) -> list[Panel]:
    table = getattr(encoding, "table", None)
    if isinstance(table, nn.Embedding) and not isinstance(encoding, T5Bias):
        length = min(length, len(table.weight) - getattr(encoding, "offset", 0))
    names = [str(position) for position in range(length)]
    positions = position_indices(encoding, length)
    similarity = Heatmap(
        title=f"{kind}: {'bias' if isinstance(encoding, ALiBi | T5Bias) else 'dot product'}",
        rows=names,
        columns=names,
        values=position_similarity(encoding, length, normalize=False)[0].tolist(),
        x_label="position s",
        y_label="position t",
        signed=True,
    )
    if isinstance(encoding, ALiBi | T5Bias):
        with torch.no_grad():
            bias = encoding.bias(positions, positions)
        middle = length // 2
        series = {
            f"head {head}": [
                (key - middle, bias[0, head, middle, key].item()) for key in range(length)
            ]
            for head in range(0, bias.shape[1], max(1, bias.shape[1] // 4))
        }
        curves = LinePlot(
            title=f"{kind}: bias of a key by its distance",
            x_label="key position - query position",
            y_label="bias",
            series=series,
        )
        return [curves, similarity]
    if isinstance(encoding, Rotary):
        rotation = encoding.rotation(positions)
        values, x_label = rotation.cos[0, 0], "pair of coordinates"
        title = f"{kind}: cos of the angle"
    else:
        with torch.no_grad():
            vectors = encoding.embed(positions)
        assert vectors is not None
        values, x_label, title = vectors[0], "dimension", f"{kind}: vectors"
    dims = [str(dimension) for dimension in range(values.shape[1])]
    values_map = Heatmap(
        title=title,
        rows=names,
        columns=dims,
        values=values.tolist(),
        x_label=x_label,
        y_label="position",
        signed=True,
    )
    return [values_map, similarity]
