"""What it costs to import and to load a checkpoint of 1 GB, beside a plain read of the file.

    python bench/import_checkpoint.py [GIGABYTES]

The checkpoint is a random LLaMA in a temporary folder. Import and load each run in a process of
their own, which says how much more memory it held than after its imports: all of it, and what was
its own (anonymous) rather than pages of files. Import is a copy with other names, load a read into
new memory; the same without us stands above them.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CHUNK = 1 << 23


def main() -> None:
    """Make a checkpoint, read it, import it, load it; print the figures."""
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "llama")
        make(folder, size)
        file = folder / "model.safetensors"
        print(f"checkpoint   {file.stat().st_size / 1e9:.2f} GB")
        read(file)  # so that it lies in the system's cache
        seconds = read(file)
        size = file.stat().st_size / 1e9
        print(f"read         {seconds:6.2f} s   {size / seconds:.2f} GB/s   and forgotten")
        seconds = keep(file)
        print(f"read         {seconds:6.2f} s   {size / seconds:.2f} GB/s   into new memory")
        seconds = copy(file, Path(place, "copy"))
        print(f"copy         {seconds:6.2f} s   {size / seconds:.2f} GB/s   down to the disk")
        for verb in ("import", "load"):
            words = [sys.executable, __file__, "--measure", verb, str(folder), f"{place}/run"]
            told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            found = json.loads(told)
            print(
                f"{verb:6}       {found['seconds']:6.2f} s   "
                f"{size / found['seconds']:.2f} GB/s   "
                f"memory {found['resident'] / size / 1e9:.2f} of the file, "
                f"its own {found['anonymous'] / size / 1e9:.2f}"
            )


def make(folder: Path, gigabytes: float) -> None:
    """A random LLaMA of about this size, as transformers would save it."""
    import torch

    from regard.hub.config_json import write_config
    from regard.hub.external_checkpoint import prefixed_rules
    from regard.hub.safetensors_writer import SafetensorsWriter
    from regard.hub.weight_mapping import plan_export
    from regard.models.build import on_meta, preset, weights

    layers = max(1, round((gigabytes * 1e9 / 4 - 2 * 32000 * 1024) / 12.6e6))
    config = preset(
        "modern", vocab_size=32000, dim=1024, heads=16, kv_heads=16, layers=layers, tied=False
    )
    family, table = write_config(config)
    shapes = {name: weight.shape for name, weight in weights(on_meta(config)).items()}
    mappings = plan_export(prefixed_rules(family, config), shapes).mappings
    specs = {mapping.external: (torch.float32, shapes[mapping.internal[0]]) for mapping in mappings}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
    with SafetensorsWriter({folder / "model.safetensors": specs}) as writer:
        for name, (_, shape) in specs.items():
            writer.write(name, torch.randn(shape))


def read(file: Path) -> float:
    """Seconds to read a file, a chunk at a time."""
    began = time.perf_counter()
    with open(file, "rb", buffering=0) as opened:
        buffer = bytearray(CHUNK)
        while opened.readinto(buffer):
            pass
    return time.perf_counter() - began


def keep(file: Path) -> float:
    """Seconds to read a file into memory that was not touched before."""
    import numpy as np

    began = time.perf_counter()
    with open(file, "rb", buffering=0) as opened:
        memory = memoryview(np.empty(file.stat().st_size, np.uint8).data)
        while len(memory):
            memory = memory[opened.readinto(memory[: 1 << 30]) :]
    return time.perf_counter() - began


def copy(file: Path, to: Path) -> float:
    """Seconds to copy a file down to the disk, a chunk at a time."""
    began = time.perf_counter()
    with open(file, "rb", buffering=0) as opened, open(to, "wb", buffering=0) as written:
        buffer = bytearray(CHUNK)
        while got := opened.readinto(buffer):
            written.write(memoryview(buffer)[:got])
        os.fsync(written.fileno())
    to.unlink()
    return time.perf_counter() - began


def measure(verb: str, folder: str, run: str) -> None:
    """Do it here, watched by a thread, and print what it took."""
    import torch

    from regard.hub.external_checkpoint import open_checkpoint
    from regard.training.import_export import import_run

    torch.ones(2, 2) @ torch.ones(2, 2)  # what torch allocates at its first use is its own affair
    before = memory()
    peak = dict(before)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            now = memory()
            peak.update({name: max(peak[name], now[name]) for name in now})

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    kept = import_run(folder, Path(run)) if verb == "import" else open_checkpoint(folder).load()
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    assert kept is not None
    more = {name: peak[name] - before[name] for name in peak}
    print(json.dumps({"seconds": seconds, **more}))


def memory() -> dict[str, int]:
    """Bytes that this process holds now: all, and its own."""
    names = {"VmRSS": "resident", "RssAnon": "anonymous"}
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {ours: 1024 * int(fields[theirs].split()[0]) for theirs, ours in names.items()}


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(*sys.argv[2:])
    else:
        main()
