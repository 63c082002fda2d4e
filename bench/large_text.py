"""Memory of training on a 1 GB text, and the time until the first step.

    python bench/large_text.py [--gigabytes 1] [--tokenizer char|bpe] [--folder DIR]

The text is Python's documentation, repeated with different line numbers. Each run is a separate
process, whose anonymous memory is read from /proc: first a small text, which shows the memory of
model, torch and interpreter, then the large one twice, with an empty cache and with the cache of
the first run. Wall-clock time and CPU time are printed; CPU time does not depend on other load.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from regard.pipelines import open_data

RUN = """
import os, sys, time
start = time.perf_counter()
import regard
from regard.training.events import StepLogged
first = []
def on_event(event):
    if isinstance(event, StepLogged) and not first:
        first.extend((time.perf_counter() - start, sum(os.times()[:4])))
regard.train(sys.argv[1], "train.steps=20", "train.evaluate_every=20",
             f"data.tokenizer={sys.argv[3]}", "device=cpu", out=sys.argv[2], on_event=on_event)
print(*first)
"""


def write(path: Path, size: int) -> None:
    lines = "".join(piece for piece, _ in open_data("python-docs").chunks()).splitlines()
    written, number = 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            number += 1
            written += file.write(f"{number} {lines[number % len(lines)]}\n")


def train(text: Path, out: Path, home: Path, tokenizer: str) -> tuple[float, float, float]:
    """Peak anonymous memory in bytes; wall-clock and CPU seconds until the first step."""
    command = [sys.executable, "-c", RUN, str(text), str(out), tokenizer]
    environment = {**os.environ, "REGARD_HOME": str(home)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    peak = 0
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"training failed with {process.returncode}")
    assert process.stdout is not None
    wall, cpu = map(float, process.stdout.read().split())
    return peak, wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tokenizer", default="char")
    parser.add_argument("--folder", help="folder for the text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        small, large = folder / "small.txt", folder / "large.txt"
        write(small, 1_000_000)
        write(large, int(options.gigabytes * 1e9))
        results = {}
        for label, text in (("small", small), ("first start", large), ("second start", large)):
            memory, wall, cpu = train(text, folder / label, folder / "home", options.tokenizer)
            results[label] = {
                "anonymous_mb": memory / 1e6,
                "seconds_to_first_step": wall,
                "cpu_seconds": cpu,
            }
            print(
                f"{label:13} {memory / 1e6:8.0f} MB  {wall:7.1f} s, {cpu:.1f} s CPU time",
                file=sys.stderr,
            )
        print(json.dumps(results))


if __name__ == "__main__":
    main()
