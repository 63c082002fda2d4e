"""Figures of recurrent networks: gates over a text, and gradients through time."""

import math

from regard.errors import ConfigError
from regard.explain.figures.figure_model import FigureModel, check_positive, untrained_note
from regard.explain.figures.panels import FigureData, Heatmap, LinePlot, Panel
from regard.explain.gradient import require_gradients
from regard.nn.recurrent import RecurrentLayer


def gates(model: FigureModel, text: str, *, layer: int = 0, units: int = 16) -> FigureData:
    r"""The gates of a recurrent cell over a text, unit by unit.

    LSTM: i, f, o = sigmoid(W x + U h + b),  c <- f * c + i * g,  h = o * tanh(c)
    """
    cells = [m for m in model.module.modules() if isinstance(m, RecurrentLayer) and m.hook_names]
    if not cells:
        raise ConfigError(
            f"{model.name} has no cell with gates; give a run or a preset of a gated recurrent "
            "network, such as lstm or gru"
        )
    check_positive(units=units)
    states = model.states(text)
    if not 0 <= layer < len(states):
        raise ConfigError(
            f"layer={layer}: {model.name} has {len(states)} cells, 0 to {len(states) - 1}"
        )
    path, cell = list(states.items())[layer]
    variation = cell.values.std(1, correction=0).sum(0)  # summed over the gates
    chosen = variation.topk(min(units, len(variation))).indices.sort().values
    panels: list[Panel] = [
        Heatmap(
            title=f"{name.replace('_', ' ')}, mean {values.mean():.2f}",
            rows=[str(unit) for unit in chosen.tolist()],
            columns=cell.rows,
            values=values[:, chosen].T.tolist(),
            y_label="unit",
            high=1.0 if name.endswith("gate") else None,
        )
        for name, values in zip(cell.headings, cell.values, strict=True)
    ]
    return FigureData(
        title=f"Gates of {model.name}, {path}",
        caption=f"The {len(chosen)} units that vary most over the text. A gate of 0 is closed, of "
        f"1 open; candidate, cell and state are signed.{model.note}",
        panels=panels,
    )


def gradient_flow(models: list[FigureModel], text: str, *, layer: int = 0) -> FigureData:
    r"""The gradient norm of the last token's loss with respect to each earlier state.

    flow_t = || d loss / d h_t ||
    """
    series: dict[str, list[tuple[float, float]]] = {}
    numbers = {}
    for model in models:
        require_gradients(model.module)
        flow = model.gradients(text)
        if not 0 <= layer < len(flow.layers):
            raise ConfigError(
                f"layer={layer}: {model.name} has {len(flow.layers)} layers, 0 to "
                f"{len(flow.layers) - 1}"
            )
        norms = flow.by_distance(layer)
        name = model.name if model.name not in series else f"{model.name} ({len(series)})"
        series[name] = [
            (distance, norm) for distance, norm in enumerate(norms) if 0 < norm < math.inf
        ]
        if norms[0] > 0:
            numbers[f"{name}: norm {len(norms) - 1} positions back / last"] = norms[-1] / norms[0]
    return FigureData(
        title="Gradient flow through time",
        caption="The norm of the gradient of the last token's loss with respect to the state of "
        "each position before it: a curve that falls steeply is a vanishing gradient, a rising one "
        f"an exploding gradient.{untrained_note(models)}",
        panels=[
            LinePlot(
                x_label="positions back",
                y_label="gradient norm",
                series=series,
                log_y=True,
            )
        ],
        numbers=numbers,
    )
