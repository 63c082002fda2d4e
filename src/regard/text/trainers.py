"""`TOKENIZERS`, the table of tokenizer trainers, and training from a stream of text."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from regard.config import Choice, kind_of, make
from regard.errors import DataError
from regard.text import bpe, char, unigram, word, wordpiece
from regard.text.tokenizer import Tokenizer, check_text

# Tokenizers by the name that `data.tokenizer` takes.
TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "char": char.train,
    "word": word.train,
    "bpe": bpe.train,
    "wordpiece": wordpiece.train,
    "unigram": unigram.train,
}

MAX_TRAINING_BYTES = 100_000_000
# With byte-level BPE no text is out of vocabulary, so a smaller sample suffices (docs/results.md).
MAX_BPE_BYTES = 20_000_000
WINDOW = 1 << 16  # characters; longer texts are split, so that they can be sampled too


def train_tokenizer(
    choice: Choice,
    texts: Iterable[str],
    *,
    total_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tokenizer:
    """Train the tokenizer that `choice` names on a stream of texts, which is read once.

    Of more than 100 MB of text (20 MB for "bpe"), an evenly spread sample is used. `total_bytes` is
    the size of all texts, if it is known: then less text is held in memory before it is sampled.
    `progress` is called with the number of characters that the trainer has read, and their total.

    >>> train_tokenizer({"kind": "bpe", "vocab_size": 300}, ["a rose is a rose is a rose"])
    Tokenizer('bpe', vocab_size=270)
    """
    limit = MAX_BPE_BYTES if kind_of(choice)[0] == "bpe" else MAX_TRAINING_BYTES
    sampled = sample_texts(texts, limit, total_bytes=total_bytes)
    if not sampled:
        raise DataError("the training data has no text, so no tokenizer can be trained; add text")
    return make(choice, TOKENIZERS, "tokenizer", texts=_with_progress(sampled, progress))


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Read a `tokenizer.json`."""
    return Tokenizer.load(path)


def sample_texts(
    texts: Iterable[str], max_bytes: int, *, total_bytes: int | None = None
) -> list[str]:
    """At most `max_bytes` of text: every `stride`-th window of the stream.

    Whenever the limit is exceeded, the stride is tripled and two of three windows are dropped.
    It stays odd, so that both languages of an alternating stream are sampled equally.
    """
    # A stride 10 % larger than needed, so that windows of different sizes stay below the limit.
    stride = 1
    if total_bytes is not None and total_bytes > max_bytes:
        stride = -(-11 * total_bytes // (10 * max_bytes)) | 1  # odd
    windows: list[str] = []
    size = 0
    for index, window in enumerate(_windows(texts)):
        if index % stride:
            continue
        windows.append(window)
        size += _byte_count(window)
        while size > max_bytes and len(windows) > 1:
            windows = windows[::3]
            stride *= 3
            size = sum(map(_byte_count, windows))
    return windows


def _with_progress(texts: list[str], progress: Callable[[int, int], None] | None) -> Iterable[str]:
    if progress is None:
        return texts
    total, characters_read = sum(map(len, texts)), 0
    report = progress

    def texts_with_reports() -> Iterator[str]:
        nonlocal characters_read
        for text in texts:
            yield text
            characters_read += len(text)
            report(characters_read, total)

    return texts_with_reports()


def _windows(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for start in range(0, len(text), WINDOW):
            yield text[start : start + WINDOW]


def _byte_count(text: str) -> int:
    return len(text) if text.isascii() else len(check_text(text).encode())
