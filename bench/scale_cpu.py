"""Compare the losses of one run on 1, 2 and 4 ranks, with DDP and with FSDP.

    python bench/scale_cpu.py [--steps 200]

Every run is `torchrun -m regard train python-docs …` on CPUs, without dropout, on the same rows.
Prints the largest difference of a step's loss and of the final validation loss from those of one
rank.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = ["model.preset=tiny-decoder", "model.layers=2", "model.dim=64", "model.heads=4"]
MODEL += ["model.context=64", "model.dropout=0"]
TRAIN = ["train.batch=8", "train.lr=3e-3", "train.optimizer=muon", "train.ema=0.9"]
OTHERS = ["data.tokenizer=char", "device=cpu"]


def train(folder: Path, ranks: int, shard: str, steps: int) -> tuple[list[float], float]:
    """The loss of every step, and the final validation loss."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    overrides = [*MODEL, *TRAIN, *OTHERS, f"train.steps={steps}", f"train.shard={shard}"]
    subprocess.run(
        [*command, "-m", "regard", "train", "python-docs", *overrides, "--out", folder, "--quiet"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return losses, [row["validation"]["loss"] for row in rows if "validation" in row][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as temporary:
        losses, validation = train(Path(temporary, "one-rank"), 1, "none", steps)
        print(f"one rank: loss {losses[0]:.6f} to {losses[-1]:.6f}, validation {validation:.6f}")
        print("| ranks | strategy | max difference of a step's loss | of the validation loss |")
        print("|---|---|---|---|")
        for ranks in (2, 4):
            for shard, name in (("none", "DDP"), ("full", "FSDP2")):
                folder = Path(temporary, f"{ranks}-{shard}")
                rank_losses, rank_validation = train(folder, ranks, shard, steps)
                pairs = zip(rank_losses, losses, strict=True)
                difference = max(abs(a - b) for a, b in pairs)
                validation_difference = abs(rank_validation - validation)
                print(
                    f"| {ranks} | {name} | {difference:.1e} | {validation_difference:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
