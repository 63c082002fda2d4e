"""The time of matrix-vector kernels on a GPU, by the shape of a layer and by the launch options.

    python bench/gpu_gemv.py [LAYER …] [--processes 15]

For every layer of some decoders, in bfloat16: the time to read its weights at the copy bandwidth,
the time of the kernel with its options in `accel.kernels.gemv.PROGRAMS`, and the fastest of other
options (inputs that are multiplied at once, rows of W in a program, warps, and whether each block
is summed at once). A CUDA graph calls the kernel for so many layers that no weight is in the L2
cache, each call after the previous one. Kernels are compiled by several processes side by side.
"""

import argparse
import itertools
import statistics
import time

import torch
from gpu_decode import copy_bandwidth
from side_by_side import Worker, wait_for_all

from regard.accel.kernels import gemv
from regard.accel.kernels.common import FFNActivation
from regard.accel.packed import FusedNormLinear, PackedLinear

# inputs, outputs, whether a norm comes before it, whether it is gated
LAYERS = {
    "gpt2 up": (768, 3072, True, False),
    "gpt2 down": (3072, 768, False, False),
    "bloom-560m up": (1024, 4096, True, False),
    "bloom-560m down": (4096, 1024, False, False),
    "qwen3-0.6b qkv": (1024, 4096, True, False),
    "qwen3-0.6b out": (2048, 1024, False, False),
    "qwen3-0.6b gate and up": (1024, 3072, True, True),
    "qwen3-0.6b down": (3072, 1024, False, False),
    "tinyllama out": (2048, 2048, False, False),
    "tinyllama gate and up": (2048, 5632, True, True),
    "tinyllama down": (5632, 2048, False, False),
    "qwen2-1.5b gate and up": (1536, 8960, True, True),
    "qwen2-1.5b down": (8960, 1536, False, False),
    "gemma-2-2b gate and up": (2304, 9216, True, True),
    "gemma-2-2b down": (9216, 2304, False, False),
    "gemma-2-2b head": (2304, 256_000, True, False),
    "llama-3-8b gate and up": (4096, 14336, True, True),
    "llama-3-8b down": (14336, 4096, False, False),
}
BYTES = 300_000_000  # of the weights of a CUDA graph
PROGRAMS = gemv.PROGRAMS


def candidates(layer: str) -> list[gemv.Program]:
    """Options with 8 to 128 elements of W per thread, and enough programs for the GPU."""
    width, outputs, _, gated = LAYERS[layer]
    choices = itertools.product((512, 1024, 2048), (2, 4, 8, 16), (4, 8), (False, True))
    return [
        program
        for program in itertools.starmap(gemv.Program, choices)
        if 8 <= program.rows * program.block / (32 * program.warps) <= 128
        and program.block <= 2 * width
        and gemv.MIN_PROGRAMS <= outputs * (1 + gated) / program.rows < gemv.MAX_PROGRAMS
    ]


def build(layer: str, count: int) -> list[FusedNormLinear]:
    width, outputs, norm, gated = LAYERS[layer]
    gain = torch.randn(width, device="cuda") if norm else None
    shape = outputs * (1 + gated), width
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    return [FusedNormLinear(PackedLinear(weight), gain, 1e-5) for weight in weights]


def run(layer: str, program: gemv.Program | None, layers: list[FusedNormLinear]) -> None:
    width, _, _, gated = LAYERS[layer]
    gemv.PROGRAMS = PROGRAMS if program is None else dict.fromkeys(PROGRAMS, program)
    x = torch.ones(1, width, device="cuda")
    for norm_linear in layers:
        gemv.linear(x, norm_linear, activation=FFNActivation("silu" if gated else "", gated))


def prepare(jobs: list[tuple[str, gemv.Program | None]]) -> None:
    """Compile kernels, which the other processes find in Triton's cache."""
    for layer, program in jobs:
        run(layer, program, build(layer, 1))
    torch.cuda.synchronize()


def microseconds(layer: str, program: gemv.Program | None, layers: list[FusedNormLinear]) -> float:
    run(layer, program, layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(layer, program, layers)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times[1:]) / len(layers)


def main() -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--processes", type=int, default=15)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    jobs = [(name, program) for name in options.layers for program in [None, *candidates(name)]]
    count = options.processes
    workers = [Worker(f"process {n}", prepare, jobs[n::count]) for n in range(count)]
    wait_for_all(workers, begin + 600)
    for worker in workers:
        worker.end()
    for name in options.layers:
        weight_bytes = build(name, 1)[0].layer.weight.nbytes
        layers = build(name, max(4, -(-BYTES // weight_bytes)))
        times = {program: microseconds(name, program, layers) for program in candidates(name)}
        default, best = microseconds(name, None, layers), min(times, key=lambda p: times[p])
        read = 1e6 * weight_bytes / bandwidth
        print(f"{name:24} read {read:7.2f}  default {default:7.2f}  {times[best]:7.2f} µs  {best}")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
