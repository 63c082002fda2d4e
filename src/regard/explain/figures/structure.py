"""Figures about the structure of layers: receptive field, path lengths, parameters."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.explain.figures.figure_model import FigureModel, check_positive
from regard.explain.figures.panels import FigureData, LinePlot, Network, Panel, Point, Table
from regard.nn.attention import Attention
from regard.nn.convolution import CausalConvolution
from regard.nn.recurrent import LSTM

MAX_POSITIONS = 40  # positions of a network that is drawn


def receptive_field(
    model: FigureModel | None = None,
    *,
    kernel_size: int = 2,
    layers: int = 4,
    dilations: tuple[int, ...] | None = None,
) -> FigureData:
    r"""The inputs that one output of a stack of causal convolutions depends on.

    field = 1 + (kernel_size - 1) (dilation_1 + ... + dilation_L)

    The dilations are 1, 2, 4, ... by default; given a run or a preset, those of its convolutions.
    """
    if model is not None:
        convolutions = [m for m in model.module.modules() if isinstance(m, CausalConvolution)]
        if not convolutions:
            raise ConfigError(
                f"{model.name} has no convolution; give a run or a preset with one, such as "
                "convolution"
            )
        (kernel_size,) = convolutions[0].filter.kernel_size
        dilations = tuple(layer.filter.dilation[0] for layer in convolutions)
    if dilations is None:
        check_positive(layers=layers)
        dilations = tuple(2**n for n in range(layers))
    if kernel_size < 2 or not dilations or min(dilations) < 1:
        raise ConfigError(
            f"kernel_size={kernel_size} must be at least 2, and dilations={list(dilations)} one or "
            "more numbers of at least 1"
        )
    fields = [
        receptive_field_size(kernel_size, dilations[:count]) for count in range(len(dilations) + 1)
    ]
    undilated_fields = [
        receptive_field_size(kernel_size, [1] * count) for count in range(len(dilations) + 1)
    ]
    drawn_layers = max(count for count, field in enumerate(fields) if field <= MAX_POSITIONS)
    note = "" if drawn_layers == len(dilations) else f" Drawn: the first {drawn_layers} layers."
    rows = [
        [layer, 0 if layer == 0 else dilations[layer - 1], field, undilated]
        for layer, (field, undilated) in enumerate(zip(fields, undilated_fields, strict=True))
    ]
    panels: list[Panel] = (
        [_field_network(kernel_size, dilations[:drawn_layers])] if drawn_layers else []
    )
    panels.append(
        Table(
            header=["layer", "dilation", "receptive field", "without dilation"],
            rows=[[*row] for row in rows],
        )
    )
    return FigureData(
        title="Receptive field of causal convolutions" + (f", {model.name}" if model else ""),
        caption=f"Kernel size {kernel_size}: the last output depends on the inputs that are "
        "connected to it. The receptive field is 1 + (kernel size - 1) times the sum of the "
        f"dilations.{note}",
        panels=panels,
        numbers={"receptive field": fields[-1]},
    )


def receptive_field_size(kernel_size: int, dilations: Sequence[int]) -> int:
    """The receptive field of causal convolutions.

    >>> receptive_field_size(2, [1, 2, 4, 8])
    16
    """
    return 1 + (kernel_size - 1) * sum(dilations)


def _field_network(kernel_size: int, dilations: Sequence[int]) -> Network:
    """The units of every layer that the last output depends on."""
    size = receptive_field_size(kernel_size, dilations)
    units_by_layer = [{size - 1}]
    edges = []
    for index in range(len(dilations), 0, -1):
        inputs: set[int] = set()
        for position in units_by_layer[0]:
            for k in range(kernel_size):
                source = position - k * dilations[index - 1]
                inputs.add(source)
                edges.append((index - 1, source, index, position))
        units_by_layer.insert(0, inputs)
    return Network(
        title=f"dilations {', '.join(map(str, dilations))}",
        layers=["input", *(f"layer {n + 1}" for n in range(len(dilations)))],
        positions=[str(position - size + 1) for position in range(size)],
        marks=[["•" if p in units else "" for p in range(size)] for units in units_by_layer],
        edges=edges,
        x_label="position relative to the output",
    )


def path_lengths(
    *, positions: int = 8, layers: int = 3, kernel_size: int = 3, window: int = 4
) -> FigureData:
    r"""Sequential operations and maximum path length of layers (Vaswani et al. 2017, table 1).

                                 sequential ops      maximum path length
        recurrence               n                   n
        self-attention           1                   1
        convolution              1                   n / k, dilated log_k n
        sliding-window attention 1                   n / r

    n is the length, k the kernel size and r the window. The table is for one layer. Path lengths
    are counted in the graph of the positions that a layer connects.
    """
    if not 2 <= positions <= MAX_POSITIONS or layers < 1 or kernel_size < 2 or window < 2:
        raise ConfigError(
            f"positions={positions} must be between 2 and {MAX_POSITIONS}, layers={layers} at "
            f"least 1, kernel_size={kernel_size} and window={window} at least 2"
        )
    lengths = [2**n for n in range(2, 9)]
    kinds: dict[str, Callable[[int, int], Bool[Tensor, "time seen"]]] = {
        "recurrence": lambda n, layer: _band(n, 2),
        "self-attention": lambda n, layer: _band(n, n),
        f"convolution, kernel size {kernel_size}": lambda n, layer: _band(n, kernel_size),
        f"convolution, kernel size {kernel_size}, dilated": lambda n, layer: _band(
            n, kernel_size, kernel_size**layer
        ),
        f"sliding-window attention, size {window}": lambda n, layer: _band(n, window),
    }
    paths: dict[str, list[Point]] = {
        name: [(n, path_length(lambda layer, n=n, kind=kind: kind(n, layer))) for n in lengths]  # type: ignore[misc]
        for name, kind in kinds.items()
    }
    names = [f"{t + 1}" for t in range(positions)]
    layer_names = ["input", *(f"layer {n + 1}" for n in range(layers))]
    blank = [""] * positions
    recurrence = Network(
        title="recurrence: the earliest step of each state",
        layers=layer_names,
        positions=names,
        marks=[blank, *([str(t + n) for t in range(1, positions + 1)] for n in range(layers))],
        edges=[
            *((n, t, n + 1, t) for n in range(layers) for t in range(positions)),
            *((n, t, n, t + 1) for n in range(1, layers + 1) for t in range(positions - 1)),
        ],
    )
    attention = Network(
        title="self-attention: the earliest step of each state",
        layers=layer_names,
        positions=names,
        marks=[blank, *([str(n + 1)] * positions for n in range(layers))],
        edges=[
            (n, s, n + 1, t) for n in range(layers) for t in range(positions) for s in range(t + 1)
        ],
    )
    return FigureData(
        title="Sequential operations and path lengths",
        caption="The number in a unit is the earliest step at which it can be computed with "
        "unlimited parallelism. The curves show the smallest number of layers, or of steps of a "
        "recurrence, after which the last position depends on the first.",
        panels=[
            recurrence,
            attention,
            LinePlot(
                title="maximum path length",
                x_label="length n",
                y_label="layers or steps",
                series=paths,
                log_x=True,
                log_y=True,
            ),
        ],
        numbers={
            "steps of the recurrence": positions + layers - 1,
            "steps of self-attention": layers,
        },
    )


def _band(n: int, width: int, dilation: int = 1) -> Bool[Tensor, "time seen"]:
    """The positions that one layer connects: t with t, t - dilation, ..., `width` of them."""
    distance = torch.arange(n)[:, None] - torch.arange(n)
    return (distance >= 0) & (distance < width * dilation) & (distance % dilation == 0)


def path_length(layer: Callable[[int], Bool[Tensor, "time seen"]]) -> int:
    """The number of layers after which the last position depends on the first."""
    row = layer(0)[-1].float()
    count = 1
    while not row[0]:
        row = ((row @ layer(count).float()) > 0).float()
        count += 1
    return count


def parameter_count(
    model: FigureModel | None = None,
    *,
    dim: int = 64,
    lengths: tuple[int, ...] = (1, 4, 16, 64, 256, 1024),
) -> FigureData:
    r"""The parameters of a dense layer over n inputs, compared with those of attention.

        dense        (n d)^2 + n d
        attention    4 d^2

    Counted on the modules, also for a convolution of kernel size 3 and an LSTM.
    """
    dim = getattr(model.config, "dim", dim) if model is not None else dim
    if dim < 1 or min(lengths, default=0) < 1:
        raise ConfigError(f"dim={dim} and lengths={list(lengths)} must be at least 1")
    with torch.device("meta"):
        fixed = {
            "self-attention": Attention(dim, 1),
            "convolution, kernel size 3": nn.Conv1d(dim, dim, 3),
            "LSTM": LSTM(dim, dim),
        }
        dense = {n: nn.Linear(n * dim, n * dim) for n in lengths}
    sizes: dict[str, list[Point]] = {
        "dense layer": [(n, _parameters(layer)) for n, layer in dense.items()]
    }
    sizes |= {name: [(n, _parameters(m)) for n in lengths] for name, m in fixed.items()}
    return FigureData(
        title=f"Parameters of a layer over n inputs of width {dim}",
        caption="The parameters of a dense layer grow with the square of the length of the input; "
        "those of attention, convolution and recurrence do not depend on it.",
        panels=[
            LinePlot(
                x_label="length n",
                y_label="parameters",
                series=sizes,
                log_x=True,
                log_y=True,
            )
        ],
        numbers={f"{name} at n = {lengths[-1]}": points[-1][1] for name, points in sizes.items()},
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
