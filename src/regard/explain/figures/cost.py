"""The measured cost of layers: time, memory and FLOPs against the length of the input."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.errors import ConfigError
from regard.explain.figures.figure_model import check_positive
from regard.explain.figures.panels import FigureData, LinePlot, Panel, Point, Table
from regard.nn.attention import Attention, AttentionInputs, Mask, split_heads
from regard.nn.convolution import CausalConvolution
from regard.nn.recurrent import LSTM


class SlidingWindowAttention(Attention):
    """Causal attention of each position to itself and the `window` - 1 positions before it.

    Each block of `window` queries is compared with the keys of its block and of the block before,
    so that the cost is n * window and not n^2.
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
        distance = size + torch.arange(size)[:, None] - torch.arange(2 * size)
        allowed = (distance >= 0) & (distance < size)
        first = allowed & (torch.arange(2 * size) >= size)  # the first block has no block before it
        mask = torch.cat([first[None], allowed.expand(blocks - 1, -1, -1)])
        scores = (q @ k.mT) * self.head_dim**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        y = (weights @ v).flatten(2, 3).transpose(1, 2).flatten(2)
        return self.out(y)[:, :time]


def _layers(
    dim: int, heads: int, window: int, kernel_size: int
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The layers that are compared; attention is unfused: it materializes its weights."""
    attention, cell = Attention(dim, heads), LSTM(dim, dim)
    windowed, convolution = (
        SlidingWindowAttention(dim, heads, window),
        CausalConvolution(dim, kernel_size, 1),
    )

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
        f"convolution, kernel size {kernel_size}": convolve,
        f"sliding-window attention, size {window}": windowed.forward,
    }


def cost(
    *,
    lengths: tuple[int, ...] = (256, 512, 1024, 2048),
    dim: int = 16,
    heads: int = 1,
    window: int = 32,
    kernel_size: int = 3,
    repeats: int = 3,
    seed: int = 1,
) -> FigureData:
    r"""Time, memory and FLOPs of one layer against length, measured on this machine.

                                 complexity per layer
        self-attention           n^2 d
        recurrence               n d^2
        convolution              k n d^2
        sliding-window attention r n d

    n is the length, d the width, k the kernel size and r the window.
    The exponent is the slope of a line fitted to the logarithms. Memory is that of the activations
    saved for the backward pass; time is that of the forward pass, the shortest of `repeats`.
    Attention runs without a fused kernel, so that it materializes its weights.
    """
    check_positive(dim=dim, heads=heads, kernel_size=kernel_size)
    if len(set(lengths)) < 2 or min(lengths) < 1 or repeats < 1 or window < 2:
        raise ConfigError(
            f"lengths={list(lengths)} must be two or more different numbers of at least 1, "
            f"repeats={repeats} at least 1 and window={window} at least 2"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = _layers(dim, heads, window, kernel_size)
    measurements: dict[str, dict[str, list[Point]]] = {"time (ms)": {}, "memory (MB)": {}}
    measurements["FLOPs (millions)"] = {}
    for name, layer in layers.items():
        for length in lengths:
            x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(seed))
            values = (
                1e3 * seconds(layer, x, repeats),
                saved_bytes(layer, x) / 1e6,
                flops(layer, x) / 1e6,
            )
            for key, value in zip(measurements, values, strict=True):
                measurements[key].setdefault(name, []).append((length, value))
    exponents = {
        key: {name: exponent(points) for name, points in series.items()}
        for key, series in measurements.items()
    }
    rows: list[list[str | float]] = [
        [
            name,
            *(series[name][-1][1] for series in measurements.values()),
            *(fitted[name] for fitted in exponents.values()),
        ]
        for name in layers
    ]
    quantities = [key.partition(" ")[0] for key in measurements]
    panels: list[Panel] = [
        LinePlot(title=key, x_label="length n", y_label=key, series=series, log_x=True, log_y=True)
        for key, series in measurements.items()
    ]
    header = ["layer", *(f"{key} at {lengths[-1]:,}" for key in measurements)]
    panels.append(
        Table(
            title="measurements at the longest input, and fitted exponents of n",
            header=[*header, *(f"{key} ~ n^" for key in quantities)],
            rows=rows,
        )
    )
    return FigureData(
        title=f"Cost of one layer of width {dim}, measured on this machine",
        caption=f"Batch 1, threads: {torch.get_num_threads()}. Self-attention grows with the "
        "square of the length, the others with the length; a recurrence takes its steps one after "
        "another.",
        panels=panels,
    )


@torch.no_grad()
def seconds(layer: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    """The shortest time of a forward pass, after one warm-up pass."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def saved_bytes(layer: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The bytes of the activations that a forward pass saves for the backward pass."""
    bytes_by_address: dict[int, int] = {}
    keep_alive: list[Any] = []  # the address of a freed storage would be used again

    def record(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            bytes_by_address[storage.data_ptr()] = storage.nbytes()
            keep_alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        keep_alive.append(layer(x.requires_grad_()))
    return sum(bytes_by_address.values())


@torch.no_grad()
def flops(layer: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The FLOPs of all matmuls and convolutions of a forward pass."""
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
