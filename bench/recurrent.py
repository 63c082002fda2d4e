"""How fast recurrent models train beside a bare loop around torch.nn, in turns.

    python bench/recurrent.py [--cells lstm gru elman] [--turns 7]

The same embedding, layers, tied output matrix, AdamW and clipping, on the same ids: ours by
`training.loop.train`, with all that it does beside the arithmetic; the peer's in ten lines. In
one thread, and in seconds of the processor, so that nobody else on the machine counts. A turn
is five steps of each; the medians count. Cells for which torch has no kernel run as a loop in
Python, and are told beside torch.nn.LSTM: what the readable form costs.
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
from regard.tasks import Causal, Objective
from regard.training.loop import train
from regard.training.optim import optimizers

VOCAB, DIM, LAYERS, ROWS, TIME, STEPS = 65, 256, 2, 12, 64, 5
PEERS: dict[str, Callable[..., nn.RNNBase]] = {
    "elman": nn.RNN,
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "gated": nn.LSTM,
}


def ours(cell: str, ids: Tensor, targets: Tensor) -> Callable[[], float]:
    model = build_model(preset(cell, vocab_size=VOCAB, dim=DIM, layers=LAYERS, context=TIME))
    objective = Objective(model, Causal())
    batches = itertools.repeat(TextBatch(ids, targets))
    steps = train(objective, batches, optimizers("adamw", model, 1e-3), lambda step: 1e-3)
    return lambda: sum(float(next(steps).loss) for _ in range(STEPS))


def bare(cell: str, ids: Tensor, targets: Tensor) -> Callable[[], float]:
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


def seconds(steps: Callable[[], float]) -> float:
    """Of one step."""
    begin = time.process_time()
    steps()
    return (time.process_time() - begin) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{LAYERS} × {DIM}, {ROWS} rows of {TIME}, milliseconds of a step")
    print(f"{'cell':8}{'ours':>10}{'torch.nn':>10}{'ratio':>8}")
    for cell in given.cells:
        torch.manual_seed(1)
        ids, targets = torch.randint(VOCAB, (2, ROWS, TIME))
        both = [make(cell, ids, targets) for make in (ours, bare)]
        for steps in both:  # memory is fetched, kernels are chosen
            steps()
        turns = [[seconds(steps) for steps in both] for _ in range(given.turns)]
        mine, theirs = (statistics.median(turn) * 1e3 for turn in zip(*turns, strict=True))
        print(f"{cell:8}{mine:10.1f}{theirs:10.1f}{mine / theirs:8.2f}", flush=True)


if __name__ == "__main__":
    main()
