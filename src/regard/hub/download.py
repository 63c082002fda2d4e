"""Download a checkpoint from the Hugging Face hub with the huggingface_hub library."""

import re
from pathlib import Path

from regard.errors import CheckpointError
from regard.files.safetensors import conversion_hint

ALLOWED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.spm", "*.jinja", "merges*"]
IGNORED_FILES = ["*/*", "consolidated*"]  # copies of the same weights for other libraries
REPOSITORY_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def download(name: str) -> Path:
    """Download a repository, unless it is in the local cache already; returns its folder."""
    if not REPOSITORY_NAME.fullmatch(name):
        raise CheckpointError(
            f"no folder at {name}, and it is not a repository name of the hub, such as "
            "openai-community/gpt2"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"no folder at {name}; to download it by name, install huggingface_hub:\n"
            "pip install huggingface_hub"
        ) from None
    try:
        path = snapshot_download(name, allow_patterns=ALLOWED_FILES, ignore_patterns=IGNORED_FILES)
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"no folder at {name}, and it cannot be downloaded from the hub: {reason}"
        ) from None
    folder = Path(path)
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{name} has no safetensors on the hub; pickle files can execute arbitrary code and "
            f"are not read;\n{conversion_hint(folder, name)}"
        )
    return folder
