"""The cache of trained tokenizers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from regard.config import Choice, to_table
from regard.files.cache import cache_key, cached_folder
from regard.text import Tokenizer, train_tokenizer
from regard.text.pair_tokenizers import JOINT


def cached_tokenizer(choice: Choice, data: Sequence[Any], write: Callable[[Path], None]) -> Path:
    """The cache folder of the tokenizer that was trained on this data; `write` fills a new one."""
    key = cache_key(to_table(choice), [part.fingerprint() for part in data])
    return cached_folder("tokenizers", key, write)[0]


def train_cached_tokenizer(
    choice: Choice, data: Any, texts: Callable[[], Iterable[str]]
) -> Tokenizer:
    """One tokenizer, trained on the `texts` of the data, or from the cache."""

    def write(folder: Path) -> None:
        train_tokenizer(choice, texts()).save(folder / JOINT)

    return Tokenizer.load(cached_tokenizer(choice, [data], write) / JOINT)
