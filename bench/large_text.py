"""Memory of training on a 1 GB text, and the time until the first step.

    python bench/large_text.py [--gigabytes 1] [--tokenizer char|bpe|default] [--folder DIR]
    python bench/large_text.py --gigabytes 0.05 --tokenizer default --source DIR --first-step

The text is Python's documentation, repeated with different line numbers, or with `--source` the
.py files in a folder (repeated likewise if they are too small). With `--first-step` a run ends at
its first step. Each run is a separate process, whose anonymous memory is read from /proc: first a
small text, which shows the memory of model, torch and interpreter, then the large one twice, with
an empty cache and with the cache of the first run. Wall-clock time and CPU time are printed; CPU
time does not depend on other load.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
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
        if sys.argv[4] == "first":
            print(*first, flush=True)
            os._exit(0)
tokenizer = [] if sys.argv[3] == "default" else [f"data.tokenizer={sys.argv[3]}"]
regard.train(sys.argv[1], "train.steps=20", "train.evaluate_every=20", *tokenizer, "device=cpu",
             out=sys.argv[2], on_event=on_event)
print(*first)
"""


def write(path: Path, size: int, source: Path | None) -> None:
    written, number = 0, 0
    with open(path, "wb") as file:
        for part in sorted(source.rglob("*.py")) if source else ():
            content = part.read_bytes() if part.is_file() else b""
            with suppress(UnicodeDecodeError):
                content.decode()
                written += file.write(content) if written < size else 0
    if source and written < size:
        print(f"only {written / 1e6:.0f} MB of .py files; repeated", file=sys.stderr)
        lines = path.read_text(encoding="utf-8").splitlines()
    elif not source:
        lines = "".join(piece for piece, _ in open_data("python-docs").chunks()).splitlines()
    with open(path, "a", encoding="utf-8") as file:
        while written < size:
            number += 1
            written += file.write(f"{number} {lines[number % len(lines)]}\n")


def train(
    text: Path, out: Path, home: Path, tokenizer: str, until: str
) -> tuple[float, float, float]:
    """Peak anonymous memory in bytes; wall-clock and CPU seconds until the first step."""
    command = [sys.executable, "-c", RUN, str(text), str(out), tokenizer, until]
    environment = {**os.environ, "REGARD_HOME": str(home)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    peak = 0
    while process.poll() is None:
        with suppress(OSError):  # the process has ended
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"training on {text} failed with exit code {process.returncode}")
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
    parser.add_argument("--source", type=Path, help="a folder with .py files")
    parser.add_argument("--first-step", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        small, large = folder / "small.txt", folder / "large.txt"
        write(small, 1_000_000, options.source)
        write(large, int(options.gigabytes * 1e9), options.source)
        until = "first" if options.first_step else "end"
        results = {}
        for label, text in (("small", small), ("first start", large), ("second start", large)):
            home = folder / "home"
            memory, wall, cpu = train(text, folder / label, home, options.tokenizer, until)
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
