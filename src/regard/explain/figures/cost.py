"""Figures of what layers see and cost: receptive fields, sequential steps, time, parameters."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.errors import ConfigError
from regard.explain.figures.panels import Lines, Network, Panel, Picture, Point, Table
from regard.explain.figures.subject import Subject
from regard.nn.attention import Attention, AttentionInputs, Mask, split_heads
from regard.nn.convolution import CausalConvolution
from regard.nn.recurrent import LSTM

LONGEST_NETWORK = 40  # positions of a drawn network


def receptive_field(
    subject: Subject | None = None,
    *,
    width: int = 2,
    layers: int = 4,
    dilations: tuple[int, ...] | None = None,
) -> Picture:
    r"""The inputs that one output of a stack of causal convolutions depends on.

    field = 1 + (width - 1) (dilation_1 + ... + dilation_L)

    By default dilations 1, 2, 4, ...; with a run or a preset, those of its convolutions.
    """
    if subject is not None:
        convolutions = [m for m in subject.model.modules() if isinstance(m, CausalConvolution)]
        if not convolutions:
            raise ConfigError(
                f"{subject.name} has no convolution; give a run or a preset that has, such as "
                "convolution"
            )
        (width,) = convolutions[0].filter.kernel_size
        dilations = tuple(layer.filter.dilation[0] for layer in convolutions)
    dilations = tuple(2**n for n in range(layers)) if dilations is None else dilations
    if width < 2 or not dilations or min(dilations) < 1:
        raise ConfigError(f"width={width} must be at least 2, and dilations at least 1")
    fields = [field_of(width, dilations[:count]) for count in range(len(dilations) + 1)]
    contiguous = [field_of(width, [1] * count) for count in range(len(dilations) + 1)]
    drawn = max(count for count, field in enumerate(fields) if field <= LONGEST_NETWORK)
    more = "" if drawn == len(dilations) else f" Drawn: the first {drawn} layers."
    rows = [
        [number, 1 if number == 0 else dilations[number - 1], field, plain]
        for number, (field, plain) in enumerate(zip(fields, contiguous, strict=True))
    ]
    rows[0][1] = 0
    panels: list[Panel] = [_field_network(width, dilations[:drawn])] if drawn else []
    panels.append(
        Table(
            header=["layer", "dilation", "field", "without dilation"],
            rows=[[*row] for row in rows],
        )
    )
    return Picture(
        title="Receptive field of causal convolutions" + (f", {subject.name}" if subject else ""),
        caption=f"Kernel width {width}: the last output depends on the inputs that are connected "
        f"with it. The field is 1 + (width - 1) times the sum of the dilations.{more}",
        panels=panels,
        facts={"receptive field": fields[-1]},
    )


def field_of(width: int, dilations: Sequence[int]) -> int:
    """The receptive field of causal convolutions.

    >>> field_of(2, [1, 2, 4, 8])
    16
    """
    return 1 + (width - 1) * sum(dilations)


def _field_network(width: int, dilations: Sequence[int]) -> Network:
    """The units of every layer that the last output depends on."""
    size = field_of(width, dilations)
    reached = [{size - 1}]
    edges = []
    for index in range(len(dilations), 0, -1):
        below: set[int] = set()
        for position in reached[0]:
            for k in range(width):
                source = position - k * dilations[index - 1]
                below.add(source)
                edges.append((index - 1, source, index, position))
        reached.insert(0, below)
    return Network(
        title=f"dilations {', '.join(map(str, dilations))}",
        layers=["input", *(f"layer {n + 1}" for n in range(len(dilations)))],
        positions=[str(position - size + 1) for position in range(size)],
        marks=[["•" if p in units else "" for p in range(size)] for units in reached],
        edges=edges,
        x_label="position, from that of the output",
    )


# Sequential steps and path lengths


def path_lengths(
    *, positions: int = 8, layers: int = 3, width: int = 3, window: int = 4
) -> Picture:
    r"""How many steps before each state can be computed, and how far two positions are apart.

                                 sequential steps    maximum path length
        recurrence               n                   n
        self-attention           1                   1
        convolution              1                   n / k, dilated log_k n
        restricted attention     1                   n / r

    Of one layer. Paths are counted on the graph of which positions a layer connects.
    """
    if not 2 <= positions <= LONGEST_NETWORK or layers < 1 or width < 2 or window < 2:
        raise ConfigError(
            f"positions={positions} must lie between 2 and {LONGEST_NETWORK}, layers={layers} be "
            f"at least 1, width={width} and window={window} at least 2"
        )
    lengths = [2**n for n in range(2, 9)]
    kinds: dict[str, Callable[[int, int], Bool[Tensor, "time seen"]]] = {
        "recurrence": lambda n, layer: _band(n, 2),
        "self-attention": lambda n, layer: _band(n, n),
        f"convolution, width {width}": lambda n, layer: _band(n, width),
        f"convolution, width {width}, dilated": lambda n, layer: _band(n, width, width**layer),
        f"attention, window {window}": lambda n, layer: _band(n, window),
    }
    paths: dict[str, list[Point]] = {
        name: [(n, path_length(lambda layer, n=n, kind=kind: kind(n, layer))) for n in lengths]  # type: ignore[misc]
        for name, kind in kinds.items()
    }
    names = [f"{t + 1}" for t in range(positions)]
    rungs = ["input", *(f"layer {n + 1}" for n in range(layers))]
    blank = [""] * positions
    recurrence = Network(
        title="recurrence: the earliest step of each state",
        layers=rungs,
        positions=names,
        marks=[blank, *([str(t + n) for t in range(1, positions + 1)] for n in range(layers))],
        edges=[
            *((n, t, n + 1, t) for n in range(layers) for t in range(positions)),
            *((n, t, n, t + 1) for n in range(1, layers + 1) for t in range(positions - 1)),
        ],
    )
    attention = Network(
        title="self-attention: the earliest step of each state",
        layers=rungs,
        positions=names,
        marks=[blank, *([str(n + 1)] * positions for n in range(layers))],
        edges=[
            (n, s, n + 1, t) for n in range(layers) for t in range(positions) for s in range(t + 1)
        ],
    )
    return Picture(
        title="Sequential steps and path lengths",
        caption="The number in a unit is the earliest step at which it can be computed when all "
        "that is possible at once is done at once. Below: the least number of layers, or of steps "
        "of a recurrence, over which the last position depends on the first.",
        panels=[
            recurrence,
            attention,
            Lines(
                title="maximum path length",
                x_label="length n",
                y_label="layers or steps",
                series=paths,
                log_x=True,
                log_y=True,
            ),
        ],
        facts={
            "steps of the recurrence": positions + layers - 1,
            "steps of self-attention": layers,
        },
    )


def _band(n: int, width: int, dilation: int = 1) -> Bool[Tensor, "time seen"]:
    """Which positions one layer connects: t with t, t - dilation, ..., `width` of them."""
    back = torch.arange(n)[:, None] - torch.arange(n)
    return (back >= 0) & (back < width * dilation) & (back % dilation == 0)


def path_length(layer: Callable[[int], Bool[Tensor, "time seen"]]) -> int:
    """The number of layers after which the last position depends on the first."""
    row = layer(0)[-1].float()
    count = 1
    while not row[0]:
        row = ((row @ layer(count).float()) > 0).float()
        count += 1
    return count


# Parameters


def parameter_count(
    subject: Subject | None = None,
    *,
    dim: int = 64,
    lengths: tuple[int, ...] = (1, 4, 16, 64, 256, 1024),
) -> Picture:
    r"""Parameters of a dense layer over n inputs beside those of attention.

        dense        (n d)^2 + n d
        attention    4 d^2

    Counted on the modules; a convolution of width 3 and an LSTM beside them.
    """
    dim = getattr(subject.config, "dim", dim) if subject is not None else dim
    if dim < 1 or min(lengths, default=0) < 1:
        raise ConfigError(f"dim={dim} and lengths={list(lengths)} must be at least 1")
    with torch.device("meta"):
        fixed = {
            "self-attention": Attention(dim, 1),
            "convolution, width 3": nn.Conv1d(dim, dim, 3),
            "LSTM": LSTM(dim, dim),
        }
        dense = {n: nn.Linear(n * dim, n * dim) for n in lengths}
    sizes: dict[str, list[Point]] = {
        "dense layer": [(n, _parameters(layer)) for n, layer in dense.items()]
    }
    sizes |= {name: [(n, _parameters(m)) for n in lengths] for name, m in fixed.items()}
    return Picture(
        title=f"Parameters of a layer over n inputs of width {dim}",
        caption="The parameters of a dense layer grow with the square of the length of the input; "
        "those of attention, convolution and recurrence do not depend on it.",
        panels=[
            Lines(
                x_label="length n",
                y_label="parameters",
                series=sizes,
                log_x=True,
                log_y=True,
            )
        ],
        facts={f"{name} at n = {lengths[-1]}": points[-1][1] for name, points in sizes.items()},
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# Measured cost


class WindowedAttention(Attention):
    """Causal attention to the `window` positions up to each, computed in blocks.

    Each block of `window` queries is compared with its own keys and those of the block before, so
    that the cost is n * window and not n^2.
    """

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__(dim, heads)
        self.window = window

    def forward(self, x: Float[Tensor, "batch time dim"]) -> Float[Tensor, "batch time dim"]:  # type: ignore[override]
        """The same as `Attention` with a causal mask and this window."""
        size, time = self.window, x.shape[1]
        blocks = -(-time // size)
        padded = nn.functional.pad(x, (0, 0, 0, blocks * size - time))
        layers = (self.query, self.key, self.value)
        q, k, v = (split_heads(layer(padded), self.heads) for layer in layers)
        q, k, v = (part.unflatten(2, (blocks, size)) for part in (q, k, v))
        k, v = (torch.cat([nn.functional.pad(p, (0, 0, 0, 0, 1, -1)), p], 3) for p in (k, v))
        back = size + torch.arange(size)[:, None] - torch.arange(2 * size)
        allowed = (back >= 0) & (back < size)
        first = allowed & (torch.arange(2 * size) >= size)  # the first block has none before it
        mask = torch.cat([first[None], allowed.expand(blocks - 1, -1, -1)])
        scores = (q @ k.mT) * self.head_dim**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        y = (weights @ v).flatten(2, 3).transpose(1, 2).flatten(2)
        return self.out(y)[:, :time]


def _layers(dim: int, heads: int, window: int, width: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The layers that are compared; attention with its weights, as the formula says."""
    attention, cell = Attention(dim, heads), LSTM(dim, dim)
    windowed, convolution = WindowedAttention(dim, heads, window), CausalConvolution(dim, width, 1)

    def attend(x: Tensor) -> Tensor:
        inputs = AttentionInputs.of(Mask.causal(), torch.arange(x.shape[1])[None])
        parts = (attention.query(x), attention.key(x), attention.value(x))
        q, k, v = (split_heads(part, heads) for part in parts)
        y = attention.weights(q, k, inputs) @ v
        out: Tensor = attention.out(y.transpose(1, 2).flatten(2))
        return out

    def recur(x: Tensor) -> Tensor:
        return cell.loop(x, cell.start(len(x)))[0]

    def convolve(x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (0, 0, convolution.left_context, 0))
        return convolution(padded)

    return {
        "self-attention": attend,
        "recurrence (LSTM)": recur,
        f"convolution, width {width}": convolve,
        f"attention, window {window}": windowed.forward,
    }


def cost(
    *,
    lengths: tuple[int, ...] = (256, 512, 1024, 2048),
    dim: int = 16,
    heads: int = 1,
    window: int = 32,
    width: int = 3,
    repeats: int = 3,
    seed: int = 1,
) -> Picture:
    r"""Time, memory and operations of one layer against length, measured on this machine.

                                 operations      per layer
        self-attention           n^2 d
        recurrence               n d^2
        convolution              k n d^2
        restricted attention     r n d

    The exponent is the slope of a line through the logarithms. Memory is what the layer stores
    for its gradient; time is that of the forward pass, the least of `repeats`. Attention computes
    its weights, as the formula says: fused kernels store none of them.
    """
    if len(lengths) < 2 or min(lengths) < 1 or repeats < 1 or window < 2:
        raise ConfigError(
            f"lengths={list(lengths)} must be two or more of at least 1, repeats={repeats} at "
            f"least 1 and window={window} at least 2"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = _layers(dim, heads, window, width)
    measured: dict[str, dict[str, list[Point]]] = {"time (ms)": {}, "memory (MB)": {}}
    measured["operations (millions)"] = {}
    for name, layer in layers.items():
        for length in lengths:
            x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(seed))
            values = (
                1e3 * seconds(layer, x, repeats),
                stored_bytes(layer, x) / 1e6,
                operations(layer, x) / 1e6,
            )
            for key, value in zip(measured, values, strict=True):
                measured[key].setdefault(name, []).append((length, value))
    exponents = {
        key: {name: exponent(points) for name, points in series.items()}
        for key, series in measured.items()
    }
    rows: list[list[str | float]] = [
        [
            name,
            *(series[name][-1][1] for series in measured.values()),
            *(fitted[name] for fitted in exponents.values()),
        ]
        for name in layers
    ]
    short = [key.partition(" ")[0] for key in measured]
    panels: list[Panel] = [
        Lines(title=key, x_label="length n", y_label=key, series=series, log_x=True, log_y=True)
        for key, series in measured.items()
    ]
    header = ["layer", *(f"{key} at {lengths[-1]:,}" for key in measured)]
    panels.append(
        Table(
            title="measured at the longest, and fitted exponents of n",
            header=[*header, *(f"{key} ~ n^" for key in short)],
            rows=rows,
        )
    )
    return Picture(
        title=f"Cost of one layer of width {dim}, measured on this machine",
        caption=f"Batch 1, {torch.get_num_threads()} thread(s). Self-attention grows with the "
        "square of the length, the others with the length; a recurrence takes its steps one after "
        "another.",
        panels=panels,
    )


@torch.no_grad()
def seconds(layer: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    """The shortest time of a forward pass, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def stored_bytes(layer: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The bytes of the activations that a forward pass stores for the backward pass."""
    stored: dict[int, int] = {}
    kept: list[Any] = []  # a freed storage's address would be used again

    def record(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            stored[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        kept.append(layer(x.requires_grad_()))
    return sum(stored.values())


@torch.no_grad()
def operations(layer: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The multiplications and additions of all matrix products of a forward pass."""
    with FlopCounterMode(display=False) as counter:
        layer(x)
    total: int = counter.get_total_flops()
    return total


def exponent(points: Sequence[Point]) -> float:
    """The slope of the line through the logarithms: b of y = a x^b, by least squares.

    >>> round(exponent([(1, 3), (2, 12), (4, 48)]), 6)
    2.0
    """
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in logs)
    return covariance / sum((x - mean_x) ** 2 for x, _ in logs)
