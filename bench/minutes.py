"""Time budgets: the wall-clock time of whole commands with `minutes=`, and their metrics.

    python bench/minutes.py text pairs labels images --minutes 1 3 --data DIR

DIR holds the datasets tinyshakespeare, multi30k, sst2 and cifar10. For every kind and number of
minutes `regard train` is run once; with `--unlimited` once more without `minutes=`, with the
default number of steps. `--busy 2` starts two other programs that occupy the cores. Arguments
after `--` are passed on, as in `-- train.threads=1`. `taskset -c 0,1 python …` limits all programs
to two cores. Prints a row of a Markdown table for each run.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

METRICS = ("bits_per_byte", "bleu", "accuracy", "loss")


def training_arguments(kind: str, data: Path, folder: Path) -> list[str]:
    """The words of the command that trains on a kind of data."""
    if kind == "text":
        return [str(data / "tinyshakespeare" / "input.txt")]
    if kind == "labels":
        train, dev = (data / "sst2" / f"sent_{part}.tsv" for part in ("train", "dev"))
        return [str(train), f"data.validation={dev}"]
    if kind == "pairs":
        train, validation = (
            [str(data / "multi30k" / f"{part}.{language}.gz") for language in ("de", "en")]
            for part in ("train", "val")
        )
        files = [f"data.source={train[0]}", f"data.target={train[1]}"]
        return [*files, f"data.validation={json.dumps(validation)}"]
    return [str(cifar10(data / "cifar10" / "cifar10_jpeg.npz", folder / "cifar10.npz"))]


def cifar10(source: Path, target: Path, train: int = 20_000, test: int = 2_000) -> Path:
    """Decode some of the images of an archive of JPEG streams, which share one header."""
    from PIL import Image

    archive = np.load(source)
    header, arrays = archive["header"].tobytes(), {}
    for part, count in (("train", train), ("test", test)):
        data, offsets = archive[f"{part}_bytes"], archive[f"{part}_off"]
        streams = (header + data[offsets[i] : offsets[i + 1]].tobytes() for i in range(count))
        arrays[f"x_{part}"] = np.stack(
            [np.asarray(Image.open(io.BytesIO(stream)).convert("RGB")) for stream in streams]
        )
        arrays[f"y_{part}"] = archive[f"{part}_y"][:count]
    np.savez(target, **arrays)
    return target


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """A context during which some other programs occupy a core each."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="+", choices=["text", "pairs", "labels", "images"])
    parser.add_argument("--minutes", nargs="*", type=float, default=[1.0])
    parser.add_argument("--unlimited", action="store_true")
    parser.add_argument("--data", type=Path, default=os.environ.get("REGARD_DATA"))
    parser.add_argument("--busy", type=int, default=0)
    arguments, words = split_at_double_dash(sys.argv[1:])
    options = parser.parse_args(arguments)
    print("| data | minutes | busy programs | load | wall | of the budget | steps | result |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            data = training_arguments(kind, Path(options.data), Path(folder))
            for minutes in [*options.minutes, *([None] if options.unlimited else [])]:
                name = "unlimited" if minutes is None else f"{minutes:g}"
                budget = [] if minutes is None else [f"minutes={name}"]
                out = Path(folder, f"{kind}-{name}")
                command = [sys.executable, "-m", "regard", "train", *data, *budget]
                with busy_programs(options.busy), Path(folder, "log").open("w+") as log:
                    start = time.perf_counter()
                    done = subprocess.run(
                        [*command, *words, "--out", str(out), "--json"],
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        check=False,
                    )
                    wall, load = time.perf_counter() - start, os.getloadavg()[0]
                    log.seek(0)
                    print(log.read(), file=sys.stderr, flush=True)
                if done.returncode:
                    sys.exit(done.returncode)
                result = json.loads(done.stdout)
                shown = ", ".join(f"{k} {result[k]:.4g}" for k in METRICS if k in result)
                time_shown = f"{int(wall) // 60}:{wall % 60:04.1f}"
                share = "" if minutes is None else f"{wall / (60 * minutes):.0%}"
                cells = [kind, name, options.busy, f"{load:.1f}", time_shown]
                cells += [share, result["step"], shown]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


def split_at_double_dash(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before and after `--`."""
    index = words.index("--") if "--" in words else len(words)
    return words[:index], words[index + 1 :]


if __name__ == "__main__":
    main()
