"""The speed of the matmuls of a linear layer in training, with oneDNN and with MKL, on a CPU.

    python bench/onednn_matmul.py [--threads 1] [--repeats 9]

Times the forward pass and the gradients of input and weight for several shapes, alternately, in CPU
time, and prints the median of the ratios with the smallest and the largest.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.accel import onednn_matmul

SHAPES = [  # rows, inputs, outputs
    *((768, 64, 256), (768, 128, 512), (768, 512, 128), (768, 128, 2048)),
    *((2048, 256, 1024), (768, 768, 3072), (16, 768, 3072)),
]
MULTIPLY_ADDS = 2e9  # per turn, about


def seconds_per_pass(linear: Callable[..., Tensor], x: Tensor, weight: Tensor, count: int) -> float:
    """CPU seconds of one forward and backward pass."""
    start = time.process_time()
    for _ in range(count):
        y = linear(x, weight)
        torch.autograd.grad(y, (x, weight), y.detach())
    return (time.process_time() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    faster = onednn_matmul.is_onednn_faster()
    print(f"torch {torch.__version__}, {options.threads} threads; regard uses oneDNN: {faster}")
    onednn_matmul.is_onednn_faster = lambda: True  # type: ignore[assignment]
    for rows, inputs, outputs in SHAPES:
        x = torch.randn(rows, inputs, requires_grad=True)
        weight = torch.randn(outputs, inputs, requires_grad=True)
        count = max(2, int(MULTIPLY_ADDS / (rows * inputs * outputs)))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.repeats):
            for values, linear in zip(times, (F.linear, onednn_matmul.linear), strict=True):
                values.append(seconds_per_pass(linear, x, weight, count))
        ratios = [mkl / onednn for mkl, onednn in zip(*times, strict=True)]
        mkl, onednn = (1e3 * statistics.median(values) for values in times)
        print(
            f"{rows:5} x {inputs:4} -> {outputs:4}: torch {mkl:7.2f} ms, oneDNN {onednn:7.2f} ms, "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
