"""The GPUs of this machine, found without importing torch."""

from pathlib import Path

NVIDIA = Path("/proc/driver/nvidia/gpus")


def driver_gpus() -> list[str]:
    """The NVIDIA GPUs that the driver lists, whether or not torch can use them."""
    return [
        line.partition(":")[2].strip()
        for file in sorted(NVIDIA.glob("*/information"))
        for line in file.read_text().splitlines()
        if line.startswith("Model:")
    ]
