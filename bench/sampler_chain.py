"""What a chain of ten samplers costs at a vocabulary of 50,257, beside a decoding step.

    python bench/sampler_chain.py [--device cpu] [--rows 1] [--turns 60] [--threads 2] [--cpu-time]

On the CPU the step is that of the GPT-2 124M shape in float32, on a GPU that of the LLaMA shape
of 1.1B in bfloat16, both with random weights and 128 ids read, through the same code that
`generate` uses. Step and chain take turns, so that both meet the same machine; on a GPU each is
one recorded CUDA graph. The median of the turns counts, and the share is chain / step. On a
machine that others use, `--cpu-time` counts seconds of one thread's work.
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
from regard.generate import Chain, SamplerContext, parse_chain
from regard.models.build import build_model, preset

VOCAB, READ, ROOM = 50257, 128, 256
TEN = [
    *("repetition=1.1", "frequency=0.1", "dry=0.8", "top_n_sigma=3", "top_k=200"),
    *("typical=0.95", "top_p=0.95", "min_p=0.02", "xtc=0.3", "temperature=0.8"),
]
CHAINS = {
    "argmax": parse_chain(["greedy"]),
    "temperature, top-k": parse_chain(["temperature=0.8", "top_k=50"]),
    "ten, in llama.cpp's order": parse_chain(TEN, "llama.cpp"),
    "ten, in regard's order": parse_chain(TEN, "regard"),
    "ten, top-k last": parse_chain([*(word for word in TEN if word != "top_k=200"), "top_k=200"]),
}


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """The same work as a CUDA graph."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return partial(replayed, graph, work)


def replayed(graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
    """Do it again; the graph does not own the tensors it uses, `work` does."""
    graph.replay()


def stepping(model: Any, rows: int, device: torch.device) -> Callable[[], None]:
    """Take in one id more."""
    state = model.start(rows, model.context)
    _, state = model.step(torch.zeros(rows, READ, dtype=torch.long, device=device), state)
    if device.type == "cuda":
        state = state.with_static_shapes()
    last = torch.zeros(rows, 1, dtype=torch.long, device=device)
    held = [state]

    def work() -> None:
        _, held[0] = model.step(last, held[0])

    return work


def picking(chain: Chain, logits: Tensor) -> Callable[[], None]:
    """Draw, with a text of 128 ids to look back at."""
    prompts = torch.randint(VOCAB, (len(logits), READ)).tolist()
    context = SamplerContext.from_prompts(prompts, ROOM, seed=1, device=logits.device)
    chain.sample(logits, context)  # makes the tensors of its settings

    def work() -> None:
        chain.sample(logits, context)

    return work


def took(
    work: Callable[[], None], device: torch.device, times: int, clock: Callable[[], float]
) -> float:
    """Seconds of one call, of several in a row."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times
    began = clock()
    for _ in range(times):
        work()
    return (clock() - began) / times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1 if given.cpu_time else given.threads)
    clock = time.thread_time if given.cpu_time else time.perf_counter
    torch.manual_seed(0)
    device = torch.device(given.device)
    on_gpu = device.type == "cuda"
    with device:
        model: Any = build_model(preset("tinyllama" if on_gpu else "gpt2"))
    model = model.to(torch.bfloat16 if on_gpu else torch.float32).eval()
    logits = 2.5 * torch.randn(given.rows, VOCAB, device=device)
    step = stepping(pack(model), given.rows, device)
    chains = {name: picking(chain, logits) for name, chain in CHAINS.items()}
    if on_gpu:
        step = recorded(step)
        for name, work in list(chains.items()):
            try:
                chains[name] = recorded(work)
            except RuntimeError as error:  # tell, and measure the others
                print(f"{name} could not be recorded: {str(error).splitlines()[0]}")
                del chains[name]
    times: dict[str, list[float]] = {name: [] for name in ("step", *chains)}
    each = 4 if on_gpu else 1
    most = (ROOM - READ - 8) // each  # turns for which the context has room, warming up included
    for _ in range(min(given.turns, most)):
        times["step"].append(took(step, device, each, clock))
        for name, work in chains.items():
            times[name].append(took(work, device, each, clock))
    whole = statistics.median(times.pop("step"))
    shape = "LLaMA 1.1B bfloat16" if on_gpu else "GPT-2 124M float32"
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}, {given.rows} rows")
    print(f"{'a step of ' + shape:34} {1e3 * whole:8.3f} ms")
    for name, found in times.items():
        cost = statistics.median(found)
        print(f"{name:34} {1e3 * cost:8.3f} ms  {cost / whole:6.1%}")


if __name__ == "__main__":
    main()
