"""Training and evaluation on a CPU with a vocabulary of 32,000, compared with nanoGPT.

    python bench/large_vocabulary.py --nanogpt DIR [--repeats 5] [--threads 1]

DIR is a checkout of nanoGPT; its model and optimizer are used unchanged. Three processes have the
same model (4 layers, 4 heads, dim 128, context 128, tied embeddings, no biases, no dropout) and
random ids, and take turns:

    nanoGPT     as it is
    returned    regard, where glibc returns freed memory to the kernel, as it does by default
    kept        regard, where the process keeps it (`accel.cpu_memory`), as `regard train` runs

Prints tokens per second of CPU time and page faults per step, medians of the turns, and the ratio
to nanoGPT, with the smallest and the largest.
"""

import argparse
import importlib.util
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from side_by_side import Worker, wait_for_all

from regard.accel import attach_onednn_linear
from regard.accel.cpu_memory import keep_freed_memory
from regard.data.batch import TextBatch
from regard.models.build import build_model, preset
from regard.tasks import Causal
from regard.training.loop import Objective, train
from regard.training.optim import optimizers

VOCAB_SIZE, LAYERS, HEADS, DIM, CONTEXT, ROWS = 32000, 4, 4, 128, 128, 12
Step = Callable[[], None]
Turn = tuple[float, float]  # tokens per second of CPU time, page faults per step


def random_ids() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCAB_SIZE, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def regard_steps() -> tuple[Step, Step]:
    """A training step and an evaluation step of regard."""
    config = preset(
        "gpt2",
        vocab_size=VOCAB_SIZE,
        layers=LAYERS,
        heads=HEADS,
        dim=DIM,
        context=CONTEXT,
        bias=False,
        dropout=0.0,
        ffn="gelu",
    )
    objective = Objective(build_model(config), Causal())
    attach_onednn_linear(objective)
    batch = TextBatch(*random_ids())
    steps = train(
        objective,
        iter(lambda: batch, None),
        optimizers("adamw", objective.model, 1e-3),
        lambda step: 1e-3,
    )

    def evaluate() -> None:
        with torch.no_grad():
            objective.eval()(batch).item()

    return lambda: next(steps).loss.item() and None, evaluate


def nanogpt_steps(folder: str) -> tuple[Step, Step]:
    """A training step and an evaluation step of nanoGPT, as in its train.py."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder, "model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=CONTEXT,
        vocab_size=VOCAB_SIZE,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=DIM,
        dropout=0.0,
        bias=False,
    )
    model = module.GPT(config)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    x, y = random_ids()

    def step() -> None:
        _, loss = model.train()(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(x, y)[1].item()

    return step, evaluate


def prepare(name: str, folder: str, threads: int) -> Callable[[int], tuple[Turn, Turn]]:
    """Build a model; return a function that times some training and evaluation steps."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if name == "kept":
        keep_freed_memory()
    steps = nanogpt_steps(folder) if name == "nanoGPT" else regard_steps()
    for step in (*steps, *steps):  # warm up
        step()
    return lambda count: tuple(time_steps(step, count) for step in steps)


def time_steps(step: Step, count: int) -> Turn:
    start, faults = time.process_time(), _page_faults()
    for _ in range(count):
        step()
    seconds = time.process_time() - start
    return count * ROWS * CONTEXT / seconds, (_page_faults() - faults) / count


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="number of steps in a turn")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    workers = {
        name: Worker(name, prepare, name, options.nanogpt, options.threads)
        for name in ("nanoGPT", "returned", "kept")
    }
    wait_for_all([*workers.values()], time.perf_counter() + 300)
    turns = [
        {name: worker.call(options.steps) for name, worker in workers.items()}
        for _ in range(options.repeats)
    ]
    for worker in workers.values():
        worker.end()
    for index, kind in enumerate(("training", "evaluation")):
        for name in workers:
            speeds, faults = zip(*(turn[name][index] for turn in turns), strict=True)
            ratios = [turn[name][index][0] / turn["nanoGPT"][index][0] for turn in turns]
            print(
                f"{kind:10} {name:8} {statistics.median(speeds):8,.0f} tokens/s of CPU time"
                f"  {statistics.median(faults):9,.0f} page faults per step"
                f"  {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
