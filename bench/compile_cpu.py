"""Speedup of torch.compile on a CPU, and after how many steps the compile time is amortized.

    python bench/compile_cpu.py [--rows text pairs masked images wide]

The models are the defaults of regard for each kind of data without a GPU, and a wider one. Eager
and compiled steps are timed alternately, five at a time, in one thread and in CPU time, so that
other load on the machine does not matter; medians are printed. The compile time, divided by the
time saved per step, is the number of steps that amortize it.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config

from regard.data.batch import Batch, ImageBatch, MaskedBatch, PairBatch, TextBatch
from regard.models.build import build_model, preset
from regard.nn.state import Source
from regard.tasks import Causal, ImageClassification, Masked, Seq2Seq, Task
from regard.training.loop import Objective, SingleProcess, train
from regard.training.optim import optimizers

REPEATS, STEPS = 7, 5


def ids(*shape: int, vocab: int) -> torch.Tensor:
    return torch.randint(vocab, shape)


def text() -> tuple[Any, Task, Batch]:
    config = preset("tiny-decoder", vocab_size=65, dim=128, layers=4, heads=4, context=64)
    return config, Causal(), TextBatch(ids(12, 64, vocab=65), ids(12, 64, vocab=65))


def wide() -> tuple[Any, Task, Batch]:
    config = preset("tiny-decoder", vocab_size=8000, dim=384, layers=6, heads=6, context=256)
    return config, Causal(), TextBatch(ids(8, 256, vocab=8000), ids(8, 256, vocab=8000))


def pairs() -> tuple[Any, Task, Batch]:
    config = preset("tiny-encoder-decoder", vocab_size=2000, dim=128, layers=2, heads=4)
    source = Source(ids(64, 32, vocab=2000), torch.full((64,), 30))
    return config, Seq2Seq(), PairBatch(source, *(ids(64, 32, vocab=2000) for _ in range(2)))


def masked() -> tuple[Any, Task, Batch]:
    config = preset("tiny-encoder", vocab_size=2000, dim=128, layers=4, heads=4, context=64)
    positions = torch.arange(64).expand(16, 64)
    batch = MaskedBatch(
        ids=ids(16, 64, vocab=2000),
        documents=None,  # as `Masked` makes batches of one long text
        positions=positions,
        masked_positions=ids(16, 9, vocab=64),
        targets=ids(16, 9, vocab=2000),
    )
    return config, Masked(), batch


def images() -> tuple[Any, Task, Batch]:
    config = preset("tiny-vit", image_size=28, patch_size=7, dim=96, layers=4, heads=3)
    return config, ImageClassification(), ImageBatch(torch.randn(64, 1, 28, 28), ids(64, vocab=10))


ROWS: dict[str, Callable[[], tuple[Any, Task, Batch]]] = {
    "text": text,
    "pairs": pairs,
    "masked": masked,
    "images": images,
    "wide": wide,
}


def step_timer(
    make: Callable[[], tuple[Any, Task, Batch]], *, compiled: bool
) -> Callable[[], float]:
    """A function that runs `STEPS` training steps and returns the seconds per step."""
    torch.manual_seed(1)
    config, task, batch = make()
    objective = Objective(build_model(config), task)
    strategy = SingleProcess(objective)
    if compiled:
        strategy.compile()
    steps = train(
        objective,
        iter(lambda: batch, None),
        optimizers("muon", objective.model, 1e-3),
        lambda number: 1e-3,
        strategy=strategy,
    )

    def seconds_per_step() -> float:
        start = time.process_time()
        for _ in range(STEPS):
            next(steps)
        return (time.process_time() - start) / STEPS

    return seconds_per_step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # in this process, so that its CPU time is measured
    torch._inductor.config.force_disable_caches = True
    print(f"torch {torch.__version__}")
    for name in options.rows:
        eager, compiled = (step_timer(ROWS[name], compiled=flag) for flag in (False, True))
        eager()
        start = sum(os.times()[:4])  # child processes (the C++ compiler) included
        compiled()
        compile_time = sum(os.times()[:4]) - start
        pairs = [(eager(), compiled()) for _ in range(REPEATS)]
        eager_ms, compiled_ms = (
            1e3 * statistics.median(times) for times in zip(*pairs, strict=True)
        )
        saved = eager_ms - compiled_ms
        steps = f"{1e3 * compile_time / saved:,.0f} steps" if saved > 0 else "never"
        print(
            f"{name:7} {eager_ms:7.1f} ms  compiled {compiled_ms:7.1f} ms  "
            f"ratio {eager_ms / compiled_ms:.2f}  compiled in {compile_time:.1f} s, "
            f"amortized in {steps}",
            flush=True,
        )


if __name__ == "__main__":
    main()
