"""The lectures' experiment with balanced brackets, several seeds: curves and longer sequences.

    python bench/parentheses.py train OUT [--seeds 3] [--jobs 9] [key=value …]
    python bench/parentheses.py draw OUT

`train` trains the runs of the recipe `parentheses`, `--jobs` at a time with one thread each, and
writes OUT/RUN-SEED.json: validation accuracy by step, and accuracy by length on the data of the
recipe's report. `draw` prints the table and draws OUT/parentheses.svg.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

NAMES = ("elman", "update-gate", "lstm")


def train_one(out: Path, name: str, seed: int, overrides: list[str]) -> None:
    from regard import api
    from regard.training.events import Evaluated

    words = (*overrides, f"train.seed={seed}")
    study = api.open_study("parentheses", *words, out=out / f"seed-{seed}")
    assert study is not None
    curve = [
        (event.step, event.metrics["accuracy"])
        for event in study.events(name)
        if isinstance(event, Evaluated)
    ]
    run = api.load(study.folder / name)
    ranges = run.evaluate_by_length(*study.report).ranges
    result = {
        "curve": curve,
        "accuracy": run.evaluate()["accuracy"],
        "lengths": [(r.shortest, r.longest, r.examples, r.metrics["accuracy"]) for r in ranges],
    }
    (out / f"{name}-{seed}.json").write_text(json.dumps(result))


def train(out: Path, seeds: int, jobs: int, overrides: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(name: str, seed: int) -> None:
        command = [sys.executable, __file__, "one", str(out), *overrides]
        done = subprocess.run(
            [*command, "--name", name, "--seeds", str(seed)],
            env=environment,
            capture_output=True,
            text=True,
        )
        print(name, seed, "ended with", done.returncode, done.stderr[-500:], flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for seed in range(1, seeds + 1):
            for name in NAMES:
                pool.submit(start, name, seed)


def draw(out: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    rows = []
    for colour, name in enumerate(NAMES):
        runs = [json.loads(path.read_text()) for path in sorted(out.glob(f"{name}-[0-9]*.json"))]
        for number, run in enumerate(runs):
            steps, accuracy = zip(*run["curve"], strict=True)
            label = name if not number else None
            left.plot(steps, accuracy, color=f"C{colour}", label=label)
            middle = [(low + high) / 2 for low, high, *_ in run["lengths"]]
            right.plot(middle, [r[3] for r in run["lengths"]], color=f"C{colour}", marker=".")
        if runs:
            rows.append((name, runs))
    left.set(xlabel="sequences seen", ylabel="accuracy on validation")
    right.set(xlabel="length of the sequence", ylabel="accuracy")
    right.axvline(20, color="grey", linestyle=":")
    left.legend(frameon=False)
    figure.savefig(out / "parentheses.svg")
    names = [f"{low}–{high}" for low, high, *_ in rows[0][1][0]["lengths"]]
    print(f"| | validation | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for name, runs in rows:
        columns = zip(*([r[3] for r in run["lengths"]] for run in runs), strict=True)
        cells = [_range([run["accuracy"] for run in runs]), *map(_range, columns)]
        print(f"| {name} | {' | '.join(cells)} |")


def _range(values: list[float]) -> str:
    return f"{100 * mean(values):.1f} ({100 * min(values):.1f} to {100 * max(values):.1f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("train", "one", "draw"))
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=9)
    parser.add_argument("--name")
    options = parser.parse_intermixed_args()
    if options.command == "train":
        train(options.out, options.seeds, options.jobs, options.overrides)
    elif options.command == "one":
        train_one(options.out, options.name, options.seeds, options.overrides)
    else:
        draw(options.out)
