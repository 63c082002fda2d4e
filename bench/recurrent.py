"""Training speed of recurrent models, compared with a minimal training loop around torch.nn.

    python bench/recurrent.py [--cells lstm gru elman] [--repeats 7]

Both have the same embedding, layers, tied output matrix, AdamW, gradient clipping and ids. regard
uses `training.loop.train`. They are timed alternately, five steps at a time, in one thread and in
CPU time, so that other load on the machine does not matter; medians are printed. Cells without a
torch kernel run as a loop over time in Python and are compared with torch.nn.LSTM.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import TextBatch
from regard.models.build import build_model, preset
from regard.tasks import Causal
from regard.training.loop import Objective, train
from regard.training.optim import optimizers

VOCAB, DIM, LAYERS, ROWS, TIME, STEPS = 65, 256, 2, 12, 64, 5
PEERS: dict[str, Callable[..., nn.RNNBase]] = {
    "elman": nn.RNN,
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "update-gate": nn.LSTM,
}


def regard_steps(cell: str, ids: Tensor, targets: Tensor) -> Callable[[], float]:
    model = build_model(preset(cell, vocab_size=VOCAB, dim=DIM, layers=LAYERS, context=TIME))
    objective = Objective(model, Causal())
    batches = itertools.repeat(TextBatch(ids, targets))
    steps = train(objective, batches, optimizers("adamw", model, 1e-3), lambda step: 1e-3)
    return lambda: sum(float(next(steps).loss) for _ in range(STEPS))


def torch_steps(cell: str, ids: Tensor, targets: Tensor) -> Callable[[], float]:
    embed = nn.Embedding(VOCAB, DIM)
    layers = PEERS[cell](DIM, DIM, LAYERS, batch_first=True)
    parameters = [*embed.parameters(), *layers.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-3, fused=True)

    def steps() -> float:
        for _ in range(STEPS):
            y, _ = layers(embed(ids))
            loss = F.cross_entropy((y @ embed.weight.T).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    return steps


def seconds_per_step(run_steps: Callable[[], float]) -> float:
    """CPU time of one of `STEPS` steps."""
    start = time.process_time()
    run_steps()
    return (time.process_time() - start) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{LAYERS} × {DIM}, {ROWS} rows of {TIME}, milliseconds per step")
    print(f"{'cell':12}{'regard':>10}{'torch.nn':>10}{'ratio':>8}")
    for cell in options.cells:
        torch.manual_seed(1)
        ids, targets = torch.randint(VOCAB, (2, ROWS, TIME))
        runs = [make(cell, ids, targets) for make in (regard_steps, torch_steps)]
        for run_steps in runs:  # warm-up
            run_steps()
        times = [[seconds_per_step(run) for run in runs] for _ in range(options.repeats)]
        ours, theirs = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        print(f"{cell:12}{ours:10.1f}{theirs:10.1f}{ours / theirs:8.2f}", flush=True)


if __name__ == "__main__":
    main()
