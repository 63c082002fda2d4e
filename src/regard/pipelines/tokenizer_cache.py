"""The cache of trained tokenizers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from regard.config import Choice, to_table
from regard.files.cache import cache_key, cached_folder


def cached_tokenizer(choice: Choice, data: Sequence[Any], write: Callable[[Path], None]) -> Path:
    """The cache folder of the tokenizer that was trained on this data; `write` fills a new one."""
    key = cache_key(to_table(choice), [part.fingerprint() for part in data])
    return cached_folder("tokenizers", key, write)[0]
