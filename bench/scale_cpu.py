"""One run on one, two and four ranks, whole and in parts: how far their losses are apart.

    python bench/scale_cpu.py [--steps 200]

Every run is `torchrun -m regard train python-docs …` on CPUs, without dropout, and reads the same
rows. Printed is the largest difference from one rank of a loss in any step and of the held-out
loss at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = ["model.preset=tiny-decoder", "model.layers=2", "model.dim=64", "model.heads=4"]
TRAIN = ["train.batch=8", "train.lr=3e-3", "train.optimizer=muon", "train.ema=0.9"]
REST = ["model.context=64", "model.dropout=0", "data.tokenizer=char", "device=cpu"]


def train(folder: Path, ranks: int, shard: str, steps: int) -> tuple[list[float], float]:
    """The loss of every step, and the held-out loss at the end."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    words = [*MODEL, *TRAIN, *REST, f"train.steps={steps}", f"train.shard={shard}"]
    subprocess.run(
        [*command, "-m", "regard", "train", "python-docs", *words, "--out", folder, "--quiet"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return losses, [row["validation"]["loss"] for row in rows if "validation" in row][-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as place:
        losses, held = train(Path(place, "alone"), 1, "none", steps)
        print(f"one rank: loss {losses[0]:.6f} to {losses[-1]:.6f}, held out {held:.6f}")
        print("| ranks | weights | largest difference of a step's loss | of the held-out loss |")
        print("|---|---|---|---|")
        for ranks in (2, 4):
            for shard, name in (("none", "whole (DDP)"), ("full", "in parts (FSDP2)")):
                found, judged = train(Path(place, f"{ranks}-{shard}"), ranks, shard, steps)
                far = max(abs(one - other) for one, other in zip(found, losses, strict=True))
                print(f"| {ranks} | {name} | {far:.1e} | {abs(judged - held):.1e} |", flush=True)


if __name__ == "__main__":
    main()
