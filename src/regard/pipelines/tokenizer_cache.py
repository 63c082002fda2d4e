"""The cache of trained tokenizers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from regard.config import Choice, to_table
from regard.files.cache import cache_key, cached_folder
from regard.text import Tokenizer, train_tokenizer
from regard.text.pair_tokenizers import JOINT


def cached_tokenizer(choice: Choice, splits: Sequence[Any], write: Callable[[Path], None]) -> Path:
    """The cache folder of a tokenizer that is trained on these splits; `write` fills a new one."""
    key = cache_key(to_table(choice), [split.fingerprint() for split in splits])
    return cached_folder("tokenizers", key, write)[0]


def train_cached_tokenizer(
    choice: Choice, data: Any, texts: Callable[[], Iterable[str]]
) -> Tokenizer:
    """A tokenizer trained on the `texts` of the data; it is read from the cache if possible."""

    def write(folder: Path) -> None:
        train_tokenizer(choice, texts()).save(folder / JOINT)

    return Tokenizer.load(cached_tokenizer(choice, [data], write) / JOINT)
