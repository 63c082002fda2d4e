"""A name on the Hugging Face hub, brought onto this machine by its own library."""

import re
from pathlib import Path

from regard.errors import CheckpointError
from regard.files.safetensors import conversion_hint

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.spm", "merges*"]
UNWANTED = ["*/*", "consolidated*"]  # the same weights once more, in forms of other libraries
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def fetch(name: str) -> Path:
    """The folder where the files of a repository lie, fetched where they are not there yet."""
    if not NAME.fullmatch(name):
        raise CheckpointError(f"no folder at {name}, and it is no name on the hub either")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"no folder at {name}; to fetch it by name, install huggingface_hub:\n"
            "pip install huggingface_hub"
        ) from None
    try:
        found = snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"no folder at {name}, and it cannot be fetched from the hub: {reason}"
        ) from None
    folder = Path(found)
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{name} has no safetensors on the hub; a pickle, which can run any code, is not read;"
            f"\n{conversion_hint(folder, name)}"
        )
    return folder
