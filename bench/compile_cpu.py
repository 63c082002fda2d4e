"""Does compiling pay on a CPU? Steps as they are and compiled, in turns, and when it is paid back.

    python bench/compile_cpu.py [--rows text pairs masked images wide]

The models are those that regard chooses for data of each kind without a GPU, and one that is
wider. All in one thread, and in seconds of the processor, so that nobody else on the machine
counts. A turn is five steps of each; the medians count. What the compiler takes is told apart,
and divided by what it saves: so many steps pay for it.
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
from regard.tasks import Causal, Classify, Masked, Objective, Seq2Seq, Task
from regard.training.loop import train
from regard.training.optim import optimizers
from regard.training.parallel.strategy import SingleProcess

TURNS, STEPS = 7, 5


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
    at = torch.arange(64).expand(16, 64)
    batch = MaskedBatch(
        ids=ids(16, 64, vocab=2000),
        documents=torch.ones_like(at),
        positions=at,
        masked_positions=ids(16, 9, vocab=64),
        targets=ids(16, 9, vocab=2000),
    )
    return config, Masked(), batch


def images() -> tuple[Any, Task, Batch]:
    config = preset("tiny-vit", image_size=28, patch=7, dim=96, layers=4, heads=3)
    return config, Classify(), ImageBatch(torch.randn(64, 1, 28, 28), ids(64, vocab=10))


ROWS: dict[str, Callable[[], tuple[Any, Task, Batch]]] = {
    "text": text,
    "pairs": pairs,
    "masked": masked,
    "images": images,
    "wide": wide,
}


def stepper(make: Callable[[], tuple[Any, Task, Batch]], *, compiled: bool) -> Callable[[], float]:
    """Something that takes some steps and says how many seconds one took."""
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

    def turn() -> float:
        began = time.process_time()
        for _ in range(STEPS):
            next(steps)
        return (time.process_time() - began) / STEPS

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # in this process, so that it is counted
    torch._inductor.config.force_disable_caches = True
    print(f"torch {torch.__version__}")
    for name in given.rows:
        plain, compiled = (stepper(ROWS[name], compiled=each) for each in (False, True))
        plain()
        before_it = sum(os.times()[:4])  # of the compilers it starts too
        compiled()
        first = sum(os.times()[:4]) - before_it
        turns = [(plain(), compiled()) for _ in range(TURNS)]
        before, after = (statistics.median(column) for column in zip(*turns, strict=True))
        paid = f"{first / (before - after):,.0f} steps" if after < before else "never"
        print(
            f"{name:7} {1e3 * before:7.1f} ms  compiled {1e3 * after:7.1f} ms  "
            f"ratio {before / after:5.2f}  compiling {first:6.1f} s  paid back after {paid}",
            flush=True,
        )


if __name__ == "__main__":
    main()
