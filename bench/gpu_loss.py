"""The time and the error of the loss over a vocabulary on a GPU: bfloat16 and FP8, and their parts.

    python bench/gpu_loss.py [--repeats 5]
    python bench/gpu_loss.py --device cpu    (small sizes: a smoke test)

For two output layers, in bfloat16 and in FP8: the relative errors of the loss, dx and dW against
float64, on part of the rows; the time of loss and gradients on all rows; and the times of the
parts, for one chunk of rows, multiplied by the number of chunks. Times are medians of the repeats
(with the fastest and the slowest), in alternation, each as a CUDA graph. The model FLOP/s are
relative to a bfloat16 matmul of 8,192 x 8,192 x 8,192, measured here. The inputs give logits as a
trained model has: frequent and rare tokens, some of them predicted.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpu_decode_step import milliseconds
from torch import Tensor

from regard.accel import cross_entropy, float8, float8_cross_entropy, matmul
from regard.nn import loss

SHAPES = {"GPT-2": (65_536, 768, 50_257), "LLaMA shape": (16_384, 2048, 32_000)}
SMALL = {"small": (256, 64, 1000)}
CHECKED_ROWS = 16_384  # compared with float64
PART_ROWS = {"bfloat16": 4096, "float8": 8192}  # of a chunk of GPT-2's logits
BF16 = torch.bfloat16
Run = Callable[[], object]
quantize_operands = float8_cross_entropy.operands  # compiled on a GPU


class Problem(NamedTuple):
    """Inputs of the loss."""

    x: Tensor
    weight: Tensor
    targets: Tensor

    @property
    def flops(self) -> float:
        return 6.0 * self.x.numel() * len(self.weight)

    def first(self, rows: int) -> "Problem":
        return Problem(self.x[:rows], self.weight, self.targets[:rows])


def problem(rows: int, width: int, vocab: int, device: torch.device) -> Problem:
    """Targets by Zipf's law, and hidden states from which they can be predicted in part."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    frequency = 1 / (torch.arange(vocab, device=device) + 10.0)
    targets = torch.multinomial(frequency, rows, replacement=True, generator=generator)
    targets[::97] = loss.IGNORE_INDEX
    weight = torch.randn(vocab, width, **options) * (8 / width**0.5 / 3)
    weight[:, 0] = frequency.log() / 8
    x = torch.randn(rows, width, **options) + 0.5 * weight[targets]
    x[:, 0] = 8
    return Problem(x.to(BF16), weight.to(BF16), targets)


def bfloat16(given: Problem) -> list[Tensor]:
    """Loss, dx and dW."""
    x, weight, targets = given
    return cross_entropy.linear_cross_entropy(x, weight, None, targets, 0.0, None, True)[:3]


def fp8(given: Problem) -> list[Tensor]:
    """Loss, dx and dW."""
    vocab, operands = len(given.weight), quantize_operands(given.x, given.weight)
    results = torch.ops.regard.float8_cross_entropy(*operands, given.targets, vocab, False)
    return [*results[:2], results[2][:vocab]]


VARIANTS: dict[str, Callable[[Problem], list[Tensor]]] = {"bfloat16": bfloat16, "float8": fp8}


def print_errors(given: Problem) -> None:
    given = given.first(CHECKED_ROWS)
    x, weight, rows = given.x.double(), given.weight.double(), len(given.x)
    exact = loss.chunked_cross_entropy(x, weight, None, given.targets, 0.0, None, needs_grad=True)
    print(f"relative errors on {rows} rows of loss ({float(exact[0]) / rows:.3f} per row), dx, dW:")
    for name, run in VARIANTS.items():
        pairs = zip(run(given), exact[:3], strict=True)
        print(
            f"  {name:36} " + " ".join(f"{float((a - b).norm() / b.norm()):.1e}" for a, b in pairs)
        )


def captured(run: Run, device: torch.device) -> Run:
    """A CUDA graph of a function; the function itself on a CPU."""
    if device.type == "cpu":
        return run
    for _ in range(4):  # matmuls are autotuned at the third call
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds(run: Run, device: torch.device) -> float:
    """The time of one call; on a GPU, of several in a row."""
    if device.type == "cuda":
        return milliseconds(run) / 1e3
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def alternate(runs: dict[str, Run], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """The seconds of each function."""
    replays = {name: captured(run, device) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, replay in replays.items():
            times[name].append(seconds(replay, device))
    return times


def matmul_rates(device: torch.device, size: int) -> list[float]:
    """Measured FLOP/s of a square matmul in bfloat16 and in FP8."""
    a, b = (torch.randn(size, size, device=device, dtype=BF16) for _ in range(2))
    a8, b8 = float8.quantize(a, float8.E4M3), float8.quantize(b, float8.E4M3)
    runs: dict[str, Run] = {
        "bfloat16": lambda: a @ b,
        "float8": lambda: float8.scaled_matmul(a8, b8, BF16, fast_accum=True),
    }
    times = alternate(runs, device, 5)
    return [2 * size**3 / statistics.median(times[name]) for name in runs]


def parts(given: Problem, rows: dict[str, int]) -> dict[str, Run]:
    """The parts of both, for one chunk of rows; the first word of a name is that of the variant."""
    vocab = len(given.weight)
    weight = F.pad(given.weight, (0, 0, 0, -vocab % cross_entropy.VOCAB_MULTIPLE))
    x, _, targets = given.first(rows["bfloat16"])
    logits = torch.randn(rows["bfloat16"], len(weight), device=x.device).to(BF16)
    dx, dweight = torch.empty_like(x), torch.zeros(weight.shape, device=x.device)
    softmax = partial(cross_entropy.cross_entropy_with_gradient, logits.clone())
    runs: dict[str, Run] = {
        "bfloat16 logits": lambda: matmul.matmul(x, weight.T, out=logits),
        "bfloat16 loss": lambda: softmax(None, targets, vocab, 0.0, None),
        "bfloat16 dx": lambda: matmul.matmul(logits, weight, out=dx),
        "bfloat16 dW": lambda: matmul.matmul(logits.T, x, out=dweight, add=True),
    }
    return runs | float8_parts(given, rows["float8"])


def float8_parts(given: Problem, rows: int) -> dict[str, Run]:
    x, weight, targets = given.first(rows)
    x8, x_scale, w8, w_scale = float8_cross_entropy.operands(x, weight)
    logits = torch.randn(rows, len(w8), device=x.device).to(BF16)
    dx, dweight = torch.empty_like(x), torch.zeros(w8.shape, device=x.device)
    scaled_matmul, transpose = float8_cross_entropy._matmul, float8_cross_entropy._transpose
    gradient = logits.to(float8.E5M2)
    left, left_transposed = (gradient, x_scale), (transpose(gradient), x_scale)
    x_transposed, weight_transposed = (transpose(x8), x_scale), (transpose(w8), w_scale)
    softmax = partial(cross_entropy.cross_entropy_with_gradient, logits.clone())
    options = {"gradient_dtype": float8.E5M2, "scale": float8_cross_entropy.GRADIENT_SCALE}
    return {
        "float8 quantize x and W": lambda: quantize_operands(given.x, weight),
        "float8 logits": lambda: scaled_matmul(
            (x8, x_scale), (w8, w_scale), logits, fast_accum=True
        ),
        "float8 loss": lambda: softmax(None, targets, len(weight), 0.0, None, **options),
        "float8 transpose": lambda: transpose(gradient),
        "float8 dx": lambda: scaled_matmul(left, weight_transposed, dx),
        "float8 dW": lambda: scaled_matmul(left_transposed, x_transposed, dweight, add=True),
    }


def print_times(given: Problem, device: torch.device, repeats: int, bf16_rate: float) -> None:
    runs: dict[str, Run] = {name: partial(run, given) for name, run in VARIANTS.items()}
    for name, times in alternate(runs, device, repeats).items():
        median, low, high = (1e3 * f(times) for f in (statistics.median, min, max))
        rate = given.flops / median * 1e3
        share = f"{rate / 1e12:.0f} TFLOP/s, {100 * rate / bf16_rate:.1f} %"
        print(f"  {name:36} {median:7.2f} ms ({low:.2f} to {high:.2f})  {share}", flush=True)
    rows = {name: min(size, len(given.x)) for name, size in PART_ROWS.items()}
    for name, times in alternate(parts(given, rows), device, repeats).items():
        chunks = 1.0 if "quantize" in name else len(given.x) / rows[name.split()[0]]
        print(f"  {name:36} {1e3 * chunks * statistics.median(times):7.2f} ms", flush=True)


def main() -> None:
    global quantize_operands
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
        quantize_operands = torch.compile(quantize_operands, dynamic=False)
    rates = matmul_rates(device, 8192 if on_gpu else 64)
    print("matmuls: " + ", ".join(f"{rate / 1e12:.0f} TFLOP/s" for rate in rates) + " (FP8)")
    for name, sizes in (SHAPES if on_gpu else SMALL).items():
        print(f"\n{name}: {sizes[0]} x {sizes[1]} -> {sizes[2]}", flush=True)
        given = problem(*sizes, device)
        print_errors(given)
        print_times(given, device, options.repeats, rates[0])


if __name__ == "__main__":
    main()
