"""Train on a text of a gigabyte: how much memory, and how long until the first step.

    python bench/large_text.py [--gigabytes 1] [--tokenizer char|bpe] [--folder DIR]

The text is Python's own documentation over and over, each copy with its own line numbers. Runs
in processes of their own whose anonymous memory is read from /proc: a small text first, as the
measure of what the model, torch and the interpreter take by themselves, then the large one
twice, with an empty cache and with what the first start left there. Beside the clock's seconds
stand the processor's, which do not depend on who else uses the machine.
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
began = time.perf_counter()
import regard
from regard.training.events import StepLogged
first = []
def watch(event):
    if isinstance(event, StepLogged) and not first:
        first.extend((time.perf_counter() - began, sum(os.times()[:4])))
regard.train(sys.argv[1], "train.steps=20", "train.evaluate_every=20",
             f"data.tokenizer={sys.argv[3]}", "device=cpu", out=sys.argv[2], on_event=watch)
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
    """The most anonymous memory in bytes, and the seconds of both kinds until the first step."""
    words = [sys.executable, "-c", RUN, str(text), str(out), tokenizer]
    environment = {**os.environ, "REGARD_HOME": str(home)}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True)
    most = 0
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                most = max(most, int(line.split()[1]) * 1024)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"training failed with {process.returncode}")
    assert process.stdout is not None
    clock, processor = map(float, process.stdout.read().split())
    return most, clock, processor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tokenizer", default="char")
    parser.add_argument("--folder", help="where there is room for the text")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        small, large = folder / "small.txt", folder / "large.txt"
        write(small, 1_000_000)
        write(large, int(given.gigabytes * 1e9))
        results = {}
        for label, text in (("small", small), ("first start", large), ("second start", large)):
            memory, clock, processor = train(text, folder / label, folder / "home", given.tokenizer)
            results[label] = {
                "anonymous_mb": memory / 1e6,
                "seconds_to_first_step": clock,
                "processor_seconds": processor,
            }
            print(
                f"{label:13} {memory / 1e6:8.0f} MB  {clock:7.1f} s, {processor:.1f} s of a core",
                file=sys.stderr,
            )
        print(json.dumps(results))


if __name__ == "__main__":
    main()
