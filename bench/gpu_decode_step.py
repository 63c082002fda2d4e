"""The time of a decode step of one row on a GPU, without sampling, by the kernels that compute it.

    python bench/gpu_decode_step.py [PRESET | PRESET/int8 | PRESET/int4 …] [--tokens 256]
        [--against FOLDER …]

For every preset, in bfloat16 with random weights and a KV cache of random keys and values for this
number of tokens: the step as one CUDA kernel for all layers (`accel.persistent_step`) and as Triton
kernels, each replayed as a CUDA graph, in alternation; median, fastest and slowest, and the bytes
of weights and KV cache that a step reads over this time, relative to the copy bandwidth of the GPU.
`--against` adds other versions of the kernel: folders with their sources, as `accel/cuda`. GPUs of
the same kind differ by more than most changes do, so versions are compared in one run.

Also printed is the largest difference of the logits from those of the model in float32 with the
same weights, before they are quantized, and the same KV cache, in standard deviations of the
logits; and that of the two kernels from each other.
"""

import argparse
import copy
import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_decode import copy_bandwidth
from gpu_decoders import PRESETS, Spec, build, read_bytes

from regard.accel.nvrtc import CudaKernelError
from regard.accel.persistent_step import PersistentStep
from regard.accel.triton_decoder import TritonDecoder
from regard.nn.loss import soft_cap


def filled_state(model: Any, tokens: int) -> Any:
    """A state after some tokens, with random keys and values."""
    torch.manual_seed(1)
    state = model.start(1, tokens + 64)
    for cache in state.layers:
        cache.keys.normal_()
        cache.values.normal_()
    return replace(state, lengths=torch.full_like(state.lengths, tokens), max_length=tokens)


def in_float32(state: Any) -> Any:
    """The same state with float32 keys and values."""
    layers = [
        replace(cache, keys=cache.keys.float(), values=cache.values.float())
        for cache in state.layers
    ]
    return replace(state, layers=layers)


def capture(run: Callable[[], Any]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def milliseconds(replay: Callable[[], None], count: int = 10) -> float:
    """Of one of several replays, one directly after the other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


@torch.inference_mode()
def measure(spec: Spec, repeats: int, bandwidth: float, against: list[Path]) -> None:
    config = spec.config()
    model = build(config, torch.bfloat16)
    decoder = TritonDecoder(model, **({spec.weights: True} if spec.weights else {}))
    state = filled_state(model, spec.prompt)
    token = torch.tensor([[7]], device="cuda")
    x = decoder._embed(token, state.lengths).squeeze(1)
    runs = {"Triton": lambda: decoder._decode_by_gemv(x, state)}
    if reason := decoder.persistent_unsupported_reason:
        print(f"{spec!s:24} one kernel is not used, and forced here: {reason}")
        try:
            decoder.persistent_step = PersistentStep.on_gpu(decoder)
        except CudaKernelError:
            print(f"{spec!s:24} one kernel is not possible")
            return
    runs["one kernel"] = lambda: decoder._decode(x, state)
    for folder in against:
        step = PersistentStep.on_gpu(decoder, folder)
        runs[folder.name] = partial(step, x, state)
    read = read_bytes(model, decoder, replace(spec, prompt=spec.prompt - 128), config)
    logits = {name: soft_cap(run(), decoder.cap) for name, run in runs.items()}
    replays = {name: capture(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, replay in replays.items():
            times[name].append(milliseconds(replay))
    reference = copy.deepcopy(model).float()
    expected, _ = reference.step(token, in_float32(filled_state(model, spec.prompt)))
    between = float((logits["one kernel"] - logits["Triton"]).abs().max() / expected.std())
    print(f"{spec!s:24} logits of both differ by {between:.4f}")
    for name, values in times.items():
        difference = (logits[name] - expected[:, 0]).abs().max() / expected.std()
        median = statistics.median(values)
        print(
            f"{spec!s:24} {name:10} {median:6.3f} ms ({min(values):.3f} to {max(values):.3f})"
            f"  {read / median / 1e9:5.2f} TB/s  {1e3 * read / median / bandwidth:5.1%} of copies"
            f"  logits differ by {float(difference):.4f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*", default=PRESETS)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--against", nargs="*", default=[], type=Path, metavar="FOLDER")
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name in options.presets:
        gc.collect()
        torch.cuda.empty_cache()
        spec = replace(Spec.parse(name), prompt=options.tokens)
        measure(spec, options.repeats, bandwidth, options.against)


if __name__ == "__main__":
    main()
