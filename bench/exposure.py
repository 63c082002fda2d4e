"""Teacher forcing and scheduled sampling with several seeds: means and 95 % confidence intervals.

    python bench/exposure.py [RECIPE] [--seeds 5] [--jobs 4] [--out OUT] [key=value …]

Trains every run of a study, by default the recipe `exposure`, with each seed, `--jobs` at a time
with one thread each, evaluates it on its validation data and prints the table. Results are kept in
OUT/RUN-SEED.json, so a second call continues.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

METRICS = ("loss", "free_running_loss", "exact_match", "bleu", "chrf")
# Student's t for a confidence interval of 95 %, by degrees of freedom: at most 10 seeds
STUDENT = (0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def train(recipe: str, name: str, out: Path, overrides: list[str]) -> None:
    from regard import api

    study = api.open_study(recipe, *overrides, out=out)
    assert study is not None
    for _ in study.events(name):
        pass
    print(json.dumps(api.load(out / name).evaluate(beam=1)))


def run_one(recipe: str, name: str, seed: int, out: Path, overrides: list[str]) -> None:
    path = out / f"{name}-{seed}.json"
    if path.exists():
        return
    folder = out / f"seed-{seed}"
    command = [sys.executable, __file__, recipe, "--one", name, "--out", str(folder), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"train.seed={seed}"], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        print(name, seed, done.stderr[-800:], file=sys.stderr)
    else:
        path.write_text(done.stdout)


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "-"
    half = STUDENT[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="exposure")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/exposure-seeds"))
    parser.add_argument("--one")
    options = parser.parse_intermixed_args()
    if options.one:
        train(options.recipe, options.one, options.out, options.overrides)
        sys.exit()
    from regard import api

    study = api.open_study(options.recipe, *options.overrides)
    assert study is not None
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for seed in range(1, options.seeds + 1):
            for name in study.configs:
                pool.submit(run_one, options.recipe, name, seed, options.out, options.overrides)
    print(f"| | seeds | {' | '.join(METRICS)} |\n|---|---|{'---|' * len(METRICS)}")
    for name in study.configs:
        results = [
            json.loads(p.read_text()) for p in sorted(options.out.glob(f"{name}-[0-9]*.json"))
        ]
        cells = [interval([r[key] for r in results if key in r]) for key in METRICS]
        print(f"| {name} | {len(results)} | {' | '.join(cells)} |")
