"""Time and memory to import and to load a checkpoint of 1 GB, compared with a plain read.

    python bench/import_checkpoint.py [GIGABYTES]

The checkpoint is a random LLaMA in a temporary folder. Import and load run in separate processes,
which report their peak memory above that after the Python imports: resident memory, and anonymous
memory without file pages. Import copies the tensors under other names, load reads them into new
memory; a plain copy and plain reads of the file are printed for comparison.
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
    """Write a checkpoint, then time reading, importing and loading it."""
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "llama")
        write_checkpoint(folder, size)
        file = folder / "model.safetensors"
        print(f"checkpoint   {file.stat().st_size / 1e9:.2f} GB")
        read(file)  # brings it into the page cache
        seconds = read(file)
        size = file.stat().st_size / 1e9
        print(f"read         {seconds:6.2f} s   {size / seconds:.2f} GB/s   into one buffer")
        seconds = read_into_memory(file)
        print(f"read         {seconds:6.2f} s   {size / seconds:.2f} GB/s   into new memory")
        seconds = copy(file, Path(temporary, "copy"))
        print(f"copy         {seconds:6.2f} s   {size / seconds:.2f} GB/s   synced to disk")
        for action in ("import", "load"):
            run = f"{temporary}/run"
            command = [sys.executable, __file__, "--measure", action, str(folder), run]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            result = json.loads(output)
            print(
                f"{action:6}       {result['seconds']:6.2f} s   "
                f"{size / result['seconds']:.2f} GB/s   "
                f"resident memory {result['resident'] / size / 1e9:.2f} of the file, "
                f"anonymous {result['anonymous'] / size / 1e9:.2f}"
            )


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    """Write a random LLaMA of about this size in the format of transformers."""
    import torch

    from regard.hub.config_json import write_config
    from regard.hub.external_checkpoint import prefixed_rules
    from regard.hub.safetensors_writer import SafetensorsWriter
    from regard.hub.weight_mapping import plan_export
    from regard.models.build import build_on_meta, preset, weights

    layers = max(1, round((gigabytes * 1e9 / 4 - 2 * 32000 * 1024) / 12.6e6))
    config = preset(
        "modern", vocab_size=32000, dim=1024, heads=16, kv_heads=16, layers=layers, tied=False
    )
    model_type, table = write_config(config)
    shapes = {name: weight.shape for name, weight in weights(build_on_meta(config)).items()}
    mappings = plan_export(prefixed_rules(model_type, config), shapes).mappings
    specs = {mapping.external: (torch.float32, shapes[mapping.internal[0]]) for mapping in mappings}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
    with SafetensorsWriter({folder / "model.safetensors": specs}) as writer:
        for name, (_, shape) in specs.items():
            writer.write(name, torch.randn(shape))


def read(file: Path) -> float:
    """Seconds to read a file in chunks into one buffer."""
    start = time.perf_counter()
    with open(file, "rb", buffering=0) as opened:
        buffer = bytearray(CHUNK)
        while opened.readinto(buffer):
            pass
    return time.perf_counter() - start


def read_into_memory(file: Path) -> float:
    """Seconds to read a whole file into newly allocated memory."""
    import numpy as np

    start = time.perf_counter()
    with open(file, "rb", buffering=0) as opened:
        memory = memoryview(np.empty(file.stat().st_size, np.uint8).data)
        while len(memory):
            memory = memory[opened.readinto(memory[: 1 << 30]) :]
    return time.perf_counter() - start


def copy(file: Path, to: Path) -> float:
    """Seconds to copy a file in chunks and sync it to disk."""
    start = time.perf_counter()
    with open(file, "rb", buffering=0) as opened, open(to, "wb", buffering=0) as written:
        buffer = bytearray(CHUNK)
        while count := opened.readinto(buffer):
            written.write(memoryview(buffer)[:count])
        os.fsync(written.fileno())
    to.unlink()
    return time.perf_counter() - start


def measure(action: str, folder: str, run: str) -> None:
    """Import or load in this process, sample its memory in a thread, and print the result."""
    import torch

    from regard.hub.external_checkpoint import open_checkpoint
    from regard.training.import_export import import_run

    torch.ones(2, 2) @ torch.ones(2, 2)  # excludes what torch allocates at first use
    before = memory()
    peak = dict(before)
    done = threading.Event()

    def sample_memory() -> None:
        while not done.wait(0.002):
            now = memory()
            peak.update({name: max(peak[name], now[name]) for name in now})

    thread = threading.Thread(target=sample_memory)
    thread.start()
    start = time.perf_counter()
    result = import_run(folder, Path(run)) if action == "import" else open_checkpoint(folder).load()
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    assert result is not None
    growth = {name: peak[name] - before[name] for name in peak}
    print(json.dumps({"seconds": seconds, **growth}))


def memory() -> dict[str, int]:
    """Resident and anonymous memory of this process in bytes."""
    names = {"VmRSS": "resident", "RssAnon": "anonymous"}
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: 1024 * int(fields[key].split()[0]) for key, name in names.items()}


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(*sys.argv[2:])
    else:
        main()
