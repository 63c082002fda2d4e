"""Time of a chain of ten samplers with a vocabulary of 50,257, compared with a decode step.

    python bench/sampler_chain.py [--device cpu] [--rows 1] [--repeats 60] [--cpu-time]

On a CPU the step is that of GPT-2 124M in float32, on a GPU that of LLaMA 1.1B in bfloat16, both
with random weights and a prompt of 128 ids, by the code that `generate` uses. Step and chain are
timed alternately; on a GPU each is one captured CUDA graph. Medians are printed, and chain time
relative to step time. On a shared machine, `--cpu-time` measures the CPU time of one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.accel import pack
from regard.generate import Chain, SamplingState, parse_chain
from regard.models.build import build_model, preset

VOCAB, PROMPT, CAPACITY = 50257, 128, 256
TEN_SAMPLERS = [
    *("repetition=1.1", "frequency=0.1", "dry=0.8", "top_n_sigma=3", "top_k=200"),
    *("typical=0.95", "top_p=0.95", "min_p=0.02", "xtc=0.3", "temperature=0.8"),
]
CHAINS = {
    "argmax": parse_chain(["greedy"]),
    "temperature, top-k": parse_chain(["temperature=0.8", "top_k=50"]),
    "ten, in llama.cpp's order": parse_chain(TEN_SAMPLERS, "llama.cpp"),
    "ten, in regard's order": parse_chain(TEN_SAMPLERS, "regard"),
    "ten, top-k last": parse_chain(
        [*(spec for spec in TEN_SAMPLERS if spec != "top_k=200"), "top_k=200"]
    ),
}


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """Capture a function as a CUDA graph and return its replay."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(replay, graph, run)


def replay(graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
    """Replay a graph; `run` keeps the tensors that it uses alive."""
    graph.replay()


def decode_step(model: Any, rows: int, device: torch.device) -> Callable[[], None]:
    """A function that runs one decode step after a prompt."""
    state = model.start(rows, model.context)
    _, state = model.step(torch.zeros(rows, PROMPT, dtype=torch.long, device=device), state)
    if device.type == "cuda":
        state = state.with_static_shapes()
    last = torch.zeros(rows, 1, dtype=torch.long, device=device)
    states = [state]

    def run() -> None:
        _, states[0] = model.step(last, states[0])

    return run


def sample_step(chain: Chain, logits: Tensor) -> Callable[[], None]:
    """A function that samples with a history of 128 ids."""
    prompts = torch.randint(VOCAB, (len(logits), PROMPT)).tolist()
    sampling = SamplingState.from_prompts(prompts, CAPACITY, seed=1, device=logits.device)
    chain.sample(logits, sampling)  # creates the tensors of its settings

    def run() -> None:
        chain.sample(logits, sampling)

    return run


def seconds_per_call(
    run: Callable[[], None], device: torch.device, calls: int, clock: Callable[[], float]
) -> float:
    """The mean time of several calls in a row."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls
    start_time = clock()
    for _ in range(calls):
        run()
    return (clock() - start_time) / calls


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    torch.manual_seed(0)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    with device:
        model: Any = build_model(preset("tinyllama" if on_gpu else "gpt2"))
    model = model.to(torch.bfloat16 if on_gpu else torch.float32).eval()
    logits = 2.5 * torch.randn(options.rows, VOCAB, device=device)
    step = decode_step(pack(model), options.rows, device)
    chains = {name: sample_step(chain, logits) for name, chain in CHAINS.items()}
    if on_gpu:
        step = capture(step)
        for name, run in list(chains.items()):
            try:
                chains[name] = capture(run)
            except RuntimeError as error:  # report it, and time the others
                print(f"{name} could not be captured as a CUDA graph: {str(error).splitlines()[0]}")
                del chains[name]
    times: dict[str, list[float]] = {name: [] for name in ("step", *chains)}
    calls = 4 if on_gpu else 1
    max_repeats = (CAPACITY - PROMPT - 8) // calls  # that fit the KV cache, with the warm-up
    for _ in range(min(options.repeats, max_repeats)):
        times["step"].append(seconds_per_call(step, device, calls, clock))
        for name, run in chains.items():
            times[name].append(seconds_per_call(run, device, calls, clock))
    step_time = statistics.median(times.pop("step"))
    shape = "LLaMA 1.1B bfloat16" if on_gpu else "GPT-2 124M float32"
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}, {options.rows} rows")
    print(f"{'decode step of ' + shape:34} {1e3 * step_time:8.3f} ms")
    for name, seconds in times.items():
        chain_time = statistics.median(seconds)
        print(f"{name:34} {1e3 * chain_time:8.3f} ms  {chain_time / step_time:6.1%}")


if __name__ == "__main__":
    main()
