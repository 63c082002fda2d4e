"""Read the chat template of a Hugging Face folder: chat_template.jinja, tokenizer_config.json."""

from pathlib import Path
from typing import Any

from regard.errors import CheckpointError
from regard.files.untrusted import path_exists, read_json, read_text

FILE = "chat_template.jinja"
MAX_CHARACTERS = 200_000


def read_chat_template(folder: Path) -> str | None:
    """The template in a folder; None if there is none."""
    if path_exists(folder / FILE):
        return _check(folder / FILE, read_text(folder / FILE))
    path = folder / "tokenizer_config.json"
    value: Any = read_json(path).get("chat_template") if path_exists(path) else None
    if isinstance(value, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return None if value is None else _check(path, value)


def _check(path: Path, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_CHARACTERS:
        raise CheckpointError(
            f"{path}: a chat template must be a string of at most {MAX_CHARACTERS:,} characters"
        )
    return value
