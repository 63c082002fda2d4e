"""Training and generation while other programs run, compared with nanoGPT under the same load.

    python bench/busy.py --nanogpt DIR --text input.txt [--busy 0 2 5] [--seconds 30] [--repeats 3]

DIR is a checkout of nanoGPT. Both train the model of `bench/shakespeare_cpu.py` (4 layers, dim 128,
context 64, batch 12) for `--seconds`, then generate with a model of this size, 60 characters at a
time, for half of that. Each runs in a separate process, one after the other, while
`--busy` other programs occupy the cores. Three further rows are regard with as many threads as
there are cores, with torch's default spin count (threads wait in a busy loop), and with one thread;
`--rows 3` leaves out the last two. Repeats alternate between the rows; medians are printed at the
end. `taskset -c 0,1 python …` limits all programs to two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

from minutes import busy_programs

VARIANTS = {
    "nanoGPT": {},
    "regard": {},
    "regard, all threads": {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
    "regard, torch's spin count": {"GOMP_SPINCOUNT": "300000"},
    "regard, one thread": {"OMP_NUM_THREADS": "1"},
}
WARM_UP = 0.25  # fraction of the time that is not counted


def rate(counts: Iterator[int], seconds: float) -> float:
    """The increase per second of a counter that is read for some seconds, after a warm-up.

    The time begins with the first count: regard evaluates the model before its first step.
    """
    first = (next(counts), time.perf_counter())
    begin = first[1]
    for number in counts:
        now = time.perf_counter()
        if now - begin < WARM_UP * seconds:
            first = (number, now)
        elif now - begin >= seconds and number > first[0]:
            return (number - first[0]) / (now - first[1])
    raise AssertionError(f"the counter ended before {seconds} s were over")


def regard_rates(options: argparse.Namespace) -> list[float]:
    import regard
    from regard import api

    config = regard.load(options.run).config
    words = ["train.steps=1000000", "train.baseline=false", "train.evaluate_every=1000000"]
    with tempfile.TemporaryDirectory() as folder:
        events = api.train_events(config, *words, out=Path(folder, "run"))
        steps = (event.step for event in events if isinstance(event, api.StepLogged))
        training = rate(steps, options.seconds)
    run = regard.load(options.run)
    return [
        training,
        rate(token_counts(lambda: run.generate("T", max_new_tokens=60)), options.seconds / 2),
    ]


def nanogpt_rates(options: argparse.Namespace) -> list[float]:
    import shakespeare_cpu
    import torch

    shakespeare_cpu.TURN_STEPS = 1
    nano = shakespeare_cpu.NanoGPT(options.nanogpt, options.text)
    nano.total = 1_000_000

    def steps() -> Iterator[int]:
        while True:
            nano.run_turn()
            yield nano.done

    training = rate(steps(), options.seconds)
    prompt = torch.zeros(1, 1, dtype=torch.long)
    nano.model.eval()
    counts = token_counts(lambda: nano.model.generate(prompt, 60))
    return [training, rate(counts, options.seconds / 2)]


def token_counts(generate: Callable[[], object]) -> Iterator[int]:
    """The number of generated tokens after every call."""
    for number in count(1):
        generate()
        yield 60 * number


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 2, 5])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rows", type=int, default=len(VARIANTS))
    parser.add_argument("--measure", choices=["regard", "nanoGPT"], help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure = regard_rates if options.measure == "regard" else nanogpt_rates
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(options.text, folder)
        print("| busy programs | load | | steps/s | of nanoGPT | generated tokens/s | of nanoGPT |")
        print("|---|---|---|---|---|---|---|")
        for programs in options.busy:
            with busy_programs(programs):
                repeats = [print_rows(programs, run, options.rows) for _ in range(options.repeats)]
            if options.repeats > 1:
                print_medians(programs, repeats)


def make_run(text: str, folder: str) -> str:
    """A run of a few steps, whose settings and weights are used."""
    from shakespeare_cpu import SAME

    words = [word for word in SAME if not word.startswith("train.steps")]
    run = str(Path(folder, "run"))
    command = [sys.executable, "-m", "regard", "train", text, *words, "train.steps=2"]
    command += ["train.baseline=false", "--out", run, "--quiet"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return run


def print_rows(programs: int, run: str, rows: int) -> dict[str, list[float]]:
    """Measure the first variants, one after the other, and print a row for each."""
    measured: dict[str, list[float]] = {}
    for name, environment in islice(VARIANTS.items(), rows):
        which = name.split(",")[0]
        command = [sys.executable, *sys.argv, "--measure", which, "--run", run]
        done = subprocess.run(
            command, env=os.environ | environment, stdout=subprocess.PIPE, check=True
        )
        measured[name] = json.loads(done.stdout.splitlines()[-1])  # nanoGPT prints too
        print_row([programs, f"{os.getloadavg()[0]:.1f}", name], measured, name)
    return measured


def print_medians(programs: int, repeats: list[dict[str, list[float]]]) -> None:
    medians = {
        name: [median(values) for values in zip(*(repeat[name] for repeat in repeats), strict=True)]
        for name in repeats[0]
    }
    for name in medians:
        print_row([programs, "median", name], medians, name)


def print_row(cells: list[Any], measured: dict[str, list[float]], name: str) -> None:
    for number, other in zip(measured[name], measured["nanoGPT"], strict=True):
        cells += [f"{number:.3g}", f"{number / other:.2f}"]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
