"""`TOKENIZERS`, the table of tokenizer trainers, and training from a stream of text."""

from collections.abc import Callable, Iterable
from pathlib import Path

from regard.config import Choice, make
from regard.errors import DataError
from regard.text import bpe, char, unigram, word, wordpiece
from regard.text.tokenizer import Tokenizer, check_text

TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "char": char.train,
    "word": word.train,
    "bpe": bpe.train,
    "wordpiece": wordpiece.train,
    "unigram": unigram.train,
}

MAX_TRAINING_BYTES = 100_000_000
WINDOW = 1 << 16  # characters; longer texts are cut, so that a few long ones can be sampled too


def train_tokenizer(choice: Choice, texts: Iterable[str], *, total: int | None = None) -> Tokenizer:
    """Train the tokenizer that `choice` names on a stream of texts, which is read once.

    Of more than 100 MB of text, an evenly spread sample is used. `total`, the number of bytes of
    all texts if known, only avoids collecting text that would be dropped again.

    >>> train_tokenizer({"kind": "bpe", "size": 300}, ["a rose is a rose is a rose"])
    Tokenizer('bpe', size=270)
    """
    sampled = sample(texts, MAX_TRAINING_BYTES, total=total)
    if not sampled:
        raise DataError("there is no text to train a tokenizer on; is the file empty?")
    return make(choice, TOKENIZERS, "tokenizer", texts=sampled)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Read a `tokenizer.json`."""
    return Tokenizer.load(path)


def sample(texts: Iterable[str], max_bytes: int, *, total: int | None = None) -> list[str]:
    """At most `max_bytes` of text: every `stride`-th window of the stream.

    Whenever the limit is exceeded, the stride is tripled and two of three windows are dropped.
    It stays odd, so that both languages of an alternating stream are sampled equally.
    """
    stride = 1 if total is None else -(-total // max_bytes) | 1
    sampled: list[str] = []
    size = 0
    for number, window in enumerate(_windows(texts)):
        if number % stride:
            continue
        sampled.append(window)
        size += _byte_count(window)
        while size > max_bytes and len(sampled) > 1:
            sampled = sampled[::3]
            stride *= 3
            size = sum(map(_byte_count, sampled))
    return sampled


def _windows(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for start in range(0, len(text), WINDOW):
            yield text[start : start + WINDOW]


def _byte_count(text: str) -> int:
    return len(text) if text.isascii() else len(check_text(text).encode())
